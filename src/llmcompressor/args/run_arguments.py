# SPDX-License-Identifier: Apache-2.0
"""How a run uses the machine, and what happens when it is repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.args.checks import about, apply_checks, boolean, one_of, optional, reject, size

__all__ = ["RESUME", "RunArguments"]

RESUME: Mapping[str, str] = {name: name for name in ("auto", "never", "must")}
"""What to do with the progress of a run that was broken off."""

_HOST = ("cpu", "host")
_DEVICE = re.compile(r"(?:cuda:|xpu:)?(\d+)")


def _max_memory(name: str, value: Any) -> dict[str | int, int]:
    """A size for the host, or sizes by device: numbers for accelerators, "cpu" for the host."""
    if not isinstance(value, Mapping):
        value = _pairs(name, value)
    limits: dict[str | int, int] = {}
    for device, limit in value.items():
        found = _DEVICE.fullmatch(str(device))
        if found is None and str(device) not in _HOST:
            raise reject(name, value, 'sizes by device, such as {0: "40GiB", "cpu": "100GiB"}')
        limits[int(found.group(1)) if found else "cpu"] = size(name, limit)
    return limits


def _pairs(name: str, value: Any) -> dict[str, Any]:
    """``"20GiB"`` or ``"0=40GiB,cpu=100GiB"``, as a command line has it."""
    if not isinstance(value, str) or "=" not in value:
        return {"cpu": value}
    parts = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise reject(name, value, 'sizes by device, such as "0=40GiB,cpu=100GiB"')
    return {device.strip(): limit.strip() for device, _, limit in parts}


@dataclass(frozen=True)
class RunArguments:
    """How a run uses the machine, and what happens when it is repeated."""

    max_memory: Any = field(
        default=None,
        metadata=about(
            "The most memory to use: a size such as 40GiB for the host, or by device, "
            "0=40GiB,cpu=100GiB. Not given: what is free.",
            optional(_max_memory),
        ),
    )
    resume: str = field(
        default="auto",
        metadata=about(
            "A run on this output that was broken off: auto continues it, never throws its "
            "progress away, must refuses to begin without one.",
            one_of(RESUME),
        ),
    )
    verify: bool = field(
        default=True,
        metadata=about("Read the written files again and check them at the end.", boolean),
    )
    dry_run: bool = field(
        default=False,
        metadata=about("Make and show the plan of the run; compress and write nothing.", boolean),
    )

    def __post_init__(self) -> None:
        apply_checks(self)
