# SPDX-License-Identifier: Apache-2.0
"""Storages in the pages of a file: read and written in place, and free again by themselves."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcompressor.modeling.offload import MmapStoragePool

PAGE = mmap.PAGESIZE
MIB = 2**20

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="a system that cannot take disk space in advance"
)


def _values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _put(pages: MmapStoragePool, tensor: torch.Tensor) -> torch.Tensor | None:
    storage = pages.put(tensor.untyped_storage())
    if storage is None:
        return None
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)


@pytest.mark.parametrize("count", [1, PAGE // 4, PAGE // 4 + 1, 3 * MIB])
def test_values_are_there_and_can_be_written(count: int) -> None:
    pages, tensor = MmapStoragePool(64 * MIB), _values(count)
    held = _put(pages, tensor)
    assert held is not None
    assert held.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert pages.owns(held.untyped_storage())
    assert not pages.owns(tensor.untyped_storage())
    assert torch.equal(held, tensor)
    held.mul_(2)
    pages.let_go()
    assert torch.equal(held, 2 * tensor)


def test_many_storages_do_not_touch_each_other() -> None:
    pages = MmapStoragePool(256 * MIB)
    tensors = [_values(1 + 997 * index, index) for index in range(200)]
    held = [_put(pages, tensor) for tensor in tensors]
    del held[::3]  # their places are taken by others
    again = [_values(1 + 499 * index, 1000 + index) for index in range(100)]
    taken = [_put(pages, tensor) for tensor in again]
    pages.let_go()
    del tensors[::3]
    assert all(map(torch.equal, held, tensors))
    assert all(map(torch.equal, taken, again))


def test_a_place_is_free_when_the_last_view_is_gone() -> None:
    pages = MmapStoragePool(64 * MIB)
    held = _put(pages, _values(MIB))
    assert held is not None
    place, view = held.data_ptr(), held[5:]
    del held
    other = _put(pages, _values(MIB, 1))
    assert other is not None
    assert other.data_ptr() != place
    del view
    third = _put(pages, _values(MIB - 3, 2))
    assert third is not None
    assert third.data_ptr() == place
    assert torch.equal(other, _values(MIB, 1))


def test_a_full_disk_is_no_room_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pages = MmapStoragePool(256 * MIB)
    held = _put(pages, _values(MIB))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert _put(pages, _values(16 * MIB)) is None
    assert _put(pages, _values(16 * MIB)) is None
    (warning,) = warned
    assert "No space left on device" in warning
    assert "stay in memory" in warning
    assert held is not None
    assert torch.equal(held, _values(MIB))
    assert list(tmp_path.iterdir()) == []
