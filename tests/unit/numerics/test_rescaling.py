# SPDX-License-Identifier: Apache-2.0
"""Channels rescaled before a rotation: by the least product, whatever outliers are planted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.rotation import channel_rescaling

KANTOROVICH = 1.5625
"""(m + M)² / 4mM, where squares of rounded powers of two are from m = 1/2 to M = 2 of the best."""


def cost(scale_C: Tensor, square_C: Tensor, column_square_C: Tensor) -> float:
    """||W D||² E||x / D||²."""
    return float((column_square_C * scale_C**2).sum() * (square_C / scale_C**2).sum())


def drawn(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exponents = spread * torch.randn(2, 96, generator=generator, dtype=torch.float64)
    square_C, column_square_C = exponents.exp2()
    return square_C, column_square_C


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_cost_is_near_the_least(seed: int, spread: float) -> None:
    square_C, column_square_C = drawn(seed, spread)
    least = float((column_square_C * square_C).sqrt().sum() ** 2)
    best_C = (square_C / column_square_C) ** 0.25
    assert cost(best_C, square_C, column_square_C) == pytest.approx(least)
    found = cost(channel_rescaling(square_C, column_square_C), square_C, column_square_C)
    assert least <= found <= KANTOROVICH * least
    if spread > 1:
        assert found < 0.9 * cost(torch.ones(96), square_C, column_square_C)


def test_planted_outliers_are_taken_back() -> None:
    square_C, column_square_C = drawn(0, 0.1)
    plain_C = channel_rescaling(square_C, column_square_C)
    planted_C = torch.ones(96, dtype=torch.float64)
    planted_C[[3, 77]] = torch.tensor([64.0, 0.25], dtype=torch.float64)
    found_C = channel_rescaling(square_C * planted_C**2, column_square_C / planted_C**2)
    assert torch.equal(found_C, plain_C * planted_C)


def test_what_is_zero_stays_and_counts_for_nothing() -> None:
    square_C, column_square_C = drawn(3, 4.0)
    wanted_C = channel_rescaling(square_C[2:], column_square_C[2:])
    square_C[0] = column_square_C[1] = 0.0
    found_C = channel_rescaling(square_C, column_square_C)
    assert found_C[:2].tolist() == [1, 1]
    assert torch.equal(found_C[2:], wanted_C)
    assert bool((channel_rescaling(torch.zeros(4), torch.ones(4)) == 1).all())
