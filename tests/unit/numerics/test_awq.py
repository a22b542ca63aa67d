# SPDX-License-Identifier: Apache-2.0
"""AWQ's search: losses against forwards, candidates at their limits, clips against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.awq import (
    Duo,
    StackedLinears,
    candidates,
    choose_scale,
    clip_bounds,
    output_error_from_gram,
    relative_column_magnitude,
)
from llmcompressor.numerics.cholesky import QuadraticForm
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition, fake_quantize_matrix
from llmcompressor.numerics.scales import scales_from_range

GRID = Grid("int", 3, symmetric=False)
GROUP = 16
COLUMNS = 64


def rounded(weight_RC: Tensor) -> Tensor:
    """Three bits with a zero point, groups of 16 columns."""
    partition = Partition(1, GROUP)
    scale, zero = scales_from_range(*partition.extremes(weight_RC), GRID)
    return fake_quantize_matrix(weight_RC, scale, zero, GRID, partition)


def scales_within(least: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
    """Its scales for groups with given ends."""
    scale, zero = scales_from_range(least, greatest, GRID)
    return scale, zero.float()


@pytest.fixture
def inputs() -> Tensor:
    """Correlated, with one column in each group much larger than the others."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    states = torch.randn(500, COLUMNS, generator=generator) @ (mixing + torch.eye(COLUMNS))
    states[:, ::GROUP] *= 30
    return states


@pytest.fixture
def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, COLUMNS, generator=generator) for rows in (24, 8)]


def readers(weights: list[Tensor], inputs: Tensor, *, by_rows: bool = True) -> list[StackedLinears]:
    gram = inputs.T @ inputs
    if by_rows:
        return [StackedLinears(torch.cat(weights), gram, rounded, by_rows)]
    return [StackedLinears(weight, gram, rounded, by_rows) for weight in weights]


@pytest.mark.parametrize("by_rows", [True, False])
def test_the_loss_is_that_of_the_outputs(
    by_rows: bool, weights: list[Tensor], inputs: Tensor
) -> None:
    scales = torch.rand(3, COLUMNS, generator=torch.Generator().manual_seed(2)) + 0.5
    found = output_error_from_gram(readers(weights, inputs, by_rows=by_rows))(scales)
    for scale, error in zip(scales, found, strict=True):
        outputs = sum(
            float(((inputs / scale) @ rounded(w * scale).T - inputs @ w.T).square().sum())
            for w in weights
        )
        assert error == pytest.approx(outputs, rel=1e-3)


@pytest.mark.parametrize("duo", [True, False, "both"])
def test_the_best_candidate_is_chosen_and_beats_rounding(
    duo: bool, weights: list[Tensor], inputs: Tensor
) -> None:
    grid = list(
        candidates(inputs.abs().mean(0), relative_column_magnitude(weights, GROUP), 20, duo)
    )
    error_of = output_error_from_gram(readers(weights, inputs))
    found = choose_scale(error_of, grid, torch.ones(COLUMNS))
    assert len(grid) == 20
    assert found.error == pytest.approx(min(error_of(torch.stack([s for _, s in grid]))))
    assert found.error < 0.5 * found.before


def test_a_sample_of_rows_finds_what_all_rows_do(inputs: Tensor) -> None:
    weight_RC = torch.randn(1100, COLUMNS, generator=torch.Generator().manual_seed(5))
    one = readers([weight_RC], inputs)[0]
    assert torch.equal(one.sample().weight_RC, weight_RC[::8])
    assert len(one._replace(by_rows=False).sample().weight_RC) == 1100
    prominence_C = relative_column_magnitude([weight_RC], GROUP)
    grid = list(candidates(inputs.abs().mean(0), prominence_C, 20, duo=True))
    error_of, estimate_of = (output_error_from_gram([some]) for some in (one, one.sample()))
    judged: list[int] = []

    def counted(scale_KC: Tensor) -> Sequence[float]:
        judged.append(len(scale_KC))
        return error_of(scale_KC)

    found = choose_scale(counted, grid, torch.ones(COLUMNS), estimate_of=estimate_of)
    assert judged == [6], "the best five, and no scaling"
    assert found.candidate == choose_scale(error_of, grid, torch.ones(COLUMNS)).candidate


def test_products_of_sixteen_bits_give_nearly_the_same_errors(inputs: Tensor) -> None:
    change_RC = rounded(w := torch.randn(512, COLUMNS)) - w
    gram_CC = (inputs + 20).T @ (inputs + 20)  # a mean makes one eigenvalue nearly all of the trace
    exact_R = QuadraticForm(gram_CC)(change_RC)
    coarse_R = QuadraticForm(gram_CC, torch.bfloat16)(change_RC)
    assert float(coarse_R.sum()) == pytest.approx(float(exact_R.sum()), rel=2e-3)


