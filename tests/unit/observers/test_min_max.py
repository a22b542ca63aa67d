# SPDX-License-Identifier: Apache-2.0
"""How observers of extremes remember."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from llmcompressor.observers import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver

ARGS = QuantizationArgs(num_bits=8, strategy="tensor")
BATCHES = [torch.tensor([[-1.0, 2.0]]), torch.tensor([[-5.0, 1.0]]), torch.tensor([[0.5, 4.0]])]


def bounds(observer) -> tuple[float, float]:
    low, high = observer.range()
    return low.item(), high.item()


def observed(kind, **options):
    observer = kind("input", ARGS, **options)
    for batch in BATCHES:
        observer.observe(batch)
    return observer


def test_memoryless_knows_the_last_tensor():
    assert bounds(observed(MemorylessMinMaxObserver)) == (0.5, 4.0)


def test_static_knows_all_tensors():
    assert bounds(observed(StaticMinMaxObserver)) == (-5.0, 4.0)


@pytest.mark.parametrize("constant", [0.01, 0.5, 1.0])
def test_minmax_is_a_moving_average(constant):
    low, high = -1.0, 2.0
    for batch in BATCHES[1:]:
        low += constant * (batch.min().item() - low)
        high += constant * (batch.max().item() - high)
    observer = observed(MinMaxObserver, averaging_constant=constant)
    assert bounds(observer) == pytest.approx((low, high))


def test_an_average_of_16_bit_ranges_does_not_stand_still():
    observer = MinMaxObserver("input", ARGS)
    observer.observe(torch.ones(1, 2, dtype=torch.bfloat16))
    for _ in range(1000):
        observer.observe(torch.full((1, 2), 1.1, dtype=torch.bfloat16))
    assert observer.range()[1].dtype is torch.bfloat16
    assert observer.range()[1].item() == pytest.approx(1.1, rel=0.01)
