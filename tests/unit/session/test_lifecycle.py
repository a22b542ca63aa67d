# SPDX-License-Identifier: Apache-2.0
"""The lifecycle keeps the order of events and makes schedules start and end on time."""

from __future__ import annotations

import contextlib
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import PrivateAttr
from torch import nn

from llmcompressor.core import CompressionLifecycle, Event, EventType, State
from llmcompressor.errors import InputError, LifecycleError
from llmcompressor.logger import logger
from llmcompressor.modifiers import Modifier, StageModifiers
from llmcompressor.recipe import Recipe, Stage

BATCH = [
    EventType.BATCH_START,
    EventType.LOSS_CALCULATED,
    EventType.OPTIM_PRE_STEP,
    EventType.OPTIM_POST_STEP,
    EventType.BATCH_END,
]
CALIBRATION = [
    EventType.CALIBRATION_EPOCH_START,
    EventType.SEQUENTIAL_EPOCH_END,
    EventType.CALIBRATION_EPOCH_END,
]


class Recorder(Modifier):
    """Writes down what is called, and the index at which it was."""

    _calls: list[tuple[str, Any]] = PrivateAttr(default_factory=list)

    def on_initialize(self, state, **kwargs):
        self._calls.append(("initialize", kwargs))
        return True

    def on_finalize(self, state, **kwargs):
        self._calls.append(("finalize", kwargs))
        return True

    def on_event(self, state, event, **kwargs):
        self._calls.append((f"event {event.type_.value}", event.current_index))

    def on_start(self, state, event, **kwargs):
        self._calls.append(("start", event.current_index))

    def on_update(self, state, event, **kwargs):
        self._calls.append((f"update {event.type_.value}", event.current_index))

    def on_end(self, state, event, **kwargs):
        self._calls.append(("end", event.current_index))

    def on_calibration_start(self, state, event, **kwargs):
        self._calls.append(("calibration start", None))

    def on_sequential_epoch_end(self, state, event, modules, **kwargs):
        self._calls.append(("sequential", list(modules)))

    def on_calibration_end(self, state, event, **kwargs):
        self._calls.append(("calibration end", None))

    def turns(self):
        """The calls to on_start and on_end."""
        return [call for call in self._calls if call[0] in ("start", "end")]


def begun(*modifiers, **kwargs):
    lifecycle = CompressionLifecycle()
    lifecycle.initialize(recipe=list(modifiers), **kwargs)
    return lifecycle


def send(lifecycle, event_type, **kwargs):
    if event_type is EventType.LOSS_CALCULATED:
        kwargs.setdefault("loss", 1.0)
    return lifecycle.event(event_type, **kwargs)


def run_batch(lifecycle, **kwargs):
    for event_type in BATCH:
        send(lifecycle, event_type, **kwargs)


def test_modifiers_get_state_and_arguments_in_recipe_order():
    order, model = [], nn.Linear(2, 2)

    class Probe(Modifier):
        name: str

        def on_initialize(self, state, **kwargs):
            order.append((self.name, state.model, state.hardware.device, kwargs))
            return True

    begun(Probe(name="a"), Probe(name="b"), model=model, sequential_targets=["Linear"])
    device = model.weight.device
    given = {"sequential_targets": ["Linear"]}
    assert order == [("a", model, device, given), ("b", model, device, given)]


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("needing", [True, False])
def test_what_needed_data_and_saw_none_is_named_at_the_end(calibrated, needing, warned):
    class Counter(Recorder):
        @property
        def requires_calibration_data(self):
            return needing

    lifecycle = begun(Counter())
    run_batch(lifecycle)
    for event_type in CALIBRATION if calibrated else []:
        send(lifecycle, event_type)
    lifecycle.finalize()
    assert any("Counter did nothing" in text for text in warned) == (needing and not calibrated)


