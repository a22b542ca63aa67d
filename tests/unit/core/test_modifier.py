# SPDX-License-Identifier: Apache-2.0
"""The base class checks fields, keeps phases, and makes the calls in order."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from pydantic import Field, PrivateAttr
from torch import nn

from llmcompressor import modifiers
from llmcompressor.core import Event, EventType, State
from llmcompressor.core.modifier import Phase
from llmcompressor.core.state import Schedule
from llmcompressor.errors import RecipeError
from llmcompressor.modifiers import Modifier, ModifierFactory
from llmcompressor.modifiers.utils import HooksMixin


class Pruner(Modifier):
    sparsity: float = Field(0.5, ge=0, le=1)
    targets: list[str] | str = "Linear"

    def on_initialize(self, state, **kwargs):
        return True


class Spy(Pruner):
    """Records every on_… call and the phase it came in."""

    _log: list[str] = PrivateAttr(default_factory=list)

    def on_initialize(self, state, **kwargs):
        self._log.append("initialize")
        return True

    def on_finalize(self, state, **kwargs):
        self._log.append("finalize")

    def on_event(self, state, event, **kwargs):
        self._log.append("event")

    def on_start(self, state, event, **kwargs):
        self._log.append("start")

    def on_update(self, state, event, **kwargs):
        self._log.append("update")

    def on_end(self, state, event, **kwargs):
        self._log.append("end")

    def on_calibration_start(self, state, event):
        self._log.append("calibration start")

    def on_sequential_epoch_end(self, state, event, modules):
        self._log.append(f"sequential {modules}")

    def on_calibration_end(self, state, event):
        self._log.append("calibration end")

    def heard(self):
        log, self._log = self._log, []
        return log


def event(type_, step=0, **kwargs):
    return Event(type_=type_, global_step=step, **kwargs)


def ready(**fields):
    spy = Spy(**fields)
    spy.initialize(State())
    spy.heard()
    return spy


@pytest.mark.parametrize("targets", ["", [""], ["Linear", ""], "re:", ["re:"]])
def test_an_empty_name_is_no_target(targets):
    """The name of the model itself: all of it would be taken."""
    with pytest.raises(RecipeError, match="an empty name or pattern stands for the whole model"):
        Pruner(targets=targets)
    Pruner(targets=[])


def test_public_names():
    names = ["Modifier", "ModifierFactory", "ModifierInterface", "StageModifiers"]
    assert modifiers.__all__ == names
    assert all(hasattr(modifiers, name) for name in modifiers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Modifer'"):
        modifiers.Modifer  # noqa: B018


@pytest.mark.parametrize("make", [lambda kw: Pruner(**kw), Pruner.model_validate])
def test_a_wrong_value_names_the_default(make):
    with pytest.raises(RecipeError, match=r"'sparsity': .*given: 'much'.*its default, 0\.5\."):
        make({"sparsity": "much"})


@pytest.mark.parametrize("make", [lambda kw: Pruner(**kw), Pruner.model_validate])
def test_wrong_field_names_modifier_field_and_the_right_ones(make):
    with pytest.raises(RecipeError) as caught:
        make({"sparsty": 0.5})
    message = str(caught.value)
    assert "Pruner" in message
    assert "'sparsty'" in message
    assert "Did you mean sparsity?" in message
    for field in ("index", "group", "start", "end", "update", "sparsity", "targets"):
        assert field in message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sparsity": 2}, r"'sparsity'.*less than or equal to 1.*given: 2"),
        ({"sparsity": "x"}, r"'sparsity'.*valid number.*given: 'x'"),
        ({"targets": 3}, r"'targets'.*valid list.*, or .*valid string"),
        ({"start": "soon"}, r"'start'.*given: 'soon'"),
        ({"sparsity": 2, "end": "x"}, r"'end'.*; field 'sparsity'"),
        ({"start": 3, "end": 2}, r"end \(2\) lies before start \(3\).*Leave out"),
        ({"end": float("nan")}, r"end is not a number"),
        ({"update": float("nan")}, r"update is not a number"),
        ({"sparsity": True}, r"'sparsity'.*it is a number, not true or false \(given: True\)"),
        ({"end": False}, r"'end'.*it is a number, not true or false"),
    ],
)
def test_wrong_value_names_field_and_reason(fields, reason):
    with pytest.raises(RecipeError, match=f"Pruner: .*{reason}"):
        Pruner(**fields)


def test_missing_field():
    class Needy(Pruner):
        sparsity: float

    with pytest.raises(RecipeError, match=r"Needy: field 'sparsity': it is required"):
        Needy()


def test_flags_of_earlier_releases_may_be_set():
    pruner = Pruner()
    pruner.initialize(State())
    pruner.started_ = True
    assert pruner.started
    assert pruner.phase is Phase.STARTED
    pruner.started_ = True
    pruner.ended_ = True
    assert pruner.passed_phases == ("created", "initialized", "started", "ended")
    pruner.ended_ = False
    assert not pruner.ended
    assert pruner.started_
    pruner.finalize(State())
    assert pruner.finalized_


@pytest.mark.parametrize("flag", ["initialized", "started", "ended", "finalized"])
def test_phase_is_no_field(flag):
    pruner = Pruner()
    for name in (flag, f"{flag}_"):
        with pytest.raises(RecipeError, match=name):
            Pruner(**{name: True})
        assert getattr(pruner, name) is False
    with pytest.raises(AttributeError):
        setattr(pruner, flag, True)
    with pytest.raises(RecipeError, match="_passed"):
        Pruner(_passed=(Phase.FINALIZED,))
    pruner.initialize(State())
    assert pruner.model_dump() == {
        "index": None,
        "group": None,
        "start": None,
        "end": None,
        "update": None,
        "sparsity": 0.5,
        "targets": "Linear",
    }


def test_phases_one_after_the_other():
    spy, state = Spy(start=1, end=2), State()
    phases = [spy.phase]
    spy.initialize(state)
    phases.append(spy.phase)
    spy.update_event(state, event(EventType.BATCH_START, 1))
    phases.append(spy.phase)
    spy.update_event(state, event(EventType.BATCH_END, 2))
    phases.append(spy.phase)
    spy.finalize(state)
    phases.append(spy.phase)
    assert phases == list(Phase)
    assert spy.initialized and spy.started and spy.ended and spy.finalized  # noqa: PT018


def test_calls_out_of_order():
    state, start = State(), event(EventType.BATCH_START)
    created, initialized, finalized = Spy(), Spy(), Spy()
    initialized.initialize(state)
    finalized.initialize(state)
    finalized.finalize(state)
    for act in (
        lambda: created.update_event(state, start),
        lambda: created.finalize(state),
        lambda: initialized.initialize(state),
        lambda: finalized.initialize(state),
        lambda: finalized.update_event(state, start),
        lambda: finalized.finalize(state),
    ):
        with pytest.raises(RuntimeError, match=r"^Spy cannot be"):
            act()
    assert (created.phase, initialized.phase) == (Phase.CREATED, Phase.INITIALIZED)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, ["initialize"]),
        (0, None, ["initialize", "start"]),
        (-1, None, ["initialize", "start"]),
        (-1, 1, ["initialize", "start"]),
        (1, None, ["initialize"]),
        (-1, 0, ["initialize"]),
    ],
)
def test_initialize_starts_what_is_due_at_step_zero(start, end, expected):
    spy = Spy(start=start, end=end)
    spy.initialize(State(schedule=Schedule(steps_per_epoch=5)))
    assert spy.heard() == expected
    assert spy.started == ("start" in expected)


def test_training_events():
    spy, state = ready(start=1, end=2), State()

    def send(type_, step):
        spy.update_event(state, event(type_, step))
        return spy.heard()

    assert send(EventType.BATCH_START, 0) == ["event"]
    assert send(EventType.BATCH_END, 1) == ["event"]
    assert send(EventType.OPTIM_PRE_STEP, 1) == ["event"]
    assert send(EventType.BATCH_START, 1) == ["event", "start", "update"]
    assert send(EventType.BATCH_START, 1) == ["event", "update"]
    assert send(EventType.OPTIM_POST_STEP, 2) == ["event", "update"]
    assert send(EventType.BATCH_END, 2) == ["event", "end", "update"]
    assert send(EventType.BATCH_END, 2) == ["event"]
    assert send(EventType.BATCH_START, 2) == ["event"]


def test_calibration_events():
    spy, state = ready(), State()
    spy.update_event(state, event(EventType.CALIBRATION_EPOCH_START))
    assert (spy.started, spy.ended) == (True, False)
    spy.update_event(state, event(EventType.SEQUENTIAL_EPOCH_END), modules=["a"])
    spy.update_event(state, event(EventType.CALIBRATION_EPOCH_END))
    assert (spy.started, spy.ended) == (True, True)
    assert spy.heard() == [
        "event",
        "calibration start",
        "event",
        "sequential ['a']",
        "event",
        "calibration end",
    ]
    spy.finalize(state)
    assert spy.heard() == ["finalize"]


def test_finalize_ends_what_still_runs():
    spy = ready(start=0)
    spy.finalize(State())
    assert spy.heard() == ["end", "finalize"]
    idle = ready(start=5)
    idle.finalize(State())
    assert idle.heard() == ["finalize"]
    assert (idle.started, idle.ended) == (False, False)


def test_hooks_do_not_outlive_the_modifier():
    layer, calls = nn.Linear(2, 2), []

    class Hooked(Pruner):
        def on_initialize(self, state, **kwargs):
            self.register_hook(layer, lambda *_: calls.append(1), "forward")
            return True

        def on_finalize(self, state, **kwargs):
            raise OSError("disk")

    hooked = Hooked()
    hooked.initialize(State())
    assert isinstance(hooked, HooksMixin)
    layer(torch.ones(2))
    with pytest.raises(OSError, match="disk"):
        hooked.finalize(State())
    layer(torch.ones(2))
    assert calls == [1]


@pytest.fixture
def package(monkeypatch):
    """A module of somebody else's, with one modifier in it."""
    module = types.ModuleType("somebody_elses")
    source = "class Shrinker(Pruner):\n    amount: int = 1\nother = 3\n"
    exec(source, {"Pruner": Pruner, "__name__": "somebody_elses"}, module.__dict__)
    module.Shrinker.__module__ = "somebody_elses"
    monkeypatch.setitem(sys.modules, "somebody_elses", module)
    return module


