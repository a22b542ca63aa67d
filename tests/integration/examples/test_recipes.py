# SPDX-License-Identifier: Apache-2.0
"""Every recipe of ``examples/recipes`` is planned on models of the real size, without weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from llmcompressor import plan
from llmcompressor.planning.result import Plan

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "recipes"
CONFIGURATIONS = Path(__file__).parent / "configurations"
TOKENS = [{"input_ids": list(range(start, start + 32))} for start in range(4)]

# What is never quantized: head, embeddings, routers, what sees and what leads from it to text.
PLAIN = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_tokens|gate|router|conv1d)"
    r"|(?:.*\.)?(?:visual|vision_tower|vision_model|multi_modal_projector)(?:\..*)?"
)
ALSO_PLAIN = {"gpt_oss": r".*\.experts", "deepseek_v3": r".*\.self_attn\..*"}
MIXTURES = {"deepseek_v3", "glm4_moe", "granite_hybrid", "llama4", "mixtral", "qwen3_moe"}
"""Recipes that quantize experts: planning all of them takes seconds."""


def rows() -> list[list[str]]:
    """The cells of the table of the page."""
    page = (ROOT / "docs" / "recipe_library.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\|[^|]*\| \[`(\w+)\.yaml`\][^|]*\|(.*)\|$", page, re.MULTILINE)
    return [[name, *(cell.strip(" `") for cell in rest.split("|"))] for name, rest in lines]


ROWS = {row[1]: row for row in rows()}
"""Model → recipe, model, scheme, GB before and after, devices."""


def hollow(model: str, blocks: int | None = None) -> Any:
    """A model without weights, of so many blocks."""
    settings = json.loads((CONFIGURATIONS / f"{model}.json").read_text(encoding="utf-8"))
    text = settings.get("text_config", settings)
    if blocks is not None:
        text["num_hidden_layers"] = blocks
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][2 : blocks + 2]  # both kinds are there
    kind: Any = getattr(transformers, settings["architectures"][0])
    with torch.device("meta"):
        made = kind._from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    made.tie_weights()
    return made


def planned(model: str, *, blocks: int | None = None, devices: int | None = None) -> Plan:
    recipe = RECIPES / f"{ROWS[model][0]}.yaml"
    return plan(hollow(model, blocks), recipe, TOKENS, measure=False, serve="vllm", tp=devices)


def check_selection(recipe: str, found: Plan) -> None:
    assert [str(one) for one in found.problems] == []
    assert [str(one) for one in found.serving if one.severity == "error"] == []
    plain = {row.pattern for row in found.modules if row.scheme == "dense"}
    compressed = {row.pattern for row in found.modules if row.scheme != "dense"}
    also = re.compile(ALSO_PLAIN.get(recipe, "$^"))
    is_plain = {one for one in plain | compressed if PLAIN.fullmatch(one) or also.fullmatch(one)}
    assert plain == is_plain
    assert compressed
    assert any(".experts." in one for one in compressed) is (recipe in MIXTURES)


@pytest.mark.parametrize("model", ROWS)
def test_a_recipe_reaches_what_it_is_to_reach(model: str) -> None:
    """On the first blocks, in their real widths."""
    recipe = ROWS[model][0]
    found = planned(model, blocks=4)
    check_selection(recipe, found)
    useless = {one.pattern for one in found.matches if not one.matched}
    for_those_that_see = {one for one in useless if "vision" in one or "multi_modal" in one}
    assert useless == (for_those_that_see if recipe == "mistral" else set())


def slow_ones(row: list[str]) -> list[Any]:
    return [pytest.mark.slow] if row[0] in MIXTURES else []


@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=slow_ones(row)) for one, row in ROWS.items()]
)
def test_sizes_of_the_page_are_those_of_the_plan(model: str) -> None:
    recipe, _, scheme, before, after, devices = ROWS[model]
    found = planned(model, devices=int(devices))
    check_selection(recipe, found)
    assert found.sizes is not None
    assert f"{found.sizes.source / 1e9:.1f}" == before
    assert f"{found.sizes.weights / 1e9:.1f}" == after
    splits = [one for one in found.serving if "split over" in one.message]
    assert splits == [], "on as many devices as the page says"
    assert scheme in (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")


def test_every_recipe_is_on_the_page_and_gives_its_reasons() -> None:
    assert {row[0] for row in ROWS.values()} == {path.stem for path in RECIPES.glob("*.yaml")}
    assert set(ROWS) == {path.stem for path in CONFIGURATIONS.glob("*.json")}
    for path in RECIPES.glob("*.yaml"):
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        assert first.startswith("# ")
        left_out = [line for line in lines if line.lstrip().startswith("- ")]
        assert left_out
        assert [line for line in left_out if " # " not in line] == [], path.name


SIZED = dict(
    re.findall(
        r"\(([\w]+)\.py\) \|[^|]*\| ([\d.]+ → [\d.]+) \|$",
        (ROOT / "examples" / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
"""Script → GB before and after, of the model that it names."""


TRIED_OUT = {"awq", "kv_cache", "moe", "rotations", "w8a8_smoothquant"}
"""Scripts whose plan runs a block or takes experts apart: seconds at the real size."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in TRIED_OUT)) for one in SIZED]
)
def test_sizes_of_a_script_are_those_of_its_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("llmcompressor.oneshot", lambda **arguments: given.update(arguments))
    exec((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"), {})
    model = hollow(given["model"].partition("/")[2])
    found = plan(model, given["recipe"], TOKENS, measure=False, serve="vllm")
    assert found.ok, str(found)
    assert found.sizes is not None
    sizes = found.sizes.source / 1e9, found.sizes.weights / 1e9
    assert "{:.1f} → {:.1f}".format(*sizes) == SIZED[name]


def test_every_script_of_a_known_model_has_its_size() -> None:
    known = "|".join(map(re.escape, ROWS))
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        is_known = re.search(rf'^MODEL = "[\w-]+/(?:{known})"$', text, re.MULTILINE)
        assert bool(is_known and "oneshot(" in text) is (path.stem in SIZED), path.name
