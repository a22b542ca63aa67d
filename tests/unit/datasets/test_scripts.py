# SPDX-License-Identifier: Apache-2.0
"""What scripts call that make their batches themselves gives what a run would be given."""

from __future__ import annotations

import copy

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import (
    format_calibration_data,
    get_calibration_dataloader,
    get_processed_dataset,
    load_calibration,
)
from llmcompressor.datasets.utils import DataCollatorWithTruncation, LengthAwareSampler
from llmcompressor.errors import DatasetError

TEXTS = [{"text": f"x = {number}" * (1 + number % 3)} for number in range(8)]
IDS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15]]


def same(one, other):
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def arguments():
    return DatasetArguments(
        dataset=datasets.Dataset.from_list(TEXTS), num_calibration_samples=5, batch_size=2
    )


def test_the_loader_of_a_script_has_the_batches_of_a_run(arguments, tokenizer):
    made = get_calibration_dataloader(arguments, tokenizer)
    assert isinstance(made, DataLoader)
    same(list(made), list(load_calibration(arguments, processor=tokenizer)))


def test_a_loader_that_is_given_is_given_back():
    loader = DataLoader([{"input_ids": torch.tensor([1, 2])}])
    assert get_calibration_dataloader(DatasetArguments(dataset=loader), None) is loader
    with pytest.raises(DatasetError, match="Pass the data set itself"):
        get_processed_dataset(DatasetArguments(dataset=loader))


def test_without_data_there_is_nothing(tokenizer):
    assert get_calibration_dataloader(DatasetArguments(), tokenizer) is None
    assert get_processed_dataset(DatasetArguments(), tokenizer) is None


def test_all_rows_are_tokenized_in_order(arguments, tokenizer):
    made = get_processed_dataset(arguments, processor=tokenizer)
    assert isinstance(made, datasets.Dataset)
    assert made["input_ids"][:] == [tokenizer(row["text"])["input_ids"] for row in TEXTS]


def test_tokenized_data_stays_as_it_is():
    data = datasets.Dataset.from_list([{"input_ids": ids, "more": 1} for ids in IDS])
    assert get_processed_dataset(DatasetArguments(dataset=data)) is data


def test_two_steps_give_the_batches_of_one(arguments, tokenizer):
    made = get_processed_dataset(arguments, tokenizer)
    two_steps = format_calibration_data(arguments, made, tokenizer)
    same(list(two_steps), list(get_calibration_dataloader(arguments, tokenizer)))


def test_samples_are_cut_to_the_shortest_and_to_the_maximum():
    features = [{"input_ids": ids, "labels": ids, "text": "a"} for ids in IDS[:3]]
    before = copy.deepcopy(features)
    batch = DataCollatorWithTruncation()(features)
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[5, 6], [9, 10], [11, 12]]
    assert batch.keys() == {"input_ids", "labels"}
    assert features == before
    assert DataCollatorWithTruncation(1)(features)["input_ids"].tolist() == [[5], [9], [11]]


def test_the_longest_come_first_and_the_shortest_are_left_out():
    for name in ["input_ids", "decoder_input_ids"]:
        data = datasets.Dataset.from_list([{name: ids} for ids in IDS])
        assert list(LengthAwareSampler(data)) == [0, 2, 1, 3]
        sampler = LengthAwareSampler(data, num_samples=3, batch_size=2)
        assert (list(sampler), len(sampler), sampler.num_samples) == ([0, 2, 1], 3, 3)
        assert len(LengthAwareSampler(data, num_samples=100)) == 4


def test_sampler_and_collator_work_in_a_loader():
    data = datasets.Dataset.from_list([{"input_ids": ids} for ids in IDS])
    loader = DataLoader(
        data,
        batch_size=2,
        sampler=LengthAwareSampler(data, batch_size=2),
        collate_fn=DataCollatorWithTruncation(),
    )
    assert [batch["input_ids"].shape for batch in loader] == [(2, 3), (2, 2)]
