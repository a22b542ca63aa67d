# SPDX-License-Identifier: Apache-2.0
"""Where learned rounding begins: at GPTQ's codes, unless rounding to nearest is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as mixtures
from tests.support.listed_mixtures import AsList
from tests.support.thinned import few
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from llmcompressor.modifiers.autoround import AutoRoundModifier, base, begin, tune
from llmcompressor.modifiers.autoround.tune import BlockRunner
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier
from llmcompressor.numerics.autoround import RoundingParameters
from llmcompressor.pipelines.moe_routing import experts_report
from llmcompressor.quantization.column_solver import Options, Problem, Solution, solve

WEIGHTS: dict[str, Any] = {"num_bits": 3, "strategy": "group", "group_size": 32}


def autoround(**fields: Any) -> AutoRoundModifier:
    """Three bits in groups of 32, everything but the head, few steps."""
    weights = {**WEIGHTS, **fields.pop("weights", {})}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    given = {"config_groups": groups, "ignore": ["lm_head"], "iters": 4, **fields}
    return AutoRoundModifier(**given)


def falls(modifier: AutoRoundModifier) -> bool:
    """Whether what was begun with beats rounding to nearest, and learning loses nothing of that."""
    each = modifier.records.values()
    return all(one.error <= one.error_begun < one.error_nearest for one in each)


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the blocks of the tiny models, whose tokens are few."""
    monkeypatch.setattr(base, "TOKENS_PER_COLUMN", 0)


@pytest.fixture
def solutions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, Solution]]:
    """What was solved, in order."""
    seen: list[tuple[Problem, Solution]] = []

    def watched(problems: Sequence[Problem], options: Options) -> list[Solution]:
        found = solve(problems, options)
        seen.extend(zip(problems, found, strict=True))
        return found

    monkeypatch.setattr(begin, "solve", watched)
    return seen


@pytest.fixture
def beginnings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BlockRunner, Any, Any]]:
    """The block, what it was rounded to nearest with, and what was solved."""
    seen: list[tuple[BlockRunner, Any, Any]] = []
    own = begin.solve_block

    def watched(runner: BlockRunner, nearest: Any, order: Any) -> Any:
        found = own(runner, nearest, order)
        seen.append((runner, nearest, found))
        return found

    monkeypatch.setattr("llmcompressor.modifiers.autoround.base.solve_block", watched)
    return seen


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_begins_with_the_codes_of_the_sweep(
    symmetric: bool,
    solutions: list[tuple[Problem, Solution]],
    beginnings: list[tuple[BlockRunner, Any, Any]],
) -> None:
    modifier = autoround(weights={"symmetric": symmetric})
    tiny.run(tiny.llama(num_hidden_layers=1), modifier, data=tiny.batches(number=2))
    (_, _, found), solved = beginnings[0], solutions[:4]
    assert [len(problem.weights) for problem, _ in solved] == [3, 1, 2, 1]
    rounded = [RoundingParameters.of(one.start).apply(one.start).values for one in found.values()]
    codes = {values.shape: [] for values in rounded}
    for _, solution in solved:
        for values in solution.weights:
            codes[values.shape].append(values)
    for values in rounded:
        assert any(torch.allclose(values, one, atol=1e-5) for one in codes[values.shape])
    for record in modifier.records.values():
        assert record.error <= record.error_begun < 0.9 * record.error_nearest


def test_it_is_no_worse_than_it_began_with_any_rate() -> None:
    modifier = autoround(lr=1.0)
    tiny.run(tiny.llama(), modifier)
    assert falls(modifier)


def test_what_is_worse_than_rounding_to_nearest_is_not_begun_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solver that is out of its mind."""

    def turned(problems: Sequence[Problem], options: Options) -> list[Solution]:
        found = solve(problems, options)
        return [replace(one, weights=[-values for values in one.weights]) for one in found]

    monkeypatch.setattr(begin, "solve", turned)
    modifier = autoround(lr=1e-6)
    tiny.run(tiny.llama(num_hidden_layers=1), modifier, data=tiny.batches(number=1))
    for record in modifier.records.values():
        assert record.error_begun == record.error_nearest
        assert record.error <= record.error_nearest


def test_only_what_is_added_to_the_output_makes_up_for_it(
    solutions: list[tuple[Problem, Solution]], beginnings: list[tuple[BlockRunner, Any, Any]]
) -> None:
    tiny.run(tiny.llama(num_hidden_layers=1), autoround(), data=tiny.batches(number=1))
    runner = beginnings[0][0]
    for name, module in tiny.linears(runner.block).items():
        assert begin._is_added_to_output(runner, module) is name.endswith("down_proj")
    # four inputs, then the last one once more
    direct = [problem.missing_CR is not None for problem, _ in solutions]
    assert direct == [False, False, False, True, True]
    assert [problem.cross_CC is None for problem, _ in solutions] == direct


def test_the_last_linear_makes_up_for_those_before_it(
    beginnings: list[tuple[BlockRunner, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solved for what the original one returns, which forgets the others, it leaves more."""
    errors = []
    for added in (None, lambda runner, linear: False):
        if added is not None:
            monkeypatch.setattr(begin, "_is_added_to_output", added)
        modifier = autoround(iters=1, lr=1e-6)
        tiny.run(tiny.llama(num_hidden_layers=1), modifier)
        errors.append(next(iter(modifier.records.values())).error)
    assert errors[0] < 0.98 * errors[1]


