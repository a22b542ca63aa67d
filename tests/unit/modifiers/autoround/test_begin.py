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
from tests.support.thinned import few
from torch import Tensor

from llmcompressor.modifiers.autoround import AutoRoundModifier, base, begin
from llmcompressor.modifiers.autoround.tune import BlockRunner
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


def test_what_is_worse_than_rounding_is_not_begun_with(
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
def test_experts_with_few_tokens_are_solved_for_what_is_shown(
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
