# SPDX-License-Identifier: Apache-2.0
"""Names, joins and plain parts of architectures as vLLM builds them, and rotations of these."""

from __future__ import annotations

from typing import Any

import pytest

from llmcompressor.verification import Deployment, Severity, TensorInfo, check_serving
from llmcompressor.verification.rules.view import View

MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
HYBRID = {"model_type": "granitemoehybrid", **MAMBA, **HEADS}
FALCON = {"model_type": "falcon_h1", **MAMBA, **HEADS}
ZAMBA = {"model_type": "zamba2", "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3]}

# What vLLM 0.32 told of tiny models: the prefix of a module; None: it is built without a scheme.
PREFIXES = [
    ("llama", {}, "model.embed_tokens", ""),
    ("gpt_neox", {}, "gpt_neox.embed_in", "model.embed_in"),
    ("gpt_neox", {}, "gpt_neox.layers.1.mlp.dense_h_to_4h", "model.layers.1.mlp.dense_h_to_4h"),
    ("gpt_neox", {}, "embed_out", "lm_head"),
    ("gemma2", {}, "model.embed_tokens", None),
    ("opt", {}, "model.decoder.embed_positions", None),
    ("granitemoehybrid", HYBRID, "lm_head", "lm_head"),
    ("granitemoehybrid", HYBRID, "model.layers.0.mamba.in_proj", "model.layers.0.mixer.in_proj"),
    ("falcon_h1", FALCON, "model.layers.1.mamba.in_proj", "model.3.mixer.in_proj"),
    ("falcon_h1", FALCON, "model.layers.1.self_attn.q_proj", "model.layers.1.qkv_proj"),
    ("falcon_h1", FALCON, "lm_head", None),
    ("zamba2", ZAMBA, "model.layers.1.mamba_decoder.mamba.in_proj", "3.mixer.in_proj"),
    ("zamba2", ZAMBA, "model.layers.1.shared_transformer.self_attn.o_proj", "model.o_proj"),
    ("nemotron_h", {}, "backbone.layers.0.mixer.q_proj", "model.layers.0.mixer.qkv_proj"),
    ("gpt_oss", {}, "model.layers.0.self_attn.o_proj", "model.layers.0.attn.o_proj"),
    ("jamba", {}, "model.layers.1.self_attn.o_proj", "model.layers.1.o_proj"),
    ("jamba", {}, "model.layers.0.mamba.x_proj", None),
    ("mamba", {}, "backbone.layers.0.mixer.in_proj", None),
    ("stablelm", {}, "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj"),
    ("glm4_moe_lite", {}, "model.layers.2.eh_proj", None),
    ("step3p5", {}, "model.layers.2.eh_proj", None),
    ("gemma4_assistant", {}, "masked_embedding.centroids", None),
    ("mimo", {}, "model.mtp_layers.0.input_proj", None),
    ("qwen3", {"architectures": ["Qwen3DSparkModel"]}, "confidence_head.proj", None),
    ("llama4_text", {"architectures": ["EagleLlama4ForCausalLM"]}, "fc", None),
    ("eagle", {"architectures": ["EagleDeepSeekMTPModel"]}, "model.fc", None),
    ("minicpm", {"architectures": ["MiniCPMForCausalLM"]}, "fc", None),
    ("llama", {"architectures": ["EagleLlamaForCausalLM"]}, "fc", "fc"),
    ("medusa", {}, "medusa_heads.0.0.linear", None),
    ("nemotron_h", {}, "mtp.layers.0.eh_proj", "mtp.layers.0.eh_proj"),
    ("qwen2_vl", {"text_config": {}}, "visual.merger.mlp.0", "visual.merger.mlp.0"),
    ("llava_onevision", {"text_config": {"model_type": "llama"}}, "model.embed_tokens", ""),
    ("llava_onevision", {"text_config": {}}, "model.multi_modal_projector.linear_1", None),
]


@pytest.mark.parametrize(("kind", "settings", "name", "prefix"), PREFIXES)
def test_prefixes(kind: str, settings: dict[str, Any], name: str, prefix: str | None) -> None:
    beside = [name[: -len("q_proj")] + own for own in ("q_proj", "k_proj", "v_proj")]
    names = beside if name in beside else [name]
    headers = {f"{one}.weight": TensorInfo("BF16", (64, 64)) for one in names}
    view = View({"model_type": kind, **settings}, headers)
    entry = view.entries[name]
    assert view.is_plain(entry) == (prefix is None)
    if prefix is not None:
        path, _ = view.resolver.unit(view.resolver.served(name))
        assert path == prefix


def quantized(
    config: dict[str, Any], shapes: dict[str, tuple[int, int]], args: dict[str, Any], **more: Any
) -> list[tuple[str, str]]:
    """Rule and module of vLLM's errors, for 8-bit weights of these shapes."""
    headers = {}
    for name, shape in shapes.items():
        headers[f"{name}.weight"] = TensorInfo("F8_E4M3", shape)
        block = args.get("block_structure")
        cells = [-(-size // one) for size, one in zip(shape, block or (1, shape[1]), strict=True)]
        headers[f"{name}.weight_scale"] = TensorInfo("F32", (cells[0], cells[1]))
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", **args},
        "format": "float-quantized",
    }
    settings = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        **more,
    }
    found = check_serving(
        {"architectures": ["X"], **config, "quantization_config": settings},
        headers,
        deployment=Deployment("vllm", tp=(1,)),
    )
    return [(one.rule, one.module) for one in found if one.severity is Severity.ERROR]


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
IN_PROJ = "model.layers.0.mamba.in_proj"


@pytest.mark.parametrize(
    ("config", "name", "rows", "is_torn"),
    [
        (HYBRID, IN_PROJ, 256 + 256 + 16 + 16 + 8, True),
        ({**HYBRID, "mamba_d_state": 128}, IN_PROJ, 256 + 256 + 128 + 128 + 8, False),
        ({"model_type": "phi3"}, "model.layers.0.mlp.gate_up_proj", 2 * 192, True),
        ({"model_type": "phi3"}, "model.layers.0.mlp.gate_up_proj", 2 * 256, False),
        ({"model_type": "falcon", **HEADS}, "h.0.query_key_value", 12 * 64, True),
        ({"model_type": "bloom", "n_head": 4}, "h.0.query_key_value", 12 * 128, False),
        ({"model_type": "llama"}, "model.layers.0.mamba.in_proj", 552, False),
    ],
)
def test_blocks_fit_each_part(config: dict[str, Any], name: str, rows: int, is_torn: bool) -> None:
    found = quantized(config, {name: (rows, 128)}, BLOCKS)
    assert (("S36", name) in found) == is_torn


def rotation(location: str, targets: list[str]) -> dict[str, Any]:
    """A transform, applied while serving."""
    applied = {"targets": targets, "location": location, "inverse": False, "ignore": []}
    return {"type": "random-hadamard", "apply": [applied]}


def rotated(config: dict[str, Any], names: list[str], **schemes: dict[str, Any]) -> set[str]:
    """The modules of which rule S75 tells."""
    found = quantized(
        config,
        dict.fromkeys(names, (64, 64)),
        {"strategy": "channel"},
        transform_config={"config_groups": schemes},
    )
    return {module for rule, module in found if rule == "S75"}


QKV = [f"model.layers.0.self_attn.{own}_proj" for own in "qkv"]
JOINED = "model.layers.0.self_attn.qkv_proj"


def test_rotations_of_what_is_joined() -> None:
    every = rotation("input", ["Linear"])
    assert not rotated({"model_type": "llama"}, QKV, v=every)
    assert rotated({"model_type": "stablelm"}, QKV, v=every) == {JOINED}
    assert rotated({"model_type": "phi3", **HEADS}, [JOINED], v=every) == {JOINED}
    assert rotated(HYBRID, [IN_PROJ], v=every) == {IN_PROJ}


def test_names_of_rotations_are_those_of_vllm() -> None:
    name = "model.layers.0.mamba.out_proj"
    assert not rotated(HYBRID, [name], v=rotation("input", ["Linear"]))
    assert rotated(HYBRID, [name], v=rotation("input", [name])) == {name}
    assert not rotated(HYBRID, [name], v=rotation("input", [r"re:.*out_proj$"]))


def test_outputs_of_what_is_joined_have_one_rotation() -> None:
    llama = {"model_type": "llama"}
    own = {f"u_{index}": rotation("output", [name]) for index, name in enumerate(QKV)}
    assert rotated(llama, QKV, **own) == {JOINED}
    assert not rotated(llama, QKV, u_0=rotation("output", QKV))
    assert not rotated(llama, QKV, a=rotation("output", QKV), b=rotation("input", QKV))
