# SPDX-License-Identifier: Apache-2.0
"""Memory for what is read comes back when nobody looks at it any more."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from llmcompressor.checkpoint.tensor_files import BufferPool

LARGE = 2**21
pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is not asked of the system here"
)


def idle_bytes(buffers: BufferPool) -> int:
    return sum(size * len(every) for size, every in buffers._idle.items())


def test_what_is_gone_makes_room_for_the_next_of_its_size() -> None:
    buffers = BufferPool()
    tensor = buffers.take(LARGE)
    place = tensor.data_ptr()
    assert idle_bytes(buffers) == 0
    del tensor
    assert idle_bytes(buffers) == LARGE
    assert buffers.take(LARGE).data_ptr() == place
    assert (buffers.take(LARGE).numel(), buffers.take(7).numel()) == (LARGE, 7)


def test_what_is_needed_once_is_not_kept() -> None:
    buffers = BufferPool()
    tensor = buffers.take(LARGE, once=True).fill_(3)
    row = tensor[LARGE // 2 :]
    del tensor
    buffers.take(LARGE).fill_(0)
    assert bool((row == 3).all())
    kept = idle_bytes(buffers)
    del row
    assert idle_bytes(buffers) == kept


def test_nothing_is_given_twice() -> None:
    buffers = BufferPool()
    first = buffers.take(LARGE).view(torch.bfloat16).reshape(2, -1)
    row = first[1]  # all that is left of it
    row.fill_(3.0)
    del first
    others = [buffers.take(LARGE).fill_(0) for _ in range(3)]
    assert idle_bytes(buffers) == 0
    assert bool((row == 3).all())
    assert len({one.data_ptr() for one in others}) == 3


def test_what_python_sees_of_a_tensor_keeps_its_memory() -> None:
    buffers = BufferPool()
    seen = buffers.take(LARGE).fill_(5).numpy()
    buffers.take(LARGE).fill_(0)
    assert (seen == 5).all()


def test_closed_it_keeps_nothing_and_takes_nothing_away() -> None:
    buffers = BufferPool()
    tensor, idle = buffers.take(LARGE).fill_(1), buffers.take(LARGE)
    del idle
    buffers.close()
    assert idle_bytes(buffers) == 0
    assert bool((tensor == 1).all())
    del tensor
    assert idle_bytes(buffers) == 0
    left = weakref.ref(buffers)
    del buffers
    gc.collect()
    assert left() is None
