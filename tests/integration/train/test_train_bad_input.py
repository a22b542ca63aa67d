# SPDX-License-Identifier: Apache-2.0
"""What ``train`` cannot use: one error that says what to do, before a step and before a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.training_cases import QUANTIZE, Breaker, Freezer, WeightHalver, arguments
from torch.utils.data import DataLoader

from llmcompressor import oneshot, train
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    InputError,
    OutputError,
    RecipeError,
    TargetError,
)

PRUNE = "modifiers: {{MagnitudePruningModifier: {{init_sparsity: 0, final_sparsity: 0.5, {0}}}}}"
DISTILL = "modifiers: {{OutputDistillationModifier: {{{0}}}}}"

Case = tuple[dict[str, Any], type[InputError], tuple[str, ...]]


def _refusing(samples: Any) -> Any:
    raise TypeError("no way")


CASES: dict[str, Case] = {
    "ends before it starts": (
        {"recipe": PRUNE.format("targets: [Linear], start: 2, end: 1, update: 0.5")},
        RecipeError,
        ("MagnitudePruningModifier", "end (1)", "start (2)"),
    ),
    "ends where it starts": (
        {"recipe": QUANTIZE.replace("end: 2", "end: 0")},
        RecipeError,
        ("QuantizationModifier", "ends where it starts", "later end"),
    ),
    "a teacher for no time": (
        {"recipe": DISTILL.format("start: 2, end: 2")},
        RecipeError,
        ("OutputDistillationModifier", "ends where it starts, at 2"),
    ),
    "never updates": (
        {"recipe": PRUNE.format("targets: [Linear], start: 0, end: 2, update: 0")},
        RecipeError,
        ("MagnitudePruningModifier", "update"),
    ),
    "no such target": (
        {"recipe": PRUNE.format("targets: [Conv7d], start: 0, end: 2, update: 1")},
        TargetError,
        ("Conv7d",),
    ),
    "a target without parameters": (
        {"recipe": PRUNE.format("targets: ['re:.*rotary_emb'], start: 0, end: 2, update: 1")},
        TargetError,
        ("rotary_emb",),
    ),
    "a teacher that does not pair": (
        {
            "recipe": DISTILL.format("targets: [['re:model.layers.0$', 're:model.layers.*']]"),
            "distill_teacher": lambda: small.one_block(num_hidden_layers=3),
        },
        InputError,
        ("teacher",),
    ),
    "no teacher": (
        {"recipe": DISTILL.format("targets: ['re:model.layers.0$']")},
        InputError,
        ("teacher", "distill_teacher"),
    ),
    "a teacher that is not there": (
        {"distill_teacher": "./no/such/teacher"},
        CheckpointError,
        ("./no/such/teacher",),
    ),
    "a modifier of oneshot": (
        {"recipe": "modifiers: {WeightHalver: {}}"},
        RecipeError,
        ("WeightHalver", "default", "oneshot"),
    ),
    "GPTQ": (
        {"recipe": "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16}}"},
        RecipeError,
        ("GPTQModifier", "oneshot"),
    ),
    "an unknown argument": (
        {"learning_rat": 1e-3},
        ArgumentError,
        ("learning_rat", "Did you mean learning_rate"),
    ),
    "a wrong value": ({"lr_scheduler_type": "cosinus"}, ArgumentError, ("cosinus", "cosine")),
    "no steps": ({"max_steps": 0}, ArgumentError, ("max_steps",)),
    "no epochs": ({"num_train_epochs": 0}, ArgumentError, ("num_train_epochs",)),
    "a batch of none": (
        {"per_device_train_batch_size": 0},
        ArgumentError,
        ("per_device_train_batch_size",),
    ),
    "the batch size of calibration": (
        {"batch_size": 4},
        ArgumentError,
        ("batch_size", "per_device_train_batch_size"),
    ),
    "a dry run": ({"dry_run": True}, ArgumentError, ("dry run",)),
    "an upload": ({"push_to_hub": True}, ArgumentError, ("push_to_hub",)),
    "a stream without an end": (
        {"dataset": lambda: iter(small.token_rows()), "max_steps": -1},
        ArgumentError,
        ("stream", "max_steps"),
    ),
    "a loader": (
        {"dataset": lambda: DataLoader([{"input_ids": [1, 2]}])},  # type: ignore[arg-type]
        DatasetError,
        ("DataLoader", "data_collator"),
    ),
    "a collator that raises": (
        {"data_collator": lambda: _refusing},
        DatasetError,
        ("data_collator", "TypeError: no way", "input_ids"),
    ),
    "a collator that gives nothing": (
        {"data_collator": lambda: lambda samples: None},
        DatasetError,
        ("data_collator", "NoneType", "dictionaries"),
    ),
    "an infinite learning rate": (
        {"learning_rate": float("inf")},
        ArgumentError,
        ("learning_rate", "finite"),
    ),
    "a seed that numpy does not take": ({"seed": 2**40}, ArgumentError, ("seed", str(2**32 - 1))),
    "a text for true or false": ({"bf16": "false"}, ArgumentError, ("bf16", "True or False")),
    "a text for true, false or unset": (
        {"activation_checkpointing": "false"},
        ArgumentError,
        ("checkpointing", "True or False"),
    ),
    "a text for an own flag": ({"do_oneshot": "no"}, ArgumentError, ("do_oneshot", "True or")),
    "a text for a number": ({"adam_epsilon": "small"}, ArgumentError, ("adam_epsilon", "number")),
    "more smoothing than all": (
        {"label_smoothing_factor": 2},
        ArgumentError,
        ("label_smoothing_factor", "0 to 1"),
    ),
    "noise below zero": ({"neftune_noise_alpha": -1}, ArgumentError, ("neftune_noise_alpha",)),
    "a number for a checkpoint": (
        {"resume_from_checkpoint": 5},
        ArgumentError,
        ("resume_from_checkpoint", "folder"),
    ),
    "no data": ({"dataset": None}, DatasetError, ("dataset",)),
    "data that is not there": (
        {"dataset": "./no-such.jsonl"},
        DatasetError,
        ("./no-such.jsonl",),
    ),
    "tokens beyond the vocabulary": (
        {"dataset": [{"input_ids": [3, 4, 999]}]},
        DatasetError,
        ("999",),
    ),
    "labels of another length": (
        {"dataset": [{"input_ids": [3, 4, 5], "labels": [4, 5]}]},
        DatasetError,
        ("3 input_ids, but 2 in labels",),
    ),
    "labels beyond the vocabulary": (
        {"dataset": [{"input_ids": [3, 4, 5], "labels": [-100, 4, 999]}]},
        DatasetError,
        ("999 in its labels",),
    ),
    "labels that the loss does not leave out": (
        {"dataset": [{"input_ids": [3, 4, 5], "labels": [-1, 4, 5]}]},
        DatasetError,
        ("-1 in its labels",),
    ),
    "labels none of which counts": (
        {"dataset": [{"input_ids": [3, 4, 5], "labels": [-100] * 3}] * 4},
        DatasetError,
        ("-100", "nothing to learn"),
    ),
    "nothing to evaluate on": (
        {"eval_strategy": "steps", "splits": "train"},
        DatasetError,
        ("eval_strategy", "splits"),
    ),
    "nothing but what is trained on to evaluate on": (
        {"eval_strategy": "steps", "eval_steps": 1},
        DatasetError,
        ("eval_strategy", "'validation'", "dataset={", "--splits 'eval=train[:100]'"),
    ),
    "loggers that are none": (
        {"loggers": ["foo"]},
        ArgumentError,
        ("'foo' is not a logger", "BaseLogger"),
    ),
    "no list of loggers": ({"loggers": 5}, ArgumentError, ("5 is no list of loggers",)),
    "nothing of this name to report to": (
        {"report_to": "tensorbord"},
        ArgumentError,
        ("'tensorbord'", "Did you mean tensorboard"),
    ),
    "nothing installed to report to": (
        {"report_to": ["swanlab"]},
        ArgumentError,
        ("swanlab", "not installed", "pip install swanlab"),
    ),
    "an optimizer that is not installed": (
        {"optim": "galore_adamw"},
        ArgumentError,
        ("optim", "galore_adamw", "galore_torch"),
    ),
    "an argument that the optimizer does not take": (
        {"adam_beta1": 1.5},
        ArgumentError,
        ("adamw_torch", "Invalid beta", "1.5"),
    ),
    "learning rates without what they need": (
        {"lr_scheduler_type": "warmup_stable_decay"},
        ArgumentError,
        ("warmup_stable_decay", "num_decay_steps", "lr_scheduler_kwargs"),
    ),
    "an argument that learning rates do not take": (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 2}},
        ArgumentError,
        ("cosine", "num_cycle"),
    ),
    "shards of one process": ({"fsdp": True}, ArgumentError, ("fsdp", "torchrun")),
    "nothing to resume": ({"resume_from_checkpoint": True}, OutputError, ("nothing to resume",)),
    "no such checkpoint": (
        {"resume_from_checkpoint": "./checkpoint-7"},
        ArgumentError,
        ("resume_from_checkpoint", "./checkpoint-7"),
    ),
    "mixed precision of narrow weights": (
        {"fp16": True, "precision": "float16"},
        InputError,
        ("float16",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_error_before_the_first_step(name: str, one_block: Path, tmp_path: Path) -> None:
    changes, error, words = CASES[name]
    given = {"model": str(one_block), "recipe": QUANTIZE, **arguments(tmp_path / "out")}
    given |= {key: value() if callable(value) else value for key, value in changes.items()}
    with small.counted_forwards() as forwards, pytest.raises(error) as caught:
        train(**given)
    assert type(caught.value) is error or error is InputError
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert forwards == []
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_batches_without_labels_are_one_error(one_block: Path, tmp_path: Path) -> None:
    def only_ids(samples: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([samples[0]["input_ids"]])}

    given = {"model": str(one_block), "recipe": QUANTIZE, **arguments(tmp_path / "out")}
    with pytest.raises(DatasetError, match=r"no labels.*data_collator") as caught:
        train(**given, data_collator=only_ids)
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_modifier_of_train_is_refused_by_oneshot(one_block: Path, tmp_path: Path) -> None:
    recipe = "fine_stage: {a_modifiers: {Freezer: {}}}"
    with pytest.raises(RecipeError, match=r"Freezer, in the stage 'fine'.*train") as caught:
        oneshot(str(one_block), recipe, output_dir=tmp_path / "out")
    assert "llmcompressor train" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert Freezer.run_types == {"train"}
    assert WeightHalver.run_types == {"oneshot"}


def _occupied(output: Path) -> None:
    output.mkdir()
    (output / "notes.txt").write_text("mine")


def _a_file(output: Path) -> None:
    output.write_text("mine")


@pytest.mark.parametrize("prepare", [_occupied, _a_file])
def test_an_output_that_is_in_use(
    prepare: Callable[[Path], None], one_block: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    prepare(output)
    before = small.tree(tmp_path)
    with pytest.raises(OutputError, match="out"):
        train(str(one_block), QUANTIZE, **arguments(output))
    assert small.tree(tmp_path) == before


def test_another_recipe_does_not_continue(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    given = arguments(output, save_steps=1)
    Breaker.at = 2
    try:
        with pytest.raises(KeyboardInterrupt):
            train(str(one_block), [Freezer(), Breaker()], **given)
    finally:
        Breaker.at = None
    kept = small.tree(tmp_path)
    with pytest.raises(OutputError, match=r"progress of another run: recipe"):
        train(str(one_block), [Breaker()], **given)
    with pytest.raises(OutputError, match=r"training\.learning_rate: 0\.001 then, 0\.5 now"):
        train(str(one_block), [Freezer(), Breaker()], **{**given, "learning_rate": 0.5})
    assert {name: kept[name] for name in kept if "lock" not in name} == {
        name: value for name, value in small.tree(tmp_path).items() if "lock" not in name
    }
    train(str(one_block), [Breaker()], resume="never", **given)
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 4


def test_a_model_of_which_nothing_learns_is_refused(tmp_path: Path) -> None:
    model = small.one_block().requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"No parameter .* takes a gradient.*requires_grad_"):
        train(model, QUANTIZE, **arguments(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not any(hasattr(one, "quantization_scheme") for one in model.modules())
