# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the process while some code runs."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil
import torch

__all__ = ["PeakMemory"]

_EVERY_S = 0.02


class PeakMemory:
    """Samples the resident memory of this process; on an accelerator, also the allocator's peak.

    ::

        with PeakMemory() as peak:
            work()
        print(peak.bytes)

    Attributes:
        bytes: most bytes resident at any sample, Python and its libraries included.
        device_bytes: most bytes of the accelerator's memory in use, 0 without one.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.device_bytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._sample()
        if torch.accelerator.is_available():
            self.device_bytes = int(torch.accelerator.max_memory_allocated())

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        self.bytes = max(self.bytes, self._process.memory_info().rss)
