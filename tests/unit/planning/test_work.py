# SPDX-License-Identifier: Apache-2.0
"""What a plan counts beside statistics and solvers, against the products that a run makes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.support.thinned import few
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.core.contract import DataSize
from llmcompressor.core.state import State
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.numerics.awq import candidates
from llmcompressor.pipelines import moe_routing
from llmcompressor.planning import passes, workload

SAMPLES, LENGTH = 32, 32
TARGETS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def folder_of(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    if kind == "mixtral":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        MixtralForCausalLM(MixtralConfig(**SIZES, **experts)).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def rows() -> Dataset:
    return Dataset.from_dict({"input_ids": torch.randint(3, 120, (SAMPLES, LENGTH)).tolist()})


@pytest.fixture
def of_linears(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the multiply-adds of Linears, in all threads."""
    found: Counter[str] = Counter()
    linear = torch.nn.functional.linear

    def counting(inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        found["linear"] += inputs.numel() * weight.shape[0]
        return linear(inputs, weight, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    return found


class ByDtype(TorchDispatchMode):
    """Counts the multiply-adds of all products of matrices, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.found[result.dtype] += result.numel() * args[0].shape[-1]
        return result


def gptq() -> GPTQModifier:
    return GPTQModifier(scheme="W4A16", asymmetric=False, **TARGETS)


RECIPES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gptq": ("llama", lambda: [gptq()], {}),
    "every expert": ("mixtral", lambda: [gptq()], {}),
    "routed": ("mixtral", lambda: [gptq()], {"moe_calibrate_all_experts": False}),
    "reap": (
        "mixtral",
        lambda: [
            REAPPruningModifier(sparsity=0.5),
            QuantizationModifier(scheme="W4A16", **TARGETS),
        ],
        {},
    ),
    "reap and gptq": ("mixtral", lambda: [REAPPruningModifier(sparsity=0.5), gptq()], {}),
}


@pytest.mark.parametrize(
    "name",
    few(RECIPES, *list(RECIPES)[::2]),
)
def test_as_many_products_are_planned_as_linears_make(
    name: str, tmp_path: Path, of_linears: Counter[str]
) -> None:
    """Forwards, those of every expert, of every candidate, and of experts one by one."""
    kind, make, more = RECIPES[name]
    source, data = folder_of(kind, tmp_path / "model"), rows()
    found = plan(str(source), make(), data, measure=False, max_seq_length=LENGTH, **more)
    of_linears.clear()
    given = {"max_seq_length": LENGTH, "output_dir": tmp_path / "out", **more}
    oneshot(model=str(source), recipe=make(), dataset=data, verify=False, **given)
    between = SAMPLES * LENGTH * SIZES["num_hidden_layers"] * SIZES["hidden_size"] * LENGTH
    runs = sum(one.forwards for one in found.passes)
    planned = found.operations.forward - runs * between
    if name.startswith("reap"):  # what a token's experts return, one by one
        layers = SIZES["num_hidden_layers"] * SIZES["hidden_size"] * SIZES["intermediate_size"]
        planned += SAMPLES * LENGTH * layers * 3 * 2
        planned += between  # attention holds nothing that is looked at: it runs once
    assert planned == pytest.approx(of_linears["linear"], rel=0.12)


def test_as_many_products_are_planned_as_rotations_make(tmp_path: Path) -> None:
    """In float64 for the weights, in float32 where it is tried out; passes come on top."""

    def recipe() -> list[Any]:
        rotating = SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-matrix")
        return [rotating, QuantizationModifier(scheme="W4A16", **TARGETS)]

    source = folder_of("llama", tmp_path / "model")
    found = plan(str(source), recipe(), measure=False)
    with ByDtype() as counter:
        oneshot(model=str(source), recipe=recipe(), output_dir=tmp_path / "out", verify=False)
    products = 2 * counter.found[torch.float64] + counter.found[torch.float32]
    assert products < found.operations.solve < 20 * products


def test_both_ways_of_scaling_are_planned_as_one_grid() -> None:
    """They share the points; so many runs are made of each parent (see ``numerics.awq``)."""
    ones = torch.ones(4)
    for points in (2, 3, 10, 21):
        for duo in (True, False, "both"):
            (searching,) = AWQModifier(n_grid=points, duo_scaling=duo)
            assert searching._candidate_count == len(list(candidates(ones, ones, points, duo)))


def planned_flops(folder: Path, modifier: Any) -> int:
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    modifier.initialize(State(model=model))
    return int(modifier.cost(list(model.modules()), DataSize()).flops)


def test_smoothing_counts_its_readers_and_their_inputs(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    readers = 4 * (64 * 64 + 2 * 64 * 32 + 2 * 64 * 96)
    found = planned_flops(folder, SmoothQuantModifier())
    assert found % readers == 0
    assert found > 0
    static = QuantizationModifier(scheme="FP8", **TARGETS)
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    static.initialize(State(model=model))
    attention = model.model.layers[0].self_attn
    one = static.cost([attention.q_proj], DataSize(tokens=5))
    assert one == static.cost([attention.q_proj, attention.k_proj], DataSize(tokens=5))
    assert one.flops > 0
    assert not static.cost([attention.q_proj], DataSize()).flops


@pytest.mark.parametrize("name", few(["gptq", "every expert", "routed"], "routed"))
def test_what_is_planned_for_one_stop_is_solved_at_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a wave wait together: their statistics are all held, in waves of five here."""
    kind, make, more = RECIPES[name]
    source, data = folder_of(kind, tmp_path / "model"), rows()
    for user in (workload, moe_routing):
        monkeypatch.setattr(user, "experts_per_wave", lambda mixture, *, every: 5)
    planned: list[int] = []
    block_works = workload.block_works

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = block_works(*args, **kwargs)
        planned.extend(
            sum(len(group) for group in stop.groups) for work in found for stop in work.stops
        )
        return found

    monkeypatch.setattr(passes, "block_works", watched)
    plan(str(source), make(), data, measure=False, max_seq_length=LENGTH, **more)

    solved: list[int] = []
    quantize_weights = GPTQModifier.quantize_weights

    def counted(self: GPTQModifier, state: State, modules: list[Module]) -> None:
        solved.append(len(modules))
        quantize_weights(self, state, modules)

    monkeypatch.setattr(GPTQModifier, "quantize_weights", counted)
    given = {"max_seq_length": LENGTH, "output_dir": tmp_path / "out", **more}
    oneshot(model=str(source), recipe=make(), dataset=data, verify=False, **given)
    assert sorted(planned) == sorted(solved)
