# SPDX-License-Identifier: Apache-2.0
"""What rounding a Linear is expected to cost, beside the second derivative written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.small_models import llama
from torch import Tensor, nn

from llmcompressor.budget.sensitivity import RoundingErrors
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.presets import preset_scheme

T, C = 40, 128
CANDIDATES = ("W3A16", "W8A16")


def losses(
    linear: nn.Linear,
    calls: list[tuple[Tensor, Tensor]],
    *,
    compensates: bool,
    searches: bool = False,
    **fields: Any,
) -> Any:
    schemes = {one: {"linear": preset_scheme(one)} for one in CANDIDATES}
    modifier = SimpleNamespace(
        compensates=compensates,
        actorder="static",
        searches_scales=lambda args: searches and args.num_bits == 3,
    )
    options: Any = SimpleNamespace(
        sets=[["linear"]],
        candidates=CANDIDATES,
        schemes=schemes,
        modifier=modifier,
        searches_scales=modifier.searches_scales,
    )
    model = nn.ModuleDict({"linear": linear})
    errors = RoundingErrors(model, options, {linear: "linear"}, **fields)
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


def test_scales_are_searched_for_by_what_columns_count() -> None:
    """A large value of a column without inputs takes the grid of its group."""
    linear = nn.Linear(C, 8, bias=False)
    torch.manual_seed(0)
    with torch.no_grad():
        linear.weight[:, 0] = 0.2
    x_TC, delta_TR = torch.randn(512, C), torch.randn(512, 8)
    x_TC[:, 0] *= 1e-4
    plain, own = (
        losses(linear, [(x_TC, delta_TR)], compensates=True, searches=each)
        for each in (False, True)
    )
    assert own[0] < 0.6 * plain[0]
    assert own[1] == plain[1]


def test_what_others_of_the_block_make_up_for_counts_less() -> None:
    """Of q, k, v, and less of gate, up, in a run that corrects errors."""
    model = llama()
    modules = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    names = [name for name in modules if ".0." in name]
    scheme = preset_scheme("W8A16", targets=["Linear"])
    modifier = SimpleNamespace(compensates=False, searches_scales=lambda args: False)
    options: Any = SimpleNamespace(
        sets=[[name] for name in names],
        candidates=["W8A16"],
        schemes={"W8A16": dict.fromkeys(names, scheme)},
        modifier=modifier,
        searches_scales=modifier.searches_scales,
    )
    by_name = {modules[name]: name for name in names}
    found = []
    for corrects in (False, True):
        errors = RoundingErrors(model, options, by_name, corrects=corrects)
        torch.manual_seed(0)
        for name in names:
            rows, columns = modules[name].weight.shape
            errors.watch(modules[name], torch.randn(64, columns), torch.randn(64, rows))
        errors.settle(by_name)
        found.append([loss for (loss,) in errors.by_set(64)])
    shares = {
        name.rpartition(".")[2]: own / plain for name, plain, own in zip(names, *found, strict=True)
    }
    assert shares["o_proj"] == shares["down_proj"] == 1
    assert shares["q_proj"] == pytest.approx(shares["v_proj"])
    assert shares["q_proj"] < shares["gate_proj"] == pytest.approx(shares["up_proj"])
    assert shares["gate_proj"] < 1


def test_massive_tokens_are_not_felt_where_errors_are_corrected() -> None:
    """Later Linears undo their errors; runs from what is kept do not correct, and need them."""
    linear, x_TC, delta_TR = tokens(rows=8)
    calls = [(x_TC, delta_TR)]
    kept: list[dict[str, Tensor]] = []
    writer = SimpleNamespace(write_loss=lambda block, tensors, tokens: kept.append(tensors))
    delta_TR[0] *= 1e6
    felt, corrected = (
        losses(linear, calls, compensates=False, keep_in=writer, corrects=each)
        for each in (False, True)
    )
    without = losses(linear, [(x_TC[1:], delta_TR[1:])], compensates=False)
    assert felt[0] > 1e4 * corrected[0]
    # the mean squares of inputs, by which ranges are found, are of all tokens
    assert corrected[1] == pytest.approx(without[1], rel=0.05)
    first, second = kept
    torch.testing.assert_close(first, second, rtol=0, atol=0)
