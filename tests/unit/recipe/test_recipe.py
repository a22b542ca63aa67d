# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import ClassVar

import pytest
from pydantic import Field

import llmcompressor.recipe
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError
from llmcompressor.recipe import Recipe, Stage


class RecipeShaper(Modifier):
    """Prepares for RecipeCutter and therefore has to come before it."""

    must_precede: ClassVar[frozenset[str]] = frozenset({"RecipeCutter"})
    strength: float = 0.5

    def on_initialize(self, state, **kwargs):
        return True


class RecipeCutter(Modifier):
    targets: list[str] = Field(default_factory=lambda: ["Linear"])

    def on_initialize(self, state, **kwargs):
        return True


class RecipeFineCutter(RecipeCutter):
    depth: int = 1


TEXT = """
shape_stage:
  shape_modifiers:
    RecipeShaper: {strength: 0.25}
cut_train_stage:
  cut_modifiers:
    RecipeCutter: {targets: [Embedding]}
    RecipeFineCutter: {depth: 2}
"""


@pytest.fixture
def recipe():
    return Recipe.create_instance(TEXT)


def kinds(recipe):
    return [type(modifier).__name__ for modifier in recipe.modifiers]


def test_a_recipe_and_its_mapping_are_made_of_each_other(recipe):
    mapping = recipe.to_dict()
    assert list(mapping) == ["shape_stage", "cut_train_stage"]
    for make in (Recipe.from_dict, Recipe.model_validate, Recipe.create_instance):
        assert make(mapping) == recipe


@pytest.mark.parametrize("extension", ["yaml", "json", "md", "txt"])
@pytest.mark.parametrize("as_text", [True, False])
def test_every_form_gives_an_equal_recipe(tmp_path, recipe, extension, as_text):
    path = tmp_path / f"recipe.{extension}"
    document = llmcompressor.recipe.document.parse_text(TEXT)
    forms = {"yaml": TEXT, "txt": TEXT, "md": f"---{TEXT}---\n", "json": json.dumps(document)}
    path.write_text(forms[extension])
    assert Recipe.create_instance(str(path) if as_text else path) == recipe
    assert Recipe.create_instance(forms[extension]) == recipe
    assert Recipe.create_instance(document) == recipe


@pytest.mark.parametrize(
    ("group", "name", "run_type"),
    [
        (None, "default", None),
        ("oneshot", "oneshot", "oneshot"),
        ("a_train_stage", "a_train", "train"),
    ],
)
def test_the_group_name_of_objects_is_the_stage(group, name, run_type):
    recipe = Recipe.create_instance([RecipeShaper()], modifier_group_name=group)
    assert [(stage.name, stage.run_type) for stage in recipe.stages] == [(name, run_type)]


def test_a_list_mixes_everything(tmp_path, recipe):
    path = tmp_path / "more.yaml"
    path.write_text("modifiers: {RecipeFineCutter: {depth: 3}}")
    mixed = Recipe.create_instance(
        [RecipeShaper(), recipe, [str(path), path], {"modifiers": {"RecipeCutter": {}}}]
    )
    assert [stage.name for stage in mixed.stages] == ["default", "shape", "cut_train", "default_1"]
    assert kinds(mixed) == [
        "RecipeShaper",
        *kinds(recipe),
        "RecipeFineCutter",
        "RecipeFineCutter",
        "RecipeCutter",
    ]
    assert Recipe.create_instance(mixed.yaml()) == mixed


@pytest.mark.parametrize("target", ["cut_train", "cut_train_stage"])
def test_a_stage_by_name(recipe, target):
    chosen = Recipe.create_instance(recipe, target_stage=target)
    assert kinds(chosen) == ["RecipeCutter", "RecipeFineCutter"]
    assert chosen == Recipe.create_instance(TEXT, target_stage=target)
    assert recipe.stage(target) == chosen.stages[0]
    assert len(recipe.stages) == 2


def test_an_unknown_stage_lists_those_there_are(recipe):
    with pytest.raises(RecipeError, match=r"no stage 'cut'.*shape, cut_train"):
        Recipe.create_instance(recipe, target_stage="cut")
    with pytest.raises(RecipeError, match=r"no stage 'x'.*no stages"):
        Recipe.create_instance(None, target_stage="x")


