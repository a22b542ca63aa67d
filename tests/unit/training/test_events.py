# SPDX-License-Identifier: Apache-2.0
"""The trainer sends every event once, in order, with the right progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from pydantic import PrivateAttr
from tests.support import tiny_training as tiny
from torch.nn import Parameter

from llmcompressor.core import EventType, active_session
from llmcompressor.errors import InputError, RecipeError
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.training import SessionManagerMixIn, Trainer

BY_NAME = "modifiers: {EventRecorder: {}}"
BY_PATH = "modifiers: {tests.support.tiny_training.Recorder: {}}"


class EventRecorder(tiny.Recorder):
    """A user's modifier that a recipe names without its module."""


def expected(groups: list[int]) -> list[tuple[str, int, int]]:
    """The events of steps with so many micro-batches each: kind, step and batch."""
    events, batch = [], 0
    for step, size in enumerate(groups):
        for micro in range(size):
            events += [("batch_start", step, batch), ("loss_calculated", step, batch)]
            if micro == size - 1:
                events += [("optim_pre_step", step, batch), ("optim_post_step", step + 1, batch)]
            events.append(("batch_end", step + (micro == size - 1), batch))
            batch += 1
    return events


def record(folder: Path, dataset, recipe=BY_NAME, **changed) -> list[tuple[str, int, int]]:
    trainer = Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(folder, **changed),
        train_dataset=dataset,
        eval_dataset=tiny.Rows(2),
        recipe=recipe,
    )
    trainer.train()
    return tiny.Recorder.seen


@pytest.mark.parametrize("recipe", [BY_NAME, BY_PATH])
def test_one_batch_per_step(tmp_path, recipe):
    assert record(tmp_path, tiny.Rows(6), recipe) == expected([1] * 3)


def test_four_batches_per_step_and_an_incomplete_group(tmp_path):
    """Eleven batches of two: groups of 4, 4 and 3, twice."""
    seen = record(tmp_path, tiny.Rows(21), gradient_accumulation_steps=4, num_train_epochs=2)
    assert seen == expected([4, 4, 3] * 2)


def test_max_steps_ends_within_an_epoch(tmp_path):
    seen = record(tmp_path, tiny.Rows(12), gradient_accumulation_steps=2, max_steps=5)
    assert seen == expected([2, 2, 2, 2, 2])


@pytest.mark.parametrize(("accumulation", "groups"), [(1, [1] * 3), (4, [4] * 3)])
def test_a_stream(tmp_path, accumulation, groups):
    data = tiny.Stream(40)
    seen = record(tmp_path, data, gradient_accumulation_steps=accumulation, max_steps=3)
    assert seen == expected(groups)


def test_a_modifier_sees_model_optimizer_and_device_at_once(tmp_path):
    model = tiny.tiny_model()
    trainer = Trainer(
        model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.Rows(4), recipe=BY_NAME
    )
    trainer.train()
    [(seen_model, optimizer, hardware)] = tiny.Recorder.begun
    assert seen_model is model
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer is active_session().state.optimizer
    assert optimizer is trainer.optimizer.optimizer, "the one that steps"
    ours = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert ours == {id(each) for each in model.parameters()}
    assert hardware.device == torch.device("cpu")
    assert hardware.distributed_strategy == "none"


@pytest.mark.parametrize(
    ("data", "changed", "per_epoch", "ends"),
    [
        (tiny.Rows(21), {"gradient_accumulation_steps": 4}, 3, 1.0),
        (tiny.Rows(21), {"gradient_accumulation_steps": 4, "max_steps": 4}, 3, 4 / 3),
        (tiny.Stream(40), {"max_steps": 4}, None, 4),
    ],
)
def test_schedules_count_in_epochs_or_else_in_steps(tmp_path, data, changed, per_epoch, ends):
    indices = []

    class Clock(tiny.Recorder):
        def on_event(self, state, event, **kwargs):
            assert event.steps_per_epoch == per_epoch
            indices.append(event.current_index)

    record(tmp_path, data, Clock(), **changed)
    assert indices[-1] == pytest.approx(ends)


class Window(Modifier):
    """Starts and ends within the run."""

    _calls: list[tuple[str, float]] = PrivateAttr(default_factory=list)

    def on_initialize(self, state, **kwargs):
        return True

    def on_start(self, state, event, **kwargs):
        self._calls.append(("start", event.current_index))

    def on_end(self, state, event, **kwargs):
        self._calls.append(("end", event.current_index))


