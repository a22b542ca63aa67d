# SPDX-License-Identifier: Apache-2.0
"""What a plan says about patterns, problems, data and servers, and that it reads no weight."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.support import published_models as published
from torch import nn
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.errors import ArgumentError, CheckpointError, InputError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.sparsity import WandaPruningModifier
from llmcompressor.planning.result import Match, Plan

GPTQ = "modifiers:\n  GPTQModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}\n"
RTN = "modifiers:\n  QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}\n"


def rows(samples: int = 4, length: int = 16) -> Dataset:
    ids = torch.randint(3, 160, (samples, length), generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict({"input_ids": ids.tolist()})


def quick(model: Any, recipe: Any, *data: Any, **more: Any) -> Plan:
    return plan(model, recipe, *data, measure=False, **more)


def match(found: Plan, pattern: str) -> Match:
    (one,) = [each for each in found.matches if each.pattern == pattern]
    return one


def test_what_each_pattern_matches_and_decides(llama_folder: Path) -> None:
    modifier = QuantizationModifier(
        config_groups={
            "mlp": {"targets": ["re:.*mlp.*proj$"], "weights": {"num_bits": 8}},
            "rest": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
        },
        ignore=["lm_head", "re:.*k_proj", "model.embed_tokens"],
    )
    found = quick(llama_folder, modifier)

    assert (match(found, "re:.*mlp.*proj$").matched, match(found, "re:.*mlp.*proj$").decided) == (
        6,
        6,
    )
    assert (match(found, "Linear").matched, match(found, "Linear").decided) == (15, 6)
    assert (match(found, "lm_head").matched, match(found, "lm_head").decided) == (1, 1)
    assert (match(found, "re:.*k_proj").matched, match(found, "re:.*k_proj").decided) == (2, 2)
    # no target wants the embedding: the entry decides nothing
    assert (match(found, "model.embed_tokens").decided, len(found.schemes)) == (0, 12)


@pytest.mark.parametrize(("target", "decided"), [("Linear", 14), ("LlamaDecoderLayer", 2)])
def test_what_targets_of_pruning_decide(llama_folder: Path, target: str, decided: int) -> None:
    """The Linears that are pruned, or the layers that hold them."""
    pruner = WandaPruningModifier(sparsity=0.5, targets=target, ignore=["lm_head"])
    found = quick(llama_folder, pruner, dataset=[{"input_ids": list(range(3, 19))}])
    assert match(found, target).decided == decided


def test_a_pattern_that_misses_says_what_it_may_have_meant(llama_folder: Path) -> None:
    found = quick(llama_folder, QuantizationModifier(scheme="W8A8", ignore=["re:.*gatee_proj"]))

    assert match(found, "re:.*gatee_proj").matched == 0
    assert "gate_proj" in match(found, "re:.*gatee_proj").hint
    assert found.ok


def test_every_matrix_is_accounted_for_with_its_reason(pico: Path) -> None:
    found = quick(pico, QuantizationModifier(targets=["Linear"], scheme="W8A8"))
    reasons = {row.pattern: row.why for row in found.modules if row.scheme == "dense"}
    model = AutoModelForCausalLM.from_pretrained(pico)

    assert reasons["model.embed_tokens"] == "no target"
    assert reasons["lm_head"] == "its weight is the input embedding's"
    names = {name for name, module in model.named_modules() if list(module.parameters(False))}
    assert sum(row.modules for row in found.modules) == sum("norm" not in name for name in names)


def oneshot_error(**call: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        oneshot(**call)
    return caught.value


FAULTS: dict[str, dict[str, Any]] = {
    "a target that matches nothing": {"recipe": RTN.replace("Linear", "Linaer")},
    "no such modifier": {"recipe": RTN.replace("QuantizationModifier", "QuantisationModifier")},
    "no such preset": {"recipe": RTN.replace("W4A16", "W4A17")},
    "no data": {"recipe": GPTQ},
    "a wrong path": {"recipe": GPTQ, "dataset": "no/such/file.jsonl"},
    "token ids too large": {"recipe": GPTQ, "dataset": Dataset.from_dict({"input_ids": [[999]]})},
    "no data, and data": {"recipe": GPTQ, "dataset": rows(), "pipeline": "datafree"},
    "blocks that are not there": {
        "recipe": GPTQ,
        "dataset": rows(),
        "sequential_targets": ["LlamaLayer"],
    },
    "little memory": {"recipe": RTN, "max_memory": "1MiB"},
}


def test_what_one_modifier_leaves_to_another_is_counted_once(pico: Path, tmp_path: Path) -> None:
    """One rounds all, and one behind it solves some of them for the same scheme."""
    recipe = """
    modifiers:
      - QuantizationModifier: {targets: Linear, scheme: W8A16, ignore: [lm_head]}
      - GPTQModifier: {targets: ["re:.*mlp.*_proj"], scheme: W8A16}
    """
    given = {"dataset": ["def f(x): return x"] * 4, "max_seq_length": 16}
    found = plan(str(pico), recipe, **given, measure=False)
    assert found.ok
    assert not [one for one in found.serving if one.severity == "error"]
    assert match(found, "Linear").decided == 16
    assert match(found, "re:.*mlp.*_proj").decided == 12
    oneshot(model=str(pico), recipe=recipe, output_dir=str(tmp_path / "out"), **given)
    assert found.sizes.weights == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_run_refuses_is_a_problem_in_the_same_words(
    fault: str, llama_folder: Path, tmp_path: Path
) -> None:
    call = {"model": str(llama_folder), "output_dir": tmp_path / "out", **FAULTS[fault]}
    found = quick(**call)
    error = oneshot_error(**call)

    assert not found.ok
    (problem,) = found.problems
    assert problem.error == type(error).__name__
    # figures of memory are those of the moment
    assert problem.message[:32] == error.problem[:32]
    assert problem.remedy[:10] == error.remedy[:10]


def test_an_output_that_is_taken(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    call = {"model": str(llama_folder), "recipe": RTN, "output_dir": tmp_path / "out"}
    error = oneshot_error(**call)

    assert [one.message for one in quick(**call).problems] == [error.problem]
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_what_cannot_be_planned_is_an_error(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="num_calibration_sample"):
        quick(llama_folder, RTN, num_calibration_sample=3)
    with pytest.raises(CheckpointError):
        quick(tmp_path / "nothing", RTN)
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    weights = (llama_folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        quick(tmp_path, RTN)


def test_the_sizes_are_told_even_without_the_data(llama_folder: Path) -> None:
    found = quick(llama_folder, GPTQ, max_seq_length=32, num_calibration_samples=8)

    assert [one.where for one in found.problems] == ["dataset"]
    assert found.sizes is not None
    assert found.tokens is not None
    assert (found.tokens.tokens, found.tokens.is_exact) == (8 * 32, False)


def test_headers_are_enough_and_give_the_same_plan(llama_folder: Path, tmp_path: Path) -> None:
    config = published.small(published.LLAMA_3_8B)
    hollow = published.write_headers(tmp_path / "hollow", config, published.tensors_of(config))
    found, full = quick(hollow, RTN), quick(llama_folder, RTN)

    assert found.sizes is not None
    assert full.sizes is not None
    assert found.sizes.files == full.sizes.files
    assert found.schemes == full.schemes
    assert any("no data" in note for note in found.notes)
    assert not full.notes


def test_a_modifier_that_was_planned_can_be_applied(llama_folder: Path, tmp_path: Path) -> None:
    modifier = GPTQModifier(targets=["Linear"], scheme="W4A16", ignore=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype="auto")
    before = {name: id(one) for name, one in model.named_parameters()}
    first = quick(model, modifier, rows())
    second = quick(model, modifier, rows())

    assert not modifier.initialized
    assert {name: id(one) for name, one in model.named_parameters()} == before
    assert not any(hasattr(one, "quantization_scheme") for one in model.modules())
    assert first.sizes == second.sizes
    oneshot(model=model, recipe=modifier, dataset=rows(), output_dir=tmp_path / "out")


def test_data_that_can_be_read_once_is_left_alone(llama_folder: Path) -> None:
    def texts() -> Iterator[str]:
        yield "def main(): pass"

    data = texts()
    found = quick(llama_folder, GPTQ, data, max_seq_length=32)

    assert found.tokens is not None
    assert not found.tokens.is_exact
    assert list(data) == ["def main(): pass"]


def test_granularity_and_residency(llama_folder: Path) -> None:
    found = quick(llama_folder, GPTQ, rows())
    (one,) = found.passes
    assert (one.pipeline, one.level, one.streams, one.forwards) == ("sequential", "linear", 2, 2)
    assert one.spilled == 0
    assert "one block at a time" in found.residency

    tight = quick(llama_folder, GPTQ, rows(), activation_budget=1024).passes[0]
    assert (tight.level, tight.forwards) == ("block", 3)
    assert tight.spilled == tight.activations - 1024

    chosen = quick(llama_folder, GPTQ, rows(), sequential_targets=["LlamaDecoderLayer"]).passes[0]
    assert chosen.level == "block"
    whole = quick(AutoModelForCausalLM.from_pretrained(llama_folder), GPTQ, rows())
    assert "whole" in whole.residency


def test_where_listed_experts_may_starve_passes_wait_at_blocks(llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    for layer in model.model.layers:
        layer.mlp = Routed(layer.mlp)
    assert levels_of(model) == {True: "linear", False: "block"}


def levels_of(model: nn.Module) -> dict[bool, str]:
    return {
        every: quick(model, GPTQ, rows(), moe_calibrate_all_experts=every).passes[0].level
        for every in (True, False)
    }


class Routed(nn.Module):
    """Each of two MLPs for every other token."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp, copy.deepcopy(mlp)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, 1)
        made = torch.empty_like(rows)
        chosen = torch.arange(len(rows)) % 2
        for number, expert in enumerate(self.experts):
            made[chosen == number] = expert(rows[chosen == number])
        return made.view_as(hidden_states)


