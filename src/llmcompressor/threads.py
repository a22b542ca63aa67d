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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

__all__ = ["each_on_one_thread", "each_span", "one_thread"]

T = TypeVar("T")


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


def each_on_one_thread(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Do ``work`` for every item, several at a time, each of them on a single thread.

    What an item gives does not depend on how many threads there are.

    Args:
        work: must not depend on the order of the items.
        items: what to do; large ones first.
    """
    threads = torch.get_num_threads()
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
        torch.set_num_threads(threads)
    for one in begun:
        one.result()


def each_span(work: Callable[[slice], None], length: int, device: torch.device) -> None:
    """Do ``work`` for spans of a dimension whose elements do not see each other.

    On the CPU by parts that depend on ``length`` alone, each on one thread; elsewhere at once.

    Args:
        work: told which elements.
        length: of the dimension.
        device: what the work runs on.
    """
    if device.type != "cpu":
        work(slice(None))
        return
    each_on_one_thread(work, [slice(lo, lo + _SPAN) for lo in range(0, length, _SPAN)])


_SPAN = 256
"""Long enough for a product to run at the machine's rate."""


@functools.cache  # threads that are there already: starting them takes as long as a small matrix
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "one")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
