# SPDX-License-Identifier: Apache-2.0
"""Mixtures from checkpoint to checkpoint: names, readers, routes counted, starved experts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import mixtures
from tests.support.thinned import few, thinned
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmcompressor import oneshot, plan
from llmcompressor.checkpoint import block_stream
from llmcompressor.entrypoints.verify import verify
from llmcompressor.errors import DatasetError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.rotation import SpinQuantModifier
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.quantization import column_solver as gptq_solve

SERVED = tuple(mixtures.PREFIXES)
TOKENS = 8 * 32
IGNORED = ["lm_head", "re:.*gate$", "re:.*router$"]


def compressed(
    folder: Path, output: Path, *, gptq: bool = False, scheme: str = "W4A16", **arguments: Any
) -> Any:
    recipe = (GPTQModifier if gptq else QuantizationModifier)(
        targets="Linear", scheme=scheme, ignore=arguments.pop("ignore", ["lm_head"])
    )
    arguments.setdefault("verify", False)  # those that are to be right are verified by the tests
    if gptq:
        arguments.setdefault("dataset", mixtures.rows())
    return oneshot(model=str(folder), recipe=recipe, output_dir=output, **arguments)


def config_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "config.json").read_text())
    return found["quantization_config"]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }


def report_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "compression_report.json").read_text())
    return found


def reread(output: Path, *, eager: bool = True) -> PreTrainedModel:
    """As transformers alone reads it; with its plainest loop over experts."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(output).eval()
    if eager and any(hasattr(one, "is_concatenated") for one in model.modules()):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(("family", "gptq"), thinned(SERVED, [False, True]))
def test_written_as_servers_expect_and_read_by_transformers(
    family: str, gptq: bool, tmp_path: Path
) -> None:
    original = mixtures.saved(family, tmp_path / "source")
    returned = compressed(tmp_path / "source", tmp_path / "out", gptq=gptq)
    written = mixtures.names(tmp_path / "out")
    prefix = mixtures.PREFIXES[family]
    own = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    experts = 8 if family == "deepseek_v3" else 4
    expected = {
        f"{prefix}.{number}.{name}.weight_{kind}"
        for number in range(experts)
        for name in own
        for kind in ("packed", "scale", "shape")
    }
    assert {name for name in written if name.startswith(f"{prefix}.")} == expected
    assert verify(tmp_path / "out").ok

    config = config_of(tmp_path / "out")
    gate = prefix.replace("experts", "router" if family == "llama4_text" else "gate")
    assert f"{gate}.weight" in written
    assert gate in config["ignore"]
    assert not [entry for entry in config["ignore"] if "experts" in entry]
    assert list(config["config_groups"]) == ["group_0"]

    found = mixtures.logits(reread(tmp_path / "out"))
    assert torch.allclose(found, mixtures.logits(returned), atol=1e-6)
    error = float((found - mixtures.logits(original)).abs().max())
    assert 1e-4 < error < 0.3 * float(found.abs().max())  # measured: at most 0.22


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_8_bit_floats_are_read_by_transformers(family: str, tmp_path: Path) -> None:
    """It holds experts that it stacks in bfloat16, and rounds no inputs of theirs."""
    mixtures.saved(family, tmp_path / "source")
    returned = compressed(tmp_path / "source", tmp_path / "out", scheme="FP8_DYNAMIC")
    assert verify(tmp_path / "out").ok
    found = mixtures.logits(reread(tmp_path / "out", eager=False))
    wanted = mixtures.logits(returned)
    allowed = 1e-6 if family == "llama4_text" else 0.05 * float(wanted.abs().max())
    assert float((found - wanted).abs().max()) < allowed


