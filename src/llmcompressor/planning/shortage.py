# SPDX-License-Identifier: Apache-2.0
"""Warnings about phases that exceed the available or allowed memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from llmcompressor.planning.result import Phase
from llmcompressor.units import in_bytes

__all__ = ["Capacity", "shortages"]


@dataclass(frozen=True)
class Capacity:
    """Available amount of a kind of memory.

    Attributes:
        name: name of the memory in messages.
        free: bytes that this process uses or can still allocate; ``None`` if unknown.
        allowed: limit by the user in bytes; ``None`` without one.
    """

    name: str
    free: int | None = None
    allowed: int | None = None


def shortages(phases: Sequence[Phase], host: Capacity, device: Capacity) -> Iterator[str]:
    """Yield a message for each kind of memory that is too small.

    Args:
        phases: of the run.
        host: main memory.
        device: memory of the accelerator, if the run uses one.
    """
    for capacity, bytes_of in ((host, attrgetter("host")), (device, attrgetter("device"))):
        most = max(phases, key=bytes_of, default=None)
        if most is None:
            continue
        peak = bytes_of(most)
        takes = f"{most.name.capitalize()} takes {in_bytes(peak)} of {capacity.name}"
        if capacity.free is not None and peak > capacity.free:
            yield (
                f"{takes}, and {in_bytes(capacity.free)} are free here: on this machine the run "
                "would end for want of memory, or swap."
            )
        elif capacity.allowed is not None and peak > capacity.allowed:
            yield (
                f"{takes}, where max_memory allows {in_bytes(capacity.allowed)}: it holds weights "
                "and waiting activations within its limit, but not what solvers take, nor what "
                "modifiers keep of the data."
            )
