# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: roles become code, and blocks behind ``::`` too."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|data|func|meth|mod|attr|exc):`~?\.?([^`]*)`")
_LITERAL = re.compile(r"::\s*$", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Do so for one module, class, function or attribute."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub(":", text)