@pytest.mark.parametrize("later", [RecipeShaper, "modifiers: {RecipeShaper: {}}"])
@pytest.mark.parametrize("first", [RecipeCutter, RecipeFineCutter])
def test_declared_order_is_checked(first, later):
    later = later if isinstance(later, str) else later()
    with pytest.raises(RecipeError, match=r"RecipeShaper stands after Recipe(Fine)?Cutter"):
        Recipe.create_instance([first(), later])
    Recipe.create_instance([later, first()])


@pytest.mark.parametrize("given", [42, 1.5, object(), b"modifiers: {}", [RecipeCutter(), 3]])
def test_things_that_are_no_recipe(given):
    with pytest.raises(RecipeError, match="cannot be made of"):
        Recipe.create_instance(given)


def test_equality_is_by_content():
    assert Recipe() == Recipe.create_instance([])
    assert Recipe.from_modifiers(RecipeShaper()) == Recipe.from_modifiers(RecipeShaper(group="x"))
    base = Recipe.from_modifiers(RecipeCutter())
    assert base != Recipe.from_modifiers(RecipeFineCutter())
    assert base != Recipe.from_modifiers(RecipeCutter(targets=[]))
    assert base != Recipe.from_modifiers(RecipeCutter(), "other")
    assert base != Recipe([Stage("default", (RecipeCutter(),), "train")])
    assert base != "recipe"
    with pytest.raises(TypeError):
        hash(base)


def test_expressions_load_without_modifiers_or_torch():
    code = (
        "import sys; from llmcompressor.recipe.expressions import evaluate; evaluate('1');"
        "sys.exit(int('torch' in sys.modules or 'llmcompressor.core.modifier' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _doubled(first, pair):
    """Forty arguments, each made of the one before it twice."""
    later = "".join(f"\n  a{n}: {pair}".replace("B", f"a{n - 1}") for n in range(1, 41))
    return f"args:\n  a0: {first}{later}\nmodifiers: "


def _nested():
    found = ["x"]
    for _ in range(40):
        found = [found, found]
    return found


@pytest.mark.parametrize(
    ("pair", "used"),
    [
        ("eval([B, B])", "eval(a40)"),
        ("eval([B, B])", "eval(1 + a40)"),
        ("eval([B, B])", "text eval(a40)"),
        ("eval((B, B))", "eval(1 if a40 else 2)"),
        ("eval([[B], [B]])", "eval(a40 < a39)"),
        ("['eval(B)', 'eval(B)']", "eval(a40)"),
        ("{x: 'eval(B)', y: 'eval(B)'}", "eval(a40)"),
        ("'eval(B) eval(B)'", "eval(a40)"),
        ("eval(B + B)", "eval(a40)"),
    ],
)
def test_arguments_that_double_are_refused_at_once(pair, used, monkeypatch):
    monkeypatch.setattr("llmcompressor.runtime.limits.MAX_VALUES", 5000)
    text = _doubled("eval([1, 1])" if "+" in pair else "1", pair)
    started = time.perf_counter()
    with pytest.raises(RecipeError, match=r"values|too long"):
        Recipe.create_instance(f"{text}{{RecipeCutter: {{targets: '{used}'}}}}")
    assert time.perf_counter() - started < 5


def test_objects_that_double_are_refused_at_once(monkeypatch):
    monkeypatch.setattr("llmcompressor.runtime.limits.MAX_VALUES", 1000)
    monkeypatch.setattr("llmcompressor.core.modifier.MAX_FIELD_VALUES", 1000)
    use = "modifiers: {RecipeCutter: {targets: 'eval(a)'}}"
    for build in (
        lambda: Recipe.create_instance({"modifiers": {"RecipeCutter": {"targets": _nested()}}}),
        lambda: Recipe.create_instance(use, recipe_args={"a": _nested()}),
        lambda: RecipeCutter(targets=_nested()),
        lambda: RecipeCutter.model_validate({"targets": _nested()}),
    ):
        with pytest.raises(RecipeError, match=r"values\. Look for"):
            build()
    with pytest.raises(RecipeError, match="whole number of 5000000 bits"):
        Recipe.create_instance(f"modifiers: {{RecipeFineCutter: {{depth: 0x{'f' * 1250000}}}}}")
    with pytest.raises(RecipeError, match="nested too deeply"):
        Recipe.create_instance(f"---\nmodifiers: {{}}\n---\n{'[' * 10000}")
