# SPDX-License-Identifier: Apache-2.0
"""A model that speaks: its voices lie in a file beside the weights, which its class has to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from llmcompressor import oneshot

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
        "rope_theta": 10000.0,
    },
    "pad_token_id": 0,
    "dtype": torch.bfloat16,
}


def omni() -> Qwen2_5OmniForConditionalGeneration:
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 16,
        "max_source_positions": 20,
        "n_window": 10,
        "output_dim": 32,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"patch_size": 4, "out_hidden_size": 32}
    tokens = {"image_token_index": 4, "audio_token_index": 5, "video_token_index": 6}
    config = Qwen2_5OmniConfig(
        thinker_config={
            "audio_config": audio,
            "vision_config": vision,
            "text_config": TEXT,
            **tokens,
        },
        enable_audio_output=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    return Qwen2_5OmniForConditionalGeneration(config).to(torch.bfloat16)


def test_voices_are_read_and_copied(tmp_path: Path) -> None:
    source, place = tmp_path / "model", tmp_path / "out"
    omni().save_pretrained(source)
    torch.save({"Somebody": {"bos_token": torch.tensor(1)}}, source / "spk_dict.pt")
    recipe = {"targets": ["re:thinker.model.language_model.layers.*proj"], "scheme": "FP8_DYNAMIC"}
    model = oneshot(
        model=str(source),
        recipe={"modifiers": {"QuantizationModifier": recipe}},
        output_dir=str(place),
    )
    assert "Somebody" in model.speaker_map
    assert (place / "spk_dict.pt").read_bytes() == (source / "spk_dict.pt").read_bytes()