BAD = [0.0, float("inf"), float("nan"), 1e-45, 3e38]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(BAD, BAD)))
def test_no_candidate_is_zero_or_beyond_numbers(first: float, second: float) -> None:
    inputs, prominence = torch.tensor([first, 1.0]), torch.tensor([second, 1.0])
    for _, scale in candidates(inputs, prominence, 20, "both"):
        assert bool((torch.isfinite(scale) & (scale > 0)).all())


@pytest.mark.parametrize("duo", [False, True])
def test_scales_keep_columns_without_inputs(duo: bool) -> None:
    """Scaled by a power of zero they would be rounded to zero."""
    input_C = torch.tensor([0.5, 0.0, 2.0, 8.0])
    live, weight_C = [0, 2, 3], torch.tensor([0.5, 1.0, 0.9, 0.8])
    others = candidates(input_C[live], weight_C[live], 20, duo)
    for (_, scale_C), (_, other_L) in zip(
        candidates(input_C, weight_C, 20, duo), others, strict=True
    ):
        assert float(scale_C[1]) == 1
        assert torch.equal(scale_C[live], other_L)


def test_clipping_lowers_the_error_of_outputs(weights: list[Tensor], inputs: Tensor) -> None:
    weight = weights[0].clone()
    weight[:, 5::GROUP] *= 6  # outliers that meet small inputs
    gram = inputs.T @ inputs
    bounds = clip_bounds(weight, gram, GRID, scales_within, GROUP)
    clamped = bounds.clamp(weight)

    def error(values: Tensor) -> float:
        change = rounded(values) - weight
        return float(((change @ gram) * change).sum())

    assert error(clamped) < 0.7 * error(weight)


def test_every_sweep_lowers_the_error(weights: list[Tensor], inputs: Tensor) -> None:
    gram = inputs.T @ inputs
    errors = []
    for sweeps in range(4):
        bounds = clip_bounds(weights[0], gram, GRID, scales_within, GROUP, sweeps=sweeps)
        change = rounded(bounds.clamp(weights[0])) - weights[0]
        errors.append(((change @ gram) * change).sum(dim=1))
    for before, after in itertools.pairwise(errors):
        assert bool((after <= before * (1 + 1e-4)).all())
    assert float(errors[2].sum()) < 0.9 * float(errors[0].sum())


@pytest.mark.parametrize("sweeps", [1, 2])
def test_one_group_gets_the_best_of_all_tried_ends(inputs: Tensor, sweeps: int) -> None:
    """Against a loop over rows and ends: both ends first, then one of them."""
    weight = torch.randn(6, GROUP, generator=torch.Generator().manual_seed(4))
    gram = inputs.T[:GROUP] @ inputs[:, :GROUP]
    bounds = clip_bounds(weight, gram, GRID, scales_within, GROUP, sweeps=sweeps)

    def error(row: Tensor, low: float, high: float) -> float:
        change = rounded(row.clamp(float(row.min()) * low, float(row.max()) * high)[None]) - row
        return float(change @ gram @ change.T)

    for row, low, high in zip(weight, bounds.low_RN, bounds.high_RN, strict=True):
        tried = [(f, f) for f in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)]
        best = min(tried, key=lambda ends: error(row, *ends))
        if sweeps == 2:
            steps = (0.9, 0.95, 1.05, 1.1)
            tried = [best, *((min(best[0] * step, 1.0), best[1]) for step in steps)]
            tried += [(best[0], min(best[1] * step, 1.0)) for step in steps]
            best = min(tried, key=lambda ends: error(row, *ends))
        expected = float(row.min()) * best[0], float(row.max()) * best[1]
        assert (float(low), float(high)) == pytest.approx(expected)


def test_the_grid_is_that_of_the_published_search() -> None:
    """Of n points: r = i / (n - 1); with weights too, one without and then r = i / (n - 2)."""

    def points(number: int, duo: Duo) -> list[tuple[float, bool]]:
        grid = candidates(torch.ones(3), torch.ones(3), number, duo)
        return [(one.ratio, one.duo) for one, _ in grid]

    for number in (2, 5, 20):
        plain = [(i / (number - 1), False) for i in range(number)]
        assert points(number, False) == plain
        if number > 2:
            weighted = [(i / (number - 2), True) for i in range(number - 1)]
            assert points(number, True) == [(0.0, False), *weighted]
    both = [(i / 9, duo) for i in range(10) for duo in (False, True)]
    assert points(20, "both") == both


def test_prominence_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(3, 12), torch.randn(2, 12).bfloat16()]
    for group, width in ((4, 4), (12, 12), (-1, 12), (5, 12)):
        total = [0.0] * 12
        for weight in weights:
            for row in weight.float().tolist():
                for column, value in enumerate(row):
                    begin = column // width * width
                    total[column] += abs(value) / max(map(abs, row[begin : begin + width]))
        expected = torch.tensor([one / 5 for one in total])
        torch.testing.assert_close(
            relative_column_magnitude(weights, group), expected, rtol=1e-5, atol=0
        )
