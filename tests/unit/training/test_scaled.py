# SPDX-License-Identifier: Apache-2.0
"""Steps that a loss scaler skips: weights stay, schedules count on, masks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_training as tiny
from tests.unit.training.test_events import expected
from transformers import TrainerCallback

from llmcompressor.core import CompressionSession, callbacks
from llmcompressor.training import Trainer

RECIPE = """
modifiers:
  tests.support.tiny_training.Recorder: {}
  MagnitudePruningModifier:
    {targets: [Linear], ignore: [lm_head], init_sparsity: 0.1, final_sparsity: 0.5, end: 2}
  QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8, start: 1}
"""


class ScaledTrainer(Trainer):
    """Trains in float16 with a scale that is too large at first, and again where it grows."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)


class Watch(TrainerCallback):
    """Notes of each step whether it moved what is not pruned, and how much is zero."""

    def __init__(self, model: Any) -> None:
        self.model, self.norm = model, model.model.norm.weight.detach().clone()
        self.moved: list[bool] = []
        self.zeros: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        norm, weight = self.model.model.norm.weight, self.model.model.layers[0].mlp.down_proj.weight
        assert bool(weight.isfinite().all())
        self.moved.append(not torch.equal(self.norm, norm))
        self.zeros.append(float((weight == 0).float().mean()))
        self.norm = norm.detach().clone()


def trained(cls: type[Trainer], folder: Path, **changed: Any) -> tuple[Watch, list[float]]:
    """What was seen, and the sparsities that were logged."""
    args = tiny.arguments(folder, num_train_epochs=3, gradient_accumulation_steps=2, **changed)
    made = cls(model=tiny.tiny_model(), args=args, train_dataset=tiny.Rows(16), recipe=RECIPE)
    made.add_callback(watch := Watch(made.model))
    made.train()
    return watch, [each["sparsity"] for each in made.state.log_history if "sparsity" in each]


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watch, list[float]]:
    return trained(Trainer, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_skipped_steps_change_nothing_else(
    tmp_path: Path, optim: str, unscaled: tuple[Watch, list[float]]
) -> None:
    plain, formula = unscaled
    tiny.Recorder.seen.clear()
    scaled, logged = trained(ScaledTrainer, tmp_path / "scaled", optim=optim)
    assert all(plain.moved)
    assert len(scaled.moved) == len(plain.moved) == 12
    assert 3 <= scaled.moved.count(False) <= 9, "some are skipped, some are taken"
    assert logged == formula, "the schedule is that of steps which are counted"
    assert all(zeros >= share - 0.01 for zeros, share in zip(scaled.zeros, logged, strict=True))
    assert scaled.zeros[-1] == pytest.approx(0.5, abs=0.01)
    assert tiny.Recorder.seen == expected([2] * 12)


def test_a_loop_of_ones_own_with_a_scaler(session: CompressionSession) -> None:
    """What the mask holds is zero after every step, and an infinite gradient skips the step."""
    model = tiny.tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recipe = RECIPE.replace("  tests.support.tiny_training.Recorder: {}\n", "")
    session.initialize(recipe=recipe, model=model, optimizer=optimizer, steps_per_epoch=2)
    weight = model.model.layers[0].mlp.down_proj.weight
    for step in range(8):
        skipped, before = step % 3 == 1, weight.detach().clone()
        batch = {key: value[None] for key, value in tiny.row(step).items()}
        callbacks.batch_start(batch_data=batch)
        begun = weight.detach().clone()
        loss = callbacks.loss_calculated(loss=model(**batch).loss).loss
        scaler.scale(loss * float("inf") if skipped else loss).backward()
        scaler.unscale_(optimizer)
        callbacks.optim_pre_step()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(weight, begun)
        callbacks.optim_post_step()
        optimizer.zero_grad()
        callbacks.batch_end()
        assert moved is not skipped
        assert bool((weight[before == 0] == 0).all())
        assert bool(weight.isfinite().all())
    assert session.lifecycle.global_step == 8
    assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    session.finalize()