@pytest.mark.parametrize("sent", range(1, 4))
def test_a_calibration_that_came_to_no_end_is_told(sent, warned):
    lifecycle = begun(Recorder())
    for event_type in CALIBRATION[:sent]:
        send(lifecycle, event_type)
    lifecycle.finalize()
    assert any("its calibration came to no end" in text for text in warned) == (sent < 3)


def test_second_initialization_only_updates_the_state():
    recorder = Recorder()
    lifecycle = begun(recorder, model=nn.Linear(2, 2))
    assert lifecycle.initialize(optimizer="optimizer", steps_per_epoch=4) == []
    assert lifecycle.state.optimizer == "optimizer"
    assert lifecycle.state.schedule.steps_per_epoch == 4
    other = Recorder()
    assert lifecycle.initialize(recipe=other) == []
    assert not other.initialized
    assert lifecycle.recipe.modifiers == [recorder]
    assert [name for name, _ in recorder._calls] == ["initialize"]


def test_results_come_back_without_none():
    class Talker(Recorder):
        def initialize(self, state, **kwargs):
            super().initialize(state, **kwargs)
            return "initialized"

        def update_event(self, state, event, **kwargs):
            super().update_event(state, event, **kwargs)
            return event.type_

        def finalize(self, state, **kwargs):
            super().finalize(state, **kwargs)
            return "finalized"

    lifecycle = CompressionLifecycle()
    assert lifecycle.initialize(recipe=[Talker(), Recorder()]) == ["initialized"]
    assert lifecycle.event(EventType.BATCH_START) == [EventType.BATCH_START]
    assert lifecycle.finalize() == ["finalized"]


def test_finalize_once():
    recorder = Recorder()
    lifecycle = begun(recorder)
    lifecycle.finalize()
    assert lifecycle.finalized
    assert recorder.finalized
    with pytest.raises(ValueError, match=r"reset"):
        lifecycle.finalize()


def test_nothing_before_initialization():
    for act in (
        lambda each: each.finalize(),
        lambda each: each.event(EventType.BATCH_START),
        lambda each: each.event(EventType.CALIBRATION_START),
    ):
        with pytest.raises(ValueError, match=r"initialize\("):
            act(CompressionLifecycle())


def test_nothing_after_finalization():
    lifecycle = begun()
    lifecycle.finalize()
    for act in (
        lifecycle.initialize,
        lifecycle.finalize,
        lambda: lifecycle.event(EventType.BATCH_START),
        lambda: lifecycle.event(EventType.CALIBRATION_START),
    ):
        with pytest.raises(ValueError, match=r"reset\(\)"):
            act()


@pytest.mark.parametrize("given", ["batch_start", 3, None])
def test_what_is_no_event_type_is_told(given):
    for lifecycle in (CompressionLifecycle(), begun()):
        with pytest.raises(ValueError, match=r"EventType\.BATCH_START"):
            lifecycle.event(given)


@pytest.mark.parametrize("told", ["no", "by an event", "by number"])
def test_a_schedule_that_stood_still_is_told_with_the_reason(told, warned):
    lifecycle = begun(Recorder(start=2))
    for step in range(3):
        number = {"global_step": step} if told == "by number" else {}
        send(lifecycle, EventType.BATCH_START, **number)
        if told == "by an event":
            send(lifecycle, EventType.OPTIM_POST_STEP)
        send(lifecycle, EventType.BATCH_END)
    lifecycle.finalize()
    assert any("no step of the optimizer" in text for text in warned) == (told == "no")


def is_allowed(last, event_type):
    """The rule, written another way than in the code."""
    if event_type in CALIBRATION:
        return True
    if event_type is EventType.BATCH_START:
        return last != EventType.BATCH_START
    return event_type in BATCH[BATCH.index(last) :]


