# SPDX-License-Identifier: Apache-2.0
"""What ``train`` cannot use: one error that says what to do, before a step and before a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from tests.support import small_models as small
from tests.support.pairs import each
from tests.support.training_cases import QUANTIZE, Breaker, Freezer, WeightHalver, arguments
from torch.utils.data import DataLoader

from llmcompressor import oneshot, train
from llmcompressor.args import DatasetArguments
from llmcompressor.entrypoints.training_task import TrainingData
from llmcompressor.errors import (
    ArgumentError,
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
    "an infinite learning rate": (
        {"learning_rate": float("inf")},
        ArgumentError,
        ("learning_rate", "finite"),
    ),
    "a seed that numpy does not take": ({"seed": 2**40}, ArgumentError, ("seed", str(2**32 - 1))),
    "a text for true or false": ({"bf16": "false"}, ArgumentError, ("bf16", "True or False")),
    "a text for a number": ({"adam_epsilon": "small"}, ArgumentError, ("adam_epsilon", "number")),
    "more smoothing than all": (
        {"label_smoothing_factor": 2},
        ArgumentError,
        ("label_smoothing_factor", "0 to 1"),
    ),
    "no data": ({"dataset": None}, DatasetError, ("dataset",)),
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
    "shards of one process": ({"fsdp": True}, ArgumentError, ("fsdp", "torchrun")),
    "nothing to resume": ({"resume_from_checkpoint": True}, OutputError, ("nothing to resume",)),
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


TEXTS = [f"text {number}" for number in range(8)]


def _saved(folder: Path, data: Any) -> str:
    data.save_to_disk(folder / "saved")
    return str(folder / "saved")


def _file(folder: Path) -> str:
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{one}"}}\n' for one in TEXTS))
    return str(folder / "texts.jsonl")


WITHOUT_SPLITS: dict[str, Any] = {
    "texts": lambda folder: {"dataset": TEXTS},
    "rows": lambda folder: {"dataset": [{"text": text} for text in TEXTS]},
    "a Dataset": lambda folder: {"dataset": Dataset.from_dict({"text": TEXTS})},
    "columns": lambda folder: {"dataset": {"text": TEXTS}},
    "a stream": lambda folder: {"dataset": iter(TEXTS)},
    "a saved Dataset": lambda folder: {
        "dataset": _saved(folder, Dataset.from_dict({"text": TEXTS}))
    },
    "a file": lambda folder: {"dataset": _file(folder)},
    "a file by its path": lambda folder: {"dataset_path": _file(folder)},
    "a saved Dataset by its path": lambda folder: {
        "dataset_path": _saved(folder, Dataset.from_dict({"text": TEXTS}))
    },
}


@each(
    name=WITHOUT_SPLITS, splits=[None, {"train": "train", "eval": "validation"}, ["train", "test"]]
)
def test_data_without_splits_is_refused(name: str, splits: Any, tmp_path: Path) -> None:
    args = DatasetArguments(**WITHOUT_SPLITS[name](tmp_path), splits=splits)
    with pytest.raises(DatasetError, match="nothing to evaluate on") as caught:
        TrainingData(args, evaluates=True)
    split = "test" if isinstance(splits, list) else "validation"
    assert f"no split '{split}'" in caught.value.problem
    assert "eval_strategy" in caught.value.problem
    assert "dataset={'train'" in caught.value.remedy
    TrainingData(args, evaluates=False)


def test_what_the_remedy_says_works() -> None:
    rows = small.token_rows(samples=8, length=12)
    parts = {"train": rows.select(range(6)), "validation": rows.select(range(6, 8))}
    model = small.llama()
    for given in (
        {"dataset": parts},
        {"dataset": DatasetDict(parts)},
        {"dataset": rows, "splits": {"train": "train[:6]", "eval": "train[6:]"}},
        {"dataset": list(rows), "splits": {"train": "train[:6]", "eval": "train[6:]"}},
    ):
        train, evaluate = TrainingData(DatasetArguments(**given), evaluates=True).load(model, None)
        found = [list(one["input_ids"]) for one in (*train, *evaluate)]
        assert found == [list(ids) for ids in rows["input_ids"]]
        assert (len(train), len(evaluate)) == (6, 2)


def test_data_with_other_splits_says_which_it_has(tmp_path: Path) -> None:
    data = DatasetDict(train=small.token_rows(), held_out=small.token_rows(seed=1))
    for given in (data, _saved(tmp_path, data)):
        with pytest.raises(DatasetError, match=r"no split 'validation'.*held_out, train"):
            TrainingData(DatasetArguments(dataset=given), evaluates=True)
