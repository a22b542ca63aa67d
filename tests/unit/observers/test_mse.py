# SPDX-License-Identifier: Apache-2.0
"""Observers that search for the range with the least error."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from loguru import logger

from llmcompressor.errors import InputError
from llmcompressor.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MSEObserver,
    NVFP4ExpandedIMatrixObserver,
    NVFP4ExpandedMSEObserver,
)

CASES = [
    {"num_bits": 4, "group_size": 16},
    {"num_bits": 4, "strategy": "channel", "symmetric": False},
    {"num_bits": 3, "strategy": "tensor"},
    {"num_bits": 4, "strategy": "block", "block_structure": [4, 16]},
    {"num_bits": 4, "strategy": "block", "block_structure": [5, 24]},
]


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 64) * torch.rand(64) ** 2


def loss(W: torch.Tensor, observer, weight_C: torch.Tensor | float = 1.0) -> float:
    args = observer.args
    scale, zero = observer(W)
    rounded = fake_quantize(W, scale, None if args.symmetric else zero, args)
    return float(((rounded - W).abs() ** observer.options.norm * weight_C).sum())


def minmax_loss(W: torch.Tensor, args: QuantizationArgs, norm: float, weight_C=1.0) -> float:
    scale, zero = MemorylessMinMaxObserver("weight", args)(W)
    rounded = fake_quantize(W, scale, None if args.symmetric else zero, args)
    return float(((rounded - W).abs() ** norm * weight_C).sum())


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_error_is_below_that_of_the_extremes(weight, fields):
    args = QuantizationArgs(**fields)
    observer = MemorylessMSEObserver("weight", args)
    assert loss(weight, observer) < minmax_loss(weight, args, 2.4)


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_importance_lowers_the_error_where_it_counts(weight, fields):
    args = QuantizationArgs(**fields)
    importance = torch.zeros(64)
    importance[::4] = torch.rand(16) + 0.5
    weighted = IMatrixMSEObserver("weight", args)
    weighted.importance = importance
    unweighted = MemorylessMSEObserver("weight", args, maxshrink=0.95, grid=20, norm=3.0)
    assert loss(weight, weighted, importance) < loss(weight, unweighted, importance)


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_equal_importance_is_no_importance(weight, fields):
    args = QuantizationArgs(**fields)
    equal = IMatrixMSEObserver("weight", args, maxshrink=0.5)
    equal.importance = torch.full((64,), 7.0)
    # a step of 1 / 20 further, as the weighted search includes its last one
    plain = MemorylessMSEObserver("weight", args, maxshrink=0.5501, grid=20, norm=3.0)
    assert torch.allclose(equal(weight)[0], plain(weight)[0])


BAD_IMPORTANCE = {
    "not known": None,
    "shape": torch.ones(3),
    "NaN": torch.full((64,), torch.nan),
    "negative": -torch.ones(64),
    "zero": torch.zeros(64),
}


def test_cells_without_importance_are_not_clipped_to_nothing():
    weight = torch.randn(16, 64)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    plain, weighted = (IMatrixMSEObserver("weight", args) for _ in range(2))
    plain.importance = torch.ones(64)
    weighted.importance = torch.ones(64)
    weighted.importance[16:32] = 0
    assert torch.equal(weighted(weight)[0], plain(weight)[0])


@pytest.mark.parametrize("reason", BAD_IMPORTANCE)
def test_unusable_importance_is_logged_or_refused(weight, reason):
    args = QuantizationArgs(**CASES[0])
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    lenient = IMatrixMSEObserver("weight", args)
    lenient.importance = BAD_IMPORTANCE[reason]
    found = lenient(weight)[0]
    logger.remove(sink)
    equal = IMatrixMSEObserver("weight", args)
    equal.importance = torch.ones(64)
    assert torch.equal(found, equal(weight)[0])
    assert reason in lines[0]
    strict = IMatrixMSEObserver("weight", args, strict=True)
    strict.importance = BAD_IMPORTANCE[reason]
    with pytest.raises(InputError, match=reason):
        strict.observe(weight)


def test_mse_is_a_moving_average_of_what_memoryless_finds():
    torch.manual_seed(0)
    batches = torch.randn(4, 8, 32)
    args = QuantizationArgs(num_bits=4, strategy="tensor")
    average = MSEObserver("input", args, averaging_constant=0.25)
    expected = None
    for batch in batches:
        average.observe(batch)
        found = MemorylessMSEObserver("input", args).observe(batch).range()[1]
        expected = found if expected is None else expected + 0.25 * (found - expected)
    assert torch.allclose(average.range()[1], expected)


@pytest.mark.parametrize("kind", [NVFP4ExpandedMSEObserver, NVFP4ExpandedIMatrixObserver])
def test_the_expanded_search_beats_the_plain_one_on_4_bit_floats(weight, kind):
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=16)
    expanded = kind("weight", args)
    expanded.importance = torch.ones(64)
    assert loss(weight, expanded) < loss(weight, MemorylessMSEObserver("weight", args))
    low, high = expanded.range()
    plain_low, plain_high = MemorylessMinMaxObserver("weight", args).observe(weight).range()
    ratio = torch.maximum(-low, high) / torch.maximum(-plain_low, plain_high)
    assert ratio.max() > 1
    assert ratio.max() <= 1.8001
    assert ratio.min() >= 0.7999
