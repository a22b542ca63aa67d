# SPDX-License-Identifier: Apache-2.0
"""Data given as an object: lists, Dataset, DatasetDict, streams, DataLoader."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import load_calibration
from llmcompressor.errors import DatasetError

FIRST = {"shuffle_calibration_samples": False}
WORDS = ["import os", "def f(x):", "return x + 1", "class A:", "for i in range(3):"]


def test_no_data_gives_no_loader():
    assert load_calibration(DatasetArguments()) is None


def test_a_list_of_strings(texts):
    assert texts(WORDS, shuffle_calibration_samples=False) == WORDS


def test_every_kind_of_object_gives_the_same_samples(texts):
    rows = [{"text": word} for word in WORDS]
    expected = texts(WORDS)
    assert texts(rows) == expected
    assert texts(pyarrow.Table.from_pylist(rows)) == expected
    assert texts(datasets.Dataset.from_list(rows)) == expected
    assert texts(datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})) == expected


def test_a_stream_gives_its_first_rows(texts):
    stream = datasets.Dataset.from_list([{"text": word} for word in WORDS]).to_iterable_dataset()
    got = texts(stream, num_calibration_samples=2, shuffle_calibration_samples=False)
    assert got == WORDS[:2]


def test_a_stream_is_shuffled_by_the_seed(texts):
    rows = [{"text": f"x = {i}"} for i in range(50)]

    def stream():
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    first = texts(stream(), seed=1)
    assert first == texts(stream(), seed=1) != texts(stream(), seed=2)
    assert sorted(first) == sorted(row["text"] for row in rows)


def test_only_what_is_needed_of_a_generator_is_read(texts):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield "x = 1"

    assert len(texts(endless(), num_calibration_samples=70)) == 70
    assert len(taken) == 70


def test_tokenized_data_needs_no_tokenizer(batches):
    for data in [
        [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10]}],
        [[5, 6, 7], [8, 9, 10]],
        [{"input_ids": [[5, 6, 7]]}, {"input_ids": torch.tensor([[8, 9, 10]])}],
        np.array([[5, 6, 7], [8, 9, 10]]),
        torch.tensor([[5, 6, 7], [8, 9, 10]]),
        TensorDataset(torch.tensor([[5, 6, 7], [8, 9, 10]])),
        datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]}),
        datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]}).with_format("torch"),
        datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]}).with_format("pandas"),
    ]:
        (batch,) = batches(data, processor=None, batch_size=2, shuffle_calibration_samples=False)
        assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 10]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
        assert batch["input_ids"].dtype == torch.long


def test_what_a_tokenizer_returns_is_data(batches, tokenizer):
    """A mapping of columns: not taken for splits by the names of its columns."""
    expected = batches([{"input_ids": ids} for ids in tokenizer(WORDS)["input_ids"]])
    for given in (tokenizer(WORDS), dict(tokenizer(WORDS))):
        got = batches(given, processor=None)
        assert [row["input_ids"].tolist() for row in got] == [
            row["input_ids"].tolist() for row in expected
        ]
    padded = tokenizer(WORDS, padding=True, return_tensors="pt")
    assert len(batches(padded, processor=None)) == len(WORDS)
    for single in (tokenizer("import os"), tokenizer("import os", return_tensors="np")):
        (batch,) = batches(single, processor=None)
        assert batch["input_ids"][0].tolist() == tokenizer("import os")["input_ids"]


def test_columns_of_text_are_data(texts):
    assert texts({"text": ["a", "b"]}, **FIRST) == ["a", "b"]
    assert texts({"text": "ab"}) == ["ab"]
    splits = {"text": datasets.Dataset.from_dict({"text": ["a"]})}
    assert texts(datasets.DatasetDict(splits)) == ["a"]
    with pytest.raises(DatasetError, match="text has 2, prompt has 1"):
        texts({"text": ["a", "b"], "prompt": ["a"]})


def test_a_data_frame_is_data(texts):
    frame = pandas.DataFrame({"body": ["a", None, "c"], "n": [1, 2, 3]}, index=[7, 8, 9])
    assert texts(frame[:1], text_column="body") == ["a"]
    assert texts(frame, text_column="body", **FIRST) == ["a", "c"]
    with pytest.raises(DatasetError, match=r"data frame cannot be read.*to_dict"):
        texts(pandas.DataFrame({"text": ["a", 3.5]}))


def test_columns_that_are_no_input_are_left_out(batches):
    row = {"input_ids": [5, 6], "text": "a", "idx": 3, "labels": [5, 6], "loss_mask": [0, 1]}
    (batch,) = batches([row], processor=None)
    assert set(batch) == {"input_ids", "attention_mask"}
    (batch,) = batches([row], processor=None, use_loss_mask=True)
    assert batch["loss_mask"].tolist() == [[0, 1]]


def test_a_model_with_a_decoder_of_its_own_keeps_labels(batches):
    row = {"input_ids": [5, 6], "labels": [7, 8, 9]}
    names = ["input_ids", "decoder_input_ids", "labels"]
    (batch,) = batches([row], processor=None, model_input_names=names)
    assert batch["labels"].tolist() == [[7, 8, 9]]


def test_a_mask_of_another_length_is_refused(batches):
    with pytest.raises(DatasetError, match=r"sample 0 has 2 input_ids, but 1 in attention_mask"):
        batches([{"input_ids": [5, 6], "attention_mask": [1]}], processor=None)


def batches_of_nothing():
    return []


def test_data_that_cannot_be_used(batches):
    for data, message in [
        ([], "is empty"),
        (datasets.Dataset.from_dict({"text": []}), "is empty"),
        ([""], "without tokens"),
        ([" \n", ""], "without tokens"),
        ([[]], "without tokens"),
        (iter([]), "is empty"),
        ([3.5], "is a float"),
        ([[1.5, 2.5]], "is a list"),
        ([{"input_ids": [1.5, 2.5]}], "no sequence of whole numbers"),
        (object(), "has no rows"),
        ([{"text": 7}], "has a int for its text"),
        ({"text": None}, "The column 'text' of the data is None"),
        ({"input_ids": None}, "The column 'input_ids' of the data is None"),
        ({"text": ["a"], "id": 3}, "The column 'id' of the data is of type int"),
        (batches_of_nothing, r"is a function, which has no rows.*dataset=batches_of_nothing\(\)"),
        (lambda: [], r"is a function, which has no rows.*Give what it returns\."),
        (dict, "is a type, which has no rows.*an object of it"),
        (np.array(4), "a single number"),
        ([{1: "a"}], "neither text nor input_ids; it has 1.*preprocessing_func"),
        (["\u00fc\ud800"], r"sample 0 .*is refused by the processor"),
        (pandas.Series(["a", "b"], index=[7, 8]), r"is a Series, and its sample \d cannot be read"),
    ]:
        with pytest.raises(DatasetError, match=message):
            batches(data)


def test_a_path_beside_data_is_said_to_be_unread(texts, logged):
    assert texts(["a = 1"], dataset_path="nowhere.json") == ["a = 1"]
    assert any("dataset_path is not read" in line for line in logged)


def test_text_without_a_tokenizer_is_an_error(batches):
    with pytest.raises(DatasetError, match=r"no tokenizer.*Give the model's tokenizer"):
        batches(WORDS, processor=None)


def test_no_usable_column_lists_the_columns(batches):
    with pytest.raises(DatasetError, match=r"it has body, number.*text_column='body'"):
        batches([{"body": "a", "number": 3}])
    with pytest.raises(DatasetError, match=r"no column 'bodi'.*Did you mean body"):
        batches([{"body": "a", "number": 3}], text_column="bodi")


def test_a_mask_that_is_no_mask_is_refused(batches):
    rows = [{"input_ids": [5, 6], "loss_mask": [0.5, 1.0]}]
    with pytest.raises(DatasetError, match="values in loss_mask that are no whole numbers"):
        batches(rows, use_loss_mask=True)


def test_a_row_that_came_tokenized_and_cannot_be_used_is_named(batches):
    for row, message in [
        ({"input_ids": None}, r"sample 1 has no value \(None\) in its column 'input_ids'"),
        ({"input_ids": None, "text": None}, r"sample 1 has no value \(None\).*'input_ids'"),
        ({"input_ids": [5, None]}, "sample 1 has input_ids .*number 1 of them is None"),
        ({"input_ids": [5, 6.5]}, r"sample 1 has input_ids .*number 1 of them is 6\.5"),
        ({"input_ids": [[5, 6], [7, 8]]}, "sample 1 has input_ids .*they are 2 sequences"),
        ({"input_ids": "ab"}, "sample 1 has input_ids .*they are a str"),
        ({"input_ids": [5, 6], "attention_mask": [1, None]}, "sample 1 has attention_mask .*None"),
        ({"input_ids": [5, 6], "position_ids": [0]}, "sample 1 has 2 input_ids, but 1 in position"),
        ({"input_ids": [5, 6], "attention_mask": "11"}, "sample 1 has attention_mask .*a str"),
    ]:
        with pytest.raises(DatasetError, match=message) as caught:
            batches([{"input_ids": [5, 6, 7]}, row], shuffle_calibration_samples=False)
        assert caught.value.remedy


def test_data_without_tokens_is_empty(batches):
    for row in ({"input_ids": []}, {"input_ids": [5], "attention_mask": [0]}, {"text": " "}):
        with pytest.raises(DatasetError, match="All 1 samples are without tokens"):
            batches([row])


def test_token_ids_outside_the_vocabulary_name_sample_and_id(batches):
    for token in [2048, -1]:
        data = [[5, 6], [7, token]]
        with pytest.raises(DatasetError, match=rf"sample 1 holds the token id {token}.*2047"):
            batches(data, processor=None, vocab_size=2048)
        assert batches([[5, 2047]], processor=None, vocab_size=2048)


def test_rows_without_tokens_are_left_out_and_replaced(texts, logged):
    data = ["", "a = 1", " ", "b = 2", "c = 3"]
    got = texts(data, num_calibration_samples=2, shuffle_calibration_samples=False)
    assert got == ["a = 1", "b = 2"]
    assert any("2 samples without tokens" in line for line in logged)


def test_the_users_data_is_not_changed(batches):
    rows = [{"messages": [{"role": "user", "content": None}], "extra": [1]}]
    before = copy.deepcopy(rows)

    def greedy(row):
        row["messages"].append("gone")
        row.clear()
        return {"text": "x = 1"}

    batches(rows, preprocessing_func=greedy)
    assert rows == before


class TestDataLoader:
    def test_it_is_passed_through(self):
        loader = DataLoader([{"pixel_values": torch.rand(2)} for _ in range(3)], shuffle=False)  # type: ignore[arg-type]
        found = load_calibration(DatasetArguments(dataset=loader))
        assert [one["pixel_values"].tolist() for one in found] == [
            one["pixel_values"].tolist() for one in loader
        ]

    def test_a_matrix_is_token_ids(self):
        loader = DataLoader(list(torch.arange(6).view(3, 2)), batch_size=3)  # type: ignore[arg-type]
        [batch] = load_calibration(DatasetArguments(dataset=loader))
        assert batch["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5]]

    def test_it_gives_the_same_batches_when_checked(self):
        rows = [{"input_ids": torch.tensor([i, i + 1])} for i in range(5)]
        loader = DataLoader(rows, batch_size=2)
        checked = load_calibration(DatasetArguments(dataset=loader), vocab_size=8)
        assert isinstance(checked, DataLoader)
        assert len(checked) == len(loader)
        assert checked.batch_size == 2
        for _ in range(2):
            for batch, expected in zip(checked, loader, strict=True):
                assert torch.equal(batch["input_ids"], expected["input_ids"])

    def test_its_token_ids_are_checked(self):
        loader = DataLoader([{"input_ids": torch.tensor([1, i])} for i in range(6)], batch_size=2)
        checked = load_calibration(DatasetArguments(dataset=loader), vocab_size=5)
        with pytest.raises(DatasetError, match=r"Batch 2 .*token id 5 in its sample 1"):
            list(checked)


class Failing:
    """A map-style dataset whose third sample cannot be read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError("the disk is gone")
        return {"input_ids": torch.ones(1, 3, dtype=torch.long)}


