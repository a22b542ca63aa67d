# SPDX-License-Identifier: Apache-2.0
"""The three walks of docs/architecture.md name the files that a profiler hook sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tests.support.call_trace import follow, holds_text, is_batch, is_weight
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor import oneshot
from llmcompressor.modeling import patches
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
WEIGHT = "model.layers.0.self_attn.o_proj.weight"
ANNOTATION = "fifth-of-march"


def told(heading: str) -> set[str]:
    """Files that a section of the page names."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", section))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of one block, none of whose matrices has the shape of another."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=48,
        vocab_size=320,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def compress(model: Path) -> None:
    ids = (torch.arange(160).reshape(4, 40) % 300).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 40] * 4})
    oneshot(
        model=model,
        recipe=GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        dataset=data,
        output_dir=model.parent / "out",
        verify=False,
    )


def test_weight_is_held_by_fourteen_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a processor without bfloat16 has a Linear of its own, which holds weights too
    monkeypatch.setattr(patches, "is_slow_dtype", lambda _: False)
    original = load_file(model / "model.safetensors")[WEIGHT]
    with follow(is_weight(original)) as seen:
        compress(model)
    assert len(seen.holders) <= 14
    assert len(seen.takes_part) <= 45
    assert seen.holders <= told("The way of a weight") <= seen.called


def test_batch_is_held_by_fourteen_files(model: Path) -> None:
    with follow(is_batch) as seen:
        compress(model)
    assert len(seen.holders) <= 14
    assert seen.holders <= told("The way of a batch") <= seen.called


def test_recipe_line_is_held_by_ten_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    fields = f"{{scheme: W8A8, targets: ['{ANNOTATION}']}}"
    path.write_text(f"one_stage:\n  one_modifiers:\n    GPTQModifier: {fields}\n")
    with follow(holds_text(ANNOTATION)) as seen:
        recipe = Recipe.create_instance(path)
        text = recipe.yaml()
    assert ANNOTATION in text
    assert len(seen.holders) <= 10
    assert seen.holders <= told("The way of a recipe line") <= seen.called
