# SPDX-License-Identifier: Apache-2.0
"""Small batches are run together, and only the clock can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, run_pipeline
from torch import Tensor

from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.observers.base import Observer
from llmcompressor.pipelines import batches as merging
from llmcompressor.pipelines.batches import CalibrationBatches, merge_batches

LENGTH = 12
COUNT = 5


def numbered(count: int = COUNT, length: int = LENGTH, rows: int = 1, **more: Any) -> list[Any]:
    """Batches that hold their own number."""
    return [
        {
            "input_ids": torch.full((rows, length), index),
            "attention_mask": torch.ones(rows, length, dtype=torch.long),
            **more,
        }
        for index in range(count)
    ]


def padded_batches(rows: int = 1) -> list[Any]:
    """Batches of equal shape, with padding of different lengths."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(COUNT):
        ids = torch.randint(3, 60, (rows, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, LENGTH - index :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def sizes(batches: list[Any], tokens: int | None = None) -> list[tuple[int, ...]]:
    return [one.sizes for one in merge_batches(batches, tokens)]


def test_batches_are_joined_in_order_while_they_fit() -> None:
    merged = list(merge_batches(numbered(), tokens=2 * LENGTH))
    assert [one.sizes for one in merged] == [(1, 1), (1, 1), (1,)]
    ids_BT = torch.cat([one.batch["input_ids"] for one in merged])
    assert ids_BT[:, 0].tolist() == list(range(COUNT))
    assert all(one.batch["attention_mask"].shape == one.batch["input_ids"].shape for one in merged)
    assert sizes(numbered(), tokens=2 * LENGTH - 1) == [(1,)] * COUNT
    assert sizes(numbered(), tokens=1) == [(1,)] * COUNT


@pytest.mark.parametrize(
    "more",
    [
        {"pixel_values": torch.zeros(1, 3, 8, 8)},
        {"input_features": torch.zeros(1, LENGTH)},
        {"decoder_input_ids": torch.zeros(1, LENGTH)},
        {"use_cache": False},
        {"labels": torch.zeros(1, dtype=torch.long)},
        {"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH)},
        {"attention_mask": None},
        {"input_ids": torch.zeros(LENGTH, dtype=torch.long)},
        {"input_ids": [[1, 2]]},
    ],
    ids=["image", "speech", "decoder", "flag", "class", "4-D mask", "no mask", "1-D", "list"],
)
def test_anything_but_plain_text_is_run_as_it_was_given(more: dict[str, Any]) -> None:
    batches = numbered(2, **more)
    merged = list(merge_batches([*numbered(2), *batches, *numbered(2)]))
    assert len(merged) == 4
    assert merged[1].batch is batches[0]
    assert merged[2].batch is batches[1]
    assert merged[0].sizes == merged[3].sizes == (1, 1)


@pytest.fixture(params=["merged", "alone"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every batch is run alone."""
    if request.param == "alone":
        monkeypatch.setattr(merging, "RUN_TOKENS", 1)
    return request.param == "alone"


def test_masks_and_sizes_are_those_of_the_joined_batch(alone: bool) -> None:
    batches = CalibrationBatches(tiny.build("llama"), padded_batches(rows=2))
    assert len(batches) == (COUNT if alone else 1)
    assert [batches.sizes(i) for i in range(len(batches))] == (
        [(2,)] * COUNT if alone else [(2,) * COUNT]
    )
    masks = [batches.mask(i) for i in range(len(batches))]
    real = sum(2 * LENGTH if mask is None else int(mask.sum()) for mask in masks)
    assert real == 2 * LENGTH * COUNT - sum(range(COUNT))
    assert batches.tokens == 2 * LENGTH * COUNT


def test_hooks_are_called_once_for_all_of_them(alone: bool) -> None:
    recorder = Recorder()
    run_pipeline(tiny.build("llama"), padded_batches(), recorder)
    assert {len(inputs) for inputs in recorder._inputs.values()} == {COUNT if alone else 1}


def _each_way(
    monkeypatch: pytest.MonkeyPatch, make: Any, pipeline: str = "sequential"
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """The model after a merged and an unmerged run, and the modifiers of both."""
    found, modifiers = [], []
    for tokens in (merging.RUN_TOKENS, 1):
        monkeypatch.setattr(merging, "RUN_TOKENS", tokens)
        model, modifier = tiny.build("llama"), make()
        run_pipeline(model, padded_batches(rows=2), modifier, pipeline)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
        modifiers.append(modifier)
    return found[0], found[1], modifiers


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("pipeline", ["sequential", "layer_sequential", "basic"])
def test_gptq_counts_the_same_tokens_and_finds_the_same_weights(
    pipeline: str, asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> GPTQModifier:
        # eight bits: a sum that is rounded otherwise seldom moves a weight to the next code
        return GPTQModifier(
            targets="Linear", scheme="W8A16", ignore=["lm_head"], asymmetric=asymmetric
        )

    merged, unmerged, modifiers = _each_way(monkeypatch, make, pipeline)
    expected = 2 * LENGTH * COUNT - sum(range(COUNT))
    for modifier in modifiers:
        assert {record.tokens for record in modifier.records.values()} == {expected}
    assert len(modifiers[0].records) == 7 * tiny.LAYERS
    for name, weight in unmerged.items():
        off = (merged[name] - weight).abs().max()
        assert float(off) <= 0.02 * float(weight.abs().max()), name
    same = [
        float((merged[name] == weight).float().mean())
        for name, weight in unmerged.items()
        if name.endswith("proj.weight")
    ]
    assert sum(same) / len(same) > 0.95


def _static(observer: str) -> QuantizationModifier:
    inputs = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False, observer=observer)
    weights = QuantizationArgs(num_bits=8, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    return QuantizationModifier(config_groups={"all": scheme}, ignore=["lm_head"])


def test_an_observer_is_shown_one_batch_after_another(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they were given, each without its own padding."""
    shown: dict[Observer, list[int]] = {}
    observe = Observer.observe

    def watched(self: Observer, x: Tensor) -> Observer:
        if self.base_name == "input":
            shown.setdefault(self, []).append(len(x))
        return observe(self, x)

    monkeypatch.setattr(Observer, "observe", watched)
    run_pipeline(tiny.build("llama"), padded_batches(), _static("minmax"))
    expected = [LENGTH - index for index in range(COUNT)]
    assert list(shown.values()) == [expected] * 4 * tiny.LAYERS  # inputs that are shared: once
