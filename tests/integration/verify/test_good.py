# SPDX-License-Identifier: Apache-2.0
"""Good checkpoints have no error: of every preset, compared with what they were made from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from tests.support.caches import is_passed_over
from tests.support.checkpoint_samples import Sample
from tests.support.thinned import few
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    CohereAsrForConditionalGeneration,
    PreTrainedModel,
)

from llmcompressor import verify
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.schemes.presets import PRESETS
from llmcompressor.verification import Severity, VerificationReport

Run = Callable[..., Path]

KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}


def recipe(scheme: str, **more: Any) -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **more)


def worse_than_notes(report: VerificationReport) -> list[str]:
    return [
        f"{finding.rule} {finding.module}: {finding.message}"
        for finding in report.findings
        if finding.severity is not Severity.NOTE
    ]


OF_EACH_FORMAT = {
    *("W3A16", "W4A16", "W4A16_ASYM", "W4A8", "W4AFP8", "W8A8", "FP8", "FP8_BLOCK"),
    *("FP8_DYNAMIC", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8", "MXFP6A16", "UNQUANTIZED"),
}


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(one, marks=[] if one in OF_EACH_FORMAT else [pytest.mark.slow])
        for one in sorted(PRESETS)
    ],
)
def test_every_preset_on_a_llama(preset: str, llama_folder: Path, compressed: Run) -> None:
    folder = compressed(llama_folder, recipe(preset))
    gpu = "h100" if preset == "W4AFP8" else None  # which runs on that device alone
    report = verify(folder, llama_folder, serve="vllm", tp=1, gpu=gpu)
    is_unserved = preset.startswith("MXFP6")  # vLLM 0.33 has no scheme for 6-bit floats
    assert [line[:3] for line in worse_than_notes(report)] == (["S21"] if is_unserved else [])
    assert report.quantized == (0 if preset == "UNQUANTIZED" else 14)
    assert len(report.errors) == report.quantized
    assert report.ok != is_unserved
    assert not is_unserved or verify(folder, llama_folder, serve="transformers").ok


@pytest.mark.parametrize(
    "preset",
    few(
        ["W4A16_ASYM", "W3A16", "W8A8", "W4A8", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8"]
        + [name for name in ("MXFP6A16", "MXFP6A8") if name in PRESETS],
        *("W4A16_ASYM", "W8A8", "W4A8", "FP8_BLOCK", "NVFP4", "MXFP4"),
    ),
)
def test_every_format_on_a_mixture(preset: str, mixtral_folder: Path, compressed: Run) -> None:
    folder = compressed(mixtral_folder, recipe(preset))
    report = verify(folder, mixtral_folder, serve="vllm", tp=1)
    said = worse_than_notes(report)
    unserved = {"W4A8": ["S63"], "MXFP6A16": ["S21", "S63"], "MXFP6A8": ["S21", "S63"]}
    assert sorted({line[:3] for line in said}) == unserved.get(preset, [])  # W4A8: on Arm alone
    assert report.quantized == 32


@pytest.mark.parametrize("preset", [one for one in ("MXFP4A16", "MXFP6A16") if one in PRESETS])
def test_transformers_unpacks_experts_of_small_floats(
    preset: str, mixtral_folder: Path, compressed: Run
) -> None:
    folder = compressed(mixtral_folder, recipe(preset))
    assert verify(folder, mixtral_folder, serve="transformers").ok


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_solved_weights_are_no_error(scheme: str, llama_folder: Path, compressed: Run) -> None:
    gptq = GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    report = verify(compressed(llama_folder, gptq), llama_folder, serve="vllm", tp=1)
    assert not worse_than_notes(report)
    assert report.work == "solved for"
    assert all(0 < each.relative < 0.5 for each in report.errors)


def test_a_quantized_cache(llama_folder: Path, compressed: Run) -> None:
    folder = compressed(llama_folder, recipe("FP8_DYNAMIC", kv_cache_scheme=KV_CACHE))
    said = worse_than_notes(verify(folder, llama_folder, tp=1))
    read = AutoModelForCausalLM.from_pretrained(folder)
    layers = [f"model.layers.{index}.self_attn" for index in range(2)]
    unknown = [name for name in layers if is_passed_over(read.get_submodule(name))]
    assert [line.partition(":")[0] for line in said] == [f"L11 {name}" for name in unknown]
    scaled = [name for name in layers if hasattr(read.get_submodule(name), "k_scale")]
    assert sorted(scaled + unknown) == layers  # as the rule says
    report = verify(folder, llama_folder, serve="transformers", tp=1)
    assert report.ok == (not unknown)


def test_two_schemes_in_one_model(llama_folder: Path, compressed: Run) -> None:
    both = [
        QuantizationModifier(targets=["re:.*self_attn.*_proj$"], scheme="W8A8"),
        QuantizationModifier(targets=["re:.*mlp.*_proj$"], scheme="W4A16"),
    ]
    report = verify(compressed(llama_folder, both), llama_folder, tp=1)
    assert not worse_than_notes(report)


@pytest.mark.parametrize(
    "target", ["re:.*down_proj$", "re:.*experts.1.gate_proj$", "re:.*experts.0.*"]
)
def test_each_expert_is_judged_by_its_own_scheme(
    target: str, mixtral_folder: Path, compressed: Run, tmp_path: Path
) -> None:
    """That they have several is one finding, and what is wrong besides is found all the same."""
    args = {"type": "int", "strategy": "group", "group_size": 32}
    groups = {
        "wide": {"targets": [target], "weights": {**args, "num_bits": 8}},
        "rest": {"targets": ["Linear"], "weights": {**args, "num_bits": 4}},
    }
    both = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    folder = compressed(mixtral_folder, both, verify=False)
    mixture = "model.layers.0.block_sparse_moe.experts"
    report = verify(folder, mixtral_folder, serve="vllm", tp=1)
    said = [(one.rule, one.module) for one in report.findings]
    assert said == [("S62", mixture), ("S62", mixture.replace("0", "1"))]
    assert len(report.errors) == report.quantized

    sample = Sample.read(folder)
    sample.tensors[f"{mixture}.0.w2.weight_shape"][1] *= 2
    scale = f"{mixture}.1.w1.weight_scale"
    sample.tensors[scale] = sample.tensors[scale][:, :2]
    zeros = torch.zeros_like(sample.tensors[f"{mixture}.2.w2.weight_packed"])
    sample.tensors[f"{mixture}.2.w2.weight_packed"] = zeros
    found = verify(sample.write(tmp_path / "broken"), mixtral_folder, serve="vllm", tp=1).findings
    told = {(one.rule, one.module) for one in found}
    for rule, own in (("S28", "0.w2"), ("C1", "1.w1"), ("V4", "2.w2")):
        assert (rule, f"{mixture}.{own}") in told


@pytest.mark.parametrize(
    ("cells", "inner", "devices", "expected"),
    [
        ({"strategy": "channel"}, 36, 8, ("S43", "Its 36 columns split over 8 devices")),
        ({"strategy": "group", "group_size": 32}, 64, 4, ("S64", "Its 64 columns split over 4")),
    ],
)
def test_experts_of_several_schemes_have_their_sizes(
    cells: dict[str, Any],
    inner: int,
    devices: int,
    expected: tuple[str, str],
    compressed: Run,
    tmp_path: Path,
) -> None:
    """The columns of codes of 8 bits are counted as such, though expert 0's gate has 4."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=small.VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=inner,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    args = {"type": "int", **cells}
    groups = {
        "wide": {"targets": ["re:.*down_proj$"], "weights": {**args, "num_bits": 8}},
        "rest": {"targets": ["Linear"], "weights": {**args, "num_bits": 4}},
    }
    both = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    folder = compressed(tmp_path, both, verify=False)
    found = verify(folder, tmp_path, serve="vllm", tp=devices).findings
    rule, start = expected
    said = [one.message for one in found if one.rule == rule and ".experts" in one.module]
    assert any(one.startswith(start) for one in said)


