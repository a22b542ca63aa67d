# SPDX-License-Identifier: Apache-2.0
"""What the class has that ``config.json`` names is there, in its shapes, as floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.checkpoint_samples import Sample
from tests.support.thinned import thinned
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from llmcompressor import verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification import Severity, TensorInfo
from llmcompressor.verification.transformers_model import build, readings_of_both

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
SWITCH = {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
LATENT = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 32,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 32}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": ("GptOssForCausalLM", {**SIZES, "num_local_experts": 4, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**SIZES, **LATENT}),
    "granitemoe": ("GraniteMoeForCausalLM", {**SIZES, "num_local_experts": 8}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {**SIZES, **HYBRID}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "longt5": ("LongT5ForConditionalGeneration", T5),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", {**T5, **SWITCH}),
}
Source = Callable[[str], Sample]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A random model as transformers writes it."""
    known: dict[str, Sample] = {}

    def get(model_type: str) -> Sample:
        if model_type not in known:
            name, settings = CLASSES[model_type]
            torch.manual_seed(0)
            config = CONFIG_MAPPING[model_type](**settings, dtype=torch.bfloat16)
            model = getattr(transformers, name)._from_config(config)
            folder = tmp_path_factory.mktemp("whole") / model_type
            model.to(torch.bfloat16).save_pretrained(folder)
            known[model_type] = Sample.read(folder)
        return known[model_type].copy()

    return get


def errors(folder: Path, server: str | None = None) -> set[tuple[str, str, str]]:
    return {
        (one.rule, one.module, one.message)
        for one in verify(folder, serve=server, tp=1).findings
        if one.severity is not Severity.NOTE
    }


@pytest.mark.parametrize(("model_type", "server"), thinned(CLASSES, ["transformers", "vllm"]))
def test_what_is_whole_has_no_finding(
    model_type: str, server: str, whole: Source, tmp_path: Path
) -> None:
    found = errors(whole(model_type).write(tmp_path / "whole"), server)
    assert not {one for one in found if one[0] in ("C2", "S70", "S71", "T4")}


def drop(*parts: str) -> Callable[[Sample], None]:
    def plant(sample: Sample) -> None:
        found = [name for name in sample.tensors if any(part in name for part in parts)]
        assert found
        for name in found:
            del sample.tensors[name]

    return plant


def shape(part: str, *sizes: int) -> Callable[[Sample], None]:
    def plant(sample: Sample) -> None:
        for name in [name for name in sample.tensors if part in name]:
            sample.tensors[name] = torch.ones(sizes, dtype=torch.bfloat16)

    return plant


def dtype(part: str, dtype: torch.dtype) -> Callable[[Sample], None]:
    def plant(sample: Sample) -> None:
        for name in [name for name in sample.tensors if part in name]:
            sample.tensors[name] = sample.tensors[name].to(dtype)

    return plant


def rows(part: str, count: int) -> Callable[[Sample], None]:
    def plant(sample: Sample) -> None:
        for name in [name for name in sample.tensors if part in name]:
            sample.tensors[name] = sample.tensors[name][:count].clone()

    return plant


def setting(name: str, value: Any) -> Callable[[Sample], None]:
    def plant(sample: Sample) -> None:
        assert sample.config[name] != value
        sample.config[name] = value

    return plant


