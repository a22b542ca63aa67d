# SPDX-License-Identifier: Apache-2.0
"""Moments of Linears that share an input are those that each would have on its own."""

from __future__ import annotations

import pytest
import torch
from tests.support.small_models import llama
from torch import Tensor

from llmcompressor.budget import moments
from llmcompressor.budget.moments import MomentCollector
from llmcompressor.numerics.sensitivity import compensated_shares

QKV = [f"model.layers.0.self_attn.{one}_proj" for one in "qkv"]
T, C, R = 300, 24, 8


def tokens() -> tuple[Tensor, dict[str, Tensor]]:
    """An input of two calls, and gradients, of which some are zero at some tokens."""
    torch.manual_seed(0)
    x_TC = torch.randn(2, T, C).bfloat16()
    gradients = {name: torch.randn(2, T, R).bfloat16() for name in QKV}
    gradients[QKV[0]][:, :50] = 0  # as of a first token, which attends to itself alone
    for gradient in gradients.values():
        gradient[1, 200:] = 0  # as of padding
    return x_TC, gradients


def collected(names: list[str], *, batches: int = 1) -> MomentCollector:
    x_BTC, gradients = tokens()
    found = MomentCollector(llama(), names, batches=batches, orders=(True,))
    for x_TC, place in zip(x_BTC, range(2), strict=True):
        for name in reversed(names):  # as a backward comes to them
            found.add(name, x_TC, gradients[name][place])
    found.finish()
    return found


def test_they_are_sums_over_the_tokens_that_are_felt() -> None:
    x_BTC, gradients = tokens()
    found = collected(QKV).moments
    for name in QKV:
        x_TC, delta_TR = x_BTC.flatten(0, 1).double(), gradients[name].flatten(0, 1).double()
        own = found[name]
        seen_T = torch.ones(2 * T, dtype=torch.bool)
        seen_T[T + 200 :] = False
        assert own.tokens == T + 200, "what one of them feels counts for all"
        felt_C = delta_TR.square().sum(1) @ x_TC.square()
        for sums, expected in (
            (own.gradient_R, delta_TR.square().sum(0)),
            (own.input_C, x_TC[seen_T].square().sum(0)),
            (own.felt_C, felt_C),
        ):
            torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("names", [QKV[:1], QKV[1:]])
def test_alone_each_has_what_it_has_beside_others(names: list[str]) -> None:
    together, alone = collected(QKV).moments, collected(names).moments
    for name in names:
        for field in ("gradient_R", "felt_C"):
            torch.testing.assert_close(
                getattr(alone[name], field), getattr(together[name], field), rtol=1e-6, atol=1e-6
            )


def test_one_whose_partner_is_not_felt_waits_for_the_end() -> None:
    x_BTC, gradients = tokens()
    found = MomentCollector(llama(), QKV, batches=1)
    found.add(QKV[2], x_BTC[0], gradients[QKV[2]][0])
    assert found.moments[QKV[2]].tokens == 0
    found.add(QKV[2], x_BTC[1], gradients[QKV[1]][1])
    found.finish()
    assert found.moments[QKV[2]].tokens == T + 200
    assert QKV[0] not in found.moments


def test_tokens_that_are_kept_come_from_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 and 200 tokens 72 are wanted, three for each column: every fourth and second one."""
    x_BTC, gradients = tokens()
    monkeypatch.setattr(moments, "_TOKENS_PER_COLUMN", 6)
    found = collected(QKV, batches=2)
    found.compensate(QKV[0])
    taken_TC = torch.cat([x_BTC[0][::4], x_BTC[1][:200][::2]])
    for name in QKV:
        first_TR, second_TR = gradients[name]
        felt_T = torch.cat([first_TR[::4], second_TR[:200][::2]]).float().square().sum(1)
        shares_1C = compensated_shares(taken_TC, felt_T.unsqueeze(0), ordered=True)
        own = found.moments[name]
        torch.testing.assert_close(own.shares, {True: shares_1C[0]}, rtol=1e-4, atol=1e-5)
        squares_C = taken_TC.float().square().sum(0)
        torch.testing.assert_close(own.curvature, squares_C, rtol=1e-4, atol=1e-3)
