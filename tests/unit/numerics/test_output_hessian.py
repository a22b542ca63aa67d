# SPDX-License-Identifier: Apache-2.0
"""Moved targets turn an objective with two sides into one with one, strip by strip."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.hessian import upper_factor
from llmcompressor.numerics.output_hessian import (
    BLOCK,
    RowStrip,
    add_output_products,
    blocks_of,
    damp_packed_,
    empty_blocks,
    packed_blocks,
    row_strips,
    unpacked_blocks,
)

C = 6
TOKENS = 600
CPU = torch.device("cpu")


def gradients(rows: int, seed: int = 0, tokens: int = TOKENS) -> Tensor:
    """Correlated gradients of outputs that are felt differently."""
    draw = torch.Generator().manual_seed(seed)
    mixing_RR = torch.randn(rows, rows, generator=draw) * torch.logspace(0, -1, rows)
    return torch.randn(tokens, rows, generator=draw) @ mixing_RR


def hessian(gradient_TR: Tensor) -> Tensor:
    blocks_NBB = empty_blocks(gradient_TR.shape[-1], CPU)
    add_output_products(blocks_NBB, gradient_TR)
    return blocks_NBB


def solved(gradient_TR: Tensor) -> Tensor:
    """The blocks that targets are moved by."""
    packed = packed_blocks(hessian(gradient_TR))
    return unpacked_blocks(damp_packed_(packed, gradient_TR.shape[-1], len(gradient_TR)))


def damped(blocks_NBB: Tensor, rows: int) -> Tensor:
    """All of H_O, with zeros between blocks, each with a share of its mean added, float64."""
    counts = [min(BLOCK, rows - begin) for begin in range(0, rows, BLOCK)]
    means_N = blocks_NBB.double().diagonal(dim1=-2, dim2=-1).sum(-1) / torch.tensor(counts)
    added_R = BLOCK / TOKENS * means_N.repeat_interleave(torch.tensor(counts))
    return torch.block_diag(*blocks_NBB.double())[:rows, :rows] + added_R.diag()


def own_share(strip: RowStrip, whole_RR: Tensor, done: Sequence[int]) -> Tensor:
    """What is left of H_O on the rows of a strip, once the later ones make up for these."""
    later = [row for row in range(len(whole_RR)) if row not in {*done, *strip.rows_M.tolist()}]
    order = [*done, *strip.rows_M.tolist(), *later]
    factor_RR = upper_factor(whole_RR[order][:, order])
    at = slice(len(done), len(done) + len(strip.rows_M))
    return factor_RR[at, at] @ factor_RR[at, at].T


@pytest.mark.parametrize("rows", [BLOCK, BLOCK + 40, 24])
def test_errors_from_moved_targets_add_up_to_the_objective(rows: int) -> None:
    """Of any rounding, as the sum of the strips, each by what is left of H_O on it."""
    draw = torch.Generator().manual_seed(1)
    weight_RC = torch.randn(rows, C, generator=draw)
    rounded_RC = weight_RC + torch.randn(rows, C, generator=draw)
    inputs_TC = torch.randn(40, C, generator=draw)
    gram_CC = (inputs_TC.T @ inputs_TC).double()
    blocks_NBB = hessian(gradients(rows))
    whole_RR = damped(blocks_NBB, rows)
    change_RC = (rounded_RC - weight_RC).double()
    objective = float((whole_RR * (change_RC @ gram_CC @ change_RC.T)).sum())
    done: list[int] = []
    total = 0.0
    for strip in row_strips([solved(gradients(rows))], [rows]):
        target_MC = strip.moved_target(weight_RC, rounded_RC - weight_RC)
        error_MC = (rounded_RC[strip.rows_M] - target_MC).double()
        share_MM = own_share(strip, whole_RR, done)
        total += float((share_MM * (error_MC @ gram_CC @ error_MC.T)).sum())
        done += strip.rows_M.tolist()
    assert sorted(done) == list(range(rows))
    assert total == pytest.approx(objective, rel=1e-4)


def test_without_correlation_no_target_moves() -> None:
    blocks_NBB = torch.diag_embed(torch.rand(2, BLOCK) + 0.1)
    weight_RC, change_RC = torch.randn(2 * BLOCK, C), torch.randn(2 * BLOCK, C)
    for strip in row_strips([blocks_NBB], [2 * BLOCK]):
        assert torch.equal(strip.moved_target(weight_RC, change_RC), weight_RC[strip.rows_M])


def test_what_no_token_reached_moves_no_target() -> None:
    weight_RC, change_RC = torch.randn(BLOCK, C), torch.randn(BLOCK, C)
    for strip in row_strips([empty_blocks(BLOCK, CPU)], [BLOCK]):
        assert torch.equal(strip.moved_target(weight_RC, change_RC), weight_RC[strip.rows_M])


def test_few_tokens_move_targets_less() -> None:
    """With as few as a block has rows, the mean of the diagonal is added at least."""
    gradient_TR = gradients(BLOCK)
    diagonals = [
        unpacked_blocks(damp_packed_(packed_blocks(hessian(gradient_TR)), BLOCK, tokens))[0]
        .diagonal()
        .mean()
        / hessian(gradient_TR)[0].diagonal().mean()
        for tokens in (1, BLOCK // 2, BLOCK, 10 * BLOCK, 1000 * BLOCK)
    ]
    expected = torch.tensor([1.0 + BLOCK, 3, 2, 1.1, 1.1])
    torch.testing.assert_close(torch.stack(diagonals), expected)


def test_rows_that_are_felt_most_come_first() -> None:
    blocks_NBB = solved(gradients(BLOCK))
    felt_R = blocks_NBB[0].diagonal()
    found = torch.cat([strip.rows_M for strip in row_strips([blocks_NBB], [BLOCK])])
    assert torch.equal(felt_R[found], felt_R.sort(descending=True).values)


def test_a_batch_has_the_targets_of_each_alone() -> None:
    rows = BLOCK + 24
    each = [solved(gradients(rows, seed)) for seed in (0, 1)]
    weights, changes = torch.randn(2, rows, C), torch.randn(2, rows, C)
    together = list(row_strips([torch.stack(each)], [rows]))
    for place, blocks_NBB in enumerate(each):
        for strip, joined in zip(row_strips([blocks_NBB], [rows]), together, strict=True):
            assert torch.equal(strip.rows_M, joined.rows_M[place])
            found = joined.moved_target(weights, changes)[place]
            alone = strip.moved_target(weights[place], changes[place])
            torch.testing.assert_close(found, alone)


def test_stacked_linears_have_the_targets_of_each_alone() -> None:
    counts = [40, BLOCK]
    each = [solved(gradients(rows, seed)) for seed, rows in enumerate(counts)]
    weights, changes = (torch.randn(sum(counts), C) for _ in range(2))
    found = torch.full_like(weights, torch.nan)
    for strip in row_strips(each, counts):
        found[strip.rows_M] = strip.moved_target(weights, changes)
    parts = (torch.split(one, counts) for one in (weights, changes, found))
    for blocks_NBB, weight, change, joined in zip(each, *parts, strict=True):
        for strip in row_strips([blocks_NBB], [len(weight)]):
            alone = strip.moved_target(weight, change)
            torch.testing.assert_close(joined[strip.rows_M], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_blocks_of_rows(dtype: torch.dtype) -> None:
    rows = BLOCK + 40
    gradient_TR = gradients(rows, tokens=3000).to(dtype)
    found = torch.block_diag(*hessian(gradient_TR))
    wide_TR = gradient_TR.double()
    for begin, end in ((0, BLOCK), (BLOCK, rows)):
        own_TR = wide_TR[:, begin:end]
        torch.testing.assert_close(
            found[begin:end, begin:end].double(), own_TR.T @ own_TR, rtol=1e-4, atol=1e-2
        )
    assert not found[rows:].any()
    assert blocks_of(rows) == 2


def test_gradients_that_are_not_finite_count_as_nothing() -> None:
    gradient_TR = gradients(24)
    spoilt_TR = gradient_TR.clone()
    spoilt_TR[3] = torch.nan
    spoilt_TR[5] = torch.inf
    gradient_TR[[3, 5]] = 0
    given_TR = spoilt_TR.clone()
    assert torch.equal(hessian(spoilt_TR), hessian(gradient_TR))
    assert torch.equal(spoilt_TR.isnan(), given_TR.isnan())  # what flows on stays as it was


def test_packed_blocks_are_half_and_come_back() -> None:
    blocks_NBB = hessian(gradients(BLOCK + 1))
    packed = packed_blocks(blocks_NBB)
    assert packed.numel() < 0.51 * blocks_NBB.numel()
    whole_NBB = unpacked_blocks(packed)
    assert torch.equal(whole_NBB, whole_NBB.mT)
    torch.testing.assert_close(whole_NBB, blocks_NBB)
