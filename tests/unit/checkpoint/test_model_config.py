# SPDX-License-Identifier: Apache-2.0
"""What was changed in memory is in the written configuration, or it is said that it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.checkpoint.model_config import checkpoint_config


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=16,
        )
    )


def written(model: Any, source: Path) -> dict[str, Any]:
    return checkpoint_config(model, source, tied=None, quantization=None)


def test_a_change_in_memory_is_written_and_unknown_keys_survive(tmp_path: Path) -> None:
    model = llama()
    original = {**model.config.to_dict(), "of_another_tool": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(original))
    model.config.rms_norm_eps = 0.25
    config = written(model, tmp_path)
    assert config["rms_norm_eps"] == 0.25
    assert config["of_another_tool"] == {"a": 1}


def test_an_unreadable_configuration_is_kept_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("depth")

    model = llama()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    before = model.config.rms_norm_eps
    model.config.rms_norm_eps = 0.25
    monkeypatch.setattr(LlamaConfig, "from_dict", refuse)
    assert written(model, tmp_path)["rms_norm_eps"] == before
    assert len(warned) == 1
    assert "LlamaConfig cannot read it again (KeyError('depth'))" in warned[0]


def test_lists_are_written_and_what_no_file_can_hold_is_not(tmp_path: Path) -> None:
    model = llama()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    model.config.eos_token_id = [2, 3]
    model.config.odd = {"of": object()}
    config = written(model, tmp_path)
    assert config["eos_token_id"] == [2, 3]
    assert "odd" not in config
