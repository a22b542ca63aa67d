# SPDX-License-Identifier: Apache-2.0
"""The mixin before TRL's trainer for supervised fine-tuning: texts, its collator, its loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_training as tiny
import torch
from datasets import Dataset
from test_events import expected
from torch.nn import Linear

from llmcompressor.training import SessionManagerMixIn

trl = pytest.importorskip("trl", reason="trl is an optional companion")

TEXTS = [
    f"def f{index}(x):\n    return x + {index}\n" + "# more\n" * (index % 3) for index in range(8)
]
RECORDED = "modifiers: {tiny_training.Recorder: {}}"
RECIPE = """
modifiers:
  tiny_training.Recorder: {}
  MagnitudePruningModifier:
    targets: [Linear]
    ignore: [lm_head]
    init_sparsity: 0.2
    final_sparsity: 0.5
    start: 0
    end: 0.5
"""


class SparseSFTTrainer(SessionManagerMixIn, trl.SFTTrainer):
    """What the documentation shows."""


def trainer(cls: type, model: Path, folder: Path, **kwargs):
    config = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=32,
        learning_rate=1e-3,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=7,
        model_init_kwargs={"dtype": torch.float32},
    )
    data = Dataset.from_dict({"text": TEXTS})
    return cls(model=str(model), args=config, train_dataset=data, **kwargs)


def losses(made) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_it_drives_the_session_and_masks_hold(pico: Path, tmp_path: Path) -> None:
    made = trainer(SparseSFTTrainer, pico, tmp_path, recipe=RECIPE)
    made.train()
    assert tiny.Recorder.seen == expected([2, 2])
    linears = [
        module
        for name, module in made.model.named_modules()
        if isinstance(module, Linear) and name != "lm_head"
    ]
    for module in linears:
        assert (module.weight == 0).float().mean() == pytest.approx(0.5, abs=1e-3)


def test_without_a_recipe_it_trains_as_trl_does(pico: Path, tmp_path: Path) -> None:
    plain = trainer(trl.SFTTrainer, pico, tmp_path / "plain")
    plain.train()
    made = trainer(SparseSFTTrainer, pico, tmp_path / "ours", recipe=RECORDED)
    made.train()
    assert losses(made) == losses(plain)
    for ours, theirs in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
