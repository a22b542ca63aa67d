# SPDX-License-Identifier: Apache-2.0
"""How many threads torch computes with on the CPU.

Torch splits each operation over its threads and waits, at its end, for the slowest of them. On a
machine of one's own that is right for large operations. With another process busy on one core,
every such wait lasts until that core's next time slice, and what takes a second takes ten. So
work made of many small operations runs on one thread (:func:`one_thread`), and what can be cut into
pieces gives each piece to one (:func:`each_on_one_thread`).

The number of threads decides how some products are summed, of bfloat16 too where the number of
tokens is odd, so it is never changed within a run: it is part of what a run is.
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

__all__ = [
    "SPAN",
    "each_on_one_thread",
    "each_span",
    "in_turn",
    "one_thread",
    "short_waits",
    "wide_span",
]

T = TypeVar("T")


SPAN = 256
"""Rows or columns of a part: enough for a product to run at the machine's rate."""
_WIDE = 512
"""The same for work of many short steps, where beginning each counts too."""
_allowed = 1
"""Threads that a body of :func:`one_thread` may give pieces to."""


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run the body on one thread where ``device`` is the CPU; the number is restored after.

    Pieces that the body hands to :func:`each_on_one_thread` go to as many threads as before.
    """
    global _allowed  # noqa: PLW0603 - torch's number, which it stands in for, is of the process too
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
def short_waits() -> Iterator[None]:
    """Have torch's idle threads sleep soon, for as long as the body runs.

    After each operation they wait for the next without sleeping, for milliseconds: time that pieces
    on threads of their own, and other processes, do not get. libgomp cuts that short where more
    threads stand ready than there are processors, so another team of them is made, which does
    nothing. With two processors both busy an operation's start costs 0.05 ms more; GPTQ takes a
    fifth less processor time, and with another process beside it an eighth less time. A run without
    data, whose checkpoint is read and written by other threads meanwhile, takes a quarter less.
    """
    global _standing_by  # noqa: PLW0603 - the teams are those of the process
    if torch.get_num_threads() == 1 or _standing_by:
        yield
        return
    ready, over = threading.Event(), threading.Event()

    def stand_by() -> None:
        try:
            torch.ones(_LARGE).exp_()  # large enough for all threads: this one has them from now on
        finally:
            ready.set()  # also without them: what waits for it would wait for ever
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


def each_on_one_thread(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Do ``work`` for every item, several at a time, each of them on a single thread.

    What an item gives does not depend on how many threads there are. The calling thread takes part:
    handing all to others and waiting costs small matrices as much as their products.

    Args:
        work: must not depend on the order of the items.
        items: what to do; large ones first.
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
            for item in _taken(left):
                torch.set_num_threads(1)  # each time: part of it counts for the whole process
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
        # also after an error: nothing is to be at work on what is given up
        wait([helper for helper in helpers if not helper.cancel()])
        torch.set_num_threads(before)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """In the body, the calling thread does all pieces itself, one after the other."""
    outer = getattr(_here, "is_piece", False)
    _here.is_piece = True
    try:
        yield
    finally:
        _here.is_piece = outer


def _taken(left: deque[T]) -> Iterator[T]:
    """Each item to one of the threads that ask."""
    while True:
        try:
            item = left.popleft()
        except IndexError:
            return
        yield item


def each_span(
    work: Callable[[slice], None], length: int, device: torch.device, *, width: int = SPAN
) -> None:
    """Do ``work`` for spans of a dimension whose elements do not see each other.

    On the CPU by parts that depend on ``length`` alone, each on one thread; elsewhere at once.

    Args:
        work: told which elements.
        length: of the dimension.
        device: what the work runs on.
        width: of a part.
    """
    if device.type != "cpu":
        work(slice(None))
        return
    each_on_one_thread(work, [slice(lo, lo + width) for lo in range(0, length, width)])


def wide_span(length: int) -> int:
    """The width of a part for work of many short steps; there are two parts where possible.

    >>> wide_span(4096), wide_span(512), wide_span(100)
    (512, 256, 256)
    """
    return _WIDE if length > _WIDE else SPAN


@functools.cache  # threads that are there already: starting them takes as long as a small matrix
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, "one")


_here = threading.local()
"""``is_piece``: pieces of a piece are done at once."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
