# SPDX-License-Identifier: Apache-2.0
"""``run_stages``: stages in order, each in its folder, and only those that are not finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.killed_runs import killed_at_the_last_step
from tests.support.training_cases import Breaker, Freezer, WeightHalver, arguments

from llmcompressor import run_stages, train, verify
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    InputError,
    OutputError,
    RecipeError,
)
from llmcompressor.recipe import Recipe

RECIPE = """
args: {scheme: FP8_DYNAMIC}
halving_stage: {a_modifiers: {WeightHalver: {}}}
fine_stage: {a_modifiers: {Freezer: {}, Breaker: {}}}
quant_stage:
  run_type: oneshot
  a_modifiers: {QuantizationModifier: {targets: Linear, scheme: eval(scheme), ignore: [lm_head]}}
"""
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Freezer.steps.clear()


def _stages(folder: Path, output: Path, recipe: str = RECIPE, **changes: Any) -> Any:
    return run_stages(str(folder), recipe, **arguments(output, save_steps=1, **changes))


def _breaking(folder: Path, output: Path) -> None:
    Breaker.at = 2
    try:
        with pytest.raises(KeyboardInterrupt):
            _stages(folder, output)
    finally:
        Breaker.at = None


def test_each_stage_reads_what_the_one_before_has_written(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    model = _stages(one_block, output)
    names = ["stage_fine", "stage_halving", "stage_quant", "stages.json"]
    assert sorted(path.name for path in output.iterdir()) == names
    weights = [
        load_file(folder / "model.safetensors")[NORM].float()
        for folder in (one_block, output / "stage_halving", output / "stage_fine")
    ]
    assert torch.equal(weights[1], weights[0] / 2)
    assert torch.equal(weights[2], weights[1]), "the stage that trains held it"
    assert Freezer.steps == [1, 2, 3, 4]
    assert verify(output / "stage_quant").ok
    config = json.loads((output / "stage_quant" / "config.json").read_text())
    assert config["quantization_config"]
    assert small.logits(model).isfinite().all()


def test_finished_stages_are_skipped(one_block: Path, tmp_path: Path, said: list[str]) -> None:
    output = tmp_path / "out"
    _breaking(one_block, output)
    assert Freezer.steps == [1, 2]
    before = small.tree(output / "stage_halving")
    said.clear()
    _stages(one_block, output)
    assert Freezer.steps == [1, 2, 3, 4], "the stage that was broken off goes on"
    assert small.tree(output / "stage_halving") == before
    assert [line for line in said if "skipped" in line] == [
        "Stage 1 of 3, halving (oneshot): finished before, skipped."
    ]
    whole = small.tree(output)
    again = _stages(one_block, output)
    assert Freezer.steps == [1, 2, 3, 4]
    assert small.tree(output) == whole
    assert small.logits(again).isfinite().all(), "the model of the last stage, from its folder"


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 0x10
    file.write_bytes(content)


def test_a_damaged_stage_is_done_again_if_it_is_needed(
    one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    output = tmp_path / "out"
    _stages(one_block, output)
    whole = small.tree(output / "stage_quant")
    for damaged in ("stage_fine", "stage_quant"):
        _flip(output / damaged / "model.safetensors")
    said.clear()
    Freezer.steps.clear()
    _stages(one_block, output)
    assert small.tree(output / "stage_quant") == whole
    assert Freezer.steps == [1, 2, 3, 4]
    assert any("stage_fine is damaged: model.safetensors is not" in line for line in said)
    assert (output / "stage_fine.damaged").is_dir()
    _flip(output / "stage_halving" / "model.safetensors")
    said.clear()
    _stages(one_block, output)
    assert not any("damaged" in line for line in said), "nobody reads it any more"


def test_what_a_kill_left_beside_a_finished_stage_goes(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with killed_at_the_last_step():
        _stages(one_block, output)
    assert (output / "stage_halving.partial").exists()
    _stages(one_block, output)
    names = ["stage_fine", "stage_halving", "stage_quant", "stages.json"]
    assert sorted(path.name for path in output.iterdir()) == names


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 0.5}, r"'fine'.*arguments\.learning_rate: 0\.001 then, 0\.5 now"),
        ({"recipe_args": {"scheme": "FP8_BLOCK"}}, r"'quant'.*FP8_DYNAMIC"),
    ],
)
def test_stages_of_another_run_are_not_taken_for_ones_own(
    change: dict[str, Any], named: str, one_block: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _stages(one_block, output)
    before = small.tree(output)
    with pytest.raises(OutputError, match=named):
        _stages(one_block, output, **change)
    assert small.tree(output) == before
    Freezer.steps.clear()
    _stages(one_block, output, overwrite=True, **change)
    assert bool(Freezer.steps) == ("learning_rate" in change), "and what did not change is kept"


QUANT_FIRST = """
quant_stage:
  a_modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}
fine_stage: {a_modifiers: {Freezer: {}}}
"""
QUANT_TWICE = """
stages:
  first:
    run_type: oneshot
    modifiers: {GPTQModifier: {targets: ["re:.*self_attn.*"], scheme: W8A16}}
  second:
    run_type: oneshot
    modifiers: {QuantizationModifier: {targets: ["re:.*mlp.*"], scheme: FP8_DYNAMIC}}
"""
QUANT_TRAINED = """
fine_stage:
  run_type: train
  a_modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}
