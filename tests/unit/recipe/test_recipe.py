# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
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