IDS = torch.ones(1, 3, dtype=torch.long)


def of_ids(**more):
    return [{"input_ids": IDS, **more}]


def test_batches_of_a_loader_that_cannot_be_used_are_one_error():
    for data, message in [
        ([{"input_ids": torch.ones(1, 3)}], r"batch 0 .* torch\.float32"),
        ([{"input_ids": torch.ones(3, dtype=torch.long)}], r"batch 0 .* shape \[3\]"),
        ([{"input_ids": IDS[:, :0]}], r"batch 0 .* shape \[1, 0\]"),
        ([{"input_ids": IDS[:0]}], r"batch 0 .* shape \[0, 3\]"),
        ([{"input_ids": IDS.tolist()}], "batch 0 .* a list .*for its input_ids"),
        ([{"input_ids": IDS.to("meta")}], "batch 0 .* a filled tensor"),
        ([{0: IDS}], r"batch 0 .* names \[0\]"),
        ([{}], r"batch 0 .* names \[\]"),
        (of_ids(attention_mask=IDS[:, :2]), r"shape \[1, 2\] for its attention_mask.* \[1, 3\]"),
        (of_ids(position_ids=IDS[:, :2]), r"shape \[1, 2\] for its position_ids.* \[1, 3\]"),
        (of_ids(attention_mask=[[1, 1, 1]]), "a list .*for its attention_mask"),
        ([*of_ids(), {"input_ids": None}], "batch 1 .* has no input_ids"),
        ([*of_ids(), {"labels": IDS}], "batch 1 .* has no input_ids"),
        (Failing(), r"fails on batch 2: OSError: the disk is gone\."),
    ]:
        arguments = DatasetArguments(dataset=DataLoader(data, batch_size=None))
        with pytest.raises(DatasetError, match=f"(?i){message}") as caught:
            list(load_calibration(arguments, vocab_size=100))
        assert caught.value.remedy