def pruned(modifier: AutoRoundModifier) -> dict[str, Tensor]:
    half = SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"])
    model = tiny.run(tiny.llama(num_hidden_layers=1), half, modifier)
    return {name: module.weight for name, module in tiny.linears(model).items()}


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_was_pruned_stays_zero(symmetric: bool) -> None:
    modifier = autoround(weights={"symmetric": symmetric}, lr=0.5)
    for weight in pruned(modifier).values():
        assert int((weight.view(-1, 4) == 0).sum(dim=1).min()) >= 2
    assert all(one.error_begun < one.error_nearest for one in modifier.records.values())


@pytest.mark.parametrize("family", few(mixtures.FAMILIES, "qwen3_moe"))
def test_experts_begin_with_their_own_tokens(
    family: str, solutions: list[tuple[Problem, Solution]]
) -> None:
    modifier = autoround(weights={"group_size": 8})
    tiny.run(mixtures.mixture(family, mixtures=1), modifier)
    rows = tiny.batches()
    all_tokens = sum(batch["input_ids"].numel() for batch in rows)
    routed = [problem.tokens for problem, _ in solutions if problem.tokens < all_tokens]
    assert len(routed) > mixtures.EXPERTS
    assert len(set(routed)) > 2
    assert falls(modifier)


ROUTED: dict[str, Any] = {"moe_calibrate_all_experts": False}
STARVED: dict[str, Any] = {**ROUTED, "min_tokens_per_module": 0.25}


@pytest.mark.parametrize(
    "arguments",
    few([{}, ROUTED, STARVED, {**STARVED, "starved_experts": "neighbours"}], ROUTED, STARVED),
    ids=["all", "routed", "all_tokens", "neighbours"],
)
def test_experts_with_few_tokens_are_solved_for_what_they_are_shown(
    arguments: dict[str, Any], solutions: list[tuple[Problem, Solution]]
) -> None:
    """Not learned, as they would be fitted to their own; where nothing else is shown they are."""
    modifier = autoround(weights={"group_size": 8}, lr=0.03)
    original = mixtures.mixture("mixtral", mixtures=1)
    model = tiny.run(original, modifier, data=tiny.batches(number=4), **arguments)
    everything, widest = 4 * 48, mixtures.COMMON["intermediate_size"]
    few = {
        f"{mixture}.{expert}.": count
        for mixture, own in experts_report(model).items()
        for expert, count in enumerate(own["tokens"])
        if count < widest
    }
    assert 1 < len(few) < mixtures.EXPERTS - 1
    wanted = [everything] if arguments.get("starved_experts") is None else []
    wanted += [2 * everything - count for count in few.values() if not wanted]
    of_experts = [one for one in solutions if widest in one[0].weights[0].shape]
    for_shown = [one for one in of_experts if one[0].tokens in wanted]
    assert sum(len(problem.weights) for problem, _ in for_shown) == (
        0 if arguments == ROUTED else 3 * len(few)
    )
    made = [values for _, solution in for_shown for values in solution.weights]
    for name, module in tiny.linears(model).items():
        if any(name.startswith(one) for one in few) and arguments != ROUTED:
            assert modifier.records[name].iteration == 0
            alike = (one for one in made if one.shape == module.weight.shape)
            assert any(torch.allclose(module.weight, one, atol=1e-5) for one in alike)
    assert any(one.iteration for one in modifier.records.values())