def test_own_modifier_by_class_name(package):
    shrinker = ModifierFactory.create("Shrinker", group="pruning", amount=2)
    assert type(shrinker).__name__ == "Shrinker"
    assert (shrinker.group, shrinker.amount) == ("pruning", 2)


def test_own_modifier_by_path(package):
    assert type(ModifierFactory.create("somebody_elses.Shrinker")) is package.Shrinker
    with pytest.raises(RecipeError, match=r"Shrinkr.*no such name.*Did you mean Shrinker"):
        ModifierFactory.create("somebody_elses.Shrinkr")
    with pytest.raises(RecipeError, match="something else of that name"):
        ModifierFactory.create("somebody_elses.other")
    with pytest.raises(RecipeError, match="module 'nobody' cannot be found"):
        ModifierFactory.create("nobody.knows.Shrinker")


def test_a_method_that_nothing_calls_is_told(warned):
    class Old(Modifier):
        def on_initialize(self, state, **kwargs):
            return True

        def on_calibration_epoch_end(self, state, event, **kwargs):
            return None

        def on_rainy_days(self):
            return None

    class Older(Old):
        pass

    told = "calls no Old.on_calibration_epoch_end. Did you mean on_calibration_end?"
    assert [told in text for text in warned] == [True]


def test_unknown_modifier_suggests_the_nearest():
    with pytest.raises(RecipeError, match=r"'QuantisationModifier'.*QuantizationModifier"):
        ModifierFactory.create("QuantisationModifier")
    with pytest.raises(RecipeError, match=r"'Sppy'.*Spy"):
        ModifierFactory.create("Sppy")