@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss"])
def test_stacks_without_a_table_are_written_expert_by_expert(family: str, tmp_path: Path) -> None:
    """The values are those of the slices: GPT-OSS's take turns, are transposed and have biases."""
    original = mixtures.saved(family, tmp_path / "source")
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING")
    returned = compressed(tmp_path / "source", tmp_path / "out")
    logger.remove(sink)
    assert any("no table" in text for text in said)
    holder = next(name for name, one in original.named_modules() if hasattr(one, "gate_up_proj"))
    before, after = original.get_submodule(holder), returned.get_submodule(holder)
    assert isinstance(after, LinearExperts)
    gate_up, down = before.gate_up_proj[2].detach(), before.down_proj[2].detach()
    if family == "gpt_oss":
        gate, up, down = gate_up[:, ::2].T, gate_up[:, 1::2].T, down.T
        assert torch.equal(after.linear(2, "up_proj").bias, before.gate_up_proj_bias[2, 1::2])
    else:
        gate, up = gate_up.chunk(2)
    for role, wanted in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        weight = after.linear(2, role).weight.detach()
        assert weight.shape == wanted.shape
        assert float((weight - wanted).abs().max()) < 0.06  # half a step: 0.1 · 4.5 σ / 7.5 / 2
    stored = [name for name in mixtures.names(tmp_path / "out") if "experts.2.up_proj" in name]
    assert any(name.endswith("weight_packed") for name in stored)


@pytest.mark.parametrize("family", few(["qwen3_moe", "llama4_text"], "llama4_text"))
def test_streamed_is_as_in_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtures.saved(family, tmp_path / "source")
    compressed(tmp_path / "source", tmp_path / "streamed", gptq=True)
    monkeypatch.setattr(sys.modules[oneshot.__module__], "streamable_source", lambda job: None)
    compressed(tmp_path / "source", tmp_path / "memory", gptq=True)
    for file in sorted((tmp_path / "streamed").iterdir()):
        assert file.read_bytes() == (tmp_path / "memory" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("llama4_text", marks=pytest.mark.slow)]
)
def test_scales_of_a_mixture_are_written_as_in_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of its router, which nothing quantizes."""
    mixtures.saved(family, tmp_path / "source")

    def scaled(output: Path) -> None:
        recipe = AWQModifier(scheme="W4A16", targets="Linear", n_grid=3, ignore=IGNORED)
        given = {"dataset": mixtures.rows(), "recipe": recipe}
        oneshot(model=str(tmp_path / "source"), output_dir=output, **given)

    scaled(tmp_path / "streamed")
    monkeypatch.setattr(sys.modules[oneshot.__module__], "streamable_source", lambda job: None)
    scaled(tmp_path / "memory")
    for file in sorted((tmp_path / "streamed").iterdir()):
        assert file.read_bytes() == (tmp_path / "memory" / file.name).read_bytes(), file.name
    before, after = (tensors_of(tmp_path / name) for name in ("source", "streamed"))
    routers = [name for name in after if name.endswith(("gate.weight", "router.weight"))]
    assert any(not torch.equal(before[name], after[name]) for name in routers)
    for name in routers:
        norm = re.sub(r"(mlp|feed_forward)\.\w+\.weight", "post_attention_layernorm.weight", name)
        product = before[name] * before[norm]
        torch.testing.assert_close(after[name] * after[norm], product, rtol=1e-4, atol=1e-6)


def test_a_run_that_was_broken_off_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtures.saved("llama4_text", tmp_path / "source")
    compressed(tmp_path / "source", tmp_path / "whole", gptq=True)
    leave = block_stream.BlockStream.leave

    def broken(self: Any, block: str) -> None:
        if block.endswith(".1"):
            raise KeyboardInterrupt
        leave(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(block_stream.BlockStream, "leave", broken)
        with pytest.raises(KeyboardInterrupt):
            compressed(tmp_path / "source", tmp_path / "out", gptq=True)
    compressed(tmp_path / "source", tmp_path / "out", gptq=True)
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_a_model_in_memory_is_taken_apart_and_saved(tmp_path: Path) -> None:
    model = mixtures.build("qwen3_moe")
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(tmp_path / "out")
    assert verify(tmp_path / "out").ok
    found = mixtures.logits(reread(tmp_path / "out"))
    assert torch.allclose(found, mixtures.logits(model), atol=1e-6)


def test_ignored_experts_stay_in_their_stacks(tmp_path: Path) -> None:
    mixtures.saved("llama4_text", tmp_path / "source")
    returned = compressed(
        tmp_path / "source", tmp_path / "out", ignore=["lm_head", "re:.*experts.*"]
    )
    assert not [one for one in returned.modules() if isinstance(one, LinearExperts)]
    assert "model.layers.0.feed_forward.experts.gate_up_proj" in mixtures.names(tmp_path / "out")
    assert any("experts" in entry for entry in config_of(tmp_path / "out")["ignore"])


def test_experts_of_one_layer_alone(tmp_path: Path) -> None:
    mixtures.saved("mixtral", tmp_path / "source")
    ignore = ["lm_head", "re:.*layers.0.mlp.experts.*"]
    compressed(tmp_path / "source", tmp_path / "out", ignore=ignore)
    written = mixtures.names(tmp_path / "out")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in written
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in written
    errors = [one for one in verify(tmp_path / "out").findings if one.severity == "error"]
    assert [(one.server, one.rule) for one in errors] == [("transformers", "T6")]
    assert "experts_not_quantized" not in config_of(tmp_path / "out")["config_groups"]


# ---------------------------------------------------------------------- what experts are shown


@torch.no_grad()
def routed(model: PreTrainedModel, name: str) -> list[int]:
    """How many tokens of the data a layer's router sends to each expert of the original model."""
    counts = torch.zeros(4, dtype=torch.long)

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts.add_(args[1].flatten().bincount(minlength=4))

    handle = model.get_submodule(name).register_forward_pre_hook(count)
    model(torch.tensor(mixtures.rows()["input_ids"]))
    handle.remove()
    return counts.tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return mixtures.saved("qwen3_moe", folder), folder


