# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that other tools have written: readers load them, and nothing is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from tests.support.checkpoint_samples import Sample
from tests.support.small_models import token_rows
from tests.support.thinned import few
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan, verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification import Severity
from llmcompressor.verification.scheme import parse_groups

TOKENS = torch.arange(4, 36)[None]


def negated(sample: Sample) -> Sample:
    """The same weights with negative scales, for cells whose codes can be negated."""
    for name in [name for name in sample.tensors if name.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        shape = torch.Size(sample.tensors[f"{module}.weight_shape"].tolist())
        scale = sample.tensors[f"{module}.weight_scale"]
        cells = unpack_from_int32(sample.tensors[name], 4, shape).view(*scale.shape, -1)
        turned = cells.amin(-1) > -8
        codes = torch.where(turned[..., None], -cells, cells).view(shape)
        sample.tensors[name] = pack_to_int32(codes, 4)
        sample.tensors[f"{module}.weight_scale"] = torch.where(turned, -scale, scale)
        assert turned.any()
    return sample


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    return found


def test_negative_scales_are_good_where_they_are_read(
    good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    before = good("W4A16").write(tmp_path / "positive")
    folder = negated(good("W4A16")).write(tmp_path / "negative")
    assert torch.equal(logits(before), logits(folder))
    assert not verify(folder, source, serve="transformers").findings
    report = verify(folder, source, serve="vllm", tp=1)
    assert {(one.rule, one.severity) for one in report.findings} == {("S72", Severity.WARNING)}


def test_a_second_run_keeps_negative_scales(good: Callable[[str], Sample], tmp_path: Path) -> None:
    sample = negated(good("W4A16"))
    head = QuantizationModifier(targets=["lm_head"], scheme="W8A16")
    oneshot(
        model=str(sample.write(tmp_path / "negative")), recipe=head, output_dir=tmp_path / "two"
    )
    again = Sample.read(tmp_path / "two")
    assert "lm_head.weight_packed" in again.tensors
    same = [name for name in sample.tensors if name.endswith("_proj.weight_packed")]
    assert all(torch.equal(again.tensors[name], sample.tensors[name]) for name in same)


SPELLINGS: dict[str, Any] = {
    "floats": ("W4A16", {"num_bits": 4.0, "group_size": 128.0}),
    "texts": ("W4A16", {"num_bits": "4", "type": "INT", "strategy": "GROUP"}),
    "numbers for flags": ("W4A16", {"symmetric": 1, "dynamic": 0}),
    "a preset": ("W4A16", None),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_arguments_mean_what_compressed_tensors_says(
    name: str, good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    base, written = SPELLINGS[name]
    sample = good(base)
    plain = parse_groups(sample.settings)[0]
    if written is None:
        sample.settings["config_groups"] = {base: ["Linear"]}
    else:
        sample.group["weights"].update(written)
    read = parse_groups(sample.settings)[0]
    assert (read.scheme, read.targets) == (plain.scheme, plain.targets)
    folder = sample.write(tmp_path / "folder")
    assert torch.equal(logits(folder), logits(good(base).write(tmp_path / "plain")))
    assert verify(folder, source, serve="transformers").ok
    for server in ("vllm", "sglang"):
        assert verify(folder, serve=server, tp=1).ok is (written is not None)


@pytest.mark.parametrize("base", ["W4A16", "FP8_DYNAMIC"])
def test_what_is_saved_after_a_forward_is_for_transformers(
    base: str, good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(good(base).write(tmp_path / "packed"))
    before = model(TOKENS).logits
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), before)
    report = verify(tmp_path / "again", source, serve="transformers")
    assert report.ok
    assert len(report.errors) == 14, "weights are compared by their scales"
    for server, rule in (("vllm", "S23"), ("sglang", "G2")):
        found = verify(tmp_path / "again", serve=server, tp=1).findings
        told = [one for one in found if one.severity is Severity.ERROR]
        assert [(one.rule, one.module) for one in told] == [(rule, "quantization_config")]
        assert "14 modules" in told[0].message
    sample = Sample.read(tmp_path / "again")
    weight = sample.tensors["model.layers.0.mlp.up_proj.weight"]
    weight.copy_(torch.randn(weight.shape) * weight.std())
    noise = verify(sample.write(tmp_path / "noise"), source, serve="transformers").findings
    errors = [(one.rule, one.module) for one in noise if one.severity is Severity.ERROR]
    assert errors == [("R3", "model.layers.0.mlp.up_proj")]


CONVERTED = ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4")


@pytest.mark.parametrize("preset", few([*CONVERTED, "FP8", "MXFP4", "W3A16"], "W4A16", "MXFP4"))
def test_what_llama_cpp_converts(
    preset: str, good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    """As its converter of August 2026 did with these presets."""
    folder = good(preset).write(tmp_path / "folder")
    found = verify(folder, serve="llama.cpp").findings
    assert {one.server for one in found} <= {"llama.cpp"}
    errors = [one for one in found if one.severity is Severity.ERROR]
    assert bool(errors) == (preset not in CONVERTED)
    recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])
    planned = plan(str(source), recipe, token_rows(), serve="llama.cpp", measure=False)
    assert planned.ok is (preset in CONVERTED)
