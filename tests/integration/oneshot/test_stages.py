# SPDX-License-Identifier: Apache-2.0
"""``run_stages``: stages in order, each in its folder, and only those that are not finished."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.training_cases import Breaker, Freezer, WeightHalver, arguments
from transformers import LlamaForCausalLM

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


def test_a_stage_that_is_removed_is_done_again(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    _stages(one_block, output)
    before = small.tree(output / "stage_quant")
    shutil.rmtree(output / "stage_quant")
    _stages(one_block, output)
    kept = {name: value for name, value in before.items() if "report" not in name}
    after = small.tree(output / "stage_quant")
    assert {name: value for name, value in after.items() if "report" not in name} == kept


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


@pytest.mark.parametrize("run_type", ["oneshot", "train"])
@pytest.mark.parametrize("loaded", [False, True])
def test_targets_of_later_stages_that_match_nothing_are_warned_of_before_the_first(
    run_type: str, loaded: bool, one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    recipe = RECIPE.replace("targets: Linear", "targets: [Linear, 're:.*q_prj']")
    recipe = recipe.replace("run_type: oneshot", f"run_type: {run_type}")
    model = LlamaForCausalLM.from_pretrained(one_block) if loaded else str(one_block)
    with pytest.raises(InputError, match="q_prj"):
        run_stages(model, recipe, **arguments(tmp_path / "out", save_steps=1))
    [warned] = [place for place, line in enumerate(said) if "cannot begin unless" in line]
    assert "'quant'" in said[warned]
    assert "q_proj" in said[warned]
    assert warned < next(place for place, line in enumerate(said) if "Stage 1 of 3" in line)


@pytest.mark.parametrize("changed", ["", "allow_unmatched: true, targets: [Linear, 're:.*q_prj']"])
def test_targets_that_match_or_need_not_are_not_warned_of(
    changed: str, one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    recipe = RECIPE.replace("targets: Linear", changed or "targets: Linear")
    _stages(one_block, tmp_path / "out", recipe)
    assert not [line for line in said if "cannot begin unless" in line]


def test_rotations_that_are_multiplied_in_are_no_bar(one_block: Path, tmp_path: Path) -> None:
    recipe = ROTATED.format("SpinQuantModifier: {rotations: [R1, R2]}")
    _stages(one_block, tmp_path / "out", recipe)
    assert verify(tmp_path / "out" / "stage_quant").ok


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


def test_a_stage_before_may_be_the_teacher(one_block: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "out" / "stage_halving"
    _stages(one_block, tmp_path / "out", DISTILL, distill_teacher=str(teacher), max_steps=1)
    assert (tmp_path / "out" / "stage_fine" / "trainer_state.json").is_file()


def test_a_folder_with_other_files_is_left_alone(one_block: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="already holds files"):
        _stages(one_block, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_train_can_be_told_to_run_all_stages(tmp_path: Path) -> None:
    recipe = "\n".join(RECIPE.splitlines()[:4])
    model = train(small.one_block(), recipe, **arguments(tmp_path / "out", run_stages=True))
    assert (tmp_path / "out" / "stage_halving" / "config.json").is_file()
    assert (tmp_path / "out" / "stage_fine" / "trainer_state.json").is_file()
    assert Freezer.steps == [1, 2, 3, 4]
    assert small.logits(model).isfinite().all()


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


def test_an_empty_output_is_refused(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (run_stages, partial(train, run_stages=True)):
        with pytest.raises(OutputError, match="'output_dir' is empty"):
            call(str(one_block), RECIPE, **{**arguments(tmp_path), "output_dir": ""})
    assert not list(tmp_path.iterdir())


def test_the_last_recipe_tells_of_all_stages(one_block: Path, tmp_path: Path) -> None:
    _stages(one_block, tmp_path / "out")
    found = Recipe.create_instance(tmp_path / "out" / "stage_quant" / "recipe.yaml")
    assert [stage.name for stage in found.stages] == ["halving", "fine", "quant"]


def test_a_stage_that_cannot_begin_leaves_no_record(one_block: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-model"):
        run_stages("./no-model", RECIPE, **arguments(tmp_path / "new" / "out"))
    assert not list(tmp_path.iterdir())
    recipe = RECIPE.replace("targets: Linear", "targets: Liner")
    with pytest.raises(InputError, match="Liner"):
        _stages(one_block, tmp_path / "out", recipe)
    noted = json.loads((tmp_path / "out" / "stages.json").read_text())["stages"]
    assert list(noted) == ["halving", "fine"]
    with pytest.raises(ArgumentError, match=r"'output_dir' cannot be None"):
        run_stages(str(one_block), RECIPE, **{**arguments(tmp_path), "output_dir": None})