def test_a_loader_with_a_length_is_used_whole():
    loader = DataLoader([{"input_ids": torch.tensor([5, 6])}] * 5, batch_size=2)
    args = DatasetArguments(dataset=loader, num_calibration_samples=2)
    assert len(list(load_calibration(args))) == 3


def test_what_fails_in_a_worker_is_told_without_its_traceback():
    # One that stays can be told to end; others are waited for in vain, whenever they are collected.
    loader = DataLoader(Failing(), batch_size=None, num_workers=1, persistent_workers=True)
    with pytest.raises(DatasetError, match="batch 2: OSError: the disk is gone") as caught:
        list(load_calibration(DatasetArguments(dataset=loader)))
    left: Any = loader._iterator
    left._shutdown_workers()
    assert "\n" not in str(caught.value)


def test_masks_and_positions_of_a_loader_are_handed_on():
    for more in [
        {"attention_mask": None},
        {"attention_mask": IDS},
        {"attention_mask": torch.ones(1, 1, 3, 3)},
        {"position_ids": torch.ones(3, 1, 3, dtype=torch.long)},
    ]:
        loader = DataLoader(of_ids(**more), batch_size=None)
        (batch,) = load_calibration(DatasetArguments(dataset=loader), vocab_size=100)
        assert batch.keys() == {"input_ids", *more}


