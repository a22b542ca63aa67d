# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    computed_field,
)

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import OutputError
from llmcompressor.logger import logger
from llmcompressor.recipe import Recipe, Stage


class Rounding(Enum):
    NEAREST = "nearest"


class Inner(BaseModel):
    width: int = 4
    name: str | None = None


PLAIN = f"{__name__}.WritingPlain"


class WritingPlain(Modifier):
    """Untyped values, as in the arguments of schedulers and observers."""

    value: Any = None
    rate: float = 0.1
    maybe: int | None = 5

    def on_initialize(self, state, **kwargs):
        return True


class WritingOld(Modifier):
    """A field of an earlier release."""

    moved: ClassVar[Mapping[str, str]] = {"old": "do that."}

    old: bool = True

    def on_initialize(self, state, **kwargs):
        return True


class WritingRich(Modifier):
    """One field of each kind that the package's modifiers have."""

    rounding: Rounding = Rounding.NEAREST
    pair: tuple[int, int] = (0, 1)
    names: set[str] = Field(default_factory=set)
    inner: Inner | None = None
    inners: dict[str, list[Inner]] = Field(default_factory=dict)
    config_groups: dict[str, QuantizationScheme] | None = None
    path: Path | None = None
    by_number: dict[int, str] = Field(default_factory=dict)
    secret: Annotated[int, Field(exclude=True)] = 3
    steps_: int = 0
    _runtime: int = PrivateAttr(0)

    def on_initialize(self, state, **kwargs):
        return True

    @computed_field
    @property
    def derived(self) -> int:
        return self.pair[0]


def round_trip(recipe):
    text = recipe.yaml()
    again = Recipe.create_instance(text)
    assert again == recipe, text
    assert again.yaml() == text
    yaml.safe_load(text)  # no tags of Python's
    return again, text


finite_or_not = st.floats(allow_nan=True, width=64)
texts = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="eval()'\"\\ x1+.:#-[]{}\n", max_size=30),
    st.from_regex(r"[-+.0-9eExob_:]{1,8}", fullmatch=True),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), finite_or_not, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
modifiers = st.builds(
    WritingPlain,
    value=values,
    rate=finite_or_not,
    maybe=st.none() | st.integers(),
    group=st.sampled_from([None, "quant", "quant_1", "default", "a b"]),
    start=st.none() | st.floats(allow_nan=False, width=64),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(modifiers, max_size=4), st.sampled_from([None, "oneshot", "a_1", "x"]))
def test_what_is_saved_loads_back_equal(items, name):
    recipe = Recipe.from_modifiers(items, name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    again, _ = round_trip(recipe)
    for mine, theirs in zip(recipe.modifiers, again.modifiers, strict=True):
        assert repr(mine.value) == repr(theirs.value)
        assert repr((mine.rate, mine.maybe)) == repr((theirs.rate, theirs.maybe))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "train", "a_1"]),
            st.sampled_from([None, "oneshot", "train"]),
            st.lists(modifiers, max_size=3),
        ),
        max_size=4,
        unique_by=lambda stage: stage[0],
    )
)
def test_stages_load_back_equal(stages):
    recipe = Recipe(Stage(name, tuple(items), kind) for name, kind, items in stages)
    again, _ = round_trip(recipe)
    assert [s.run_type for s in again.stages] == [s.run_type for s in recipe.stages]


@pytest.mark.parametrize(
    "value",
    [
        "1e-3",
        "on",
        "No",
        "null",
        "~",
        "12:30",
        "0x1f",
        "1_000",
        ".5",
        ".inf",
        "2024-01-01",
        "=",
        "<<",
        "",
        "a: b",
        "# x",
        "- x",
        "re:.*[0-9]$",
        "eval(x)",
        "x eval('a') eval(",
        "é→\u2028",
        "line\nline\n",
        "\x85",
        " \u2029",
        "!!x",
        1e-05,
        1e16,
        -0.0,
        5e-324,
        float("inf"),
        10**30,
        True,
        "x " * 200,
    ],
)
def test_scalars_that_yaml_readers_mistake(value):
    recipe = Recipe.from_modifiers(WritingPlain(value=[value, {"key": value}]))
    again, text = round_trip(recipe)
    assert again.modifiers[0].value == [value, {"key": value}]
    assert type(again.modifiers[0].value[0]) is type(value)
    if "eval(" not in str(value):  # others read the same values, but know no expressions
        other = yaml.safe_load(text)["default_stage"]["default_modifiers"][PLAIN]["value"]
        assert repr(other[0]) == repr(value)


