# SPDX-License-Identifier: Apache-2.0
"""Scales of SmoothQuant and of log equalization: against the formulas, and at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.pairs import pairs

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


def test_log_equalization_follows_its_formula(ranges: torch.Tensor) -> None:
    found = log_equalization_scales(ranges)
    for channel, value in enumerate(ranges.tolist()):
        assert float(found[channel]) == pytest.approx(value / math.log2(2 + value), rel=1e-5)


@pairs(
    value=[0.0, 1e-30, 1e30, float("inf"), float("nan")],
    weight=[0.0, 1e-30, 1.0, float("inf")],
    strength=[0.0, 0.5, 1.0],
)
def test_no_scale_is_zero_or_beyond_numbers(value: float, weight: float, strength: float) -> None:
    ranges = torch.tensor([value, 1.0])
    for scale in (
        smoothquant_scales(ranges, torch.tensor([weight, 1.0]), strength),
        log_equalization_scales(ranges),
    ):
        assert bool((torch.isfinite(scale) & (scale > 0)).all())


def test_a_constant_channel_does_not_drown_the_others(weights: list[torch.Tensor]) -> None:
    """It has no range and may be far from zero: divided by the floor, it alone would be rounded."""
    x_TC = torch.randn(64, 24, generator=torch.Generator().manual_seed(2))
    x_TC[:, 0] = 1.0
    range_C = x_TC.amax(dim=0) - x_TC.amin(dim=0)
    weight_RC = torch.cat(weights)
    scale_C = smoothquant_scales(range_C, column_range(weights), 0.5)

    def error(scale_C: torch.Tensor) -> float:
        smooth_TC = x_TC / scale_C
        step_T1 = smooth_TC.abs().amax(dim=1, keepdim=True) / 127
        rounded_TC = (smooth_TC / step_T1).round() * step_T1 * scale_C
        return float(((rounded_TC - x_TC) @ weight_RC.T).norm() / (x_TC @ weight_RC.T).norm())

    floored_C = torch.where(range_C > 0, scale_C, 1e-5)
    assert error(scale_C) < 0.02
    assert error(floored_C) > 0.5
