# SPDX-License-Identifier: Apache-2.0
"""Arguments for a run's use of the machine and for repeated runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.args.checks import Checked, Named, about, boolean, one_of, optional, reject, size
from llmcompressor.errors import ArgumentError

__all__ = ["RESUME", "RunArguments"]

RESUME: Mapping[str, str] = {name: name for name in ("auto", "never", "must")}
"""What to do with the progress of a run that was broken off."""

_HOST = ("cpu", "host")
_DEVICE = re.compile(r"(?:cuda:|xpu:)?(\d+)")


def _max_memory(name: str, value: Any) -> dict[str | int, int]:
    """Check for a size for the host, or sizes by device: accelerator numbers, "cpu" for it."""
    if isinstance(value, str) and "=" in value:
        pairs = _pairs(name, value)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        return {"cpu": size(name, value)}
    limits: dict[str | int, int] = {}
    for given, limit in pairs:
        device = _device(name, value, given)
        if device in limits:
            raise ArgumentError(
                f"The argument {name!r} gives more than one size for {_shown(device)}.",
                "Name each device once.",
            )
        limits[device] = size(f"{name}[{given!r}]", limit)
    return limits


def _device(name: str, value: Any, given: Any) -> str | int:
    """Return the number of an accelerator, or "cpu"."""
    if str(given) in _HOST:
        return "cpu"
    found = _DEVICE.fullmatch(str(given))
    if found is None:
        raise reject(name, value, 'sizes by device, such as {0: "40GiB", "cpu": "100GiB"}')
    return int(found.group(1))


def _shown(device: str | int) -> str:
    return "the host (cpu)" if device == "cpu" else f"device {device}"


def _pairs(name: str, value: str) -> list[tuple[str, str]]:
    """Parse ``"0=40GiB,cpu=100GiB"``, as given on a command line, into pairs."""
    parts = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise reject(name, value, 'sizes by device, such as "0=40GiB,cpu=100GiB"')
    return [(device.strip(), limit.strip()) for device, _, limit in parts]


@dataclass
class RunArguments(Checked):
    """The limits of a run on the machine, and the settings for repeated runs."""

    max_memory: Named = field(
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
        metadata=about(
            "Read the written files again and check them at the end.",
            boolean,
            off="Do not read the written files again to check them.",
        ),
    )
    dry_run: bool = field(
        default=False,
        metadata=about("Make and show the plan of the run; compress and write nothing.", boolean),
    )