ENCODINGS = {
    "plain": lambda: pyarrow.array(WORDS),
    "large": lambda: pyarrow.array(WORDS, pyarrow.large_string()),
    "view": lambda: pyarrow.array(WORDS, pyarrow.string_view()),
    "run ends": lambda: pyarrow.RunEndEncodedArray.from_arrays(
        pyarrow.array([1, 2, 3, 4, 5], pyarrow.int32()), pyarrow.array(WORDS)
    ),
    "run ends of views": lambda: pyarrow.RunEndEncodedArray.from_arrays(
        pyarrow.array([1, 2, 3, 4, 5], pyarrow.int32()), pyarrow.array(WORDS, pyarrow.string_view())
    ),
    "dictionary": lambda: pyarrow.array(WORDS).dictionary_encode(),
}


class Frame:
    """A data frame of a library that is not known here."""

    def __init__(self, table):
        self.table, self.columns = table, table.column_names

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        return Frame(self.table.slice(index, 1))

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_and_form_of_arrow_gives_the_same(texts, encoding):
    column = ENCODINGS[encoding]()
    table = pyarrow.table({"text": column})
    given = {
        "table": table,
        "batch": pyarrow.record_batch({"text": column}),
        "batches": [*table.slice(0, 2).to_batches(), *table.slice(2).to_batches()],
        "reader": table.to_reader(),
        "frame": Frame(table),
        "chunked column": {"text": table["text"]},
        "column": {"text": column},
        "values": column,
        "splits": {"train": table},
        "rows": pyarrow.table({"row": pyarrow.StructArray.from_arrays([column], ["text"])})["row"],
    }
    for form, data in given.items():
        found = texts(data, shuffle_calibration_samples=False)
        assert found == WORDS, form


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(pyarrow.int64()),
        pyarrow.list_view(pyarrow.int32()),
        pyarrow.large_list_view(pyarrow.int64()),
        pyarrow.list_(pyarrow.int64(), 3),
    ],
    ids=str,
)
def test_every_list_of_arrow_holds_token_ids(batches, tmp_path, kind):
    ids = [[5, 6, 7], [8, 9, 10]]
    column = pyarrow.array(ids, kind)
    table = pyarrow.table({"input_ids": column})
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet")
    forms = (table, {"input_ids": column}, {"input_ids": table["input_ids"]}, column)
    for data in (*forms, str(tmp_path / "ids.parquet")):
        found = batches(data, shuffle_calibration_samples=False)
        assert [one["input_ids"].tolist() for one in found] == [[each] for each in ids]