@pytest.mark.parametrize("enough", [True, False])
def test_few_tokens_are_not_solved_for(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution would be fitted to just these; the widest Linear counts."""
    data = tiny.batches(number=2)
    tokens = sum(batch["input_ids"].numel() for batch in data)
    widest = tiny.llama().model.layers[0].mlp.down_proj.in_features
    monkeypatch.setattr(base, "TOKENS_PER_COLUMN", (tokens if enough else tokens + 1) / widest)
    modifier = autoround()
    tiny.run(tiny.llama(), modifier, data=data)
    each = list(modifier.records.values())
    assert each
    assert all((one.error_begun < one.error_nearest) is enough for one in each)


def as_lists(number: int, *, narrower: int = 0) -> Any:
    model = mixtures.mixture("mixtral", mixtures=number)
    for layer in model.model.layers:
        layer.mlp = AsList(layer.mlp, narrower=narrower)
    return model.eval()


@pytest.mark.parametrize("how", few(["narrower", "quantized before"], "narrower"))
def test_experts_that_are_not_alike_are_experts_too(
    how: str, solutions: list[tuple[Problem, Solution]]
) -> None:
    """None is fitted to fewer tokens than it has columns."""
    others = "re:.*experts.0.*"
    group = {"targets": [others], "weights": {"num_bits": 8}}
    first = [QuantizationModifier(config_groups={"first": group})]
    if how == "narrower":
        others, first = "lm_head", []
    modifier = autoround(iters=1, weights={"group_size": 8}, ignore=["lm_head", others])
    model = as_lists(2, narrower=8 if how == "narrower" else 0)
    tiny.run(model, *first, modifier, data=tiny.batches(number=3), pipeline="independent")
    assert len(solutions) > mixtures.EXPERTS
    assert all(problem.tokens >= problem.weights[0].shape[-1] for problem, _ in solutions)


def test_an_earlier_run_on_the_same_model_decides_nothing() -> None:
    """It showed all experts all tokens; this one, in which nothing waits, shows none."""
    weights = []
    for pruned_before in (True, False):
        model = as_lists(1)
        if pruned_before:
            half = SparseGPTModifier(sparsity=0.5, ignore=["lm_head"])
            tiny.run(model, half)
            state = {key: value.clone() for key, value in model.state_dict().items()}
        else:
            model.load_state_dict(state)
        modifier = autoround(weights={"group_size": 8})
        tiny.run(model, modifier, data=tiny.batches(number=2), pipeline="basic", **ROUTED)
        weights.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_call_may_reach_no_expert_that_is_learned() -> None:
    """Each sample goes to few experts, one for each token, and all else stays as it is."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **{**mixtures.COMMON, "num_hidden_layers": 1, "num_experts_per_tok": 1},
        num_local_experts=mixtures.EXPERTS,
    )
    model = MixtralForCausalLM(config).eval()
    lengths = torch.randint(3, 16, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    data = [{"input_ids": torch.randint(3, 90, (1, length))} for length in lengths]
    groups = {"all": {"targets": ["re:.*experts.*"], "weights": {**WEIGHTS, "group_size": 8}}}
    modifier = autoround(config_groups=groups, batch_size=1, iters=len(data))
    tiny.run(model, modifier, data=data)
    steps = [one.iteration for one in modifier.records.values()]
    assert any(steps)
    assert not all(steps)


def test_errors_are_those_of_all_weights_rounded_to_nearest() -> None:
    """Whatever is held: with all experts rounded to nearest, and none moved, or solved."""
    found, starved = [], {**ROUTED, "min_tokens_per_module": 1.0}
    for policy in ("all_tokens", "rtn"):
        modifier = autoround(weights={"group_size": 8}, disable_opt_rtn=True)
        model = mixtures.mixture("mixtral", mixtures=1)
        tiny.run(model, modifier, **starved, starved_experts=policy)
        found.append(modifier.records)
    of_experts = {name for name in found[0] if ".experts." in name}
    for name in found[0]:
        assert found[0][name].error_nearest == found[1][name].error_nearest
        assert found[0][name].error < found[1][name].error < found[1][name].error_nearest
    assert {found[1][name].moved for name in of_experts} == {0.0}
    assert all(found[0][name].moved for name in of_experts)


def test_what_they_are_shown_takes_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
    solutions: list[tuple[Problem, Solution]],
) -> None:
    """Beyond it starved experts are rounded to nearest, others learned from what they get."""
    monkeypatch.setattr(tune, "_MOST", 0)
    data, widest = tiny.batches(number=4), mixtures.COMMON["intermediate_size"]
    model, again = (mixtures.mixture("mixtral", mixtures=1) for _ in range(2))
    tiny.run(model, autoround(weights={"group_size": 8}), data=data)
    of_experts = [problem for problem, _ in solutions if widest in problem.weights[0].shape]
    assert of_experts
    assert all(problem.tokens < 4 * 48 for problem in of_experts)
    assert not any("4 GiB" in line for line in warned)
    modifier = autoround(weights={"group_size": 8}, disable_opt_rtn=True)
    model = tiny.run(again, modifier, data=data, **STARVED)
    starved = [
        f"{mixture}.{expert}."
        for mixture, own in experts_report(model).items()
        for expert in own["starved"]
    ]
    assert any("4 GiB" in line and "rounded to nearest" in line for line in warned)
    for name, one in modifier.records.items():
        is_starved = any(name.startswith(expert) for expert in starved)
        assert (one.moved == 0) == is_starved


@pytest.mark.parametrize("policy", ["all_tokens", "neighbours"])
def test_that_what_they_are_shown_is_too_little_is_told(policy: str, warned: list[str]) -> None:
    data = [{"input_ids": torch.arange(3, 9)[None]}]  # six tokens, and 32 columns at least
    modifier = autoround(weights={"group_size": 8}, disable_opt_rtn=True)
    starved = {**ROUTED, "min_tokens_per_module": 1.0, "starved_experts": policy}
    tiny.run(mixtures.mixture("mixtral"), modifier, data=data, **starved)
    told = [line for line in warned if "fewer tokens than" in line]
    assert ["layers.0" in line for line in told] == [True, False]
    of_experts = [one for name, one in modifier.records.items() if ".experts." in name]
    assert of_experts
    assert all(one.moved == 0 for one in of_experts)