@given(st.lists(st.sampled_from([*BATCH, *CALIBRATION]), max_size=30))
def test_any_sequence_is_judged_by_the_rule(sequence):
    recorder = Recorder()
    lifecycle = begun(recorder)
    last, step, batch, accepted = EventType.BATCH_END, 0, -1, []
    for event_type in sequence:
        if is_allowed(last, event_type):
            send(lifecycle, event_type)
            accepted.append(f"event {event_type.value}")
            last = event_type if event_type in BATCH else last
            step += event_type is EventType.OPTIM_POST_STEP
            batch += event_type is EventType.BATCH_START
        else:
            with pytest.raises(ValueError, match=f"{event_type.name} cannot come after"):
                send(lifecycle, event_type)
        assert (lifecycle.global_step, lifecycle.global_batch) == (step, max(batch, 0))
    assert [name for name, _ in recorder._calls if name.startswith("event")] == accepted


def test_batch_and_loss_are_in_the_state_while_they_hold():
    seen = []

    class Probe(Modifier):
        def on_initialize(self, state, **kwargs):
            return True

        def on_event(self, state, event, **kwargs):
            seen.append((state.batch_data, state.loss))

    lifecycle = begun(Probe())
    for number in (1, 2):
        lifecycle.event(EventType.BATCH_START, batch_data=f"batch {number}")
        lifecycle.event(EventType.LOSS_CALCULATED, loss=number)
        lifecycle.event(EventType.BATCH_END)
        assert lifecycle.state.batch_data is None
    assert seen == [
        ("batch 1", None),
        ("batch 1", 1),
        ("batch 1", 1),
        ("batch 2", 1),
        ("batch 2", 2),
        ("batch 2", 2),
    ]


@pytest.mark.parametrize(
    ("start", "end"), [(0, None), (0, 2), (2, 5), (3, 4), (1, None), (None, 3), (None, None)]
)
def test_schedule_in_steps(start, end):
    recorder = Recorder(start=start, end=end)
    lifecycle = begun(recorder)
    for step in range(8):
        assert lifecycle.global_step == step
        run_batch(lifecycle)
    expected = [] if start is None else [("start", start)]
    if start is not None and end is not None:
        expected.append(("end", end))
    assert recorder.turns() == expected
    updates = [index for name, index in recorder._calls if name == "update optim_pre_step"]
    running = [] if start is None else list(range(start, 8 if end is None else end))
    assert updates == running


@settings(max_examples=40)
@given(
    per_epoch=st.integers(1, 7),
    start=st.fractions(0, 1, max_denominator=8),
    length=st.fractions(0, 1, max_denominator=8),
)
def test_schedule_in_epochs(per_epoch, start, length):
    end = start + length
    recorder = Recorder(start=float(start), end=float(end))
    lifecycle = begun(recorder, steps_per_epoch=per_epoch)
    for _ in range(2 * per_epoch):
        run_batch(lifecycle)
    # At the first whole step that is not before the point asked for; both at the same one if
    # there is none between them.
    assert recorder.turns() == [
        ("start", ceil(start * per_epoch) / per_epoch),
        ("end", ceil(end * per_epoch) / per_epoch),
    ]


def test_a_window_between_two_batches_starts_and_ends():
    recorder = Recorder(start=1.2, end=1.8)
    lifecycle = begun(recorder)
    for _ in range(4):
        run_batch(lifecycle)
    assert recorder.turns() == [("start", 2), ("end", 2)]
    assert (recorder.started, recorder.ended) == (True, True)


def test_accumulated_batches_advance_the_batch_and_not_the_step():
    events = []

    class Probe(Modifier):
        def on_initialize(self, state, **kwargs):
            return True

        def on_event(self, state, event, **kwargs):
            events.append(event)

    lifecycle = begun(Probe(), steps_per_epoch=2, batches_per_step=2)
    for batch in range(4):
        lifecycle.event(EventType.BATCH_START)
        if batch % 2:
            lifecycle.event(EventType.OPTIM_POST_STEP)
        lifecycle.event(EventType.BATCH_END)
    starts = [event for event in events if event.type_ is EventType.BATCH_START]
    assert [(event.global_batch, event.global_step) for event in starts] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    assert events[-1].epoch_full == 1.0
    assert events[-1].epoch_batch == 3
    assert {(event.batches_per_step, event.invocations_per_step) for event in events} == {(2, 1)}


