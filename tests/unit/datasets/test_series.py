# SPDX-License-Identifier: Apache-2.0
"""Rows of embeddings, sounds and features: cut and padded as token ids are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import load_training
from llmcompressor.errors import DatasetError
from llmcompressor.modifiers.gptq import GPTQModifier

LENGTHS = (4, 2, 3)
OPTIONS: dict[str, Any] = {
    "processor": None,
    "batch_size": 3,
    "shuffle_calibration_samples": False,
}
MADE = {
    "inputs_embeds": lambda n: torch.rand(n, 8) + 1,
    "input_values": lambda n: torch.rand(n) + 1,
    "input_features": lambda n: torch.rand(n, 5) + 1,
}


@pytest.fixture(params=MADE)
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{request.param: MADE[request.param](length)} for length in LENGTHS]


def test_truncation_cuts_them_to_the_shortest(batches, rows) -> None:
    ((name, _),) = rows[0].items()
    (batch,) = batches(rows, **OPTIONS)
    assert torch.equal(batch[name], torch.stack([row[name][:2] for row in rows]))
    (batch,) = batches(rows, max_seq_length=1, **OPTIONS)
    assert torch.equal(batch[name], torch.stack([row[name][:1] for row in rows]))


def test_padding_keeps_every_step_and_masks_the_rest(batches, rows) -> None:
    ((name, _),) = rows[0].items()
    (batch,) = batches(rows, data_collator="padding", **OPTIONS)
    assert batch["attention_mask"].tolist() == [[1] * n + [0] * (4 - n) for n in LENGTHS]
    for row, made, n in zip(rows, batch[name], LENGTHS, strict=True):
        assert torch.equal(made[:n], row[name])
        assert not made[n:].any()


def test_the_cut_begins_with_the_first_real_step(batches, rows) -> None:
    ((name, value),) = rows[0].items()
    row = {name: value, "attention_mask": [0, 0, 1, 1]}
    (batch,) = batches([row], max_seq_length=2, **OPTIONS)
    assert torch.equal(batch[name][0], value[2:])
    assert batch["attention_mask"].tolist() == [[1, 1]]
    args = DatasetArguments(dataset=[{**row, "labels": 1}], max_seq_length=2)
    (sample,) = load_training(args)
    assert torch.equal(sample[name][0], value[2:])


def test_a_batch_of_one_is_as_its_row(batches) -> None:
    value = torch.rand(1, 4, 8)
    one, other = (batches([{"inputs_embeds": v}], **OPTIONS)[0] for v in (value, value[0]))
    assert torch.equal(one["inputs_embeds"], other["inputs_embeds"])


@pytest.mark.parametrize("steps", [3, 6])
def test_a_mask_has_as_many_steps_as_the_embeddings(batches, steps: int) -> None:
    row = {"inputs_embeds": torch.rand(4, 8), "attention_mask": [1] * steps}
    with pytest.raises(DatasetError, match=f"4 inputs_embeds, but {steps} in attention_mask"):
        batches([row], **OPTIONS)


def test_what_does_not_fit_into_a_batch_is_told(batches) -> None:
    rows = [{"pixel_values": torch.rand(3, size, size)} for size in (4, 6)]
    with pytest.raises(DatasetError, match=r"pixel_values of shapes \[3, 4, 4\].*batch_size=1"):
        batches(rows, **OPTIONS)


def test_padding_counts_in_no_statistic() -> None:
    """Embeddings in padded batches give the weights that each row by itself gives."""
    given = tiny.batches(number=1, tokens=12)[0]["input_ids"]
    table = tiny.llama().get_input_embeddings().weight.detach()
    rows = [{"inputs_embeds": table[ids[: 12 - 3 * n]]} for n, ids in enumerate(given)]
    found = []
    for size in (1, 2):
        model = tiny.llama()
        recipe = GPTQModifier(scheme="W8A16", ignore=["lm_head"], asymmetric=False)
        options = {"batch_size": size, "data_collator": "padding", "max_seq_length": None}
        tiny.oneshot(model=model, recipe=recipe, dataset=rows, **options)
        found.append(model.model.layers[0].self_attn.q_proj.weight.detach())
        assert {record.tokens for record in recipe.records.values()} == {12 + 9}
    assert torch.allclose(*found, atol=1e-5)
