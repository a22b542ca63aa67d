# SPDX-License-Identifier: Apache-2.0
"""Files laid out beforehand are those that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmcompressor.checkpoint.source import read_header
from llmcompressor.checkpoint.tensor_files import StoredTensor, dtype_name, layout_files

TENSORS = {
    "b.weight": torch.zeros(3, 5, dtype=torch.int8),
    "a.weight": torch.ones(4, 2, dtype=torch.bfloat16),
    "c.scale": torch.ones(1),
    "ä.shape": torch.tensor([3, 5]),
    "d.packed": torch.zeros(2, 2, dtype=torch.int32),
    "e.empty": torch.zeros(0, 3),
    "f.fp8": torch.ones(7).to(torch.float8_e4m3fn),
}


def stored() -> list[StoredTensor]:
    return [
        StoredTensor(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in TENSORS.items()
    ]


def test_the_header_is_that_of_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "one.safetensors").read_bytes()
    layout = layout_files(stored(), 10**9)
    (file,) = layout.files
    assert written.startswith(file.header)
    assert len(written) == file.size
    found = read_header(tmp_path / "one.safetensors")
    for name, place in layout.places.items():
        assert (found[name].offset, found[name].nbytes) == (place.offset, place.stored.nbytes)
    assert layout.index() is None


@pytest.mark.parametrize("limit", [1, 20, 40])
def test_files_hold_no_more_than_the_limit(limit: int) -> None:
    layout = layout_files(stored(), limit)
    assert {name for name in layout.places} == set(TENSORS)
    for file in layout.files:
        own = [p.stored for p in layout.places.values() if p.file == file.name]
        assert len(own) == 1 or sum(one.nbytes for one in own) <= limit
    assert layout.index() is not None