def test_views_within_conversations_and_chosen_rows_are_read(texts, tmp_path):
    turn = pyarrow.struct([("role", pyarrow.string_view()), ("content", pyarrow.string_view())])
    chats = [[{"role": "user", "content": word}] for word in WORDS]
    plain = texts([{"messages": chat} for chat in chats], shuffle_calibration_samples=False)
    column = pyarrow.array(chats, pyarrow.list_(turn))
    assert texts({"messages": column}, shuffle_calibration_samples=False) == plain
    table = pyarrow.table({"messages": column})
    assert texts(table, shuffle_calibration_samples=False) == plain
    views = pyarrow.table({"text": pyarrow.array(WORDS, pyarrow.string_view())})
    chosen = datasets.Dataset(datasets.table.InMemoryTable(views)).select([3, 0])
    assert texts(chosen, shuffle_calibration_samples=False) == [WORDS[3], WORDS[0]]
    pyarrow.parquet.write_table(views, tmp_path / "views.parquet")
    path = str(tmp_path / "views.parquet")
    assert texts(path, shuffle_calibration_samples=False) == WORDS


def test_two_columns_of_one_name_are_one_clear_error(texts):
    column = pyarrow.array(WORDS)
    table = pyarrow.Table.from_arrays([column, column], names=["text", "text"])
    with pytest.raises(DatasetError, match=r"table cannot be read.*a name of its own"):
        texts(table)
