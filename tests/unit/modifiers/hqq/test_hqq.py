# SPDX-License-Identifier: Apache-2.0
"""HQQ on whole models: better than min-max scales, streamed without data, wrong recipes end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import embedded
from tests.support import tiny_llama as tiny
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.errors import RecipeError
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

FIELDS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}


def group(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False, **weights}
    return {"config_groups": {"all": {"targets": ["Linear"], "weights": args}}}


@torch.no_grad()
def lp_distance(model: Any, original: Any) -> float:
    total = 0.0
    for name, module in tiny.linears(model).items():
        error = module.weight.float() - original.get_submodule(name).weight.float()
        total += float(error.abs().pow(0.7).sum())
    return total


@pytest.mark.slow
def test_it_beats_rounding_at_four_bits(pico: Path) -> None:
    ids = embedded.held_out(pico, 40)
    original = embedded.model(pico)
    found = {}
    for kind in (QuantizationModifier, HQQModifier):
        model = oneshot(model=embedded.model(pico), recipe=kind(scheme="W4A16_ASYM", **FIELDS))
        found[kind] = lp_distance(model, original), embedded.loss(model, ids)
    dense = embedded.loss(original, ids)
    lp, loss = (
        (found[HQQModifier][at] - floor) / (found[QuantizationModifier][at] - floor)
        for at, floor in ((0, 0.0), (1, dense))
    )
    assert lp < 0.975
    assert loss < 0.94


@pytest.mark.slow
def test_three_bits_move_further(pico: Path) -> None:
    original = embedded.model(pico)
    distances = []
    for kind in (QuantizationModifier, HQQModifier):
        recipe = kind(ignore=["lm_head"], **group(group_size=64))
        distances.append(lp_distance(oneshot(model=embedded.model(pico), recipe=recipe), original))
    assert distances[1] < 0.93 * distances[0]


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_streamed_and_in_memory_are_the_same(scheme: str, tmp_path: Path) -> None:
    tiny.llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    recipe, source = {"scheme": scheme, **FIELDS}, tmp_path / "model"
    streamed = oneshot(model=str(source), recipe=HQQModifier(**recipe), output_dir=tmp_path / "a")
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(model=whole, recipe=HQQModifier(**recipe), output_dir=tmp_path / "b")
    files = [load_file(tmp_path / run / "model.safetensors") for run in "ab"]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    assert verify(tmp_path / "a").ok
    with loading_compressed():
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    data = tiny.batches()
    assert torch.equal(tiny.logits(read, data), tiny.logits(streamed.eval(), data))


@torch.no_grad()
def test_the_record_is_what_was_measured() -> None:
    modifier = HQQModifier(ignore=["lm_head"], **group())
    original = tiny.llama()
    model = oneshot(model=tiny.llama(), recipe=modifier)
    assert list(modifier.report()) == list(tiny.linears(model))
    for name, record in modifier.records.items():
        error = model.get_submodule(name).weight - original.get_submodule(name).weight
        assert record.error == pytest.approx(float(error.abs().pow(0.7).mean()), rel=1e-4)
        assert record.error < record.error_before


def test_every_partition_of_integers_is_refined() -> None:
    for changes in (
        {"strategy": "tensor", "group_size": None},
        {"strategy": "channel", "group_size": None, "symmetric": True},
        {"strategy": "block", "group_size": None, "block_structure": [16, 24]},
    ):
        modifier = HQQModifier(
            ignore=["lm_head"], bypass_divisibility_checks=True, **group(**changes)
        )
        oneshot(model=tiny.llama(), recipe=modifier)
        for record in modifier.records.values():
            assert record.error < record.error_before, changes


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scheme": "FP8_DYNAMIC", **FIELDS}, "floats"),
        ({"scheme": "NVFP4A16", **FIELDS}, "floats"),
        ({"scheme": "W4A16", "weight_observer": "imatrix_mse", **FIELDS}, "uses none"),
        ({"scheme": "W4A16", "lp_norm": 1.5, **FIELDS}, "lp_norm"),
    ],
)
def test_wrong_recipes_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told) as caught:
        HQQModifier(**fields)
    assert str(caught.value).count("HQQModifier:") == 1
