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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

__all__ = ["SPAN", "each_on_one_thread", "each_span", "one_thread", "short_waits"]

T = TypeVar("T")


SPAN = 256
"""Rows or columns of a part: enough for a product to run at the machine's rate."""
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
    fifth less processor time, and with another process beside it an eighth less time.
    """
    if torch.get_num_threads() == 1:
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
    try:
        yield
    finally:
        over.set()
        idle.join()


_LARGE = 2**18


def each_on_one_thread(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Do ``work`` for every item, several at a time, each of them on a single thread.

    What an item gives does not depend on how many threads there are.

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

    def alone(item: T) -> None:
        torch.set_num_threads(1)  # each time: part of it counts for all threads of the process
        work(item)

    try:
        begun = [_pool(threads).submit(alone, item) for item in items]
        wait(begun)  # also after an error: nothing is to be at work on what is given up
    finally:
        torch.set_num_threads(before)
    for one in begun:
        one.result()


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


@functools.cache  # threads that are there already: starting them takes as long as a small matrix
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "one", initializer=_begin_pieces)


_here = threading.local()


def _begin_pieces() -> None:
    """Of a thread that only does pieces: pieces of a piece are done at once."""
    _here.is_piece = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
