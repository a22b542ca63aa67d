# SPDX-License-Identifier: Apache-2.0
"""Mixtures from checkpoint to checkpoint: names, readers, routes counted, starved experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import mixtures
from tests.support.manifests import stable_bytes
from tests.support.thinned import few, thinned
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmcompressor import oneshot
from llmcompressor.checkpoint import block_stream
from llmcompressor.entrypoints import run as run_module
from llmcompressor.entrypoints.verify import verify
from llmcompressor.errors import DatasetError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.moe.linear_experts import LinearExperts

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
    monkeypatch.setattr(run_module, "streamable_source", lambda job: None)
    compressed(tmp_path / "source", tmp_path / "memory", gptq=True)
    for file in sorted((tmp_path / "streamed").iterdir()):
        assert stable_bytes(file) == stable_bytes(tmp_path / "memory" / file.name), file.name


def test_a_run_that_was_broken_off_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtures.saved("llama4_text", tmp_path / "source")
    compressed(tmp_path / "source", tmp_path / "whole", gptq=True)
    leave = block_stream.StreamedBlocks.leave

    def broken(self: Any, block: str) -> None:
        if block.endswith(".1"):
            raise KeyboardInterrupt
        leave(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(block_stream.StreamedBlocks, "leave", broken)
        with pytest.raises(KeyboardInterrupt):
            compressed(tmp_path / "source", tmp_path / "out", gptq=True)
    compressed(tmp_path / "source", tmp_path / "out", gptq=True)
    for file in sorted((tmp_path / "whole").iterdir()):
        assert stable_bytes(file) == stable_bytes(tmp_path / "out" / file.name), file.name


def test_ignored_experts_stay_in_their_stacks(tmp_path: Path) -> None:
    mixtures.saved("llama4_text", tmp_path / "source")
    returned = compressed(
        tmp_path / "source", tmp_path / "out", ignore=["lm_head", "re:.*experts.*"]
    )
    assert not [one for one in returned.modules() if isinstance(one, LinearExperts)]
    assert "model.layers.0.feed_forward.experts.gate_up_proj" in mixtures.names(tmp_path / "out")
    assert any("experts" in entry for entry in config_of(tmp_path / "out")["ignore"])


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


def test_pruned_plain_experts_go_back_into_stacks(tmp_path: Path) -> None:
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
