# SPDX-License-Identifier: Apache-2.0
"""What rounding a Linear is expected to cost, beside the second derivative written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcompressor.budget.sensitivity import RoundingErrors
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.presets import preset_scheme

T, C = 40, 128
CANDIDATES = ("W3A16", "W8A16")


def losses(linear: nn.Linear, calls: list[tuple[Tensor, Tensor]], *, compensates: bool) -> Any:
    schemes = {one: {"linear": preset_scheme(one)} for one in CANDIDATES}
    modifier = SimpleNamespace(compensates=compensates, actorder="static")
    options: Any = SimpleNamespace(
        sets=[["linear"]], candidates=CANDIDATES, schemes=schemes, modifier=modifier
    )
    model = nn.ModuleDict({"linear": linear})
    errors = RoundingErrors(model, options, {linear: "linear"})
    for given, gradient in calls:
        errors.watch(linear, given, gradient)
    errors.settle([linear])
    return errors.by_set(T)[0]


def change(linear: nn.Linear, scheme: str, x_TC: Tensor) -> Tensor:
    weight_RC, args = linear.weight.detach(), preset_scheme(scheme).weights
    assert args is not None
    importance_C = x_TC.square().mean(0)
    rounded = observe_weight(weight_RC, args, importance_C=importance_C).round(weight_RC)
    return weight_RC - rounded


def tokens(rows: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A token that is a hundred times as large as the others, and hardly felt."""
    torch.manual_seed(0)
    x_TC, delta_TR = torch.randn(T, C), torch.randn(T, rows)
    x_TC[0] *= 100
    delta_TR[0] *= 1e-3
    return nn.Linear(C, rows, bias=False), x_TC, delta_TR


def test_of_one_row_it_is_the_diagonal_of_the_fisher_matrix() -> None:
    """Large inputs count as much as the loss feels them at their token."""
    linear, x_TC, delta_T1 = tokens(1)
    found = losses(
        linear, [(x_TC[:20], delta_T1[:20]), (x_TC[20:], delta_T1[20:])], compensates=False
    )
    for value, name in zip(found, CANDIDATES, strict=True):
        fisher_C = (delta_T1.square() * x_TC.square()).mean(0)
        expected = 0.5 * float((change(linear, name, x_TC)[0].square() * fisher_C).sum())
        assert value == pytest.approx(expected, rel=1e-4)


def test_of_tokens_felt_alike_it_is_the_product_of_means() -> None:
    linear, x_TC, _ = tokens(8)
    delta_TR = torch.randn(T, 8).sign()
    (found, _) = losses(linear, [(x_TC, delta_TR)], compensates=False)
    by_row_R = change(linear, CANDIDATES[0], x_TC).square() @ x_TC.square().mean(0)
    assert found == pytest.approx(0.5 * float(by_row_R.sum()), rel=1e-4)


def test_compensation_leaves_what_inputs_do_not_share() -> None:
    linear, _, _ = tokens(8)
    delta_TR = torch.randn(T, 8)
    apart_TC = torch.eye(C)[torch.arange(T)]
    alike_TC = torch.randn(T, 1) * torch.ones(1, C)
    for x_TC, least, most in ((apart_TC, 0.99, 1.02), (alike_TC, 0.0, 0.1)):
        plain, left = (
            losses(linear, [(x_TC, delta_TR)], compensates=each)[0] for each in (False, True)
        )
        assert least * plain <= left <= most * plain