halving_stage: {a_modifiers: {WeightHalver: {}}}
"""
ROTATED = """
turn_stage: {{a_modifiers: {{{0}}}}}
quant_stage:
  a_modifiers: {{QuantizationModifier: {{targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}}}
"""
AT_RUN_TIME = """{config_groups: {v: {type: hadamard, apply: [
  {targets: [Linear], ignore: [lm_head], location: input},
  {targets: [Linear], ignore: [lm_head], location: weight_input, inverse: true}]}}}"""
DISTILL = """
halving_stage: {a_modifiers: {WeightHalver: {}}}
fine_stage: {a_modifiers: {OutputDistillationModifier: {}}}
"""
GPTQ_LAST = """
halving_stage: {a_modifiers: {WeightHalver: {}}}
quant_stage: {a_modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}}
"""


@pytest.mark.parametrize(
    ("recipe", "changes", "error", "words"),
    [
        (QUANT_FIRST, {}, RecipeError, ("'fine'", "'quant'", "quantized", "last")),
        (QUANT_TWICE, {}, RecipeError, ("'first'", "'second'", "quantized", "into one stage")),
        (QUANT_TRAINED, {}, RecipeError, ("'fine'", "'halving'", "last stage alone")),
        (
            ROTATED.format("QuIPModifier: {}"),
            {},
            RecipeError,
            ("'turn'", "'quant'", "rotates", "into one stage"),
        ),
        (
            ROTATED.format("SpinQuantModifier: {rotations: [R1, R4]}"),
            {},
            RecipeError,
            ("'turn'", "'quant'", "rotates", "into one stage"),
        ),
        (
            ROTATED.format(f"SpinQuantModifier: {{transform_config: {AT_RUN_TIME}}}"),
            {},
            RecipeError,
            ("'turn'", "'quant'", "rotates"),
        ),
        (DISTILL, {}, ArgumentError, ("'fine'", "no teacher", "distill_teacher=")),
        (DISTILL, {"distill_teacher": "./none"}, CheckpointError, ("./none", "teacher")),
        (DISTILL, {"distill_teacher": 3}, InputError, ("distill_teacher",)),
        (GPTQ_LAST, {"dataset": None}, DatasetError, ("GPTQModifier needs calibration data",)),
        (GPTQ_LAST, {"dataset": "./none.jsonl"}, DatasetError, ("./none.jsonl",)),
        (RECIPE, {"eval_strategy": "steps"}, DatasetError, ("nothing to evaluate on",)),
        (
            "train_stage: {a_modifiers: {WeightHalver: {}}}",
            {},
            RecipeError,
            ("WeightHalver", "'train'", "oneshot"),
        ),
        (
            "oneshot_stage: {a_modifiers: {Freezer: {}}}",
            {},
            RecipeError,
            ("Freezer", "'oneshot'", "train"),
        ),
        (RECIPE, {"learning_rat": 1.0}, ArgumentError, ("learning_rate",)),
        (RECIPE, {"stage": "fine"}, ArgumentError, ("stage",)),
        (RECIPE, {"dry_run": True}, ArgumentError, ("dry run",)),
        (RECIPE, {"resume": "must"}, OutputError, ("nothing to resume",)),
        (RECIPE, {"resume_from_checkpoint": "x/checkpoint-3"}, ArgumentError, ("Repeat",)),
        (RECIPE, {"dataset": "./none.jsonl"}, InputError, ("./none.jsonl",)),
        (RECIPE, {"max_steps": -1, "dataset": iter([])}, ArgumentError, ("max_steps",)),
        ("modifiers: {}", {}, RecipeError, ("no stages",)),
        (GPTQ_LAST, {"loggers": ["print"]}, ArgumentError, ("'print' is not a logger",)),
        (RECIPE, {"loggers": ["print"]}, ArgumentError, ("'print' is not a logger",)),
    ],
)
def test_one_error_before_the_first_stage(
    recipe: str,
    changes: dict[str, Any],
    error: type[InputError],
    words: tuple[str, ...],
    one_block: Path,
    tmp_path: Path,
) -> None:
    with small.counted_forwards() as forwards, pytest.raises(error) as caught:
        _stages(one_block, tmp_path / "out", recipe, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert forwards == []
    assert list(tmp_path.iterdir()) == []
    assert WeightHalver.run_types == {"oneshot"}


def test_a_stage_with_what_cannot_train_keeps_zeros_by_itself(
    one_block: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = """
    pruning_stage:
      a_modifiers:
        WeightHalver: {}
        WandaPruningModifier: {sparsity: 0.5, targets: Linear, ignore: [lm_head]}
        ConstantPruningModifier: {targets: Linear}
    """
    model = _stages(one_block, tmp_path / "out", recipe)
    assert (model.model.layers[0].mlp.up_proj.weight == 0).float().mean() >= 0.5
    assert [text for text in warned if "ConstantPruningModifier" in text and "left out" in text]


@pytest.mark.parametrize("how", ["run_stages", "do_oneshot"])
def test_a_stage_that_is_named_is_trained_alone(
    how: str, tmp_path: Path, warned: list[str]
) -> None:
    """Beside what another call has put into the same output."""
    (tmp_path / "out" / "halving").mkdir(parents=True)
    train(small.one_block(), RECIPE, **arguments(tmp_path / "out", **{how: True}, stage="fine"))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fine", "halving"]
    assert sum(f"{how} has no effect" in line for line in warned) == 1


def test_the_last_recipe_tells_of_all_stages(one_block: Path, tmp_path: Path) -> None:
    _stages(one_block, tmp_path / "out")
    found = Recipe.create_instance(tmp_path / "out" / "stage_quant" / "recipe.yaml")
    assert [stage.name for stage in found.stages] == ["halving", "fine", "quant"]
