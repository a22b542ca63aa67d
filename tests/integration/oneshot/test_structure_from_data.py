# SPDX-License-Identifier: Apache-2.0
"""What no row of token ids shows of a model is seen on the data, by the plan and by the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.support.thinned import thinned

from llmcompressor import oneshot, plan
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

IMAGE = 5
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def whisper() -> torch.nn.Module:
    ends = ("encoder", "decoder")
    sizes = {f"{end}_layers": 1 for end in ends}
    sizes |= {f"{end}_ffn_dim": 32 for end in ends}
    sizes |= {f"{end}_attention_heads": 2 for end in ends}
    config = hf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        decoder_start_token_id=1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **sizes,
    )
    return hf.WhisperForConditionalGeneration(config)


def llava() -> torch.nn.Module:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(
            **SIZES, num_hidden_layers=1, num_key_value_heads=2, vocab_size=64
        ),
        vision_config=hf.CLIPVisionConfig(**SIZES, num_hidden_layers=2, image_size=8, patch_size=4),
        image_token_id=IMAGE,
    )
    return hf.LlavaForConditionalGeneration(config)


def speech(targets: str) -> list[dict[str, Any]]:
    sound = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    return [{"input_features": each.tolist(), targets: list(range(10, 30))} for each in sound]


def images() -> list[dict[str, torch.Tensor]]:
    """A text, and then one with an image."""
    text = torch.arange(10, 30).unsqueeze(0)
    picture = torch.full((1, 4), IMAGE)
    return [
        {"input_ids": text},
        {"input_ids": torch.cat([picture, text], 1), "pixel_values": torch.rand(1, 3, 8, 8)},
    ]


CASES = {
    "speech": (whisper, speech("decoder_input_ids"), {"model.encoder", "model.decoder"}),
    "targets as labels": (whisper, speech("labels"), {"model.encoder", "model.decoder"}),
    "images behind text": (
        llava,
        torch.utils.data.DataLoader(images(), batch_size=None),
        {"model.vision_tower", "model.language_model"},
    ),
}


def recipe() -> list[Any]:
    quantized = QuantizationModifier(scheme="W4A16", targets="Linear", ignore=["re:.*(head|out)$"])
    return [*AWQModifier(n_grid=2, clip=False), quantized]


@pytest.mark.parametrize(("case", "dtype"), thinned(CASES, [torch.float32, torch.bfloat16]))
def test_both_find_every_part(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, data, parts = CASES[case]
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(tmp_path / "model")
    found = plan(tmp_path / "model", recipe(), data, measure=False)
    assert not found.problems
    modifiers = recipe()
    oneshot(tmp_path / "model", recipe=modifiers, dataset=data)
    smoothed = modifiers[0].report()
    assert {part for part in parts if any(name.startswith(part) for name in smoothed)} == parts
