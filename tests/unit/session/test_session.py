# SPDX-License-Identifier: Apache-2.0
"""Sessions nest, belong to their thread, and pass events and results on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from llmcompressor.core import (
    CompressionLifecycle,
    EventType,
    LifecycleCallbacks,
    ModifiedState,
    active_session,
    callbacks,
    create_session,
    finalize,
    initialize,
    reset_session,
)
from llmcompressor.errors import InputError
from llmcompressor.metrics import LambdaLogger, LoggerManager
from llmcompressor.modifiers import Modifier


class Halver(Modifier):
    """Gives the caller another loss."""

    amount: float = 0.5

    def on_initialize(self, state, **kwargs):
        return True

    def on_event(self, state, event, **kwargs):
        if event.type_ is EventType.LOSS_CALCULATED:
            state.loss = state.loss * self.amount


STAGES = """
first_stage:
  group_modifiers:
    Halver: {amount: 0.25}
second_stage:
  group_modifiers:
    Halver: {amount: 0.125}
"""


@pytest.mark.parametrize(
    ("event_type", "loss", "reason"),
    [
        ("batch_end", 1.0, "'batch_end' is no EventType"),
        (None, 1.0, "None is no EventType"),
        (EventType.BATCH_END, torch.ones(3), "A loss that is to be logged is no number"),
        (EventType.BATCH_END, {"a": "high"}, "A loss that is to be logged is no number"),
    ],
    ids=str,
)
def test_what_cannot_be_logged_is_told(event_type, loss, reason):
    with create_session() as session:
        session.initialize(recipe=Halver(), loggers=LoggerManager([]))
        with pytest.raises(InputError, match=reason):
            session.log(event_type, loss=loss)


def test_sessions_nest_and_come_back_after_errors():
    default = active_session()
    with create_session() as outer:
        assert active_session() is outer is not default
        with create_session() as inner:
            assert active_session() is inner is not outer
        assert active_session() is outer
        with pytest.raises(KeyError), create_session():
            raise KeyError
        assert active_session() is outer
    assert active_session() is default


def test_a_thread_sees_its_own_session_or_the_default():
    default, barrier = active_session(), threading.Barrier(2, timeout=10)

    def work():
        before = active_session()
        with create_session() as mine:
            barrier.wait()
            return before, mine, active_session()

    with create_session() as main, ThreadPoolExecutor(2) as pool:
        results = [each.result() for each in [pool.submit(work), pool.submit(work)]]
        assert active_session() is main
    assert all(before is default for before, _, _ in results)
    assert all(active is mine for _, mine, active in results)
    assert results[0][1] is not results[1][1]


def test_reset_session_resets_the_active_one_only():
    with create_session() as outer:
        outer.initialize(model=nn.Linear(2, 2))
        with create_session() as inner:
            inner.initialize(model=nn.Linear(2, 2))
            reset_session()
            assert inner.lifecycle == CompressionLifecycle()
        assert outer.lifecycle.initialized_


def test_caller_goes_on_with_what_modifiers_made_of_it():
    model, optimizer = nn.Linear(2, 2), object()
    with create_session() as session:
        begun = session.initialize(recipe=Halver(), model=model, optimizer=optimizer)
        assert begun == ModifiedState(model, optimizer, None, [])
        callbacks.batch_start(batch_data={"x": 1})
        assert session.state.batch_data == {"x": 1}
        assert callbacks.loss_calculated(loss=3.0).loss == 1.5
        callbacks.optim_pre_step()
        callbacks.optim_post_step()
        callbacks.batch_end()
        assert session.finalize().model is model


def test_callbacks_send_the_events_of_their_names():
    seen = []

    class Probe(Halver):
        def on_event(self, state, event, **kwargs):
            seen.append((event.type_, kwargs))

    with create_session() as session:
        session.initialize(recipe=Probe())
        for name in ("calibration_epoch_start", "calibration_start"):
            getattr(callbacks, name)()
        callbacks.sequential_epoch_end(["module"])
        for name in ("calibration_epoch_end", "calibration_end"):
            getattr(callbacks, name)()
        callbacks.event(EventType.BATCH_START, global_step=7)
        assert session.lifecycle.global_step == 7
    assert seen == [
        (EventType.CALIBRATION_EPOCH_START, {}),
        (EventType.CALIBRATION_EPOCH_START, {}),
        (EventType.SEQUENTIAL_EPOCH_END, {"modules": ["module"]}),
        (EventType.CALIBRATION_EPOCH_END, {}),
        (EventType.CALIBRATION_EPOCH_END, {}),
        (EventType.BATCH_START, {}),
    ]
    assert callbacks is LifecycleCallbacks


def test_a_modifier_in_yaml_sees_model_device_and_optimizer():
    seen = []

    class Witness(Modifier):
        def on_initialize(self, state, **kwargs):
            seen.append((state.model, state.hardware.device, state.optimizer))
            return True

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with create_session() as session:
        session.initialize(
            recipe="test_stage:\n  group_modifiers:\n    Witness: {}\n",
            model=model,
            optimizer=optimizer,
        )
    assert seen == [(model, model.weight.device, optimizer)]


def test_the_applied_recipe_as_yaml():
    with create_session() as session:
        assert session.get_serialized_recipe() is None
        session.initialize(recipe=Halver(amount=0.75))
        text = session.get_serialized_recipe()
    assert "Halver" in text
    assert "0.75" in text
    assert "initialized" not in text


def test_another_stage_of_the_same_recipe():
    model = nn.Linear(2, 2)
    with create_session() as session:
        session.initialize(recipe=STAGES, recipe_stage="first", model=model, start=0.0)
        (first,) = session.lifecycle.recipe.modifiers
        callbacks.batch_start()
        assert callbacks.loss_calculated(loss=1.0).loss == 0.25
        session.finalize()

        session.reset_stage()
        assert session.state.model is model
        assert session.lifecycle.recipe.modifiers == [first]
        assert not session.lifecycle.initialized_
        assert session.lifecycle.global_step == 0
        assert session.state.schedule.start is None

        session.initialize(recipe_stage="second")
        callbacks.batch_start()
        assert callbacks.loss_calculated(loss=1.0).loss == 0.125
    assert first.finalized


def test_log_hands_step_epoch_and_loss_to_the_loggers():
    seen = []
    logger = LambdaLogger(lambda *entry: seen.append(entry) or True)
    loss = torch.tensor(2.5, requires_grad=True) * 1
    with create_session() as session:
        session.log(EventType.LOSS_CALCULATED, loss=1.0)  # nobody listens
        session.initialize(loggers=[logger], steps_per_epoch=4)
        for _ in range(3):
            callbacks.batch_start()
            callbacks.loss_calculated(loss=loss)
            session.log(EventType.LOSS_CALCULATED)
            session.log(EventType.LOSS_CALCULATED)  # less than log_frequency since the last
            callbacks.optim_post_step()
            callbacks.batch_end()
    assert [(tag, values, step) for tag, _, values, step, _, _ in seen] == [
        ("loss_calculated", {"loss": 2.5, "epoch": step / 4, "step": step}, step)
        for step in range(3)
    ]


def test_the_active_session_begins_and_ends_by_functions_too() -> None:
    model = nn.Linear(2, 2)
    with create_session() as session:
        assert initialize(recipe=Halver(), model=model).model is model
        assert callbacks.batch_start() is not None
        assert callbacks.loss_calculated(loss=4.0).loss == 2.0
        assert session.lifecycle.initialized_
        assert isinstance(finalize(), ModifiedState)
        assert session.lifecycle.finalized
