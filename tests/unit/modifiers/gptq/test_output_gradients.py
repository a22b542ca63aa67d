# SPDX-License-Identifier: Apache-2.0
"""Gradients at the outputs: when GPTQ takes them, what they are, and that a run keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support import tiny_llama as tiny
from tests.support.killed_runs import CrashError, crashing_after
from torch import Tensor
from torch.nn import Module
from transformers.models.llama.modeling_llama import LlamaMLP

from llmcompressor import oneshot
from llmcompressor.core.block_source import BlockSource
from llmcompressor.core.state import State
from llmcompressor.errors import ArgumentError, RecipeError, TargetError
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.output_gradients import OutputGradients
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.numerics.output_hessian import BLOCK, blocks_of
from llmcompressor.pipelines.sampled_gradients import SampledGradients

SAMPLES = 6
TOKENS = 6 * 24
HEAD = ["lm_head"]


def gptq(bits: int = 3, **fields: Any) -> GPTQModifier:
    weights = {"num_bits": bits, "strategy": "group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights}
    return GPTQModifier(config_groups={"all": group}, ignore=HEAD, **fields)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many Linears gradients were taken of, for each time."""
    counts: list[int] = []
    run = SampledGradients.__call__

    def call(self: SampledGradients, linears: Any, *given: Any, **more: Any) -> None:
        counts.append(len(linears))
        run(self, linears, *given, **more)

    monkeypatch.setattr(SampledGradients, "__call__", call)
    return counts


def outer_products(
    model: Module, batches: list[Any], names: dict[Module, str]
) -> dict[str, Tensor]:
    """All of H_O, float64, from the same gradients."""
    found: dict[str, Tensor] = {}

    def watch(linear: Module, given: Tensor, gradient: Tensor) -> None:
        own_TR = gradient.flatten(0, -2).double()
        found[names[linear]] = found.get(names[linear], 0) + own_TR.T @ own_TR

    run = SampledGradients(model, batches, SAMPLES, without_logits=("", ""))
    run(list(names), watch, source=BlockSource(), leave=lambda block: None)
    return found


def test_they_are_the_blocks_of_the_outer_products() -> None:
    model, batches = tiny.llama(), tiny.batches()
    names = {one: name for name, one in tiny.linears(model).items()}
    state = State(model=model)
    state.data.calib = batches
    gradients = OutputGradients(state, names)
    gradients.measure(SAMPLES)
    for name, whole_RR in outer_products(model, batches, names).items():
        (found_NBB,) = gradients.of([name], torch.device("cpu"))
        assert len(found_NBB) == blocks_of(len(whole_RR))
        for place, found_BB in enumerate(found_NBB):
            at = slice(place * BLOCK, min(place * BLOCK + BLOCK, len(whole_RR)))
            size = at.stop - at.start
            own_RR = whole_RR[at, at]
            added = max(0.1, BLOCK / TOKENS) * own_RR.diagonal().mean()
            expected_BB = (own_RR + added * torch.eye(size)).float()
            torch.testing.assert_close(found_BB[:size, :size], expected_BB, rtol=1e-3, atol=1e-6)
    gradients.close()
    assert gradients.of(list(names.values()), torch.device("cpu")) == []


@pytest.mark.parametrize(("bits", "fields", "times"), [
    (3, {}, 1),
    (4, {}, 0),
    (3, {"gradient_samples": 0}, 0),
    (4, {"gradient_samples": 4}, 1),
])  # fmt: skip
def test_few_bits_take_them_by_default(
    bits: int, fields: dict[str, Any], times: int, measured: list[int]
) -> None:
    model = tiny.run(tiny.llama(), gptq(bits, **fields))
    assert measured == [len(tiny.linears(model))] * times


def test_only_weights_of_few_bits_take_them(measured: list[int]) -> None:
    def group(bits: int, targets: str) -> dict[str, Any]:
        weights = {"num_bits": bits, "strategy": "group", "group_size": 16}
        return {"targets": [targets], "weights": weights}

    groups = {"fine": group(8, "re:.*mlp.*"), "coarse": group(2, "re:.*self_attn.*")}
    model = tiny.run(tiny.llama(), GPTQModifier(config_groups=groups, ignore=HEAD))
    assert measured == [sum("self_attn" in name for name in tiny.linears(model))]