def test_schedules_start_and_end_on_time(tmp_path, warned):
    windows = [Window(start=0, end=0.5), Window(start=0.5, end=1.5), Window(start=1.5)]
    record(tmp_path, tiny.Rows(8), windows, num_train_epochs=2)
    assert [window._calls[0] for window in windows] == [
        ("start", 0),
        ("start", 0.5),
        ("start", 1.5),
    ]
    assert [window._calls[1] for window in windows[:2]] == [("end", 0.5), ("end", 1.5)]
    assert not warned


class Gain(Modifier):
    """Adds a parameter; another optimizer would leave it at one."""

    def on_initialize(self, state, **kwargs):
        head = state.model.lm_head
        head.gain = Parameter(torch.ones(1))
        self.register_hook(head, lambda module, _, output: output * module.gain, "forward")
        return True


@pytest.mark.parametrize("given", [None, "plain", "with scheduler"])
def test_parameters_that_modifiers_add_are_trained(tmp_path, given):
    model = tiny.tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if given else None
    scheduler = None
    if given == "with scheduler":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = Trainer(
        model=model,
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.Rows(4),
        recipe=Gain(),
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    gain = model.lm_head.gain
    assert gain.item() != 1
    [group] = [
        group
        for group in trainer.optimizer.param_groups
        if any(parameter is gain for parameter in group["params"])
    ]
    assert group["weight_decay"] == 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_without_an_effective_recipe_the_training_is_plain(tmp_path, accumulation):
    weights = []
    for kind, recipe in ((transformers.Trainer, None), (Trainer, None), (Trainer, BY_NAME)):
        extra = {} if kind is transformers.Trainer else {"recipe": recipe}
        trainer = kind(
            model=tiny.tiny_model(),
            args=tiny.arguments(tmp_path, gradient_accumulation_steps=accumulation),
            train_dataset=tiny.Rows(12, uneven=True),
            **extra,
        )
        losses = trainer.train().training_loss
        weights.append((losses, [each.detach() for each in trainer.model.parameters()]))
    for loss, parameters in weights[1:]:
        assert loss == weights[0][0]
        assert all(torch.equal(*pair) for pair in zip(parameters, weights[0][1], strict=True))


class OtherTrainer(transformers.Trainer):
    """As a third party's: a constructor and a loss of its own."""

    def __init__(self, model, args=None, *, scale=2.0, **kwargs):
        super().__init__(model, args, **kwargs)
        self.scale = scale

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (self.scale * loss, outputs) if return_outputs else self.scale * loss


def test_any_trainer_drives_the_session(tmp_path):
    class Mixed(SessionManagerMixIn, OtherTrainer):
        pass

    losses = []

    class Listener(tiny.Recorder):
        def on_event(self, state, event, **kwargs):
            if event.type_ is EventType.LOSS_CALCULATED:
                losses.append(state.loss.item())
            super().on_event(state, event, **kwargs)

    trainer = Mixed(
        tiny.tiny_model(),
        tiny.arguments(tmp_path),
        scale=3.0,
        train_dataset=tiny.Rows(4),
        recipe=Listener(),
    )
    trainer.train()
    assert tiny.Recorder.seen == expected([1, 1])
    assert losses == pytest.approx(
        [each["loss"] for each in trainer.state.log_history if "loss" in each]
    )
    assert losses[0] > 9, "three times the loss of random weights"


def test_a_modifier_of_oneshot_is_refused_before_anything(tmp_path):
    with pytest.raises(RecipeError, match="GPTQModifier cannot be applied while training"):
        Trainer(
            model=tiny.tiny_model(),
            args=tiny.arguments(tmp_path),
            train_dataset=tiny.Rows(4),
            recipe=GPTQModifier(scheme="W4A16"),
        )


class Hiding(SessionManagerMixIn, transformers.Trainer):
    """A trainer whose own loss stands before the mixin's."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_an_unseen_loss_is_told_and_a_vain_teacher_refused(tmp_path, warned):
    def train(**given):
        Hiding(
            model=tiny.tiny_model(),
            args=tiny.arguments(tmp_path, max_steps=2),
            train_dataset=tiny.Rows(4),
            **given,
        ).train()

    train(recipe=BY_NAME)
    told = [line for line in warned if "hides that of SessionManagerMixIn" in line]
    assert len(told) == 1
    assert "super().compute_loss" in told[0]
    distilling = "modifiers: {OutputDistillationModifier: {}}"
    with pytest.raises(InputError, match="nothing would be learned from the teacher"):
        train(recipe=distilling, teacher=tiny.tiny_model(seed=1))
