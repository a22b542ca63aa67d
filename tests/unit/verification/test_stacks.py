# SPDX-License-Identifier: Apache-2.0
"""Experts stored one by one against originals that hold them in stacks, however these lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import EXPERTS, HIDDEN, Sample, attention, coded, ends, made

from llmcompressor.schemes.presets import preset_scheme
from llmcompressor.verification import Severity
from llmcompressor.verification.check import verify_files

SCHEME = "W8A8"
RECIPE = b"quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n      targets: [Linear]\n"
PARENT = "model.layers.0.mlp"
WAYS = [(turned, in_turn) for turned in (False, True) for in_turn in (False, True)]
Bad = set[tuple[str, str]]


def experts(inner: int) -> dict[str, torch.Tensor]:
    """The weights and biases of all experts, by name."""
    torch.manual_seed(1)
    sizes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    found = {}
    for index in range(EXPERTS):
        for own, shape in sizes.items():
            path = f"{PARENT}.experts.{index}.{own}"
            found[f"{path}.weight"] = torch.randn(shape).mul_(0.02).to(torch.bfloat16)
            found[f"{path}.bias"] = torch.randn(shape[0]).to(torch.bfloat16)
    return found


def checkpoint(model_type: str, inner: int, *, biases: bool) -> Sample:
    sample = made(
        ends() | attention("model.layers.0"), SCHEME, model_type=model_type, num_hidden_layers=1
    )
    for name, tensor in experts(inner).items():
        if name.endswith(".bias"):
            sample.tensors |= {name: tensor} if biases else {}
            continue
        own = coded(tensor, preset_scheme(SCHEME))
        sample.tensors |= {name.removesuffix("weight") + each: own[each] for each in own}
    sample.files["recipe.yaml"] = RECIPE
    return sample


def original(
    model_type: str, inner: int, turned: bool, in_turn: bool, names: tuple[str, str], biases: bool
) -> Sample:
    plain = made(ends() | attention("model.layers.0"), SCHEME, only=lambda name: False)
    plain.config |= {"model_type": model_type, "num_hidden_layers": 1}
    del plain.config["quantization_config"]
    every = experts(inner)

    def stack(own: str, kind: str) -> torch.Tensor:
        paths = [f"{PARENT}.experts.{index}.{own}.{kind}" for index in range(EXPERTS)]
        return torch.stack([every[path] for path in paths])

    for kind in ("weight", "bias") if biases else ("weight",):
        gate, up, down = (stack(f"{own}_proj", kind) for own in ("gate", "up", "down"))
        both = torch.cat([gate, up], 1)
        if in_turn:
            both = torch.stack([gate, up], 2).flatten(1, 2)
        for name, tensor in zip(names, (both, down), strict=True):
            is_turned = turned and kind == "weight"
            path = f"{PARENT}.{name}" + ("_bias" if kind == "bias" else "")
            plain.tensors[path] = tensor.mT.contiguous() if is_turned else tensor
    return plain


def bad(ours: Sample, theirs: Sample, folder: Path) -> Bad:
    report = verify_files(ours.write(folder / "ours"), theirs.write(folder / "theirs"), workers=1)
    return {
        (one.rule, one.module)
        for one in report.findings
        if one.rule[0] == "R" and one.severity is not Severity.NOTE
    }


STACKS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(("turned", "in_turn"), WAYS)
@pytest.mark.parametrize("inner", [64, HIDDEN])
def test_every_way_of_an_unknown_model(
    turned: bool, in_turn: bool, inner: int, tmp_path: Path
) -> None:
    """Square matrices, and halves that lie together as one: only the values tell them apart."""
    ours = checkpoint("unknown", inner, biases=True)
    theirs = original("unknown", inner, turned, in_turn, STACKS, biases=True)
    assert not bad(ours, theirs, tmp_path / "good")
    name = f"{PARENT}.experts.1"
    for own in ("weight", "weight_scale", "bias"):
        other = ours.tensors[f"{name}.gate_proj.{own}"]
        ours.tensors[f"{name}.up_proj.{own}"] = other.clone()
    found = bad(ours, theirs, tmp_path / "bad")
    assert found == {("R3", f"{name}.up_proj"), ("R4", f"{name}.up_proj.bias")}


def test_gpt_oss_has_one_way(tmp_path: Path) -> None:
    """Where the model type tells how stacks lie, nothing else passes."""
    ours = checkpoint("gpt_oss", HIDDEN, biases=True)
    good = original("gpt_oss", HIDDEN, True, True, STACKS, biases=True)
    assert not bad(ours, good, tmp_path / "good")
    other = original("gpt_oss", HIDDEN, True, False, STACKS, biases=True)
    rules = {rule for rule, _ in bad(ours, other, tmp_path / "halves")}
    assert rules == {"R3", "R4"}
    other = original("gpt_oss", HIDDEN, False, True, STACKS, biases=True)
    found = bad(ours, other, tmp_path / "turned")
    downs = {("R3", f"{PARENT}.experts.{index}.down_proj") for index in range(EXPERTS)}
    assert found == downs  # square; that of gate and up shows by its shape how it lies
