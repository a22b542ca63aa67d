# SPDX-License-Identifier: Apache-2.0
"""One bad value anywhere is found; large finite ones are no false alarm."""

from __future__ import annotations

import pytest
import torch
from tests.support.pairs import pairs

from llmcompressor.numerics.extremes import is_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pairs(dtype=DTYPES, bad=[float("nan"), float("inf"), -float("inf")], position=[0, 500, 999])
def test_one_bad_value_is_found_wherever_it_stands(
    dtype: torch.dtype, bad: float, position: int
) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    assert is_finite(tensor)
    tensor[position] = bad
    assert not is_finite(tensor.reshape(10, 100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    tensor = torch.full((100,), 3e38, dtype=dtype)
    assert is_finite(tensor)
    tensor[93] = float("nan")
    assert not is_finite(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.arange(4),
        torch.empty(4, device="meta"),
        torch.ones(3, 4, requires_grad=True).T,
    ],
    ids=["empty", "integers", "meta", "strided with gradient"],
)
def test_what_cannot_hold_a_bad_value(tensor: torch.Tensor) -> None:
    assert is_finite(tensor)
