# SPDX-License-Identifier: Apache-2.0
"""Faults in weights that solvers rounded, or that modifiers scaled and rotated before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint_samples import Sample
from tests.support.thinned import thinned

from llmcompressor import verify
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier
from llmcompressor.verification import Severity

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FOUR = {
    "config_groups": {"all": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
EIGHT = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
RECIPES: dict[str, Callable[[], list[Any]]] = {
    "gptq": lambda: [GPTQModifier(**FOUR)],
    "autoround": lambda: [AutoRoundModifier(**FOUR, iters=2)],
    "hqq": lambda: [HQQModifier(**FOUR)],
    "awq": lambda: [AWQModifier(**FOUR)],
    "smoothquant": lambda: [SmoothQuantModifier(), QuantizationModifier(**EIGHT)],
    "smoothed gptq": lambda: [SmoothQuantModifier(), GPTQModifier(**EIGHT)],
    "spinquant": lambda: [
        SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_block_size=32),
        QuantizationModifier(**FOUR),
    ],
    "quip": lambda: [
        QuIPModifier(transform_type="random-hadamard", transform_block_size=32),
        QuantizationModifier(**FOUR),
    ],
}
ATTENTION = "model.layers.0.self_attn"


def codes_of(sample: Sample, module: str) -> torch.Tensor:
    own = sample.own(module)
    return own["weight_packed"] if "weight_packed" in own else own["weight"]


def noise(sample: Sample) -> str:
    """Codes of random numbers."""
    codes = codes_of(sample, f"{ATTENTION}.q_proj").view(torch.int8)
    random = torch.Generator().manual_seed(0)
    codes.copy_(torch.randint(-128, 128, codes.shape, generator=random, dtype=torch.int8))
    return f"{ATTENTION}.q_proj"


def doubled(sample: Sample, own: str = "k_proj") -> str:
    sample.tensors[f"{ATTENTION}.{own}.weight_scale"] *= 2
    return f"{ATTENTION}.{own}"


def enlarged(sample: Sample) -> str:
    """By less than doubling, which no scales of columns explain either."""
    sample.tensors[f"{ATTENTION}.o_proj.weight_scale"] *= 1.3
    return f"{ATTENTION}.o_proj"


def doubled_output(sample: Sample) -> str:
    return doubled(sample, "o_proj")


def doubled_row(sample: Sample) -> str:
    sample.tensors[f"{ATTENTION}.k_proj.weight_scale"][3] *= 2
    return f"{ATTENTION}.k_proj"


def swapped(sample: Sample) -> str:
    """A matrix of another layer."""
    module = "model.layers.{}.mlp.up_proj".format
    for own, tensor in sample.own(module(1)).items():
        sample.tensors[f"{module(0)}.{own}"] = tensor
    return module(0)


def reversed_scales(sample: Sample) -> str:
    """Those of groups, or of rows where each has one."""
    name = "model.layers.1.mlp.gate_proj"
    scale = sample.tensors[f"{name}.weight_scale"]
    sample.tensors[f"{name}.weight_scale"] = scale.flip(1 if scale.shape[1] > 1 else 0)
    return name


FAULTS = [noise, doubled, enlarged, doubled_output, doubled_row, swapped, reversed_scales]


def errors(checkpoint: Path, reference: Path) -> set[tuple[str, str]]:
    found = verify(checkpoint, reference, serve="vllm", tp=1).findings
    return {
        (one.rule, one.module)
        for one in found
        if one.severity is Severity.ERROR and one.rule in ("R3", "R4")
    }


@pytest.fixture(scope="module")
def made(llama_folder: Path, compressed: Callable[..., Path]) -> Callable[[str], Sample]:
    known: dict[str, Sample] = {}

    def get(technique: str) -> Sample:
        if technique not in known:
            folder = compressed(llama_folder, RECIPES[technique](), verify=False)
            assert not errors(folder, llama_folder)
            known[technique] = Sample.read(folder)
        return known[technique].copy()

    return get


@pytest.mark.parametrize(("technique", "plant"), thinned(list(RECIPES), FAULTS))
def test_faults_are_told_from_what_a_technique_changed(
    technique: str,
    plant: Callable[[Sample], str],
    made: Callable[[str], Sample],
    llama_folder: Path,
    tmp_path: Path,
) -> None:
    sample = made(technique)
    module = plant(sample)
    assert ("R3", module) in errors(sample.write(tmp_path / "bad"), llama_folder)


@pytest.mark.parametrize(
    ("technique", "name", "told"),
    [
        # no record names them
        ("smoothquant", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("awq", "model.norm.weight", "model.norm.weight"),
        # their readers have other scales
        ("smoothquant", "model.layers.0.input_layernorm.weight", f"{ATTENTION}.q_proj"),
        ("awq", "model.layers.0.input_layernorm.weight", f"{ATTENTION}.q_proj"),
        # a rotation of the original is another matrix
        ("spinquant", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_other_plain_tensors_are_told_from_those_that_were_moved(
    technique: str,
    name: str,
    told: str,
    made: Callable[[str], Sample],
    llama_folder: Path,
    tmp_path: Path,
) -> None:
    sample = made(technique)
    random = torch.Generator().manual_seed(0)
    tensor = sample.tensors[name]
    other = torch.rand(tensor.shape, generator=random) + 0.5
    sample.tensors[name] = (other * tensor.float().abs().mean()).to(tensor.dtype)
    assert told in {module for _, module in errors(sample.write(tmp_path / "bad"), llama_folder)}


def test_without_a_report_scales_are_found_all_the_same(
    made: Callable[[str], Sample], llama_folder: Path, tmp_path: Path
) -> None:
    """As beside the checkpoints of other tools, where a recipe alone tells that there were any."""
    sample = made("awq")
    del sample.files["compression_report.json"]
    assert not errors(sample.write(tmp_path / "good"), llama_folder)
    for plant in (noise, swapped):
        wrong = sample.copy()
        module = plant(wrong)
        assert errors(wrong.write(tmp_path / plant.__name__), llama_folder) == {("R3", module)}


def test_few_bits_are_no_scales_that_were_moved(
    compressed: Callable[..., Path], llama_folder: Path
) -> None:
    """Rounding to four codes makes columns smaller or larger, each by its own share."""
    two = {"targets": "Linear", "scheme": "W2A16", "ignore": ["lm_head"]}
    recipe = [SmoothQuantModifier(smoothing_strength=0.8), QuantizationModifier(**two)]
    assert not errors(compressed(llama_folder, recipe, verify=False), llama_folder)
