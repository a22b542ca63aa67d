# SPDX-License-Identifier: Apache-2.0
"""How many threads torch computes with on the CPU.

Torch splits each operation over its threads and waits, at its end, for the slowest of them. On a
machine of one's own that is right for large operations. With another process busy on one core,
every such wait lasts until that core's next time slice, and what takes a second takes ten. So
work made of many small operations runs on one thread (:func:`one_thread`), and the rest asks from
time to time which number is fastest at present (:class:`ThreadPacer`).

The number of threads must not change a result. Products of bfloat16 do not depend on it, and
LAPACK's factorization, which does, always runs on one thread. Products of float32 depend on it for
some shapes, so that for a float32 model the number stays as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

__all__ = ["ThreadPacer", "one_thread"]

_PAUSE_S = 1.0
"""Seconds between two trials: what a trial takes is a few per cent of it."""
_TRIAL_S = 0.006
"""Seconds of one trial: longer than the time slices that a competing process takes."""
_GAIN = 1.2
"""By how much more threads must be faster than fewer to be worth their waits."""


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run the body on one thread where ``device`` is the CPU; the number is restored after."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ThreadPacer:
    """Keeps torch's number of threads at what is fastest while other processes come and go.

    A context manager: the number found on entering is the most that is used, and is put back.

    Args:
        device: where the work runs; on anything but the CPU nothing is done.
        dtype: of the model; for anything but bfloat16 nothing is done.
        clock: seconds, rising.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most = torch.get_num_threads()
        fits = device.type == "cpu" and dtype is torch.bfloat16
        self._active = fits and self._most > 1
        self._clock = clock
        self._next = clock()

    def __enter__(self) -> ThreadPacer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            torch.set_num_threads(self._most)

    def pace(self) -> None:
        """Try which number of threads is fastest, if the last trial is long enough ago."""
        if not self._active or self._clock() < self._next:
            return
        candidates = sorted({1, max(self._most // 2, 1), self._most})
        best = candidates[0]
        best_rate = self.rate(best)
        for threads in candidates[1:]:
            rate = self.rate(threads)
            if rate > best_rate * _GAIN:
                best, best_rate = threads, rate
        torch.set_num_threads(best)
        self._next = self._clock() + _PAUSE_S

    def rate(self, threads: int) -> float:
        """Operations per second of a typical size with ``threads`` threads."""
        torch.set_num_threads(threads)
        left = torch.ones(256, 512, dtype=torch.bfloat16)
        right = torch.ones(512, 512, dtype=torch.bfloat16)
        done, start = 0, self._clock()
        while (elapsed := self._clock() - start) < _TRIAL_S:
            torch.mm(left, right)
            done += 1
        return done / elapsed