@pytest.mark.parametrize(
    ("granularity", "every"), thinned(["linear", "sub_block", "block"], [True, False])
)
def test_tokens_are_counted_and_shown(
    granularity: str, every: bool, source: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, folder = source
    compressed(
        folder,
        tmp_path / "out",
        gptq=True,
        moe_calibrate_all_experts=every,
        sequential_granularity=granularity,
        # attention as it was: the routes of the first layer are those of the original
        ignore=["lm_head", "re:.*self_attn.*"],
    )
    report = report_of(tmp_path / "out")
    first = "model.layers.0.mlp.experts"
    tokens = report["experts"][first]["tokens"]
    assert tokens == routed(model, first)
    assert sum(report["experts"]["model.layers.1.mlp.experts"]["tokens"]) == 2 * TOKENS
    records = report["modifiers"]["GPTQModifier"]
    for expert, count in enumerate(tokens):
        for own in ("gate_proj", "up_proj", "down_proj"):
            assert records[f"{first}.{expert}.{own}"]["tokens"] == (TOKENS if every else count)


@pytest.fixture(scope="module")
def nearest(source: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All experts rounded to nearest."""
    ignore = ["lm_head", "re:.*self_attn.*"]
    return compressed(source[1], tmp_path_factory.mktemp("nearest") / "rtn", ignore=ignore)


@pytest.mark.parametrize(
    ("policy", "granularity"), thinned(["all_tokens", "neighbours", "rtn"], ["linear", "block"])
)
def test_starved_experts(
    policy: str,
    granularity: str,
    source: tuple[PreTrainedModel, Path],
    nearest: Any,
    tmp_path: Path,
    warned: list[str],
) -> None:
    model, folder = source
    first = "model.layers.0.mlp.experts"
    wanted = routed(model, first)
    least = sorted(wanted)[0] + 1
    returned = compressed(
        folder,
        tmp_path / "out",
        gptq=True,
        moe_calibrate_all_experts=False,
        starved_experts=policy,
        min_tokens_per_module=least / TOKENS,
        sequential_granularity=granularity,
        ignore=["lm_head", "re:.*self_attn.*"],
    )
    report = report_of(tmp_path / "out")
    poor = wanted.index(min(wanted))
    assert report["experts"][first]["starved"] == {str(poor): policy}
    done = {"all_tokens": "all tokens", "neighbours": "other experts", "rtn": "rounded to nearest"}
    said = f"reached 1 of 4 experts: {first}.{poor} ({wanted[poor]}). "
    assert any(said in text and done[policy] in text for text in warned)
    shown = {"all_tokens": TOKENS, "neighbours": sum(wanted) - wanted[poor], "rtn": 0}[policy]
    records = report["modifiers"]["GPTQModifier"]
    for expert, count in enumerate(wanted):
        for own in ("gate_proj", "up_proj", "down_proj"):
            found = records[f"{first}.{expert}.{own}"]["tokens"]
            assert found == (shown if expert == poor else count)
    same = [
        torch.equal(
            returned.get_submodule(f"{first}.{expert}.down_proj").weight,
            nearest.get_submodule(f"{first}.{expert}.down_proj").weight,
        )
        for expert in range(4)
    ]
    assert same == [policy == "rtn" and expert == poor for expert in range(4)]


@pytest.mark.parametrize("pipeline", ["independent", "basic"])
def test_a_starved_expert_can_be_an_error(
    pipeline: str, source: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    # of 0.9 times the tokens; whoever has just as many as the message says is none of them
    least = r"Fewer than (\d+) calibration tokens .*model\.layers\.0\.mlp\.experts\.\d \((\d+)\)"
    with pytest.raises(DatasetError, match=least) as error:
        compressed(
            source[1],
            tmp_path / "out",
            gptq=True,
            moe_calibrate_all_experts=False,
            starved_experts="error",
            min_tokens_per_module=0.9,
            pipeline=pipeline,
        )
    said = re.search(r"Fewer than (\d+) calibration", error.value.problem)
    counts = re.findall(r"experts\.\d \((\d+)\)", error.value.problem)
    assert said is not None
    assert all(int(count) < int(said[1]) for count in counts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", few(["all_tokens", "neighbours", "rtn"], "neighbours"))
def test_a_policy_that_cannot_act_says_so(
    policy: str, source: tuple[PreTrainedModel, Path], warned: list[str]
) -> None:
    def said(**arguments: Any) -> list[str]:
        warned.clear()
        oneshot(
            model=str(source[1]),
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
            dataset=mixtures.rows(),
            starved_experts=policy,
            **arguments,
        )
        return [text for text in warned if f"{policy!r} has no effect" in text]

    routed_alone = {"moe_calibrate_all_experts": False, "min_tokens_per_module": 0.9}
    (one,) = said(pipeline="basic", **routed_alone)
    assert "model.layers.0.mlp.experts." in one
    assert not said(pipeline="sequential", **routed_alone)
    assert not said(pipeline="basic", min_tokens_per_module=0.9)  # each sees all tokens


def test_a_static_scale_wants_that_something_is_shown(
    source: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match=r"shown to model\.layers.*starved_experts \(rtn shows"):
        oneshot(
            model=str(source[1]),
            recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
            dataset=mixtures.rows(),
            output_dir=tmp_path / "out",
            moe_calibrate_all_experts=False,
            starved_experts="rtn",
            min_tokens_per_module=0.9,
        )
    assert not (tmp_path / "out").exists()


def test_gptq_of_experts_is_better_than_rounding(
    source: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    """On the data that it was calibrated with; measured: 0.40 of the error."""
    model, folder = source
    ids = torch.tensor(mixtures.rows()["input_ids"])
    errors = {}
    for gptq in (True, False):
        made = compressed(
            folder, tmp_path / str(gptq), gptq=gptq, ignore=["lm_head", "re:.*self_attn.*"]
        )
        with torch.no_grad():
            errors[gptq] = float((made(ids).logits - model(ids).logits).square().mean())
    assert errors[True] < 0.8 * errors[False]


def test_calibrated_together_is_calibrated_alone(
    source: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waves of experts are for memory and speed: what is found does not depend on them."""
    from llmcompressor.pipelines import moe_routing

    given = {"gptq": True, "moe_calibrate_all_experts": False}
    compressed(source[1], tmp_path / "together", **given)
    monkeypatch.setattr(moe_routing, "experts_per_wave", lambda mixture, every: 1)
    compressed(source[1], tmp_path / "alone", **given)
    for number in (1, 2):
        records = [
            report_of(tmp_path / name)["modifiers"]["GPTQModifier"]
            for name in ("together", "alone")
        ]
        key = f"model.layers.0.mlp.experts.{number}.down_proj"
        assert records[0][key]["loss"] == pytest.approx(records[1][key]["loss"], rel=1e-3)
        assert records[0][key]["tokens"] == records[1][key]["tokens"]


# ---------------------------------------------------------------------- bad input


def test_experts_that_would_not_be_seen_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    mixtures.saved("mixtral", tmp_path / "source")
    monkeypatch.setattr(
        MixtralExperts, "_apply_gate", lambda self, gate_up: gate_up.chunk(2, -1)[0]
    )
    with pytest.raises(TargetError, match=r"model\.layers\.0\.mlp\.experts.*Ignore them") as caught:
        compressed(tmp_path / "source", tmp_path / "out")
    pattern = caught.value.remedy.split("'")[1]
    compressed(tmp_path / "source", tmp_path / "out", ignore=["lm_head", pattern])
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in mixtures.names(tmp_path / "out")


FOREIGN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 64,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": 64,
        "vocab_size": mixtures.VOCABULARY,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "jetmoe": {
        "vocab_size": mixtures.VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
    },
}
"""Families whose experts are held in other ways."""


@pytest.mark.parametrize("family", FOREIGN)
def test_the_pattern_that_ignores_experts_is_one_of_the_model(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **FOREIGN[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    weights = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    call: dict[str, Any] = {"model": str(tmp_path / "source"), "output_dir": str(tmp_path / "out")}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    with pytest.raises(TargetError, match=r"layers\.0|blocks\.0") as caught:
        oneshot(**call, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]))
    ignore = ["lm_head", *re.findall(r"'(re:.*?)'", caught.value.remedy)]
    oneshot(**call, recipe=QuantizationModifier(config_groups=groups, ignore=ignore))
    names = mixtures.names(tmp_path / "out")
    assert any(name.endswith("weight_scale") for name in names)
    assert not any("experts" in name and name.endswith("weight_scale") for name in names)


def test_pruned_experts_that_are_not_quantized_go_back_into_stacks(tmp_path: Path) -> None:
    """No reader of this family knows dense experts one by one."""
    mixtures.saved("llama4_text", tmp_path / "source")
    recipe = SparseGPTModifier(sparsity=0.5, targets="Linear", ignore=["lm_head"])
    returned = oneshot(
        model=str(tmp_path / "source"),
        recipe=recipe,
        dataset=mixtures.rows(),
        output_dir=tmp_path / "out",
    )
    assert mixtures.names(tmp_path / "out") == mixtures.names(tmp_path / "source")
    stack = returned.model.layers[1].feed_forward.experts.gate_up_proj
    assert float((stack == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    found = mixtures.logits(reread(tmp_path / "out"))
    assert torch.allclose(found, mixtures.logits(returned), atol=1e-6)


def test_experts_that_are_changed_and_not_quantized_are_found(tmp_path: Path) -> None:
    """transformers looks for codes of what is packed, unless a group says otherwise."""
    mixtures.saved("qwen3_moe", tmp_path / "source")
    ignore = ["lm_head", "re:.*experts.*"]
    quantizing = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=ignore)
    recipe = [SpinQuantModifier(rotations=["R1"]), quantizing]
    returned = oneshot(model=str(tmp_path / "source"), recipe=recipe, output_dir=tmp_path / "out")
    found = mixtures.logits(reread(tmp_path / "out"))
    assert torch.allclose(found, mixtures.logits(returned), atol=1e-6)
    before, after = (tensors_of(tmp_path / name) for name in ("source", "out"))
    experts = [name for name in before if "experts" in name]
    assert not any(torch.equal(before[name], after[name]) for name in experts)


@pytest.mark.parametrize(
    ("family", "as_object"),
    thinned(["gpt_oss", "qwen3_moe"], [False, True]),
)
def test_a_plan_knows_that_pruned_experts_go_back_into_stacks(
    family: str, as_object: bool, tmp_path: Path
) -> None:
    mixtures.saved(family, tmp_path / "source")

    def given() -> Any:
        folder = tmp_path / "source"
        return AutoModelForCausalLM.from_pretrained(folder) if as_object else str(folder)

    def recipe() -> SparseGPTModifier:
        return SparseGPTModifier(targets="Linear", sparsity=0.5, ignore=["lm_head"])

    found = plan(given(), recipe(), mixtures.rows(), measure=False)
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING")
    oneshot(given(), recipe=recipe(), dataset=mixtures.rows(), output_dir=tmp_path / "out")
    logger.remove(sink)
    files = {one.name: one.stat().st_size for one in (tmp_path / "out").glob("*.safetensors")}
    assert found.sizes is not None
    assert dict(found.sizes.files) == files
    assert not [one for one in found.serving if one.rule == "T6"]
    assert not [text for text in said if "T6" in text]
    by_block = family == "qwen3_moe" and not as_object
    assert found.residency.startswith("one block" if by_block else "the whole model")
    assert ("a stack of experts" in found.residency) == (family == "gpt_oss" and not as_object)


@pytest.mark.parametrize(
    ("targets", "ignore", "wanted"),
    [
        (["MixtralDecoderLayer"], [], [0.5, 0.5]),
        (["re:.*layers.1$"], [], [0.0, 0.5]),
        (["MixtralDecoderLayer"], ["re:.*layers.0$"], [0.0, 0.5]),
        (["MixtralDecoderLayer"], ["re:.*experts.*"], [0.0, 0.0]),
    ],
)
def test_a_target_that_holds_experts_means_them(
    targets: list[str], ignore: list[str], wanted: list[float]
) -> None:
    model = mixtures.build("mixtral")
    recipe = SparseGPTModifier(sparsity=0.5, targets=targets, ignore=ignore)
    oneshot(model=model, recipe=recipe, dataset=mixtures.rows())
    for layer, share in zip(model.model.layers, wanted, strict=True):
        for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            assert float((stack == 0).float().mean()) == pytest.approx(share, abs=0.01)


def test_experts_of_one_shape_are_solved_in_one_batch(
    source: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    swept = gptq_solve._solve_by_sweep
    monkeypatch.setattr(
        gptq_solve,
        "_solve_by_sweep",
        lambda problems, options: (sizes.append(len(problems)), swept(problems, options))[1],
    )
    given = {"gptq": True, "ignore": ["lm_head", "re:.*self_attn.*"]}
    compressed(source[1], tmp_path / "routed", moe_calibrate_all_experts=False, **given)
    # of each layer: gate and up of four experts, down of four experts
    assert sizes == [4, 4, 4, 4]
    sizes.clear()
    compressed(source[1], tmp_path / "all", **given)
    # all gates and ups get one input: they are rows of one problem
    assert sizes == [1, 4, 1, 4]


def by_name(folder: Path, output: Path, entry: str, *, object_: bool = False) -> Any:
    """Attention in 8 bits, experts, as ``entry`` names them, in 4."""
    eight = {"num_bits": 8, "strategy": "channel"}
    model = mixtures.build("mixtral") if object_ else str(folder)
    groups = {
        "attention": {"targets": ["re:.*self_attn.*_proj$"], "weights": eight},
        "experts": {"targets": [entry], "weights": {"num_bits": 4, "group_size": 64}},
    }
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    return oneshot(
        model=model, recipe=recipe, output_dir=output, save_compressed=True, verify=False
    )


@pytest.mark.parametrize(
    ("object_", "entry"),
    [(False, "re:.*experts.*(gate|up|down)_proj$"), (True, "re:.*block_sparse_moe.*.w[123]$")],
    ids=["folder", "object"],
)
def test_experts_are_meant_by_other_names(object_: bool, entry: str, tmp_path: Path) -> None:
    """A file's w1, w3 and w2 are gate_proj, up_proj and down_proj: the same files come of all."""
    mixtures.saved("mixtral", tmp_path / "source")
    usual = by_name(
        tmp_path / "source",
        tmp_path / "usual",
        entry,
        object_=object_,
    )
    by_name(
        tmp_path / "source",
        tmp_path / "own",
        r"re:.*experts\.\d+\.(?:w1|w2|w3)$",
        object_=object_,
    )
    found, wanted = tensors_of(tmp_path / "usual"), tensors_of(tmp_path / "own")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one, wanted[name]) for name, one in found.items())
    packed = [name for name in found if "experts" in name and name.endswith("weight_packed")]
    assert len(packed) == 2 * 4 * 3
    assert verify(tmp_path / "usual").ok
    groups = config_of(tmp_path / "usual")["config_groups"].values()
    targets = [target for group in groups for target in group["targets"]]
    assert r"re:.*experts\.\d+\.(?:w1|w2|w3)$" in targets  # what servers look up (S68)
    assert torch.allclose(
        mixtures.logits(reread(tmp_path / "usual")), mixtures.logits(usual), atol=1e-6
    )


def test_experts_are_ignored_by_other_names(tmp_path: Path, warned: list[str]) -> None:
    mixtures.saved("mixtral", tmp_path / "source")
    earlier = ["re:.*block_sparse_moe.gate", "re:.*block_sparse_moe.experts.*.w2$"]
    ignored = ["lm_head", "re:.*experts.*(gate|up)_proj$", *earlier]
    compressed(tmp_path / "source", tmp_path / "out", ignore=ignored)
    packed = [name for name in tensors_of(tmp_path / "out") if name.endswith("weight_packed")]
    assert packed
    assert not [name for name in packed if "experts" in name]
    assert verify(tmp_path / "out").ok
    assert not [line for line in warned if "matches no module" in line]
