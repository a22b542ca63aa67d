# SPDX-License-Identifier: Apache-2.0
"""The pruning sweep is the textbook elimination, and ends where it must in limiting cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.hessian import damp, upper_factor
from llmcompressor.numerics.masks import NofM, Share, Sparsity
from llmcompressor.numerics.sparse_fit import sparse_fit
from llmcompressor.numerics.sparsegpt import SparseResult, sparse_sweep
from llmcompressor.numerics.wanda import wanda_mask, wanda_score

R, C, B = 24, 64, 32
PAIRS = NofM(2, 4)


def half(group: NofM | None = None, rows: int = R) -> Sparsity:
    return Sparsity((Share(rows, 0.5),), group)


def problem(seed: int = 0, columns: int = C) -> tuple[Tensor, Tensor]:
    """A random weight, and the damped Hessian of strongly correlated inputs."""
    torch.manual_seed(seed)
    weight_RC = torch.randn(R, columns)
    mixing_CC = torch.randn(columns, columns) * torch.logspace(0, -1.5, columns).unsqueeze(-1)
    inputs_TC = torch.randn(4 * columns, columns) @ mixing_CC
    return weight_RC, damp(inputs_TC.T @ inputs_TC, 0.01)


def swept(weight_RC: Tensor, hessian_CC: Tensor, sparsity: Sparsity, **kwargs: int) -> SparseResult:
    factor_CC = upper_factor(hessian_CC.double()).float()
    return sparse_sweep(weight_RC, factor_CC, sparsity, block=kwargs.pop("block", B), **kwargs)


def loss(changed_RC: Tensor, weight_RC: Tensor, hessian_CC: Tensor) -> float:
    change_RC = changed_RC - weight_RC
    return 0.5 * float(((change_RC @ hessian_CC) * change_RC).sum())


def textbook(weight_RC: Tensor, hessian_CC: Tensor, group: NofM | None) -> Tensor:
    """Optimal brain surgeon, one column after another, with an inverse for each (Sec. 3.1)."""
    work_RC, hessian_CC = weight_RC.double(), hessian_CC.double()
    kept_RC = torch.ones_like(work_RC, dtype=torch.bool)
    columns = work_RC.shape[1]
    width = B if group is None else group.group
    for c in range(columns):
        if c % width == 0:
            diagonal = [
                torch.linalg.inv(hessian_CC[k:, k:])[0, 0]
                for k in range(c, min(c + width, columns))
            ]
            score = work_RC[:, c : c + width] ** 2 / torch.stack(diagonal)
            if group is None:
                order = score.flatten().argsort()[: score.numel() // 2]
                kept = torch.ones(score.numel(), dtype=torch.bool)
                kept[order] = False
                kept_RC[:, c : c + width] = kept.view(score.shape)
            else:
                least = score.argsort(dim=1)[:, : group.zeros]
                kept_RC[:, c : c + width] = torch.ones_like(score).bool().scatter(1, least, False)
        inverse = torch.linalg.inv(hessian_CC[c:, c:])
        gone = work_RC[:, c] * ~kept_RC[:, c]
        work_RC[:, c:] -= torch.outer(gone, inverse[0] / inverse[0, 0])
        work_RC[:, c] *= kept_RC[:, c]
    return work_RC.float()


@pytest.mark.parametrize("group", [None, PAIRS, NofM(1, 4), NofM(4, 8)])
def test_it_is_the_textbook_elimination(group: NofM | None) -> None:
    weight_RC, hessian_CC = problem()
    sparsity = Sparsity((Share(R, 0.5),), group)
    found = swept(weight_RC, hessian_CC, sparsity)
    expected_RC = textbook(weight_RC, hessian_CC, group)
    assert torch.equal(found.weight_RC == 0, expected_RC == 0)
    torch.testing.assert_close(found.weight_RC, expected_RC, rtol=1e-3, atol=1e-4)
    assert torch.equal(found.kept_RC, found.weight_RC != 0)


@pytest.mark.parametrize("group", [None, PAIRS])
def test_the_loss_is_that_of_the_output(group: NofM | None) -> None:
    weight_RC, hessian_CC = problem()
    found = swept(weight_RC, hessian_CC, half(group))
    expected = loss(found.weight_RC, weight_RC, hessian_CC)
    assert float(found.loss_R.sum()) == pytest.approx(expected, rel=1e-3)


def test_blocks_and_strips_do_not_matter_to_groups() -> None:
    weight_RC, hessian_CC = problem()
    expected = swept(weight_RC, hessian_CC, half(PAIRS), block=C, strip=C)
    for block, strip in ((4, 4), (16, 4), (32, 16), (7, 3), (128, 16)):
        found = swept(weight_RC, hessian_CC, half(PAIRS), block=block, strip=strip)
        torch.testing.assert_close(found.weight_RC, expected.weight_RC, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("group", [None, PAIRS])
def test_a_diagonal_hessian_leaves_what_is_kept(group: NofM | None) -> None:
    """Nothing can be compensated: it is Wanda's score, within a block or group."""
    weight_RC, _ = problem()
    diagonal_C = torch.rand(C) + 0.1
    found = swept(weight_RC, torch.diag(diagonal_C), half(group))
    assert torch.equal(found.weight_RC, weight_RC * found.kept_RC)
    score_RC = wanda_score(weight_RC, diagonal_C)
    for lo in range(0, C, B):
        part_RB = score_RC[:, lo : lo + B]
        if group is None:
            least = part_RB.flatten().argsort()[: part_RB.numel() // 2]
            kept = torch.ones(part_RB.numel(), dtype=torch.bool)
            kept[least] = False
            kept_RB = kept.view(part_RB.shape)
        else:
            kept_RB = wanda_mask(part_RB, 0.5, group)
        assert torch.equal(found.kept_RC[:, lo : lo + B], kept_RB)


@pytest.mark.parametrize("group", [None, PAIRS])
@pytest.mark.parametrize("solver", ["sweep", "fit"])
def test_a_batch_is_solved_as_if_each_were_alone(group: NofM | None, solver: str) -> None:
    problems = [problem(seed) for seed in range(3)]
    weight_BRC = torch.stack([one[0] for one in problems])
    hessian_BCC = torch.stack([one[1] for one in problems])

    def solved(weight: Tensor, hessian: Tensor) -> SparseResult:
        if solver == "fit":
            return sparse_fit(weight, hessian, half(group))
        return swept(weight, hessian, half(group))

    together = solved(weight_BRC, hessian_BCC)
    for index, (weight_RC, hessian_CC) in enumerate(problems):
        alone = solved(weight_RC, hessian_CC)
        same = float((together.kept_RC[index] == alone.kept_RC).float().mean())
        assert same > 0.999
        assert float(together.loss_R[index].sum()) == pytest.approx(
            float(alone.loss_R.sum()), rel=1e-3
        )


@pytest.mark.parametrize("group", [None, PAIRS])
@pytest.mark.parametrize("solver", ["sweep", "fit"])
def test_zeros_that_are_there_stay_and_count(group: NofM | None, solver: str) -> None:
    weight_RC, hessian_CC = problem()
    gone_RC = torch.rand(R, C) < 0.2
    weight_RC[gone_RC] = 0
    if solver == "fit":
        found = sparse_fit(weight_RC, hessian_CC, half(group), gone_RC=gone_RC)
    else:
        factor_CC = upper_factor(hessian_CC.double()).float()
        found = sparse_sweep(weight_RC, factor_CC, half(group), gone_RC=gone_RC, block=B)
    assert not bool(found.kept_RC[gone_RC].any())
    assert not bool(found.weight_RC[~found.kept_RC].any())
    if group is None:
        assert int((~found.kept_RC).sum()) == R * C // 2
    else:
        zeros_G = (~found.kept_RC).view(-1, 4).sum(dim=1)
        assert torch.equal(zeros_G, gone_RC.view(-1, 4).sum(dim=1).clamp_min(2))


@pytest.mark.parametrize("group", [None, PAIRS])
@pytest.mark.parametrize("seed", range(3))
def test_magnitude_wanda_sweep_and_fit_come_in_this_order(group: NofM | None, seed: int) -> None:
    weight_RC, hessian_CC = problem(seed)
    choices = [torch.ones(C), hessian_CC.diagonal()]
    losses = [
        loss(weight_RC * wanda_mask(wanda_score(weight_RC, one), 0.5, group), weight_RC, hessian_CC)
        for one in choices
    ]
    found = [
        swept(weight_RC, hessian_CC, half(group)),
        sparse_fit(weight_RC, hessian_CC, half(group), dampening=0),
    ]
    losses += [loss(one.weight_RC, weight_RC, hessian_CC) for one in found]
    assert losses[1] < 0.95 * losses[0]
    assert losses[2] < 0.8 * losses[1]
    assert losses[3] < 0.8 * losses[2]
