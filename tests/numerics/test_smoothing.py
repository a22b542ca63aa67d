# SPDX-License-Identifier: Apache-2.0
"""Scales of SmoothQuant and of log equalization: against the formulas, and at their limits."""

from __future__ import annotations

import math

import pytest
import torch

from llmcompressor.numerics.smoothing import (
    column_range,
    log_equalization_scales,
    smoothquant_scales,
)


@pytest.fixture
def ranges() -> torch.Tensor:
    return torch.rand(24, generator=torch.Generator().manual_seed(0)) * 30 + 0.1


@pytest.fixture
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 24, generator=generator) for rows in (8, 4)]


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_scales_are_the_papers(
    strength: float, ranges: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    found = smoothquant_scales(ranges, column_range(weights), strength)
    for channel in range(24):
        largest = max(abs(float(row[channel])) for weight in weights for row in weight)
        expected = float(ranges[channel]) ** strength / (2 * largest) ** (1 - strength)
        assert float(found[channel]) == pytest.approx(expected, rel=1e-5)


def test_half_strength_gives_both_sides_the_same_range(
    ranges: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    scale = smoothquant_scales(ranges, column_range(weights), 0.5)
    torch.testing.assert_close(ranges / scale, column_range([w * scale for w in weights]))


def test_full_strength_makes_all_activations_alike(
    ranges: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    scale = smoothquant_scales(ranges, column_range(weights), 1.0)
    torch.testing.assert_close(ranges / scale, torch.ones(24))


def test_log_equalization_follows_its_formula(ranges: torch.Tensor) -> None:
    found = log_equalization_scales(ranges)
    for channel, value in enumerate(ranges.tolist()):
        assert float(found[channel]) == pytest.approx(value / math.log2(2 + value), rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("weight", [0.0, 1e-30, 1.0, float("inf")])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_no_scale_is_zero_or_beyond_numbers(value: float, weight: float, strength: float) -> None:
    ranges = torch.tensor([value, 1.0])
    for scale in (
        smoothquant_scales(ranges, torch.tensor([weight, 1.0]), strength),
        log_equalization_scales(ranges),
    ):
        assert bool((torch.isfinite(scale) & (scale > 0)).all())


def test_a_channel_that_never_varied_is_left_alone() -> None:
    assert float(smoothquant_scales(torch.zeros(1), torch.ones(1), 0.5)) == 1.0
