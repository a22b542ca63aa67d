# SPDX-License-Identifier: Apache-2.0
"""What ``train`` evaluates on: never, without a word, what it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tests.support import small_models as small
from tests.support.pairs import each

from llmcompressor.args import DatasetArguments
from llmcompressor.entrypoints.training_task import TrainingData
from llmcompressor.errors import DatasetError

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