LAYER, DECODER = "model.layers.0", "decoder.block.0.layer.0.SelfAttention"
ATTENTION, EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe.experts"
POSITIONS = "model.decoder.embed_positions"
FLOATS8 = torch.float8_e4m3fn
# by the class's own names, where a checkpoint has others
FAULTS = [
    ("llama", shape("model.norm.", 32), "C2", "model.norm", "the shape [32]"),
    ("llama", shape("input_layernorm", 32), "C2", f"{LAYER}.input_layernorm", "the shape [32]"),
    ("llama", dtype("model.norm.", torch.int8), "C2", "model.norm", "stored as I8"),
    ("llama", dtype("model.norm.", FLOATS8), "C2", "model.norm", "stored as F8_E4M3"),
    ("llama", drop("norm"), "S70", "model.norm", "no weight, and LlamaForCausalLM has"),
    ("qwen2", drop(".bias"), "S70", f"{ATTENTION}.q_proj", "It has no bias"),
    ("qwen3", shape("q_norm", 16), "C2", f"{ATTENTION}.q_norm", "[16], and"),
    ("opt", drop("embed_positions"), "S70", POSITIONS, "no weight"),
    ("opt", rows("embed_positions", 32), "C2", POSITIONS, "[66, 64] there"),
    ("qwen3_moe", rows("mlp.gate.", 2), "C2", f"{LAYER}.mlp.gate", "[2, 64], and"),
    ("deepseek_v3", drop("kv_a_layernorm"), "S70", f"{ATTENTION}.kv_a_layernorm", "no weight"),
    ("deepseek_v3", drop("e_score_correction"), "S70", "model.layers.1.mlp.gate", "no e_score"),
    ("granitemoe", rows("input_linear", 4), "C2", EXPERTS, "gate_up_proj has the shape [4, 64,"),
    ("granitemoehybrid", setting("num_local_experts", 4), "C2", EXPERTS, "[4, 64, 32] there"),
    ("gpt_oss", rows("gate_up_proj_bias", 2), "C2", f"{LAYER}.mlp.experts", "shape [2, 64]"),
    ("gpt2", drop("wpe"), "S70", "transformer.wpe", "no weight"),
    ("t5", drop(DECODER + ".rel"), "S70", f"{DECODER}.relative_attention_bias", "no weight"),
]


@pytest.mark.parametrize(
    ("model_type", "plant", "rule", "module", "message", "server"),
    thinned(FAULTS, [None, "transformers"]),
)
def test_what_is_not_is_named(
    model_type: str,
    plant: Callable[[Sample], None],
    rule: str,
    module: str,
    message: str,
    server: str | None,
    whole: Source,
    tmp_path: Path,
) -> None:
    sample = whole(model_type)
    plant(sample)
    found = errors(sample.write(tmp_path / "bad"), server)
    assert [one for one in found if one[:2] == (rule, module) and message in one[2]], found


@pytest.mark.parametrize(
    ("scheme", "model_type"),
    thinned(
        ["W4A16", "FP8_DYNAMIC", "NVFP4A16"],
        ["llama", "qwen3_moe", "gpt_oss", "granitemoe", "opt", "t5"],
    ),
)
def test_quantized_modules_have_the_shape_of_their_weight(
    model_type: str, scheme: str, whole: Source, tmp_path: Path, compressed: Callable[..., Path]
) -> None:
    source = whole(model_type).write(tmp_path / "source")
    ignore = ["lm_head", "re:.*gate$", "re:.*embed.*"]
    # groups of 128 are as wide as each of these matrices, and experts have to have one scheme
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    narrow = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    fields = narrow if scheme == "W4A16" else {"targets": "Linear", "scheme": scheme}
    recipe = QuantizationModifier(**fields, ignore=ignore)
    sample = Sample.read(compressed(source, recipe))
    good = errors(sample.write(tmp_path / "good"), "transformers")
    assert not {one for one in good if one[0] in ("C2", "S70", "T4")}
    name = next(name for name in sample.tensors if "norm" in name or ".ln_" in name)
    sample.drop(name)
    found = errors(sample.write(tmp_path / "bad"), "transformers")
    assert {one for one in found if one[0] == "S70"}


def test_a_class_that_nobody_knows_is_not_built(whole: Source, tmp_path: Path) -> None:
    sample = whole("llama")
    sample.config |= {"architectures": ["OfSomebodyForCausalLM"]}
    sample.drop("model.layers.0.input_layernorm.")
    found = errors(sample.write(tmp_path / "whose"))
    assert {one[:2] for one in found} == {("S70", "model.layers.0")}


def test_a_class_of_another_model_type_is_named(whole: Source, tmp_path: Path) -> None:
    sample = whole("llama")
    sample.config["architectures"] = ["Qwen3ForCausalLM"]
    found = errors(sample.write(tmp_path / "other"))
    assert {one[:2] for one in found} == {("C5", "config.json")}


def test_a_model_type_may_have_the_class_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some types are read by a configuration of their own, and are Llamas."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    config = {"model_type": "granite", "architectures": ["LlamaForCausalLM"], **sizes}
    headers = {"model.embed_tokens.weight": TensorInfo("BF16", (8, 64))}
    assert list(readings_of_both(config, headers))
    assert build(config, headers) is None
    table = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    monkeypatch.setitem(table, "granite", "LlamaForCausalLM")
    assert not list(readings_of_both(config, headers))
    built = build(config, headers)
    assert built is not None
    assert built.name == "LlamaForCausalLM"
