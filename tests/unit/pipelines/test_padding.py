# SPDX-License-Identifier: Apache-2.0
"""Padding never counts: what is compressed is the same however a batch is padded."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, run_pipeline
from tests.support.thinned import thinned
from torch import Tensor
from torch.nn import Module

from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.observers.tokens import real_tokens

CAUSAL = ["llama", "qwen3", "gemma3", "phi3", "opt"]
PIPELINES = ["basic", "sequential", "layer_sequential"]
LENGTH, EXTRA = 8, 5


def _ids(seed: int, rows: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, length), generator=generator)


def _padded(ids: Tensor, side: str, extra: int = EXTRA, prefix: str = "") -> dict[str, Tensor]:
    """A batch with ``extra`` padding tokens at one side."""
    amount = {"none": (0, 0), "right": (0, extra), "left": (extra, 0)}[side]
    mask = torch.nn.functional.pad(torch.ones_like(ids), amount)
    return {
        f"{prefix}input_ids": torch.nn.functional.pad(ids, amount, value=7),
        f"{prefix}attention_mask": mask,
    }


def _text(side: str) -> list[dict[str, Tensor]]:
    """Batches whose positions are those of the real tokens."""
    batches = [_padded(_ids(seed, length=LENGTH + seed), side) for seed in range(3)]
    for batch in batches:
        positions = batch["attention_mask"].cumsum(-1) - 1
        batch["position_ids"] = positions.clamp(min=0)
    return batches


def _pairs(source: str, target: str) -> list[dict[str, Tensor]]:
    return [
        {
            **_padded(_ids(seed, length=7), source),
            **_padded(_ids(seed + 10), target, prefix="decoder_"),
        }
        for seed in range(3)
    ]


def _build(name: str) -> Module:
    # In float64 what padding changes in the order of sums does not show in float32 statistics.
    return tiny.build(name).double()


def _calibrated(model: Module, batches: list[Any], modifier: Any, pipeline: str) -> list[Tensor]:
    run_pipeline(model, batches, modifier, pipeline)
    ignore = ["lm_head", "proj_out"]
    weights = tiny.leaves(model, "Linear", ignore)
    return [tensor for module in weights for tensor in (module.weight, module.weight_scale)]


def _gptq(**fields: Any) -> GPTQModifier:
    return GPTQModifier(
        config_groups={
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "channel", "symmetric": True},
            }
        },
        ignore=["lm_head"],
        **fields,
    )


@pytest.mark.parametrize(
    ("name", "asymmetric", "pipeline", "side"),
    thinned(
        CAUSAL,
        itertools.product([False, True], ["sequential", "layer_sequential"], ["right", "left"]),
    ),
)
def test_gptq_writes_the_same_weights(
    name: str, asymmetric: bool, pipeline: str, side: str
) -> None:
    plain = _of_text(name, asymmetric, pipeline, "none")
    padded = _of_text(name, asymmetric, pipeline, side)
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@functools.cache
def _of_text(name: str, asymmetric: bool, pipeline: str, side: str) -> list[Tensor]:
    return _calibrated(_build(name), _text(side), _gptq(asymmetric=asymmetric), pipeline)


@pytest.mark.parametrize(
    ("pipeline", "source", "target"),
    [
        *((pipeline, "right", "right") for pipeline in PIPELINES),
        *thinned(PIPELINES, [("right", "none"), ("none", "right")]),
    ],
)
def test_both_masks_of_an_encoder_decoder_are_respected(
    pipeline: str, source: str, target: str
) -> None:
    plain, padded = _of_pairs(pipeline, "none", "none"), _of_pairs(pipeline, source, target)
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@functools.cache
def _of_pairs(pipeline: str, source: str, target: str) -> list[Tensor]:
    modifier = _gptq(asymmetric=pipeline != "basic")
    return _calibrated(_build("t5"), _pairs(source, target), modifier, pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_each_input_comes_with_the_mask_of_its_half(pipeline: str) -> None:
    """As long as source and target are equally long, shapes would not tell them apart."""
    batches = [
        {
            **_padded(_ids(seed, length=10), "right", extra=seed + 1),
            **_padded(_ids(seed + 10, length=8), "right", extra=seed + 3, prefix="decoder_"),
        }
        for seed in range(3)
    ]
    recorder = Recorder(twin=True)
    run_pipeline(tiny.build("t5"), batches, recorder, pipeline)
    for name, masks in recorder._masks.items():
        crossed = name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        ours = name.startswith("encoder") or crossed
        key = "attention_mask" if ours else "decoder_attention_mask"
        expected = [batch[key].bool() for batch in batches]
        assert all(map(torch.equal, masks, expected)), name
    tokens = recorder._inputs["decoder.block.0.layer.1.EncDecAttention.k"]
    masks = recorder._masks["decoder.block.0.layer.1.EncDecAttention.k"]
    assert [len(real_tokens(x, m)) for x, m in zip(tokens, masks, strict=True)] == [20, 20, 20]


@pytest.mark.parametrize("form", ["labels", "padded labels", "labels and inputs", "inputs"])
def test_a_decoder_without_a_mask_counts_as_each_row_alone(form: str) -> None:
    """Inputs are the labels one position later: as many as there are labels."""
    labels = _ids(10, length=6)
    labels[1, 4:] = 0 if "padded" in form else -100
    recorder = Recorder()
    batch = {**_padded(_ids(0), "right")}
    if "labels" in form:
        batch["labels"] = labels
    if "inputs" in form:
        later = tiny.build("t5").prepare_decoder_input_ids_from_labels(labels)
        batch["decoder_input_ids"] = later
        if form == "inputs":  # of a padding token alone it is seen where the row has ended
            later[1, 4:] = 0
    run_pipeline(tiny.build("t5"), [batch], recorder)
    for name, (mask,) in recorder._masks.items():
        if name.startswith("encoder") or "EncDecAttention.k" in name:
            assert mask.shape == (2, LENGTH + EXTRA)
        elif name.startswith("decoder") and "EncDecAttention.v" not in name:
            assert mask.tolist() == [[True] * 6, [True] * 4 + [False] * 2]


@pytest.mark.parametrize(("pipeline", "side"), thinned(PIPELINES, ["right", "left"]))
def test_static_activation_scales_are_the_same(pipeline: str, side: str) -> None:
    scales = []
    for one in ("none", side):
        model = _build("llama")
        # A padding token whose activations are far larger than any other's.
        model.model.embed_tokens.weight.data[7] *= 1000
        modifier = QuantizationModifier(
            config_groups={
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "dynamic": False},
                    "output_activations": {"num_bits": 8, "dynamic": False},
                }
            },
            ignore=["lm_head"],
            kv_cache_scheme={"num_bits": 8, "symmetric": True, "dynamic": False},
        )
        batches = _text(one)
        for batch in batches:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            ids[(ids == 7) & mask.bool()] = 8
        run_pipeline(model, batches, modifier, pipeline)
        scales.append({n: p for n, p in model.named_parameters() if n.endswith("scale")})
    plain, padded = scales
    assert any("k_scale" in name for name in plain)
    assert plain.keys() == padded.keys()
    for name, scale in plain.items():
        torch.testing.assert_close(scale, padded[name], rtol=1e-5, atol=0)


def test_a_loss_mask_counts_only_its_tokens() -> None:
    batches = _text("right")
    for batch in batches:
        batch["loss_mask"] = torch.zeros_like(batch["input_ids"])
        batch["loss_mask"][:, 2:] = 1
    for used, first in ((False, 0), (True, 2)):
        recorder = Recorder()
        run_pipeline(tiny.build("llama"), batches, recorder, use_loss_mask=used)
        (masks,) = {tuple(map(id, masks)) for masks in recorder._masks.values()}
        mask = next(iter(recorder._masks.values()))[0]
        assert len(masks) >= 1
        assert mask[:, :first].sum() == 0
        assert mask[:, first:LENGTH].all()
        assert mask[:, LENGTH:].sum() == 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", ["truth", "added"])
def test_masks_of_queries_and_shared_positions_leave_padding_out(form: str, side: str) -> None:
    plain, padded = _text("none"), _text(side)
    for batch in padded:
        real = batch["attention_mask"].bool()
        causal = torch.ones(real.shape[1], real.shape[1]).tril().bool()
        seen = real[:, None, None, :] & causal
        seen = seen | ~seen.any(dim=-1, keepdim=True)  # or their softmax would be of nothing
        if form == "added":
            hidden = torch.finfo(torch.float64).min
            seen = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, hidden)
        batch["attention_mask"] = seen
        batch["position_ids"] = batch["position_ids"][:1]  # of all rows
    weights = [
        _calibrated(_build("llama"), batches, _gptq(asymmetric=True), "sequential")
        for batches in (plain, padded)
    ]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
