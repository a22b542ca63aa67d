# SPDX-License-Identifier: Apache-2.0
"""What a module is, where its name does not tell or tells wrongly."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, FuyuConfig, FuyuForCausalLM, PersimmonConfig
from transformers.core_model_loading import WeightRenaming

from llmcompressor import oneshot
from llmcompressor.entrypoints.verify import verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.layout import entries_of
from llmcompressor.verification.module_classes import kind_by_class, led_astray, takes_experts

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def configuration(kind: str, model: str, **settings: Any) -> dict[str, Any]:
    config = AutoConfig.for_model(kind, **settings).to_dict()
    return {**config, "architectures": [model]}


def fuyu() -> FuyuForCausalLM:
    """Its ``vision_embed_tokens`` is a Linear."""
    text = PersimmonConfig(**SMALL)
    config = FuyuConfig(**SMALL, image_size=32, patch_size=8, text_config=text.to_dict())
    return FuyuForCausalLM(config).to(torch.bfloat16).eval()


def test_a_linear_with_the_name_of_an_embedding_is_one(tmp_path: Path) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    oneshot(model=fuyu(), recipe=recipe, output_dir=tmp_path / "out")
    found = verify(tmp_path / "out", serve="transformers")
    assert found.ok
    quantized = [name for name in found_names(tmp_path / "out") if name.endswith("weight_scale")]
    assert [name for name in quantized if "vision_embed_tokens" in name]


def found_names(folder: Path) -> list[str]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as reader:
        return list(reader.keys())


@pytest.mark.parametrize(
    ("config", "name", "kind"),
    [
        (configuration("lfm2_vl", "Lfm2VlForConditionalGeneration"), "patch_embedding", "linear"),
        (
            configuration(
                "chameleon", "ChameleonForConditionalGeneration", vocabulary_map={"<image>": 4}
            ),
            "q_norm",
            "other",
        ),
        (configuration("speecht5", "SpeechT5ForSpeechToText"), "pe_k", "embedding"),
        (configuration("llama", "LlamaForCausalLM", **SMALL), "embed_tokens", "embedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_class_tells(config: dict[str, Any], name: str, kind: str) -> None:
    """Whatever the name says, of every module that is called so."""
    tell = kind_by_class(config)
    assert tell is not None
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(AutoConfig.for_model(**config))
    called = [path for path, _ in model.named_modules() if path.endswith(f".{name}")]
    assert called
    assert {tell(path) for path in called} == {kind}


def test_names_tell_where_no_class_does() -> None:
    headers = {
        f"{name}.weight": TensorInfo("BF16", (8, 8))
        for name in ("model.embed_tokens", "model.patch_embedding", "model.proj", "lm_head")
    }
    assert kind_by_class({"model_type": "nobody_knows", "architectures": ["Nobody"]}) is None
    by_name = {name: entry.kind for name, entry in entries_of(headers).items()}
    assert list(by_name.values()) == ["embedding", "embedding", "linear", "head"]
    told = entries_of(headers, lambda path: "linear" if "patch" in path else "")
    assert {name: entry.kind for name, entry in told.items()} == {
        **by_name,
        "model.patch_embedding": "linear",
    }


M3: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "num_local_experts": 2,
    "dense_intermediate_size": 64,
}
M3_EXPERT = "model.layers.0.mlp.experts.0.w1"


@pytest.mark.parametrize(
    ("config", "path", "is_taken"),
    [
        (configuration("mixtral", "MixtralForCausalLM", **SMALL, num_local_experts=2), "w1", True),
        (configuration("gpt_oss", "GptOssForCausalLM", **SMALL, num_local_experts=2), "w1", False),
        (configuration("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", **M3), M3_EXPERT, False),
        # no class: the tables tell
        ({"model_type": "mixtral"}, "w1", True),
        ({"model_type": "minimax_m3_vl_text"}, M3_EXPERT, False),
        ({"model_type": "minimax_m3_vl"}, M3_EXPERT, True),
        ({"model_type": "nobody_knows"}, "w1", True),
    ],
)
def test_the_class_tells_whether_it_takes_experts(
    config: dict[str, Any], path: str, is_taken: bool
) -> None:
    """A whole model may have a table of stacks where its language model alone has none."""
    path = path if "." in path else f"model.layers.0.block_sparse_moe.experts.0.{path}"
    assert takes_experts(config, path) is is_taken


@pytest.mark.parametrize(
    ("pattern", "target", "lost"),
    [
        (r"mlp\.w2\.weight$", "mlp.down_proj.weight", ["weight_packed", "weight_scale"]),
        (r"mlp\.w2\.", "mlp.down_proj.", []),
    ],
)
def test_codes_that_are_not_renamed_as_a_weight_is(
    pattern: str, target: str, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = [WeightRenaming(pattern, target)]
    module = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(module, "get_model_conversion_mapping", lambda *_, **__: table)
    sizes = {**SMALL, "vocab_size": 96 + len(lost)}  # the class of each is asked once
    config = configuration("llama", "LlamaForCausalLM", **sizes)
    path, own = "model.layers.0.mlp.w2", ["weight_packed", "weight_scale"]
    both = {path: own, "model.layers.0.mlp.up_proj": own}
    assert led_astray(config, both) == ({path: lost} if lost else {})


def test_names_without_the_prefix_of_the_base_model_lead_nowhere_else() -> None:
    """transformers puts it before each, also before those of codes and scales."""
    config = configuration("llama", "LlamaForCausalLM", **SMALL)
    own = ["weight_packed", "weight_scale"]
    assert not led_astray(config, {"layers.0.mlp.up_proj": own})
    assert not led_astray(config, {"model.layers.0.mlp.up_proj": own})
