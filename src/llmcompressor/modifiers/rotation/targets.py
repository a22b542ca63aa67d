# SPDX-License-Identifier: Apache-2.0
"""Short target lists for a given set of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from llmcompressor.names import named_modules

__all__ = ["short_targets"]


def short_targets(model: Any, names: Iterable[str]) -> list[str]:
    """Patterns on the last part of a name, if they match no other module, else full names.

    Servers prefix module names, which patterns such as ``re:.*down_proj$`` tolerate.

    Args:
        model: the model.
        names: names of the modules to target.
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
