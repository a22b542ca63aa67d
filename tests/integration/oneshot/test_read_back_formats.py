# SPDX-License-Identifier: Apache-2.0
"""Every kind of checkpoint, read by transformers alone in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from tests.support import tiny_checkpoints as tiny
from tests.support.caches import as_read, is_passed_over
from tests.support.releases import refuses_packed_zero_points
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.checkpoint.save import SaveOptions, save_checkpoint
from llmcompressor.schemes.presets import preset_scheme

READER = """
import sys, torch, transformers
from pathlib import Path
root, tokens = Path(sys.argv[1]), torch.load(sys.argv[2])
out = {}
for folder in sorted(root.iterdir()):
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    try:
        model, info = cls.from_pretrained(folder, output_loading_info=True)
    except RuntimeError as error:
        out[folder.name] = {"error": str(error)}
        continue
    model.eval()
    with torch.no_grad():
        given = tokens[folder.name]
        out[folder.name] = {
            "logits": model(**given).logits,
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
        }
assert not any(name.split(".")[0] == "llmcompressor" for name in sys.modules)
torch.save(out, sys.argv[3])
"""


def one_block() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=1)


def preset(name: str) -> PreTrainedModel:
    return tiny.quantize_model(one_block(), {"g": preset_scheme(name, ["Linear"])})


def with_cache(strategy: str) -> PreTrainedModel:
    cache = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    return tiny.quantize_model(
        one_block(), {"g": preset_scheme("W4A16", ["Linear"])}, kv_cache=cache
    )


def attention() -> PreTrainedModel:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    scheme = QuantizationScheme(targets=["LlamaAttention"], input_activations=args)
    model = tiny.llama()
    return tiny.quantize_model(model, {"a": preset_scheme("W8A8", ["Linear"]), "b": scheme})


def mixed() -> PreTrainedModel:
    groups = {
        "a": preset_scheme("W4A16", ["Linear"]),
        "b": preset_scheme("FP8_DYNAMIC", ["re:.*down_proj"]),
        "c": preset_scheme("NVFP4A16", ["re:.*layers.1.*up_proj"]),
    }
    return tiny.quantize_model(tiny.llama(), groups)


def static_asymmetric() -> PreTrainedModel:
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, strategy="channel"),
        input_activations=QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False),
    )
    return tiny.quantize_model(one_block(), {"g": scheme})


def ragged_blocks() -> PreTrainedModel:
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return tiny.quantize_model(
        tiny.llama(intermediate_size=200, num_hidden_layers=1), {"g": scheme}
    )


def whisper() -> PreTrainedModel:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=96,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=8,
        max_target_positions=32,
        num_mel_bins=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config).eval()
    return tiny.quantize_model(
        model, {"g": preset_scheme("W8A8", ["re:.*(_proj|fc[12])$"])}, ignore=()
    )


# Some of each format; test_read_back.py has all presets.
SOME = ("FP8", "MXFP4", "NVFP4", "UNQUANTIZED", "W2A16", "W4A16", "W4A16_ASYM", "W8A8")
CASES: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: (lambda name=name: preset(name)) for name in SOME},
    "attention": attention,
    "cache-head": lambda: with_cache("attn_head"),
    "cache-tensor": lambda: with_cache("tensor"),
    "mixed": mixed,
    "qwen2-bias": lambda: tiny.quantize_model(
        tiny.qwen2(), {"g": preset_scheme("W4A16_ASYM", ["Linear"])}
    ),
    "ragged-blocks": ragged_blocks,
    "static-asymmetric": static_asymmetric,
    "tied": lambda: tiny.quantize_model(
        tiny.llama(tied=True), {"g": preset_scheme("W4A16", ["Linear"])}
    ),
    "whisper": whisper,
}
DENSE = ("W4A16_ASYM", "NVFP4", "MXFP4", "FP8", "W8A8", "mixed", "cache-tensor")


@pytest.fixture(scope="module")
def read_back(
    tmp_path_factory: pytest.TempPathFactory, read_alone: Callable[..., None]
) -> dict[str, dict[str, Any]]:
    """Case → what the reader says, and the logits of the model in memory."""
    root = tmp_path_factory.mktemp("checkpoints")
    here, tokens = {}, {}
    for name, make in CASES.items():
        model = make()
        tokens[name] = {"input_ids": tiny.tokens()}
        if isinstance(model, WhisperForConditionalGeneration):
            tokens[name] = {
                "input_features": torch.randn(2, 4, 16),
                "decoder_input_ids": tiny.tokens(),
            }
        options = SaveOptions(max_shard_size="150KB" if name == "tied" else "1GB")
        save_checkpoint(model, root / name, options)
        with torch.no_grad(), as_read(model):
            here[name] = model(**tokens[name]).logits
        if name in DENSE:
            dense = f"{name}-dense"
            save_checkpoint(model, root / dense, SaveOptions(save_compressed=False))
            here[dense], tokens[dense] = here[name], tokens[name]
    files = [root.parent / file for file in ("tokens.pt", "out.pt")]
    torch.save(tokens, files[0])
    read_alone(READER, root, *files)
    results = torch.load(files[1])
    for name in (name for name, found in results.items() if "error" in found):
        assert "mismatched_sizes" in results[name]["error"]
        results[name] = _read_by_the_package(root / name, tokens[name])
    return {name: {**results[name], "here": here[name]} for name in here}


def _read_by_the_package(folder: Path, tokens: dict[str, Any]) -> dict[str, Any]:
    """Packed zero points, which some releases of transformers refuse, and nothing else."""
    assert refuses_packed_zero_points()
    tensors = load_file(folder / "model.safetensors")
    assert {one.dtype for own, one in tensors.items() if "zero_point" in own} == {torch.int32}
    with loading_compressed():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(**tokens).logits
    names = {own: sorted(info[f"{own}_keys"]) for own in ("missing", "unexpected")}
    return {"logits": logits, **names}


def test_reads_back_as_the_model_that_was_saved(read_back: dict[str, dict[str, Any]]) -> None:
    assert read_back.keys() == {*CASES, *(f"{name}-dense" for name in DENSE)}
    passed_over = is_passed_over(tiny.llama().model.layers[0].self_attn)
    for name, result in read_back.items():
        assert result["missing"] == [], name
        unexpected = result["unexpected"]
        assert [one for one in unexpected if not (passed_over and _is_of_states(one))] == [], name
        assert torch.equal(result["logits"], result["here"]), name


def _is_of_states(name: str) -> bool:
    """Whether a tensor is a scale or zero point of queries, keys or values."""
    own = name.rpartition(".")[2]
    return own[0] in "qkv" and own[1:] in ("_scale", "_zero_point")


def test_the_cases_differ(read_back: dict[str, dict[str, Any]]) -> None:
    """Guards the comparison itself: quantization must change what the reader computes."""
    plain = read_back["UNQUANTIZED"]["logits"]
    for name in ("W2A16", "W4A16", "NVFP4", "MXFP4", "cache-tensor", "static-asymmetric"):
        assert not torch.equal(read_back[name]["logits"], plain)