def test_a_quantized_head(llama_folder: Path, compressed: Run) -> None:
    whole = QuantizationModifier(targets=["Linear", "lm_head"], scheme="W4A16")
    report = verify(compressed(llama_folder, whole), llama_folder, tp=1)
    assert not worse_than_notes(report)
    assert report.quantized == 15


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_BLOCK", "NVFP4", "MXFP4"])
def test_a_weight_of_zeros_is_no_fault(
    preset: str, llama_folder: Path, compressed: Run, tmp_path: Path
) -> None:
    shutil.copytree(llama_folder, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"].zero_()
    tensors["model.layers.1.mlp.up_proj.weight"][:7] = 0
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    report = verify(compressed(tmp_path / "source", recipe(preset)), tmp_path / "source", tp=1)
    assert report.ok, str(report)


def test_a_model_is_its_own_reference(llama_folder: Path) -> None:
    report = verify(llama_folder, llama_folder, tp=1)
    assert not report.findings
    assert report.tensors == 21


def of_speech() -> PreTrainedModel:
    """Its head has another name in files than in the model, and is not tied."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    encoder = {key: value for key, value in (sizes | heads).items() if key != "head_dim"}
    encoder |= {"num_mel_bins": 16, "subsampling_conv_channels": 16}
    del encoder["vocab_size"]
    marks = {"tie_word_embeddings": False, "pad_token_id": 2, "eos_token_id": 3}
    config = AutoConfig.for_model("cohere_asr", encoder_config=encoder, **sizes, **heads, **marks)
    return CohereAsrForConditionalGeneration(config)


def of_pictures() -> PreTrainedModel:
    """Its norms of queries and keys have a row for each head, and biases like them."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    vision = {"base_channels": 32, "channel_multiplier": [1], "resolution": 32, "embed_dim": 16}
    vision |= {"num_res_blocks": 1, "num_embeddings": 32, "latent_channels": 16}
    named = {"<image>": 90, "IMGIMGA": 91}
    config = ChameleonConfig(**sizes, **heads, vq_config=vision, vocabulary_map=named)
    return ChameleonForConditionalGeneration(config)


@pytest.mark.parametrize("build", [of_speech, of_pictures])
def test_what_only_looks_wrong(
    build: Callable[[], PreTrainedModel], compressed: Run, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "model")
    assert not worse_than_notes(verify(tmp_path / "model"))
    dynamic = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC")
    folder = compressed(tmp_path / "model", dynamic)
    found = verify(folder, tmp_path / "model", serve="transformers").findings
    assert not [one for one in found if one.severity is Severity.ERROR]
