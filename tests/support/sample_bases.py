# SPDX-License-Identifier: Apache-2.0
"""The good checkpoints that faults are planted in: recipes for a tiny Llama, and made samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.checkpoint_samples import (
    HEADS,
    HIDDEN,
    INNER,
    VOCABULARY,
    Sample,
    attention,
    dense,
    ends,
    made,
    mlp,
    sparse,
)

from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.schemes.presets import preset_scheme

PRESETS = (
    "W4A16",
    "W4A16_ASYM",
    "W3A16",
    "W8A8",
    "W4AFP8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "MXFP4",
)
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}


def recipe_of(base: str) -> Any:
    if base in PRESETS:
        return QuantizationModifier(targets="Linear", scheme=base, ignore=["lm_head"])
    if base == "cache":
        return QuantizationModifier(
            targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"], kv_cache_scheme=CACHE
        )
    if base == "head":
        return QuantizationModifier(targets=["Linear", "lm_head"], scheme="W4A16")
    if base == "embedding":
        targets = ["Linear", "re:.*embed_tokens"]
        return QuantizationModifier(targets=targets, scheme="W4A16", ignore=["lm_head"])
    if base == "W8A8-static":
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": STATIC}
        return QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    return None


def _odd() -> Sample:
    """Rows of 100 columns in four bits, which end within a word."""
    shapes = ends()
    for index in range(2):
        path = f"model.layers.{index}"
        shapes |= attention(path) | mlp(f"{path}.mlp", inner=100)
    scheme = preset_scheme("W4A16")
    weights = scheme.weights.model_copy(update={"strategy": "channel", "group_size": None})
    return made(shapes, scheme.model_copy(update={"weights": weights}))


def _bytes() -> Sample:
    scheme = preset_scheme("W4A8").model_copy(update={"format": "int-quantized"})
    return made(dense(), scheme)


def _phi3() -> Sample:
    shapes = ends()
    for index in range(2):
        path = f"model.layers.{index}"
        shapes |= {f"{path}.self_attn.qkv_proj": (3 * HIDDEN, HIDDEN)}
        shapes |= {f"{path}.self_attn.o_proj": (HIDDEN, HIDDEN)}
    return made(shapes, "FP8_BLOCK", model_type="phi3")


def _draft() -> Sample:
    shapes = dense() | {"mtp.fc": (HIDDEN, 2 * HIDDEN)}
    return made(
        shapes,
        only=lambda name: "mtp" not in name,
        ignore=("re:^mtp.*",),
        model_type="qwen3_5",
        mtp_num_hidden_layers=1,
    )


def _t5() -> Sample:
    shapes = {"shared": (VOCABULARY, HIDDEN)}
    for stack in ("encoder", "decoder"):
        path = f"{stack}.block.0.layer"
        shapes |= {f"{path}.0.SelfAttention.{own}": (HIDDEN, HIDDEN) for own in "qkvo"}
        shapes[f"{path}.1.DenseReluDense.wi"] = (INNER, HIDDEN)
        shapes[f"{path}.1.DenseReluDense.wo"] = (HIDDEN, INNER)
    built = ["SampleForConditionalGeneration"]
    return made(
        shapes, model_type="t5", architectures=built, num_hidden_layers=1, ignore=("lm_head",)
    )


def _moe(preset: str, model_type: str = "qwen3_moe", **more: Any) -> Sample:
    sizes = {"moe_intermediate_size": INNER, "head_dim": HIDDEN // HEADS, "num_experts": 3}
    return made(sparse(), preset, model_type=model_type, **sizes, **more)


MADE: dict[str, Callable[[], Sample]] = {
    "odd": _odd,
    "W4A8-bytes": _bytes,
    "phi3": _phi3,
    "draft": _draft,
    "t5": _t5,
    "tower": lambda: made(
        dense("model.language_model"),
        model_type="gemma3",
        text_config={"num_hidden_layers": 2, "num_attention_heads": HEADS, "model_type": "x"},
    ),
    "minimax": lambda: made(
        sparse("block_sparse_moe", ("w1", "w3", "w2")), model_type="minimax_m2", num_experts=3
    ),
    "qwen2_moe": lambda: _moe("W4A16", "qwen2_moe"),
    "qwen3_moe": lambda: _moe("W4A16"),
    "W8A8-moe": lambda: _moe("W8A8"),
    "FP8_BLOCK-moe": lambda: _moe("FP8_BLOCK"),
    "NVFP4-moe": lambda: _moe("NVFP4"),
}
