# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from llmcompressor.checkpoint.finite import first_nonfinite, is_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(dtype)
    assert first_nonfinite(model) is None
    model[1].weight.data[3, 5] = bad
    assert first_nonfinite(model) == "1.weight"
    assert first_nonfinite(model, ["0"]) is None
    model[0].bias.data[0] = bad
    assert first_nonfinite(model) == "0.bias"


def test_sums_that_overflow_are_no_infinities() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.full((1000,), 3e38, dtype=torch.bfloat16))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


def test_other_dtypes() -> None:
    assert is_finite(torch.zeros(3, dtype=torch.int8))
    assert is_finite(torch.zeros(3).to(torch.float8_e4m3fn))
    assert not is_finite(torch.full((3,), float("nan")).to(torch.float8_e4m3fn))
