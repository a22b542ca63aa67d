# SPDX-License-Identifier: Apache-2.0
"""Targets that mean a given set of modules, in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from llmcompressor.names import named_modules

__all__ = ["short_targets"]


def short_targets(model: Any, names: Iterable[str]) -> list[str]:
    """Patterns by the last part of a name where they mean no other module, else the names.

    Servers put prefixes of their own before names, which patterns such as ``re:.*down_proj$``
    survive.

    Args:
        model: the model.
        names: of the modules that are meant.
    """
    wanted = set(names)
    by_end: dict[str, set[str]] = {}
    for name in sorted(wanted):
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    everything = [name for name, _ in named_modules(model)]
    targets = []
    for end, members in by_end.items():
        pattern = re.compile(f".*{re.escape(end)}$")
        if {name for name in everything if pattern.match(name)} == members:
            targets.append(f"re:.*{re.escape(end)}$")
        else:
            targets += sorted(members)
    return targets
