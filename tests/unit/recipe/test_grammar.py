# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError
from llmcompressor.recipe import Recipe


class GrammarPruner(Modifier):
    """A technique of a third party."""

    targets: str | list[str] = "Linear"
    sparsity: float = 0.5
    extra: Any = None

    def on_initialize(self, state, **kwargs):
        return True


class GrammarRounder(GrammarPruner):
    """Another one."""

    bits: int = 8


def names(recipe):
    return [type(modifier).__name__ for modifier in recipe.modifiers]


FIELDS = {"targets": ["re:.*q_proj"], "sparsity": 0.25}
SAME = [
    {"default_stage": {"default_modifiers": {"GrammarPruner": FIELDS}}},
    {"default_stage": {"modifiers": {"GrammarPruner": FIELDS}}},
    {"default_stage": {"modifiers": [{"GrammarPruner": FIELDS}]}},
    {"stages": {"default": {"prune_modifiers": {"GrammarPruner": FIELDS}}}},
    {"stages": {"default_stage": {"prune_modifiers": {"GrammarPruner": FIELDS}}}},
    {"prune_modifiers": {"GrammarPruner": FIELDS}},
    {"modifiers": {"GrammarPruner": FIELDS}},
    {"modifiers": [{"GrammarPruner": FIELDS}]},
    {"version": "1.0", "description": "eval( is no matter", "modifiers": {"GrammarPruner": FIELDS}},
    {"args": {"s": 0.25}, "modifiers": {"GrammarPruner": {**FIELDS, "sparsity": "eval(s)"}}},
]


@pytest.mark.parametrize("document", SAME)
def test_both_generations_say_the_same(document):
    expected = Recipe.from_modifiers(GrammarPruner(**FIELDS))
    assert Recipe.create_instance(document) == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 1)), min_size=1, max_size=6))
def test_generations_agree_on_order_and_groups(entries):
    """One modifier per group and class in a mapping; the list form takes any number."""
    items = [{"GrammarPruner": {"group": g, "sparsity": s}} for g, s in entries]
    in_list = Recipe.create_instance({"stages": {"x": {"modifiers": items}}})
    by_stage = Recipe.create_instance(
        {"x_stage": {f"g{i}_modifiers": item for i, item in enumerate(items)}}
    )
    objects = [GrammarPruner(sparsity=s, group=g) for g, s in entries]
    assert in_list == by_stage == Recipe.from_modifiers(objects, "x_stage")
    assert [m.group for m in by_stage.modifiers] == [g for g, _ in entries]


def test_stages_keep_their_order_names_and_run_types():
    recipe = Recipe.create_instance("""
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers: {GrammarPruner: {sparsity: 0.5}}
finetuning_train_stage:
  finetuning_modifiers: {GrammarPruner: }
quantization_stage:
  quant_modifiers: {GrammarRounder: {bits: 4}}
""")
    described = [(stage.name, stage.run_type) for stage in recipe.stages]
    assert described == [
        ("sparsity", "oneshot"),
        ("finetuning_train", "train"),
        ("quantization", None),
    ]
    assert [m.group for m in recipe.modifiers] == ["sparsity", "finetuning", "quant"]
    assert recipe.stage("quantization").modifiers == (recipe.modifiers[2],)


def test_several_entries_in_a_list_item_and_two_of_one_class():
    recipe = Recipe.create_instance("""
modifiers:
  - GrammarPruner: {sparsity: 0.1}
    GrammarRounder:
  - GrammarPruner: {sparsity: 0.2}
""")
    assert names(recipe) == ["GrammarPruner", "GrammarRounder", "GrammarPruner"]
    assert [m.sparsity for m in recipe.modifiers] == [0.1, 0.5, 0.2]


def test_derived_fields_of_other_tools_are_read_over():
    fields = {"requires_calibration_data": True}
    read = Recipe.create_instance({"modifiers": {"GrammarPruner": fields}})
    assert read.modifiers[0].requires_calibration_data is False


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"quant_modifers": {"GrammarPruner": {}}}, "`quant_modifers`.*quant_modifiers"),
        ({"quant_stag": {}}, "`quant_stag`.*Did you mean quant_stage"),
        ({"modifier": {"GrammarPruner": {}}}, "Did you mean modifiers"),
        ({"GrammarPruner": {}}, "`GrammarPruner`.*Put GrammarPruner under `modifiers`"),
        ({"modifiers": {"GrammarPruner": {}}, "zzz": 1}, "`zzz`.*A recipe has"),
        ({"x": 1, "y": 2}, "unrecognized keys: `x`, `y`"),
        ({3: 1}, "unrecognized key: `3`"),
        ({"version": 1, "name": "x"}, "no modifiers: its keys are `version`, `name`"),
        ({"a_stage": {}}, "stage 'a_stage' .*no modifiers"),
        ({"a_stage": [1]}, "stage 'a_stage' .*mapping is expected"),
        ({"a_stage": {"run_typ": "train"}}, "`run_typ`.*Did you mean run_type"),
        ({"a_stage": {"a_modifiers": {}, "run_type": "tran"}}, "run_type 'tran'.*mean train"),
        ({"a_stage": {"b_stage": {"modifiers": {}}}}, "unrecognized key: `b_stage`"),
        ({"a_stage": {"modifiers": {}}, "stages": {"a": {"modifiers": {}}}}, "'a'.*twice"),
        ({"modifiers": "GrammarPruner"}, "`modifiers` .*the text 'GrammarPruner'"),
        ({"modifiers": ["GrammarPruner"]}, "item of `modifiers`.*- ClassName"),
        ({"modifiers": {"GrammarPruner": [1]}}, "modifier GrammarPruner .*mapping is expected"),
        ({"modifiers": {"GrammarPrunner": {}}}, "GrammarPrunner.*GrammarPruner"),
        ({"modifiers": {"GrammarPruner": {"target": "x"}}}, "target.*targets"),
        ({"modifiers": {"GrammarPruner": {"sparsity": "much"}}}, "sparsity"),
        ({"args": [1], "modifiers": {}}, "args .*mapping is expected"),
    ],
)
def test_what_the_grammar_refuses(document, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.create_instance(document)


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        [],
        "{}",
        "modifiers: {}",
        {"modifiers": []},
        "a_stage: {a_modifiers: {}}",
        {"args": {"a": 1}, "x_modifiers": {}},
    ],
)
def test_empty_on_purpose(given):
    recipe = Recipe.create_instance(given)
    assert recipe.modifiers == []
    assert not recipe