def test_every_kind_of_field():
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=128, actorder="static")
    )
    rich = WritingRich(
        pair=(3, 4),
        names={"b", "a", "c"},
        inner=Inner(width=8),
        inners={"x": [Inner(name="n")]},
        config_groups={"group_0": scheme},
        path=Path("a/b"),
        by_number={2: "two"},
        steps_=7,
        group="quant",
        index=2,
    )
    rich._runtime = 9
    again, text = round_trip(Recipe.from_modifiers(rich))
    assert again.modifiers[0].config_groups == {"group_0": scheme}
    assert again.modifiers[0].inners == rich.inners
    assert again.modifiers[0].group == "quant"
    fields = yaml.safe_load(text)["default_stage"]["quant_modifiers"][f"{__name__}.WritingRich"]
    assert fields["names"] == ["a", "b", "c"]
    assert fields["inner"] == {"width": 8}
    assert fields["index"] == 2
    assert "output_activations" not in fields["config_groups"]["group_0"]
    assert not fields.keys() & {"group", "steps_", "derived", "secret", "_runtime", "start"}


@pytest.mark.parametrize("fields", [{}, {"old": True}, {"old": False}])
def test_a_field_without_effect_is_written_if_not_the_default(fields):
    """Else whoever runs what was written would be told of a field that nobody gave."""
    recipe, _ = round_trip(Recipe.from_modifiers(WritingOld(**fields)))
    assert ("old" in recipe.modifiers[0].model_fields_set) == (fields == {"old": False})


def test_values_without_a_spelling_are_left_out_aloud():
    heard = []
    sink = logger.add(heard.append, level="WARNING", format="{message}")
    try:
        modifier = WritingPlain(value={"dtype": torch.float64, "f": [len]}, rate=0.5)
        _, text = round_trip(Recipe.from_modifiers(modifier))
    finally:
        logger.remove(sink)
    assert "dtype: float64" in text
    assert "WritingPlain holds <built-in function len>" in heard[0]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(3.5), 3.5),
        (np.int64(3), 3),
        ([np.int8(-1), {"a": np.float16(0.5)}], [-1, {"a": 0.5}]),
        ({1: "one", 10: {2: 3}}, {1: "one", 10: {2: 3}}),
    ],
    ids=str,
)
def test_numbers_of_numpy_and_keys_that_are_numbers_stay_numbers(value, plain):
    [again] = Recipe.create_instance(
        Recipe.from_modifiers([WritingPlain(value=value)]).yaml()
    ).modifiers
    assert again.value == plain
    assert repr(again.value) == repr(plain)


def test_the_form_of_the_text():
    recipe = Recipe(
        [
            Stage("first", (WritingPlain(rate=0.25, group="warm"),), "oneshot"),
            Stage("second_train", (WritingPlain(value=1e-05), WritingPlain(maybe=2))),
            Stage("third", ()),
        ]
    )
    assert (
        recipe.yaml()
        == """\
first_stage:
  run_type: oneshot
  warm_modifiers:
    WritingPlain:
      rate: 0.25
      maybe: 5
second_train_stage:
  second_train_modifiers:
  - WritingPlain:
      value: 1.0e-05
      rate: 0.1
      maybe: 5
  - WritingPlain:
      rate: 0.1
      maybe: 2
third_stage:
  third_modifiers: {}
""".replace("WritingPlain", PLAIN)
    )
    round_trip(recipe)


def test_writing_to_a_file(tmp_path):
    recipe = Recipe.from_modifiers(WritingPlain(value="é"))
    path = tmp_path / "recipe.yaml"
    assert recipe.yaml(path) == path.read_text(encoding="utf-8") == recipe.yaml(str(path))
    assert Recipe.create_instance(path) == recipe
    with pytest.raises(OutputError, match="cannot be written"):
        recipe.yaml(tmp_path / "none" / "recipe.yaml")


def test_stages_of_an_earlier_recipe_come_first(tmp_path):
    path = tmp_path / "recipe.yaml"
    for value in range(3):
        recipe = Recipe.from_modifiers(WritingPlain(value=value))
        recipe.yaml(path, existing_recipe_path=path if value else None)
    stages = Recipe.create_instance(path).stages
    assert [stage.name for stage in stages] == ["default", "default_1", "default_2"]
    assert [stage.modifiers[0].value for stage in stages] == [0, 1, 2]


def test_an_unreadable_earlier_recipe_does_not_stop_saving(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("modifiers: {NobodyKnowsThis: {}}")
    recipe = Recipe.from_modifiers(WritingPlain())
    heard = []
    sink = logger.add(heard.append, level="WARNING", format="{message}")
    try:
        assert recipe.yaml(existing_recipe_path=path) == recipe.yaml()
    finally:
        logger.remove(sink)
    assert "NobodyKnowsThis" in heard[0]
