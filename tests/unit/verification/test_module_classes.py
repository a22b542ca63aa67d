# SPDX-License-Identifier: Apache-2.0
"""What a module is, where its name does not tell or tells wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, FuyuConfig, FuyuForCausalLM, PersimmonConfig

from llmcompressor import oneshot
from llmcompressor.entrypoints.verify import verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.modules import entries_of
from llmcompressor.verification.transformers_model import module_classes

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
    tell = module_classes(config)
    assert tell is not None
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(AutoConfig.for_model(**config))
    called = [path for path, _ in model.named_modules() if path.endswith(f".{name}")]
    assert called
    assert {tell.kind(path) for path in called} == {kind}


def test_names_tell_where_no_class_does() -> None:
    headers = {
        f"{name}.weight": TensorInfo("BF16", (8, 8))
        for name in ("model.embed_tokens", "model.patch_embedding", "model.proj", "lm_head")
    }
    assert module_classes({"model_type": "nobody_knows", "architectures": ["Nobody"]}) is None
    by_name = {name: entry.kind for name, entry in entries_of(headers).items()}
    assert list(by_name.values()) == ["embedding", "embedding", "linear", "head"]
    told = entries_of(headers, {"model.patch_embedding": "linear"})
    assert {name: entry.kind for name, entry in told.items()} == {
        **by_name,
        "model.patch_embedding": "linear",
    }
