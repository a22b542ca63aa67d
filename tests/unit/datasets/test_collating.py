# SPDX-License-Identifier: Apache-2.0
"""Collators: what is cut, what is filled, what is masked."""

from __future__ import annotations

import pickle

import pytest
import torch

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import load_calibration, load_training, make_collator
from llmcompressor.errors import DatasetError
from llmcompressor.transformers.utils import data_collator

ROWS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
OPTIONS = {"processor": None, "batch_size": 3, "shuffle_calibration_samples": False}


def test_truncation_cuts_to_the_shortest(batches):
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in ROWS]
    (batch,) = batches(rows, use_loss_mask=True, **OPTIONS)
    assert batch["input_ids"].tolist() == [[5, 6], [9, 10], [11, 12]]
    assert batch["attention_mask"].tolist() == batch["loss_mask"].tolist() == [[1, 1]] * 3


LEFT = {"input_ids": [0] * 5 + [5, 6, 7], "attention_mask": [0] * 5 + [1, 1, 1]}


def test_padding_on_the_left_is_cut_off_before_text(batches):
    for length, ids, mask in [
        (2, [5, 6], [1, 1]),
        (3, [5, 6, 7], [1, 1, 1]),
        (4, [0, 5, 6, 7], [0, 1, 1, 1]),
        (None, LEFT["input_ids"], LEFT["attention_mask"]),
    ]:
        row = {**LEFT, "position_ids": list(range(8))}
        (batch,) = batches([row], max_seq_length=length, **OPTIONS)
        assert batch["input_ids"].tolist() == [ids]
        assert batch["attention_mask"].tolist() == [mask]
        first = 8 - len(ids) if length != 2 else 5
        assert batch["position_ids"].tolist() == [list(range(first, first + len(ids)))]


def test_a_decoders_tokens_are_cut_by_their_own_mask(batches):
    row = {
        **LEFT,
        "decoder_input_ids": [8, 9, 0, 0],
        "decoder_attention_mask": [1, 1, 0, 0],
        "labels": [9, 10, -100, -100],
    }
    names = ("input_ids", "decoder_input_ids")
    (batch,) = batches([row], max_seq_length=2, model_input_names=names, **OPTIONS)
    assert batch["decoder_input_ids"].tolist() == [[8, 9]]
    assert batch["labels"].tolist() == [[9, 10]]
    assert batch["input_ids"].tolist() == [[5, 6]]


def test_padding_keeps_every_token_and_masks_the_rest(batches):
    (batch,) = batches(ROWS, data_collator="padding", max_seq_length=1, **OPTIONS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]


def test_padding_is_on_the_tokenizers_side(batches, tokenizer):
    import copy

    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    options = {**OPTIONS, "processor": left}
    (batch,) = batches(ROWS, data_collator="padding", **options)
    assert batch["input_ids"][1].tolist() == [left.pad_token_id] * 2 + [9, 10]
    assert batch["attention_mask"][1].tolist() == [0, 0, 1, 1]


def test_what_is_padded_with(batches):
    for pad, eos, expected in [(3, 2, 3), (None, 2, 2), (None, None, 0), (99, None, 0)]:

        class Tokenizer:
            pad_token_id, eos_token_id = pad, eos

        options = {**OPTIONS, "processor": Tokenizer()}
        (batch,) = batches(ROWS, data_collator="padding", vocab_size=50, **options)
        assert batch["input_ids"][1, 3] == expected


def test_a_collator_of_the_users_gets_the_rows_as_they_are(batches):
    rows = [{"input_ids": [[1, 2]], "note": "kept"}]
    got = batches(rows, data_collator=lambda samples: {"rows": samples}, **OPTIONS)
    assert got == [{"rows": rows}]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("llava", {"pixel_values": (3, 4, 4)}, {"pixel_values": (1, 3, 4, 4)}),
        ("pixtral", {"pixel_values": (3, 4, 4)}, {"pixel_values": (1, 3, 4, 4)}),
        ("pixtral", {"pixel_values": (2, 3, 4, 4)}, {"pixel_values": (2, 3, 4, 4)}),
        (
            "qwen2_vl",
            {"pixel_values": (4, 6), "image_grid_thw": (3,)},
            {"pixel_values": (1, 4, 6), "image_grid_thw": (1, 3)},
        ),
    ],
)
def test_a_collator_of_a_family_takes_its_inputs_of_one_sample(name, given, expected):
    collate = getattr(data_collator, f"{name}_data_collator")
    args = DatasetArguments(dataset=ROWS, data_collator=pickle.loads(pickle.dumps(collate)))
    sample = {"input_ids": [3, 4], "attention_mask": [1, 1], "note": "left out"}
    batch = make_collator(args, vocab_size=50)(
        [{**sample, **{key: torch.zeros(shape) for key, shape in given.items()}}]
    )
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    assert shapes == {"input_ids": (1, 2), "attention_mask": (1, 2), **expected}
    with pytest.raises(DatasetError, match="takes one sample"):
        collate([sample, sample])
    with pytest.raises(DatasetError, match=r"needs pixel_values.*input_ids, attention_mask, note"):
        collate([sample])


def refuses(samples):
    raise TypeError("no way")


def test_a_collator_that_cannot_be_used_is_one_error():
    for collator, message in [
        (refuses, r"data_collator fails on a batch of 3 samples: TypeError: no way.*input_ids"),
        (lambda: {}, r"data_collator fails .* takes 0 positional arguments"),
        (lambda samples: [1, 2], r"batches of type list.*dictionaries"),
        (lambda samples: {}, r"empty.*input_ids"),
        (lambda samples: {"input_ids": [[1, 2]]}, r"a list for its input_ids.*torch\.long"),
        (lambda samples: {"input_ids": torch.ones(1, 2)}, r"torch\.float32.*torch\.long"),
        (lambda samples: {"input_ids": torch.tensor([1, 2])}, r"shape \[2\].*\[1, tokens\]"),
        (lambda samples: {"input_ids": torch.tensor([[1, 60]])}, r"token id 60.*ends at 49"),
    ]:
        args = DatasetArguments(dataset=ROWS, data_collator=collator, batch_size=3)
        with pytest.raises(DatasetError, match=message) as caught:
            list(load_calibration(args, vocab_size=50))
        assert caught.value.remedy
        with pytest.raises(DatasetError, match=message):
            make_collator(args, vocab_size=50)(load_training(args))


def test_labels_of_a_collator_count_where_they_are_learned():
    ids = torch.tensor([[1, 2]])
    made = {"input_ids": ids, "labels": torch.tensor([[-100, 60]])}
    args = DatasetArguments(dataset=ROWS, data_collator=lambda samples: made)
    assert make_collator(args, vocab_size=50)([]) is made
    with pytest.raises(DatasetError, match=r"60 in its labels.*ends at 49.*-100"):
        make_collator(args, vocab_size=50, learns=True)([])
    made["labels"] = torch.tensor([[-100, 49]])
    assert make_collator(args, vocab_size=50, learns=True)([]) is made


@pytest.mark.parametrize(("size", "warned"), [(16, False), (17, True)])
def test_large_batches_are_warned_of(batches, logged, size, warned):
    batches(ROWS, num_calibration_samples=3, **{**OPTIONS, "batch_size": size})
    assert any("batch_size=17" in line for line in logged) == warned


def test_batches_are_made_by_workers(batches):
    rows = batches(ROWS, dataloader_num_workers=1, **{**OPTIONS, "batch_size": 1})
    assert [batch["input_ids"][0].tolist() for batch in rows] == ROWS
