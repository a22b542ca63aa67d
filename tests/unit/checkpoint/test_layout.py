# SPDX-License-Identifier: Apache-2.0
"""Names and partition of tensors: transformers' own writer is the measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from tests.support import tiny_checkpoints as tiny
from tests.support.thinned import thinned
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming

from llmcompressor.checkpoint.save import save_checkpoint
from llmcompressor.schemes.presets import preset_scheme

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def causal(kind: str, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **sizes})
    return AutoModelForCausalLM.from_config(config).eval()


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4
    )
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def llava() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **SMALL},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=63,
    )
    return AutoModelForImageTextToText.from_config(config).eval()


MODELS = {
    "gemma3": lambda: causal("gemma3_text"),
    "gpt2": lambda: causal("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=32),
    "llama-tied": lambda: causal("llama", tie_word_embeddings=True),
    "llava": llava,
    "mamba": lambda: causal("mamba", state_size=4),
    "mixtral": lambda: causal("mixtral", **EXPERTS),
    "olmo_hybrid": lambda: causal(
        "olmo_hybrid",
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "opt": lambda: causal("opt", ffn_dim=64, word_embed_proj_dim=64, max_position_embeddings=32),
    "phi3": lambda: causal("phi3"),
    "qwen3_moe": lambda: causal("qwen3_moe", moe_intermediate_size=32, **EXPERTS),
    "t5": t5,
}


def tensors(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("name", "reloaded"), thinned(MODELS, [False, True]))
def test_dense_models_are_written_as_transformers_writes_them(
    name: str, reloaded: bool, tmp_path: Path
) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "theirs")
    if reloaded:
        model = type(model).from_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours")
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("name", "preset"),
    thinned([name for name in MODELS if name != "gpt2"], ["W8A8", "FP8_DYNAMIC"]),
)
def test_quantized_models_read_back(name: str, preset: str, tmp_path: Path) -> None:
    """Includes renamed modules, and experts that are split while the rest is packed."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "dense")
    model = type(model).from_pretrained(tmp_path / "dense")
    head = next(
        (n for n, module in model.named_modules() if module is model.get_output_embeddings()), ""
    )
    scheme = preset_scheme(preset, ["Linear"])
    tiny.quantize_model(model, {"g": scheme}, ignore=(head, "re:.*vision.*"))
    save_checkpoint(model, tmp_path / "out")
    read, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    given = {"input_ids": tiny.tokens()}
    if name == "t5":
        given["decoder_input_ids"] = tiny.tokens()
    with torch.no_grad():
        assert torch.equal(read(**given).logits, model(**given).logits)


def test_what_is_packed_is_never_fused(tmp_path: Path) -> None:
    """q, k and v are one tensor in such a checkpoint, unless one of them is packed."""
    model = causal("llama", num_key_value_heads=4)
    converter = WeightConverter(
        source_patterns="self_attn.qkv.weight",
        target_patterns=[f"self_attn.{name}_proj.weight" for name in "qkv"],
        operations=[Chunk(dim=0)],
    )
    model._weight_conversions = [converter]
    scheme = preset_scheme("FP8_DYNAMIC", [r"re:.*layers\.0\.self_attn\.q_proj"])
    tiny.quantize_model(model, {"g": scheme})
    save_checkpoint(model, tmp_path / "out")
    stored = tensors(tmp_path / "out")
    names = {name for name in stored if "attn" in name and "o_proj" not in name}
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    assert names == {
        f"{first}.q_proj.weight",
        f"{first}.q_proj.weight_scale",
        f"{first}.k_proj.weight",
        f"{first}.v_proj.weight",
        f"{second}.qkv.weight",
    }
    key = model.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(stored[f"{first}.k_proj.weight"], key)


def ignored_when_saved(
    model: PreTrainedModel, scheme: QuantizationScheme, folder: Path
) -> set[str]:
    tiny.quantize_model(model, {"g": scheme})
    save_checkpoint(model, folder)
    config = json.loads((folder / "config.json").read_text())
    return set(config["quantization_config"]["ignore"])


def test_what_only_the_checkpoint_has_is_ignored_by_its_name(tmp_path: Path) -> None:
    """Readers that go by the file know its names alone; parts kept apart have their own."""
    model = causal("llama", num_key_value_heads=4)
    model._weight_conversions = [
        WeightConverter(
            source_patterns="self_attn.qkv.weight",
            target_patterns=[f"self_attn.{name}_proj.weight" for name in "qkv"],
            operations=[Chunk(dim=0)],
        ),
        WeightConverter(
            source_patterns=["mlp.first.weight", "mlp.second.weight"],
            target_patterns="mlp.up_proj.weight",
            operations=[Concatenate(dim=0)],
        ),
    ]
    scheme = preset_scheme("FP8_DYNAMIC", [r"re:.*layers\.0\.(self_attn\.q|mlp\.up)_proj"])
    ignored = ignored_when_saved(model, scheme, tmp_path / "out")
    linears = {
        name.removesuffix(".weight")
        for name, tensor in tensors(tmp_path / "out").items()
        if tensor.ndim == 2 and tensor.dtype != torch.float8_e4m3fn and "embed" not in name
    } - {
        f"model.layers.0.{own}"
        for own in ("self_attn.q_proj.weight_scale", "mlp.up_proj.weight_scale")
    }
    assert {"model.layers.1.self_attn.qkv", "model.layers.1.mlp.second"} < linears
    assert linears <= ignored
    assert not {"model.layers.0.self_attn.qkv", "model.layers.0.mlp.first"} & ignored


def test_sinks_beside_a_quantized_cache_keep_their_stored_name(
    tmp_path: Path,
) -> None:
    cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    model = causal("llama")
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(4))
    model._weight_conversions = [
        WeightRenaming("self_attn.softmax_offset", "self_attn.sinks"),
        WeightRenaming("lm_head.", "head."),
    ]
    model = tiny.quantize_model(model, {}, kv_cache=cache)
    save_checkpoint(model, tmp_path / "out")
    stored = tensors(tmp_path / "out")
    assert {name for name in stored if "layers.1.self_attn" in name and "proj" not in name} == {
        f"model.layers.1.self_attn.{own}" for own in ("k_scale", "v_scale", "softmax_offset")
    }
    sinks = model.model.layers[1].self_attn.sinks
    assert torch.equal(stored["model.layers.1.self_attn.softmax_offset"], sinks)


def test_matrices_of_rotations_are_not_fused_with_weights(tmp_path: Path) -> None:
    """Patterns of fused weights may match whatever goes by the name of one of the Linears."""
    model = causal("llama")
    converter = WeightConverter(
        source_patterns="self_attn.qkv",
        target_patterns=[f"self_attn.{name}_proj" for name in "qkv"],
        operations=[Chunk(dim=0)],
    )
    model._weight_conversions = [converter]
    for layer in model.model.layers:
        for name, size in (("q_proj", 64), ("k_proj", 32)):
            rotation = torch.nn.Module()
            rotation.weight = torch.nn.Parameter(torch.eye(size), requires_grad=False)
            layer.self_attn.get_submodule(name).add_module("u_output", rotation)
    tiny.quantize_model(model, {"g": preset_scheme("FP8_DYNAMIC", ["Linear"])})
    save_checkpoint(model, tmp_path / "out")
    assert {
        name for name in tensors(tmp_path / "out") if "1.self_attn" in name and "u_" in name
    } == {f"model.layers.1.self_attn.{name}_proj.u_output.weight" for name in "qk"}
