# SPDX-License-Identifier: Apache-2.0
"""The bytes of a tensor are those of its numbers in order, whatever its strides are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.checkpoint.tensor_files import bytes_of

TABLE = torch.arange(24, dtype=torch.int32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        TABLE,
        TABLE[2:],
        TABLE[1:2, 3:4],  # one element, whose strides are those of the table
        TABLE.mT[2:3, 1:2],
        TABLE[3],
        TABLE[0, 0],
        TABLE[:0],
    ],
    ids=lambda one: f"{tuple(one.shape)} {one.stride()}",
)
def test_they_are_those_of_its_numbers(tensor: Tensor) -> None:
    assert tensor.is_contiguous()
    expected = b"".join(int(one).to_bytes(4, "little") for one in tensor.flatten())
    assert bytes(bytes_of(tensor)) == expected
