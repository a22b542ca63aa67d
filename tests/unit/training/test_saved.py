# SPDX-License-Identifier: Apache-2.0
"""What a trainer saves when its training is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_training as tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmcompressor import verify
from llmcompressor.training import Trainer

QUANTIZED = "modifiers: {QuantizationModifier: {targets: Linear, ignore: [lm_head], scheme: W4A4}}"


def trainer_of(folder: Path, recipe: str | None, **changed: Any) -> Trainer:
    return Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(folder / "run", max_steps=2, **changed),
        train_dataset=tiny.Rows(8),
        recipe=recipe,
    )


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tiny.row(0)["input_ids"][None]).logits
    return found


@pytest.mark.parametrize(
    "save",
    [
        lambda trainer, folder: trainer.save_model(folder),
        lambda trainer, folder: trainer.model.save_pretrained(folder),
    ],
    ids=["save_model", "save_pretrained"],
)
def test_it_is_the_compressed_checkpoint(
    save: Callable[[Trainer, str], None], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, QUANTIZED)
    trainer.train()
    save(trainer, str(tmp_path / "out"))
    assert verify(tmp_path / "out").ok
    assert (tmp_path / "out" / "recipe.yaml").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.quantization_config is not None
    assert torch.allclose(logits(again), logits(trainer.model), atol=1e-6)


def test_checkpoints_of_the_training_hold_what_is_trained(tmp_path: Path) -> None:
    trainer_of(tmp_path, QUANTIZED, save_strategy="steps", save_steps=2).train()
    [config] = (tmp_path / "run").glob("checkpoint-2/config.json")
    assert "quantization_config" not in config.read_text()


def test_without_a_recipe_it_is_what_any_trainer_saves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, None)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "recipe.yaml").exists()
