# SPDX-License-Identifier: Apache-2.0
"""Statistics of columns, and statistics that are made of kept sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.call_graph import CallOrder
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.observers.column_statistics import (
    ColumnExtremes,
    ColumnSizes,
    ColumnSquares,
    SumCollector,
)
from llmcompressor.observers.input_statistics import InputCollector, InputStatistics

COLUMNS = 6
KINDS: list[Any] = [ColumnSquares, ColumnSizes, ColumnExtremes, InputStatistics]


def inputs(seed: int, tokens: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, COLUMNS, generator=generator).bfloat16()


def summed(*batches: Tensor) -> InputSums:
    collector = SumCollector(COLUMNS, "cpu", "a")
    for one in batches:
        collector.update(one)
    return collector.sums()


def values(statistics: Any) -> list[Tensor]:
    if isinstance(statistics, InputStatistics):
        return [statistics.gram]
    return [one for one in vars(statistics).values() if isinstance(one, Tensor)]


def test_all_sums_are_those_of_the_tokens() -> None:
    first, second = inputs(0), inputs(1, 9)
    found, every_TC = summed(first, second), torch.cat([first, second]).double()
    assert found.tokens == 49
    exact = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.gram_CC.double(), every_TC.T @ every_TC, **exact)
    torch.testing.assert_close(found.squares_C.double(), every_TC.square().sum(0), **exact)
    torch.testing.assert_close(found.sizes_C.double(), every_TC.abs().sum(0), **exact)
    assert torch.equal(found.least_C.double(), every_TC.amin(0))
    assert torch.equal(found.greatest_C.double(), every_TC.amax(0))


@pytest.mark.parametrize("kind", KINDS)
def test_kept_sums_give_the_same_bits_as_the_tokens(kind: Any) -> None:
    batches = [inputs(0), inputs(1), inputs(2, 5)]
    direct, kept = kind(COLUMNS, "cpu", name="a"), kind(COLUMNS, "cpu", name="a")
    for one in batches:
        direct.update(one)
    kept.include(summed(*batches))
    assert values(direct)
    for one, other in zip(values(direct), values(kept), strict=True):
        assert torch.equal(one, other)
    assert getattr(direct, "tokens", 0) == getattr(kept, "tokens", 0)


def test_nan_is_told_with_the_name_of_the_module() -> None:
    bad = inputs(0)
    bad[3, 2] = torch.nan
    squares, extremes = (kind(COLUMNS, "cpu", "a.b") for kind in (ColumnSquares, ColumnExtremes))
    for one in (squares, extremes):
        one.update(bad)
    with pytest.raises(NonFiniteError, match=r"a\.b"):
        squares.mean_square()
    with pytest.raises(NonFiniteError, match=r"a\.b"):
        _ = extremes.range


def test_modules_with_one_input_share_kept_sums() -> None:
    q, k, other = (Linear(COLUMNS, 2) for _ in range(3))
    order = CallOrder(((q, k), (other,)), {q: 1, k: 1, other: 1})
    kept: dict[Module, InputSums] = {}
    collector = InputCollector[ColumnSquares](
        lambda module, input_TC, twin: ColumnSquares(input_TC.shape[-1], "cpu", "a"),
        {q, k, other}.__contains__,
        order,
        kept=kept,
    )
    assert collector.of(q) is None
    sums = summed(inputs(0))
    kept |= {q: sums, k: sums}
    found = collector.of(k)
    assert found is not None
    assert found is collector.of(q)
    assert found.tokens == 40
    assert torch.equal(found.squares, sums.squares_C)
    assert collector.of(other) is None
