# SPDX-License-Identifier: Apache-2.0
"""The schema by which editors check recipes accepts what we read, and tells what we refuse."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import yaml
from tests.house import ROOT

from llmcompressor.recipe import Recipe
from llmcompressor.recipe.grammar import DERIVED_FIELDS
from llmcompressor.recipe.schema import recipe_schema

PACKAGED = json.loads((files("llmcompressor") / "data" / "recipe.schema.json").read_text())
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.M | re.S)


def shown_recipes() -> dict[str, str]:
    """Every recipe of the pages and of the examples."""
    found = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for place, text in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
            if re.search(r"modifiers:", text):
                found[f"{page.relative_to(ROOT)}:{place}"] = text
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        found[str(file.relative_to(ROOT))] = file.read_text(encoding="utf-8")
    return found


RECIPES = shown_recipes()


def problems(recipe: Any) -> list[str]:
    validator = jsonschema.Draft7Validator(PACKAGED)
    return [one.message for one in validator.iter_errors(recipe)]


def test_the_package_holds_the_schema_of_its_modifiers() -> None:
    jsonschema.Draft7Validator.check_schema(PACKAGED)
    assert recipe_schema() == PACKAGED, (
        "llmcompressor schema -o src/llmcompressor/data/recipe.schema.json"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_are_shown_are_valid(name: str) -> None:
    assert problems(yaml.safe_load(RECIPES[name])) == []


def test_what_is_written_is_valid() -> None:
    recipe = Recipe.create_instance(RECIPES["docs/recipes.md:0"])
    assert problems(yaml.safe_load(recipe.yaml())) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"modifers": {}},
        {"modifiers": {"GPTQModifier": {"sheme": "W4A16"}}},
        {"modifiers": {"GPTQModifier": {"block_size": "large"}}},
        {"quant_stage": {"run_type": "both", "quant_modifiers": {"GPTQModifier": {}}}},
        {"modifiers": [{"GPTQModifier": {"dampening_frac": [1]}}]},
        {"modifiers": {"GPTQModifier": {"config_groups": {"g": {"weights": {"bits": 4}}}}}},
    ],
)
def test_mistakes_are_told(wrong: dict[str, Any]) -> None:
    assert problems(wrong)


def test_expressions_stand_for_values() -> None:
    fields = {
        "block_size": "eval(2 * n)",
        "config_groups": {"g": {"weights": {"num_bits": "eval(n)"}}},
    }
    assert problems({"args": {"n": 4}, "modifiers": {"GPTQModifier": fields}}) == []


def test_fields_have_their_meaning() -> None:
    told = PACKAGED["definitions"]["GPTQModifier"]["properties"]
    bare = {name for name, one in told.items() if not one.get("description")}
    assert bare == DERIVED_FIELDS


def test_what_editors_show_is_one_line() -> None:
    told = [one.get("description", "") for one in recipe_schema()["definitions"].values()]
    assert any(told)
    assert not [one for one in told if "\n" in one or "noqa" in one or ":param" in one]
