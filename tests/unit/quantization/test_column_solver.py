# SPDX-License-Identifier: Apache-2.0
"""Solving Linears with one input: stacked, batched, in any order, and when nothing factorizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from tests.support.pairs import each, pairs
from torch import Tensor

from llmcompressor.numerics.gptq import corrected_weight, sweep
from llmcompressor.numerics.hessian import damp, upper_factor
from llmcompressor.numerics.output_hessian import BLOCK, add_output_products, empty_blocks
from llmcompressor.quantization import column_solver as module
from llmcompressor.quantization.column_solver import Options, Problem, Solution, solve
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.bridge import grid_of
from llmcompressor.schemes.presets import PRESETS, preset_scheme

C = 64
OPTIONS = Options(block_size=32, dampening=0.01, ridge=None)
SWEEP_ALONE = replace(OPTIONS, refinements=0)
GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
ARGS = {
    "tensor": QuantizationArgs(num_bits=8, strategy="tensor"),
    "channel": QuantizationArgs(num_bits=4, strategy="channel", symmetric=False),
    "group": GROUP,
    "block": QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[8, 16]),
    "nvfp4": preset_scheme("NVFP4A16").weights,
    "mxfp4": preset_scheme("MXFP4A16").weights,
}
if "MXFP6A16" in PRESETS:
    ARGS["mxfp6"] = preset_scheme("MXFP6A16").weights


def inputs(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(256, C) @ (torch.randn(C, C) * torch.logspace(0, -1.5, C).unsqueeze(-1))


def problem(
    *args: QuantizationArgs, seed: int = 0, twin: bool = False, ordered: bool = False
) -> Problem:
    """One Linear of 16 rows for each of ``args``, with one input."""
    y_TC = inputs(seed)
    x_TC = y_TC + 0.1 * y_TC.std() * torch.randn_like(y_TC)
    weights = [torch.randn(16, C) for _ in args]
    return Problem(
        weights=weights,
        parameters=[observe_weight(w, each) for w, each in zip(weights, args, strict=True)],
        gram_CC=y_TC.T @ y_TC,
        cross_CC=y_TC.T @ (x_TC - y_TC) if twin else None,
        tokens=len(y_TC),
        ordered=ordered,
    )


def indefinite(one: Problem, eigenvalue: float) -> Problem:
    """``one`` with a Gram matrix of mean diagonal 1 and an eigenvalue below zero."""
    outer_CC = torch.ones(C, C) / C
    gram_CC = torch.eye(C) + (eigenvalue - 1) * outer_CC
    return replace(one, gram_CC=gram_CC / gram_CC.diagonal().mean())


def alike(a: Solution, b: Solution) -> None:
    """Equal, but for single rows in which a tie fell the other way."""
    assert a.dampening == b.dampening
    assert a.loss == pytest.approx(b.loss, rel=0.02)
    for one, other in zip(a.weights, b.weights, strict=True):
        rows = torch.isclose(one, other, rtol=1e-4, atol=1e-6).all(dim=-1)
        assert float(rows.float().mean()) >= 14 / 16


@pairs(twin=[False, True], ordered=[False, True], name=ARGS)
def test_a_batch_is_solved_as_if_each_were_alone(name: str, ordered: bool, twin: bool) -> None:
    args = ARGS[name]
    problems = [problem(args, args, seed=seed, twin=twin, ordered=ordered) for seed in range(3)]
    options = replace(OPTIONS, ridge=0.03)
    together = solve(problems, options)
    for one, solution in zip(problems, together, strict=True):
        alike(solution, solve([one], replace(options, batch=1))[0])


@pytest.mark.parametrize("ordered", [False, True])
def test_linears_with_one_input_are_solved_as_if_each_were_alone(ordered: bool) -> None:
    both = problem(GROUP, GROUP, ordered=ordered)
    (together,) = solve([both], OPTIONS)
    for index in range(2):
        one = replace(both, weights=[both.weights[index]], parameters=[both.parameters[index]])
        (alone,) = solve([one], OPTIONS)
        assert torch.allclose(together.weights[index], alone.weights[0], rtol=1e-4, atol=1e-6)


def test_the_order_is_undone() -> None:
    """Activation order is nothing but solving the permuted problem."""
    one = problem(GROUP, ordered=True)
    (solution,) = solve([one], SWEEP_ALONE)
    order_C = one.gram_CC.diagonal().argsort(descending=True)
    assert order_C.tolist() != list(range(C))
    factor_CC = upper_factor(damp(one.gram_CC[order_C][:, order_C], 0.01))
    scales = one.parameters[0].columns(16, C)
    permuted = scales._replace(group_of_column_C=scales.group_of_column_C[order_C])
    swept = sweep(one.weights[0][:, order_C], factor_CC, permuted, grid_of(GROUP))
    assert torch.allclose(solution.weights[0][:, order_C], swept.weight_RC, rtol=1e-5, atol=1e-6)
    assert solution.loss == pytest.approx(float(swept.loss_R.sum()), rel=1e-3)


@pytest.mark.parametrize("refinements", [0, 1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_loss_is_that_of_the_damped_output_error(ordered: bool, refinements: int) -> None:
    one = problem(GROUP, GROUP, ordered=ordered)
    (solution,) = solve([one], replace(OPTIONS, refinements=refinements))
    change_RC = torch.cat(solution.weights).double() - torch.cat(list(one.weights)).double()
    damped_CC = damp(one.gram_CC, 0.01).double()
    expected = float(((change_RC @ damped_CC) * change_RC).sum()) / 2
    assert solution.loss == pytest.approx(expected, rel=1e-3)


@each(ordered=[False, True], name=ARGS)
def test_refinements_lower_the_damped_output_error(
    name: str, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "FINE_BITS", 99
    )  # at 8 bits there is less to gain, but the same way
    one = problem(ARGS[name], ARGS[name], ordered=ordered)
    damped_CC = damp(one.gram_CC, 0.01).double()
    errors = []
    for refinements in range(3):
        (solution,) = solve([one], replace(OPTIONS, refinements=refinements))
        change_RC = torch.cat(solution.weights).double() - torch.cat(list(one.weights)).double()
        errors.append(float(((change_RC @ damped_CC) * change_RC).sum()))
    none, once, twice = errors
    assert once < none
    assert twice <= once * (1 + 1e-6)


def test_with_twin_streams_the_corrected_weight_is_swept() -> None:
    one = problem(GROUP, twin=True)
    assert one.cross_CC is not None
    target_RC = corrected_weight(
        one.weights[0], one.gram_CC, one.cross_CC, max(0.03, C / one.tokens)
    )
    (solution,) = solve([one], replace(OPTIONS, ridge=0.03))
    (expected,) = solve([replace(one, weights=[target_RC], cross_CC=None)], OPTIONS)
    alike(solution, expected)
    (uncorrected,) = solve([one], OPTIONS)
    assert not torch.equal(solution.weights[0], uncorrected.weights[0])


def test_the_correction_brings_outputs_closer_to_the_original() -> None:
    y_TC = inputs(0)
    x_TC = y_TC + 0.3 * y_TC.std() * torch.randn_like(y_TC)
    args = GROUP.model_copy(update={"num_bits": 6})
    weight_RC = torch.randn(16, C)
    one = Problem(
        [weight_RC],
        [observe_weight(weight_RC, args)],
        y_TC.T @ y_TC,
        y_TC.T @ (x_TC - y_TC),
        tokens=len(y_TC),
        ordered=True,
    )

    def error(options: Options) -> float:
        (solution,) = solve([one], options)
        return float((y_TC @ solution.weights[0].T - x_TC @ weight_RC.T).square().sum())

    assert error(replace(OPTIONS, ridge=0.03)) < 0.95 * error(OPTIONS)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("twin", [False, True])
def test_dead_columns_are_rounded_to_nearest(twin: bool, refit: bool) -> None:
    """Alone, in a batch, in any order, and with the scales that are stored."""
    dead = [*range(5), *range(16, 32), 40]  # some of a group, all of one, one
    good = problem(GROUP, GROUP, twin=twin, ordered=True)
    one = replace(good, gram_CC=good.gram_CC.clone())
    one.gram_CC[dead], one.gram_CC[:, dead] = 0, 0
    if one.cross_CC is not None:
        one.cross_CC[dead] = 0
    for problems in ([one], [one, good]):
        found = solve(problems, replace(OPTIONS, ridge=0.03, refit=refit, settles=True))[0]
        assert (found.dead, found.is_idle) == (len(dead), False)
        for number, weight_RC in enumerate(one.weights):
            parameters = one.parameters[number]
            if found.scales is not None:
                parameters = replace(parameters, scale=found.scales[number])
            nearest_RC = parameters.round(weight_RC)[:, dead]
            assert torch.allclose(found.weights[number][:, dead], nearest_RC, atol=1e-6)
            assert found.settled is not None
            assert torch.allclose(found.settled[number][:, dead], weight_RC[:, dead], atol=1e-4)


def test_dead_columns_do_not_change_how_the_others_are_solved() -> None:
    """However small the inputs are: a dead column is no reason to damp the others more."""
    one = problem(GROUP)
    alone = replace(one, gram_CC=one.gram_CC * 1e-9)
    weight_RC = torch.cat([one.weights[0], torch.randn(16, C)], dim=1)
    wide = replace(
        alone,
        weights=[weight_RC],
        parameters=[observe_weight(weight_RC, GROUP)],
        gram_CC=torch.block_diag(alone.gram_CC, torch.zeros(C, C)),
    )
    (expected,), (found,) = solve([alone], OPTIONS), solve([wide], OPTIONS)
    assert torch.allclose(found.weights[0][:, :C], expected.weights[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, None])
@pytest.mark.parametrize("twin", [False, True])
def test_with_inputs_of_zero_weights_are_rounded_to_nearest(twin: bool, batch: int | None) -> None:
    """Whatever they become is right on these tokens; zeros would be wrong on all others."""
    good = problem(GROUP, GROUP, twin=twin, seed=1)
    idle = problem(GROUP, GROUP, twin=twin)
    nothing_CC = torch.zeros(C, C)
    idle = replace(idle, gram_CC=nothing_CC, cross_CC=nothing_CC if twin else None)
    options = replace(OPTIONS, ridge=0.03, batch=batch)
    first, found, last = solve([good, idle, good], options)
    assert (found.is_idle, found.dampening, found.loss) == (True, None, 0.0)
    for weight_RC, parameters, rounded_RC in zip(
        idle.weights, idle.parameters, found.weights, strict=True
    ):
        assert torch.equal(rounded_RC, parameters.round(weight_RC))
    (alone,) = solve([good], options)
    for neighbour in (first, last):
        assert not neighbour.is_idle
        alike(neighbour, alone)


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_dampening_is_raised_before_anything_is_given_up(ordered: bool, twin: bool) -> None:
    one = indefinite(problem(GROUP, ordered=ordered, twin=twin), -0.5)
    (solution,) = solve([one], replace(OPTIONS, ridge=0.03))
    assert solution.dampening == pytest.approx(1.0)
    assert bool(torch.isfinite(solution.weights[0]).all())


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_cannot_be_factorized_is_rounded_to_nearest(ordered: bool, twin: bool) -> None:
    one = indefinite(problem(GROUP, GROUP, ordered=ordered, twin=twin), -40.0)
    (solution,) = solve([one], replace(OPTIONS, ridge=0.03))
    assert solution.dampening is None
    for weight_RC, parameters, rounded_RC in zip(
        one.weights, one.parameters, solution.weights, strict=True
    ):
        assert torch.equal(rounded_RC, parameters.round(weight_RC))


def test_what_a_sum_lacks_is_made_up_for() -> None:
    """With E = Y Vᵀ missing, the weight to round is W + V; with nothing missing it is W."""
    one = problem(GROUP)
    weight_RC, gram_CC = one.weights[0], one.gram_CC
    change_RC = 0.1 * torch.randn_like(weight_RC)
    options = replace(OPTIONS, ridge=1e-4, settles=True)
    lacking = replace(one, missing_CR=gram_CC @ change_RC.mT)
    (found,), (same,) = solve([lacking], options), solve([one], options)
    (nothing,) = solve([replace(one, missing_CR=torch.zeros(C, 16))], options)
    assert torch.equal(nothing.weights[0], same.weights[0])

    def left(values_RC: Tensor) -> float:
        off_RC = values_RC - weight_RC - change_RC
        return float((off_RC @ gram_CC * off_RC).sum())

    assert left(found.weights[0]) < 0.5 * left(same.weights[0])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("name", ["group", "channel"])
def test_searched_scales_lose_less_than_those_of_the_extremes(name: str, bits: int) -> None:
    """In every row, where no column makes up for another: the extremes are among what is tried."""
    one = problem(ARGS[name].model_copy(update={"num_bits": bits}), ordered=True)
    one = replace(one, gram_CC=one.gram_CC.diagonal().diag(), weights=[one.weights[0] ** 3])
    one = replace(one, parameters=[observe_weight(one.weights[0], one.parameters[0].args)])
    found = [solve([replace(one, searches=each)], OPTIONS)[0] for each in (False, True)]
    change_RC = [each.weights[0] - one.weights[0] for each in found]
    extremes_R, searched_R = ((each**2 @ one.gram_CC).sum(-1) for each in change_RC)
    assert bool((searched_R <= extremes_R * (1 + 1e-5)).all())
    assert float(searched_R.sum()) < float(extremes_R.sum())
    assert (found[1].zero_points is None) == bool(one.parameters[0].args.symmetric)


def test_searched_scales_are_those_of_the_codes() -> None:
    """Values are codes times the scales that go to the file, also after a change of zero points."""
    one = replace(problem(ARGS["channel"], ordered=True), searches=True)
    (found,) = solve([one], OPTIONS)
    assert found.scales is not None
    assert found.zero_points is not None
    scale, zero = found.scales[0], found.zero_points[0]
    assert zero.dtype == one.parameters[0].zero_point.dtype
    parameters = replace(one.parameters[0], scale=scale, zero_point=zero)
    assert torch.allclose(parameters.round(found.weights[0]), found.weights[0], atol=1e-6)


def test_searched_scales_of_a_batch_are_those_of_each_alone() -> None:
    problems = [replace(problem(GROUP, GROUP, seed=one), searches=True) for one in range(3)]
    for one, solution in zip(problems, solve(problems, OPTIONS), strict=True):
        alike(solution, solve([one], replace(OPTIONS, batch=1))[0])


@pytest.mark.parametrize("name", ["tensor", "block", "nvfp4", "mxfp4"])
def test_scales_of_other_grids_are_not_searched(name: str) -> None:
    one = problem(ARGS[name])
    (plain,) = solve([one], OPTIONS)
    (asked,) = solve([replace(one, searches=True)], OPTIONS)
    assert torch.equal(plain.weights[0], asked.weights[0])
    assert asked.zero_points is None


def test_each_round_lowers_the_loss() -> None:
    one = replace(problem(GROUP.model_copy(update={"num_bits": 2})), searches=True)
    options = replace(OPTIONS, refit=True)
    losses = [solve([one], replace(options, refinements=n))[0].loss for n in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[1]


def felt(one: Problem, seed: int = 0) -> Problem:
    """``one`` with outputs that the loss feels together."""
    draw = torch.Generator().manual_seed(seed)
    blocks = []
    for weight in one.weights:
        rows = len(weight)
        mixing_RR = torch.randn(rows, rows, generator=draw) + 2 * torch.eye(rows)
        blocks_NBB = empty_blocks(rows, weight.device)
        add_output_products(blocks_NBB, torch.randn(2048, rows, generator=draw) @ mixing_RR)
        blocks.append(blocks_NBB)
    return replace(one, output_NBB=blocks)


def tall(rows: int, *, seed: int = 0, twin: bool = False) -> Problem:
    """A Linear with so many rows, in three bits, whose scales are searched for."""
    args = QuantizationArgs(num_bits=3, strategy="group", group_size=16)
    one = problem(args, seed=seed, twin=twin, ordered=True)
    weight = torch.randn(rows, C)
    return replace(one, weights=[weight], parameters=[observe_weight(weight, args)], searches=True)


@pytest.mark.parametrize("rows", [48, 200])
def test_errors_are_made_up_for_in_rows_that_are_felt_alike(rows: int) -> None:
    one = felt(tall(rows))
    (hessian_NBB,) = one.output_NBB
    hessian_RR = torch.block_diag(*hessian_NBB)[:rows, :rows]
    objectives = []
    for given in (one, replace(one, output_NBB=())):
        (solution,) = solve([given], replace(OPTIONS, refinements=None, refit=None))
        change_RC = solution.weights[0] - one.weights[0]
        objectives.append(float((hessian_RR * (change_RC @ one.gram_CC @ change_RC.T)).sum()))
        assert solution.scales is not None
        own = replace(given.parameters[0], scale=solution.scales[0])
        torch.testing.assert_close(own.round(solution.weights[0]), solution.weights[0])
    assert objectives[0] < 0.85 * objectives[1]


@pairs(twin=[False, True], pruned=[False, True])
def test_outputs_that_are_felt_alone_change_nothing(twin: bool, pruned: bool) -> None:
    one = tall(200, twin=twin)
    if pruned:
        one.weights[0][:, ::3] = 0
    options = replace(OPTIONS, ridge=0.05 if twin else None, refinements=None, refit=None)
    diagonal_NBB = torch.diag_embed(torch.rand(2, BLOCK) + 0.1)
    (found,) = solve([replace(one, output_NBB=[diagonal_NBB])], options)
    (expected,) = solve([one], options)
    torch.testing.assert_close(found.weights[0], expected.weights[0])
    assert found.scales is not None
    assert expected.scales is not None
    assert torch.equal(found.scales[0], expected.scales[0])
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)


def test_a_batch_with_felt_outputs_is_as_each_alone() -> None:
    every = [felt(tall(40, seed=seed), seed) for seed in range(3)]
    for one, found in zip(every, solve(every, OPTIONS), strict=True):
        alike(found, solve([one], OPTIONS)[0])
