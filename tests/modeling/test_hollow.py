# SPDX-License-Identifier: Apache-2.0
"""Weights that are one zero: what is computed with them, and without writing them out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear, functional

from llmcompressor.modeling.hollow import hollow_weights, zero_products


@pytest.mark.parametrize("bias", [True, False])
def test_products_with_one_zero_are_those_of_torch(bias: bool) -> None:
    with torch.device("meta"):
        linear = Linear(8, 4, bias=bias)
    given = torch.randn(2, 3, 8)
    with torch.no_grad(), hollow_weights(linear):
        expected = linear(given)
        with zero_products():
            assert torch.equal(linear(given), expected)


def test_no_weight_is_written_out() -> None:
    with torch.device("meta"):
        linear = Linear(2**20, 2**20)  # four terabytes
    with torch.no_grad(), hollow_weights(linear), zero_products():
        assert not linear(torch.ones(1, 2**20)).any()


def test_other_weights_are_multiplied() -> None:
    given = torch.randn(3, 8)
    for weight in (torch.randn(4, 8), torch.ones(()).expand(4, 8)):
        expected = functional.linear(given, weight)
        with zero_products():
            assert torch.equal(functional.linear(given, weight), expected)
            assert expected.any()


@pytest.mark.parametrize("given", [torch.ones(3, 7), torch.ones(3, 8, dtype=torch.float64)])
def test_what_torch_refuses_is_refused(given: torch.Tensor) -> None:
    weight = torch.zeros(()).expand(4, 8)
    plain = functional.linear
    with pytest.raises(RuntimeError), zero_products():
        functional.linear(given, weight)
    assert functional.linear is plain