def test_calls_for_one_step_are_told_with_every_event():
    events, given = [], []

    class Probe(Modifier):
        def on_initialize(self, state, **kwargs):
            given.append((state.schedule.invocations_per_step, kwargs))
            return True

        def on_event(self, state, event, **kwargs):
            events.append(event)

    lifecycle = begun(Probe(), invocations_per_step=3, own="kept")
    run_batch(lifecycle)
    lifecycle.event(EventType.CALIBRATION_EPOCH_START)
    assert given == [(3, {"own": "kept"})]
    assert {event.invocations_per_step for event in events} == {3}


@pytest.mark.parametrize(
    "given", [{"invocations_per_step": 0}, {"batches_per_step": -1}, {"start": float("nan")}]
)
def test_counts_that_no_run_has_initialize_nothing(given):
    lifecycle = CompressionLifecycle()
    ((name, value),) = given.items()
    with pytest.raises(InputError, match=f"{name} is {value!r}, and"):
        lifecycle.initialize(recipe=[Recorder()], **given)
    assert not lifecycle.initialized_
    assert getattr(lifecycle.state, name) is None


def test_a_resumed_run_goes_on_where_it_was():
    past, current, future = Recorder(start=1, end=2), Recorder(start=2), Recorder(start=3.5)
    lifecycle = begun(past, current, future, start=2.5)
    # The length of an epoch is often known only when the trainer has made its loader.
    lifecycle.initialize(steps_per_epoch=4, batches_per_step=2)
    assert (lifecycle.global_step, lifecycle.global_batch) == (10, 20)
    for _ in range(6):
        run_batch(lifecycle)
    assert past.turns() == [("start", 2.5), ("end", 2.5)]
    assert current.turns() == [("start", 2.5)]
    assert future.turns() == [("start", 3.5)]


def test_reset_finalizes_each_and_survives_errors(warned: list[str]):
    class Broken(Recorder):
        def on_finalize(self, state, **kwargs):
            raise OSError("disk")

    broken, sound = Broken(), Recorder()
    lifecycle = begun(broken, sound, model=nn.Linear(2, 2), steps_per_epoch=3)
    run_batch(lifecycle)
    lifecycle.reset()
    assert sound.finalized
    assert [line.strip() for line in warned] == ["Broken failed to finalize: disk"]
    assert lifecycle == CompressionLifecycle()
    assert lifecycle.state == State()
    lifecycle.initialize()
    run_batch(lifecycle)  # the order and the counting begin anew
    assert lifecycle.global_batch == 0


class Hooked(Recorder):
    """Watches the model from the beginning on, and may fail."""

    fails: str = ""

    def on_initialize(self, state, **kwargs):
        self.register_hook(state.model, lambda *_: None, "forward")
        if self.fails == "initialize":
            raise OSError("disk")
        return True

    def on_finalize(self, state, **kwargs):
        if self.fails == "finalize":
            raise OSError("disk")
        return True


def test_a_finalization_that_failed_is_gone_on_with():
    model, failing, last = nn.Linear(2, 2), Hooked(fails="finalize"), Hooked()
    first = Hooked()
    lifecycle = begun(first, failing, last, model=model)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            lifecycle.finalize()
        assert not model._forward_hooks
    failing.fails = ""
    lifecycle.finalize()
    assert first.finalized
    assert last.finalized


class Shortener(Modifier):
    """The last child will be gone."""

    def on_initialize(self, state, **kwargs):
        return True

    def outline(self, state):
        del state.model._modules["2"]


class Marker(Modifier):
    """Marks what it finds."""

    fails: bool = False

    def on_initialize(self, state, **kwargs):
        for module in state.model.children():
            module.mark = True
            module.scale = nn.Parameter(torch.ones(1))
        return not self.fails


