# SPDX-License-Identifier: Apache-2.0
"""Weights that are one number are told from codes that nobody wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import HIDDEN, INNER, Sample, coded, dense, made
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.schemes.presets import preset_scheme
from llmcompressor.verification import Finding, Severity
from llmcompressor.verification.check import verify_files

UP = "model.layers.1.mlp.up_proj"
PRESETS = ["W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]


def pair(preset: str, weight: Tensor) -> tuple[Sample, Sample]:
    """A checkpoint with ``weight`` in one module, and its original."""
    shapes = {name: shape for name, shape in dense().items() if name not in (UP,)}
    ours = made(shapes | {UP: (INNER, HIDDEN)}, preset)
    theirs = made(shapes | {UP: (INNER, HIDDEN)}, preset, only=lambda name: False)
    del theirs.config["quantization_config"]
    own = coded(weight, preset_scheme(preset))
    for name, tensor in own.items():
        ours.tensors[f"{UP}.{name}"] = tensor
    theirs.tensors[f"{UP}.weight"] = weight
    return ours, theirs


def found(ours: Sample, folder: Path, theirs: Sample | None = None) -> list[Finding]:
    reference = None if theirs is None else theirs.write(folder / "original")
    report = verify_files(ours.write(folder / "checkpoint"), reference, workers=1)
    return [one for one in report.findings if one.module == UP and one.rule in ("V2", "V4", "R3")]


def severities(findings: list[Finding]) -> list[Severity]:
    return [one.severity for one in findings]


def filled(value: float) -> Tensor:
    return torch.full((INNER, HIDDEN), value, dtype=torch.bfloat16)


@each(preset=PRESETS, value=[0.03, -0.03])
def test_a_weight_of_one_number_may_be_meant(preset: str, value: float, tmp_path: Path) -> None:
    ours, theirs = pair(preset, filled(value))
    alone = found(ours, tmp_path / "alone")
    assert [(one.rule, one.severity) for one in alone] == [("V4", Severity.WARNING)]
    assert not found(ours, tmp_path / "both", theirs)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_weight_of_zeros_is_good(preset: str, tmp_path: Path) -> None:
    ours, theirs = pair(preset, filled(0))
    assert not found(ours, tmp_path, theirs)


@pytest.mark.parametrize("preset", PRESETS)
def test_codes_never_written(preset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, theirs = pair(preset, torch.randn(INNER, HIDDEN).mul_(0.02).to(torch.bfloat16))
    name = "weight_packed" if f"{UP}.weight_packed" in ours.tensors else "weight"
    ours.tensors[f"{UP}.{name}"].view(torch.uint8).zero_()
    for folder, reference in (("alone", None), ("both", theirs)):
        said = found(ours, tmp_path / folder, reference)
        assert ("V4", Severity.ERROR) in [(one.rule, one.severity) for one in said]


@pytest.mark.parametrize("preset", ["W4A16", "W8A8", "FP8_DYNAMIC", "FP8"])
def test_nothing_was_written(preset: str, tmp_path: Path) -> None:
    """Codes of zero and scales of one: neither of the two buffers was touched."""
    ours, _ = pair(preset, filled(0.03))
    name = "weight_packed" if f"{UP}.weight_packed" in ours.tensors else "weight"
    ours.tensors[f"{UP}.{name}"].view(torch.uint8).zero_()
    ours.tensors[f"{UP}.weight_scale"].fill_(1)
    assert severities(found(ours, tmp_path)) == [Severity.ERROR]
