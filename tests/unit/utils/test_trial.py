# SPDX-License-Identifier: Apache-2.0
"""Models without their weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmcompressor.utils.dev import (
    patch_transformers_logger_level,
    skip_weights_download,
    skip_weights_initialize,
)

TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    dtype="bfloat16",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, and no weights."""
    TINY.save_pretrained(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_model_is_built_where_there_are_no_weights(kind: type, folder: Path) -> None:
    before = vars(kind).get("from_pretrained")
    with skip_weights_download(kind):
        model = kind.from_pretrained(folder)
        wide = kind.from_pretrained(str(folder), dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    assert (model.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert model.name_or_path == str(folder)
    weights = model.model.layers[0].mlp.up_proj.weight.detach()
    assert 0 < float(weights.float().std()) < 0.1
    assert vars(kind).get("from_pretrained") is before
    with pytest.raises(OSError, match="safetensors"):
        kind.from_pretrained(folder)


def test_nothing_is_initialized_inside() -> None:
    with skip_weights_initialize(use_zeros=True):
        assert not nn.Linear(4, 4).weight.any()
    with skip_weights_initialize():
        found = nn.init.ones_(torch.full((2,), 3.0))
    assert found.tolist() == [3, 3]
    assert nn.Linear(4, 4).weight.any()


def test_the_level_of_the_log_comes_back() -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    with patch_transformers_logger_level(logging.CRITICAL):
        assert logger.level == logging.CRITICAL
    assert logger.level == before
