# SPDX-License-Identifier: Apache-2.0
"""Threads of torch on the CPU.

Torch splits each operation over its threads and waits for the slowest of them at its end. On an
otherwise idle machine that is right for large operations. With another process busy on one core,
every such wait lasts until that core's next time slice, and a second of work takes ten. So work
made of many small operations runs on one thread (:func:`one_thread`), and work that can be cut into
pieces gives each piece to one thread (:func:`parallel_for`).

The number of threads decides the order of summation in some products, for bfloat16 too if the
number of tokens is odd. So it is part of a run's identity and never changed within a run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


SPAN = 256
"""Rows or columns of a part: enough for a product to run at the machine's rate."""
_WIDE = 512
"""The same for work of many short steps, where beginning each counts too."""
_allowed = 1
"""Threads that a body of :func:`one_thread` may give pieces to."""


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run the body on one thread if ``device`` is the CPU, and restore the number afterwards.

    Pieces that the body passes to :func:`parallel_for` still use as many threads as before.
    """
    global _allowed  # noqa: PLW0603 - like torch's own number, it is global to the process
    threads, outer = torch.get_num_threads(), _allowed
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    _allowed = threads
    try:
        yield
    finally:
        _allowed = outer
        torch.set_num_threads(threads)


@contextlib.contextmanager
def short_spin_waits() -> Iterator[None]:
    """Make torch's idle threads sleep soon while the body runs.

    After each operation they busy-wait for the next for milliseconds, time that pieces on threads
    of their own, and other processes, do not get. libgomp shortens that wait where more threads
    exist than processors, so a second, idle team of threads is created. With two processors both
    busy an operation's start costs 0.05 ms more; GPTQ takes a fifth less processor time, and with
    another process running an eighth less time. A run without data, whose checkpoint is read and
    written by other threads, takes a quarter less.
    """
    global _standing_by  # noqa: PLW0603 - thread teams are global to the process
    if torch.get_num_threads() == 1 or _standing_by:
        yield
        return
    ready, over = threading.Event(), threading.Event()

    def stand_by() -> None:
        try:
            torch.ones(_LARGE).exp_()  # large enough to create this thread's own team
        finally:
            ready.set()  # even on failure, or the waiting thread would hang
        over.wait()

    idle = threading.Thread(target=stand_by, name="stand-by", daemon=True)
    idle.start()
    ready.wait()
    _standing_by = True
    try:
        yield
    finally:
        _standing_by = False
        over.set()
        idle.join()


_LARGE = 2**18
_standing_by = False


def parallel_for(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call ``work`` for every item, large ones first, several at a time, each on a single thread.

    An item's result does not depend on the number of threads, nor may it on the order of the items.
    The calling thread takes part, since waiting for others costs as much as the product of small
    matrices.
    """
    before = torch.get_num_threads()
    threads = 1 if getattr(_here, "is_piece", False) else max(before, _allowed)
    if threads == 1 or len(items) < 2:
        with one_thread(torch.device("cpu")):
            for item in items:
                work(item)
        return

    left = deque(items)

    def take_turns() -> None:
        _here.is_piece = True
        try:
            while True:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                torch.set_num_threads(1)  # each time: part of this setting is global to the process
                work(item)
        except BaseException:
            left.clear()
            raise
        finally:
            _here.is_piece = False

    helpers = [_pool(threads).submit(take_turns) for _ in range(min(threads, len(items)) - 1)]
    try:
        take_turns()
    finally:
        # also after an error: no thread may go on with cancelled work
        wait([helper for helper in helpers if not helper.cancel()])
        torch.set_num_threads(before)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


@contextlib.contextmanager
def run_serially() -> Iterator[None]:
    """Make the calling thread process all pieces itself, one after the other, in the body."""
    outer = getattr(_here, "is_piece", False)
    _here.is_piece = True
    try:
        yield
    finally:
        _here.is_piece = outer


def parallel_spans(
    work: Callable[[slice], None], length: int, device: torch.device, *, width: int = SPAN
) -> None:
    """Call ``work`` for spans of a dimension of ``length`` independent elements.

    On the CPU the spans depend on ``length`` and ``width`` alone, each on one thread; elsewhere
    there is one span.
    """
    if device.type != "cpu":
        work(slice(None))
        return
    parallel_for(work, [slice(lo, lo + width) for lo in range(0, length, width)])


def wide_span(length: int) -> int:
    """Return the span width for work of many short steps; two spans where possible.

    >>> wide_span(4096), wide_span(512), wide_span(100)
    (512, 256, 256)
    """
    return _WIDE if length > _WIDE else SPAN


@functools.cache  # kept alive: starting threads takes as long as a small product
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, "one")


_here = threading.local()
"""``is_piece``: pieces of a piece are done at once."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