@pytest.mark.parametrize("fails", [False, True])
def test_modifiers_are_initialized_on_what_earlier_ones_leave(fails):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    before = list(model.named_children())
    with pytest.raises(LifecycleError) if fails else contextlib.nullcontext():
        begun(Shortener(), Marker(fails=fails), model=model)
    assert list(model.named_children()) == before
    assert [hasattr(one, "mark") for one in model] == [True, True, False]
    assert [len(list(one.parameters())) for one in model] == [3, 1, 2]


def test_recipe_and_stages_have_their_earlier_names():
    lifecycle = CompressionLifecycle()
    assert not lifecycle.recipe_container.check_any_recipe_exists()
    assert lifecycle.modifiers == []
    first, second, third = Recorder(), Recorder(start=1.0, end=3.0), Recorder(end=2.0)
    recipe = Recipe([Stage("one", (first,)), Stage("two", (second, third))])
    lifecycle.initialize(recipe=recipe, model=nn.Linear(2, 2))
    assert lifecycle.recipe_container.compiled_recipe == recipe
    assert [one.modifiers for one in lifecycle.modifiers] == [[first], [second, third]]
    assert [one.group for one in lifecycle.modifiers] == ["one", "two"]
    assert all(one.initialized and not one.finalized for one in lifecycle.modifiers)
    two = lifecycle.recipe_container.get_modifiers()[1]
    assert (two.calculate_start(), two.calculate_end(), two.unique_id) == (1.0, 3.0, "two_1")
    lifecycle.finalize()
    assert all(one.finalized and one.applied for one in lifecycle.modifiers)
    assert lifecycle.recipe_container.applied_stages == ["one", "two"]
    assert lifecycle.recipe_container.get_modifiers() == []


def test_a_container_joins_recipes_and_a_lifecycle_takes_them():
    lifecycle = CompressionLifecycle()
    container = lifecycle.recipe_container
    assert container.update(Recorder(), extra=1) == {"extra": 1}
    container.append(Recorder(start=1.0))
    assert len(container.recipes) == 2
    assert container.check_compile_recipe()
    assert not container.check_compile_recipe()
    lifecycle.initialize(model=nn.Linear(2, 2))
    assert [one.start for one in lifecycle.recipe.modifiers] == [None, 1.0]
    container.update(Recorder(start=2.0))
    assert [one.start for one in container.get_modifiers()[0].modifiers] == [2.0]


def test_a_stage_is_called_like_a_modifier():
    stage, state = StageModifiers([Recorder(), Recorder()], 0, "all"), State(model=nn.Linear(2, 2))
    stage.initialize(state, extra=1)
    assert stage.initialized
    stage.update_event(state, Event(type_=EventType.BATCH_START))
    stage.finalize(state)
    assert stage.finalized
    assert stage.applied
    for one in stage.modifiers:
        assert one._calls[0] == ("initialize", {"extra": 1})
        assert one._calls[-1][0] == "finalize"


def test_the_log_tells_what_the_lifecycle_does():
    said: list[tuple[str, str]] = []
    sink = logger.add(
        lambda one: said.append((one.record["level"].name, one.record["message"])), level="DEBUG"
    )
    try:
        lifecycle = CompressionLifecycle()
        lifecycle.reset()
        lifecycle.initialize(recipe=Recorder(), model=nn.Linear(2, 2))
        lifecycle.event(EventType.BATCH_START)
        lifecycle.finalize()
        lifecycle.reset()
    finally:
        logger.remove(sink)
    assert [text for level, text in said if level == "INFO"] == [
        "Compression lifecycle initialized for 1 modifier.",
        "Compression lifecycle finalized for 1 modifier.",
        "Compression lifecycle reset.",
    ]
    assert ("DEBUG", "Handling event: batch_start.") in said