def test_the_operations_are_those_of_the_matrices(llama_folder: Path) -> None:
    found = quick(llama_folder, GPTQ.replace("scheme", "asymmetric: false, scheme"), rows())
    hidden, inner, blocks, tokens, length = 128, 256, 2, 64, 16
    matrices = 2 * hidden * hidden + 2 * hidden * (hidden // 2) + 3 * hidden * inner

    assert found.operations.forward == tokens * blocks * (matrices + hidden * length)
    grams = 3 * (hidden**2 * 36 // 64) + inner**2 * 36 // 64
    assert found.operations.solve > tokens * blocks * grams
    assert found.operations.rounded == blocks * matrices


def test_it_is_json(llama_folder: Path) -> None:
    found = plan(llama_folder, GPTQ, rows())
    content = json.loads(json.dumps(found.as_dict()))

    assert content["ok"] is True
    assert found.sizes is not None
    assert content["sizes"]["weights"] == found.sizes.weights
    assert content["peak"]["host"] == max(phase["host"] for phase in content["phases"])
    assert content["time"]["low"] < content["time"]["seconds"] < content["time"]["high"]
    assert [phase["name"] for phase in content["phases"]] == ["load", "calibrate", "solve", "save"]


def test_servers_are_asked(llama_folder: Path) -> None:
    loose = quick(llama_folder, RTN, serve="vllm", tp=1)
    tight = quick(llama_folder, RTN, serve="vllm", tp=64)

    assert loose.ok
    assert not tight.ok
    assert {one.severity for one in tight.serving} >= {"error"}
