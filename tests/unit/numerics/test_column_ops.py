# SPDX-License-Identifier: Apache-2.0
"""numpy and torch do the same to a column, in the memory of the same tensor."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics.column_sweep import column_ops

SHAPES = [(5, 7), (3, 5, 7)]
IDS = ["one weight", "a batch"]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_both_give_the_same_bits(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(shape) * 5, torch.randn(shape)
    results = []
    for by_torch in (True, False):
        ops = column_ops(left, by_torch=by_torch)
        found = torch.zeros(shape)
        ends = ops.number(-3), ops.number(2)
        triples = zip(ops.columns(left), ops.columns(right), ops.columns(found), strict=True)
        for a, b, c in triples:
            ops.multiply(a, b, out=c)
            ops.add(c, a, out=c)
            ops.subtract(c, b, out=c)
            ops.round(c, out=c)
            ops.clamp(c, *ends, out=c)
        results.append(found)
    assert torch.equal(*results)
    assert results[0].unique().tolist() == [-3, -2, -1, 0, 1, 2]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "numpy"])
def test_an_outer_product_is_subtracted_in_place(shape: tuple[int, ...], by_torch: bool) -> None:
    torch.manual_seed(0)
    target, factor, error = (
        torch.randn(shape),
        torch.randn(shape[:-1]),
        torch.randn(shape)[..., 0, :],
    )
    expected = target - factor.unsqueeze(-1) * error.unsqueeze(-2)
    ops = column_ops(target, by_torch=by_torch)
    memory = target.data_ptr()
    ops.subtract_outer(ops.view(target), ops.view(factor), ops.view(error), ops.scratch(target))
    torch.testing.assert_close(target, expected)
    assert target.data_ptr() == memory


def test_halves_go_to_even_and_nan_stays() -> None:
    halves = torch.tensor([[0.5, 1.5, 2.5, -0.5, float("nan")]])
    ops = column_ops(halves)
    (column,) = ops.columns(halves)
    ops.round(column, out=column)
    ops.clamp(column, ops.number(-8), ops.number(7), out=column)
    assert halves[0, :4].tolist() == [0, 2, 2, 0]
    assert bool(halves[0, 4].isnan())
