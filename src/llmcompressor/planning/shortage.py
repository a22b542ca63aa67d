# SPDX-License-Identifier: Apache-2.0
"""Says where a run would take more memory than there is, or than it was allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from llmcompressor.planning.result import Phase
from llmcompressor.units import in_bytes

__all__ = ["Capacity", "shortages"]


@dataclass(frozen=True)
class Capacity:
    """What there is of one kind of memory.

    Attributes:
        name: of the memory, in a sentence.
        free: bytes that this process has and may still take; ``None`` if that is not known.
        allowed: bytes that the user allows; ``None`` for what is free.
    """

    name: str
    free: int | None = None
    allowed: int | None = None


def shortages(phases: Sequence[Phase], host: Capacity, device: Capacity) -> Iterator[str]:
    """A sentence for each kind of memory that would not do.

    Args:
        phases: of the run.
        host: main memory.
        device: that of the accelerator, where the run has one.
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
