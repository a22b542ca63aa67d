# SPDX-License-Identifier: Apache-2.0
"""Distillation in a Trainer: accumulation, checkpoints of the run, checkpointed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from torch import Tensor
from torch.nn import Module
from transformers import TrainingArguments

from llmcompressor.core import create_session
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.training import Trainer

LAYERS = r"re:.*layers\.\d+$"
LOGITS: dict[str, Any] = {}
PROJECTED = {"targets": LAYERS, "comparison": "l2_distance", "projection": "linear"}


def rows() -> list[dict[str, Tensor]]:
    """Of different lengths, and with prompts of different lengths before the targets."""
    torch.manual_seed(2)
    found = []
    for number in range(16):
        ids = torch.randint(3, 96, (24,))
        mask = (torch.arange(24) < 7 + number).long()
        prompt = torch.arange(24) < number % 5
        labels = ids.masked_fill((mask == 0) | prompt, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def half_without_targets() -> list[dict[str, Tensor]]:
    found = rows()
    for one in found[::2]:
        one["labels"] = torch.full_like(one["labels"], -100)
    return found


def trained(
    folder: Path,
    fields: dict[str, Any],
    resume: Path | None = None,
    data: list[dict[str, Tensor]] | None = None,
    log: list[dict[str, float]] | None = None,
    **changed: Any,
) -> dict[str, Tensor]:
    """The weights after two steps of four rows."""
    teacher = tiny.llama(hidden_size=96 if fields else 64, initializer_range=0.1)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **changed,
    }
    model: Module = tiny.llama()
    with create_session():
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(folder), **arguments),
            train_dataset=data or rows(),
            recipe=[OutputDistillationModifier(**fields)],
            teacher=teacher,
        )
        trainer.train(resume)
        logged = trainer.state.log_history
    if log is not None:
        log += logged
    assert any("distill_loss" in each for each in logged) or "logging_steps" not in changed
    return model.state_dict()


def expect_same(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> None:
    assert first.keys() == second.keys()
    moved = max(
        (first[name] - value).abs().max() for name, value in tiny.llama().state_dict().items()
    )
    apart = max((first[name] - second[name]).abs().max() for name in first)
    assert apart <= tolerance * moved


@pytest.mark.parametrize("fields", [LOGITS, PROJECTED], ids=["logits", "projected"])
def test_accumulation_adds_up_to_the_batch(tmp_path: Path, fields: dict[str, Any]) -> None:
    whole = trained(tmp_path, fields, logging_steps=1)
    parts = trained(tmp_path, fields, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    expect_same(whole, parts, 1e-4)


@pytest.mark.parametrize("split", [(4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_without_any_target_the_teacher_alone_is_learned_from(
    tmp_path: Path, split: tuple[int, int], scale: float
) -> None:
    data = half_without_targets()[::2]
    log: list[dict[str, float]] = []
    trained(
        tmp_path,
        {"orig_scale": scale},
        data=data,
        log=log,
        logging_steps=1,
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        learning_rate=0.0,
    )
    steps = [one for one in log if "distill_loss" in one]
    assert len(steps) == 2
    assert all(one["loss"] > 0 and one["task_loss"] == 0 for one in steps)
    if split == (4, 1):
        assert all(one["loss"] == pytest.approx(one["distill_loss"], rel=1e-3) for one in steps)
    assert not any("perplexity" in one or "step_loss" in one for one in log)


def test_a_run_that_is_resumed_gives_equal_weights(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    straight = trained(tmp_path, PROJECTED, **saving)
    resumed = trained(tmp_path, PROJECTED, tmp_path / "checkpoint-1", **saving)
    expect_same(straight, resumed, 0.0)