def test_outputs_that_another_modifier_scales_have_none(measured: list[int]) -> None:
    tiny.run(tiny.llama(), [SmoothQuantModifier(), gptq()])
    assert measured == []
    with pytest.raises(RecipeError, match="SmoothQuantModifier changes before it"):
        tiny.run(tiny.llama(), [SmoothQuantModifier(), gptq(gradient_samples=4)])


def test_what_comes_behind_changes_nothing_of_them(measured: list[int]) -> None:
    weights = {"num_bits": 3, "strategy": "group", "group_size": 16}
    group = {"targets": ["re:.*self_attn.*_proj"], "weights": weights}
    first = GPTQModifier(config_groups={"all": group}, gradient_samples=4)
    behind = SmoothQuantModifier(mappings=[[["re:.*gate_proj", "re:.*up_proj"], "re:.*post.*"]])
    model = tiny.run(tiny.llama(), [first, behind])
    assert measured == [sum("self_attn" in name for name in tiny.linears(model))]


def test_few_tokens_do_no_harm() -> None:
    """Gradients of 16 tokens say next to nothing of how the rows of a block are related."""
    sizes = {"initializer_range": 0.15}
    given = tiny.batches(seed=9)
    wanted = tiny.logits(tiny.llama(**sizes), given).log_softmax(-1)

    def divergence(**fields: Any) -> float:
        data = tiny.batches(number=1, tokens=8)
        found = tiny.logits(tiny.run(tiny.llama(**sizes), gptq(**fields), data=data), given)
        return float((wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1).mean())

    assert divergence() < 1.1 * divergence(gradient_samples=0)


def test_a_model_without_logits_is_solved_as_before() -> None:
    def bare() -> Any:
        return tiny.llama().model

    model = tiny.run(bare(), gptq())
    expected = tiny.run(bare(), gptq(gradient_samples=0))
    assert tree_equal(model, expected)
    with pytest.raises(TargetError, match="returns no logits"):
        tiny.run(bare(), gptq(gradient_samples=4))


def test_a_forward_without_a_gradient_is_solved_as_before(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that changes in place what its backward needs."""
    plain = LlamaMLP.forward

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        hidden = self.up_proj(x).sigmoid()
        found = plain(self, x) * hidden.mean(-1, keepdim=True) * hidden[..., :1].exp()
        hidden.zero_()
        return found

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = tiny.run(tiny.llama(), gptq())
    assert any("all outputs count alike" in line for line in warned)
    assert tree_equal(model, tiny.run(tiny.llama(), gptq(gradient_samples=0)))
    with pytest.raises(RuntimeError, match="inplace"):
        tiny.run(tiny.llama(), gptq(gradient_samples=4))


def tree_equal(one: Module, other: Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def test_statistics_do_not_have_them(tmp_path: Path, measured: list[int]) -> None:
    small.llama().save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "dataset": small.token_rows()}
    oneshot(**given, save_statistics=tmp_path / "kept", output_dir=tmp_path / "none")
    kept = {"model": given["model"], "statistics": tmp_path / "kept"}
    with pytest.raises(ArgumentError, match="gradient_samples: 4"):
        oneshot(**kept, recipe=gptq(gradient_samples=4), output_dir=tmp_path / "out")
    oneshot(**kept, recipe=gptq(), output_dir=tmp_path / "out")
    assert measured == []


def two() -> list[GPTQModifier]:
    """Each with gradients of its own Linears."""
    weights = {"num_bits": 3, "strategy": "group", "group_size": 16}
    parts = [{"targets": [part], "weights": weights} for part in ("re:.*self_attn", "re:.*mlp")]
    return [GPTQModifier(config_groups={"all": one}) for one in parts]


@pytest.mark.parametrize("make", [gptq, two])
def test_an_interrupted_run_goes_on_with_them(
    make: Callable[[], Any], tmp_path: Path, measured: list[int]
) -> None:
    small.llama().save_pretrained(tmp_path / "model")

    def run(name: str, **more: Any) -> bytes:
        data = small.token_rows()
        folder = tmp_path / name
        oneshot(tmp_path / "model", recipe=make(), dataset=data, output_dir=folder, **more)
        return (folder / "model.safetensors").read_bytes()

    whole = run("whole")
    with crashing_after(2), pytest.raises(CrashError):
        run("out")
    assert len(measured) == (4 if make is two else 2)
    before = list(measured)
    assert run("out", resume="must") == whole
    assert measured == before