@pytest.mark.parametrize("given", ["", "  \n", [None, ""]])
def test_a_blank_text_is_no_empty_recipe(given):
    """It is what ``--recipe "$UNSET"`` gives."""
    with pytest.raises(RecipeError, match=r"The recipe is empty\. Write `modifiers: \{\}`"):
        Recipe.create_instance(given)


# --- arguments


ARGS = """
args: {bits: 4, first: 2, last: eval(first + 3), layers: 're:.*[eval(first)-eval(last)]'}
modifiers:
  GrammarRounder:
    bits: eval(bits)
    sparsity: eval( 1 / bits )
    targets: [eval(layers), "block.eval(last).proj", medieval(x)]
    extra: {deep: ['eval(max(bits, 3) > 3)', "eval('eval(x)')"]}
"""


def test_expressions_keep_their_type_or_become_text():
    rounder = Recipe.create_instance(ARGS).modifiers[0]
    assert (rounder.bits, rounder.sparsity) == (4, 0.25)
    assert rounder.targets == ["re:.*[2-5]", "block.5.proj", "medieval(x)"]
    assert rounder.extra == {"deep": [True, "eval(x)"]}


@pytest.mark.parametrize("recipe_args", [{"bits": 2, "first": 7}, ["bits=2", " first = 7"]])
def test_overrides_win_and_reach_what_depends_on_them(recipe_args):
    recipe = Recipe.create_instance(ARGS, recipe_args=recipe_args)
    assert recipe.modifiers[0].bits == 2
    assert recipe.modifiers[0].targets[:2] == ["re:.*[7-10]", "block.10.proj"]
    assert recipe.args["last"] == 10


@pytest.mark.parametrize(
    ("recipe", "recipe_args", "message"),
    [
        (ARGS, ["bit=3"], "'bit'.*Did you mean bits"),
        (ARGS, ["bits"], "'bits'.*name=value"),
        (ARGS, ["1x=3"], "'1x' is not the name"),
        (ARGS, {3: 4}, "3 is not the name"),
        (ARGS, [7], "7 in recipe_args"),
        ("modifiers: {GrammarPruner: {}}", {"a": 1}, "'a'.*no arguments"),
        (
            "args: {a: eval(b), b: eval(c), c: eval(a)}\n"
            "m_modifiers: {GrammarPruner: {extra: eval(b)}}",
            None,
            "b → c → a → b",
        ),
        ("args: {a: eval(a)}\nm_modifiers: {GrammarPruner: {extra: eval(a)}}", None, "a → a"),
        ("modifiers: {GrammarPruner: {extra: 'eval(1 +'}}", None, "not a valid expression"),
        ("modifiers: {GrammarPruner: {extra: 'eval(open(1))'}}", None, "'open' is not allowed"),
    ],
)
def test_wrong_arguments(recipe, recipe_args, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.create_instance(recipe, recipe_args=recipe_args)


GATED = {
    "args": {"most": 0.02},
    "gates": {"kl": "eval(most)", "top1": 0.9},
    "first_stage": {"gates": {"size": "1KB"}, "modifiers": {"GrammarPruner": FIELDS}},
    "second_stage": {"gates": {"top1": 0.8}, "modifiers": {"GrammarRounder": {}}},
}


def test_gates_outside_of_a_stage_are_of_the_last_one() -> None:
    recipe = Recipe.create_instance(GATED)
    first, second = recipe.stages
    assert (first.gates, second.gates) == ({"size": 1000}, {"kl": 0.02, "top1": 0.8})
    assert recipe.gates == {"size": 1000, "kl": 0.02, "top1": 0.8}
    assert Recipe.create_instance(GATED, target_stage="first").gates == {"size": 1000}


def test_a_recipe_keeps_its_gates() -> None:
    recipe = Recipe.create_instance(GATED)
    again = Recipe.create_instance(recipe.yaml())
    assert again == recipe
    assert [one.gates for one in again.stages] == [one.gates for one in recipe.stages]
    bare = recipe.without_gates()
    assert bare != recipe
    assert not bare.gates
    assert "gates" not in bare.yaml()
    joined = Recipe.create_instance(
        [Recipe.create_instance({**SAME[0], "gates": {"kl": 1}}), SAME[0]]
    )
    assert joined.gates == {"kl": 1.0}


@pytest.mark.parametrize("gates", [{"kld": 1}, {"top1": 2}, ["kl"], 3], ids=str)
def test_wrong_gates(gates: Any) -> None:
    with pytest.raises(RecipeError, match="gate"):
        Recipe.create_instance({**SAME[0], "gates": gates})
    with pytest.raises(RecipeError, match="gate"):
        Recipe.create_instance({"a_stage": {"modifiers": {"GrammarPruner": {}}, "gates": gates}})
