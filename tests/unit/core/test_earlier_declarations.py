# SPDX-License-Identifier: Apache-2.0
"""Declarations of earlier releases feed the contract of a modifier."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
from torch import nn

from llmcompressor.core import State
from llmcompressor.core.contract import (
    DataUse,
    Edits,
    Granularity,
    PlannedModule,
    Prediction,
    RecipeRules,
    Selection,
    Traits,
)
from llmcompressor.errors import DatasetError
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationModifier

LINEAR = nn.Linear(2, 2)
PLANNED = PlannedModule("linear", LINEAR, None, {})


class Plain(Modifier):
    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "value", "traits"),
    [
        ("requires_calibration_data", True, Traits(data=DataUse.STREAM)),
        ("requires_calibration_data", False, Traits()),
        ("surveys_first", True, Traits(data=DataUse.SURVEY_FIRST)),
        ("learns_first", True, Traits(data=DataUse.LEARN_FIRST)),
        ("finest_granularity", "linear", Traits(granularity=Granularity.LINEAR)),
        ("takes_whole_blocks", True, Traits(whole_blocks=True)),
        ("twin_streams", True, Traits(twin=True)),
        ("propagates_error", False, Traits(propagates_error=False)),
        ("works_by_block", True, Traits(by_block=True)),
        ("changes_at_once", False, Traits(edits=Edits.NONE)),
        ("rewrites_inputs", True, Traits(edits=Edits.AT_ONCE | Edits.INPUTS)),
        ("leaves_open", True, Traits(edits=Edits.AT_ONCE | Edits.OPEN)),
        ("changes_structure", True, Traits(edits=Edits.AT_ONCE | Edits.STRUCTURE)),
        ("begins_a_pass", True, Traits(begins_pass=True)),
        ("joins", {"Other"}, Traits(joins=frozenset({"Other"}))),
        ("observing_steps", 3, Traits(observing_steps=3)),
        ("means_unservable", True, Traits(unservable=True)),
        ("devices", {"device": "cpu"}, Traits(devices={"device": "cpu"})),
        ("writes", {"path": "a.json"}, Traits(files={"path": "a.json"})),
    ],
)
def test_class_data_and_properties_feed_traits(name: str, value: Any, traits: Traits) -> None:
    def read(self: Plain) -> Any:
        return value

    by_property = type("ByProperty", (Plain,), {name: property(read)})
    by_data = type("ByData", (Plain,), {name: value, "__annotations__": {name: ClassVar[Any]}})
    assert by_property().traits == by_data().traits == traits


def test_a_field_feeds_the_traits_of_its_instance() -> None:
    class Asked(Plain):
        requires_calibration_data: bool = True
        finest_granularity: Granularity = Granularity.LINEAR

    assert Asked().traits == Traits(data=DataUse.STREAM, granularity=Granularity.LINEAR)
    assert not Asked(requires_calibration_data=False).traits.needs_data


def test_class_data_feeds_rules() -> None:
    class Trainer(Plain):
        run_types: ClassVar[frozenset[str]] = frozenset({"train"})
        must_precede: ClassVar[frozenset[str]] = frozenset({"Other"})
        renamed: ClassVar[dict[str, str]] = {"begin": "start"}

    class Idle(Trainer):
        idle_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})

    assert Idle.rules == RecipeRules(
        run_types=frozenset({"train"}),
        idle_types=frozenset({"oneshot"}),
        must_precede=frozenset({"Other"}),
        renamed={"begin": "start"},
    )
    assert Trainer(begin=2).start == 2  # type: ignore[call-arg]


def test_methods_feed_selection_prediction_and_report() -> None:
    class Technique(Plain):
        runs_to_end: ClassVar[bool] = True

        def calibrated_modules(self, state: State) -> list[nn.Module]:
            return [LINEAR]

        def undivided(self, state: State) -> list[nn.Module]:
            return [LINEAR]

        def accepts_unreached(self, name: str) -> bool:
            return name == "expert"

        def planned(self, state: State) -> list[PlannedModule]:
            return [PLANNED]

        def as_written(self, state: State) -> Any:
            return nullcontext(state)

        def registered(self, model: Any) -> Any:
            return [model]

        def report(self) -> dict[str, Any]:
            return {"a": 1, "b": 2}

    one, state = Technique(), State(model="model")
    chosen, prediction = one.select(state), one.predict(state)
    assert (chosen.modules, chosen.undivided, chosen.to_end) == ([LINEAR], [LINEAR], True)
    assert (chosen.accepts_unreached("expert"), chosen.accepts_unreached("x")) == (True, False)
    assert (prediction.modules, prediction.registered) == ([PLANNED], ["model"])
    with prediction.attached() as entered:
        assert entered is state
    assert one.report() == {"a": 1, "b": 2}
    assert one.report({"b"}) == {"b": 2}


def test_a_check_of_data_feeds_the_check() -> None:
    class Technique(Plain):
        def check_data(self, batches: Any, *, use_loss_mask: bool) -> None:
            raise DatasetError("There are no labels.", "Add them.")

    with pytest.raises(DatasetError):
        Technique().check([], use_loss_mask=False)


def test_the_contract_feeds_the_earlier_names() -> None:
    modifier: Any = QuantizationModifier(scheme="W8A8", ignore=["lm_head"])
    assert modifier.requires_calibration_data is modifier.traits.needs_data
    assert (modifier.finest_granularity, modifier.works_by_block) == ("linear", True)
    assert QuantizationModifier.changes_weights  # type: ignore[attr-defined]
    assert (Plain().select(State()), Plain().predict(State())) == (Selection(), Prediction())
