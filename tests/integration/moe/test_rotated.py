# SPDX-License-Identifier: Apache-2.0
"""Rotations in the forward of experts: they are passed in every way in which experts are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformArgs, TransformScheme
from tests.support import mixtures
from tests.support.thinned import thinned
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.modifiers.rotation.online import attach_transform
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier
from llmcompressor.moe.expert_stops import begin_calibration_stages, stages_bypassed
from llmcompressor.moe.layouts import DOWN, GATE, UP
from llmcompressor.moe.linear_experts import find_stacked_moes, unfuse_experts
from llmcompressor.numerics.hadamard import hadamard

GROUPS = {
    "g": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 64},
    }
}
IGNORED = ["lm_head", "re:.*gate$", "re:.*router$"]
RECIPES = {
    "QuIP": lambda: QuIPModifier(transform_type="random-hadamard"),
    "R4": lambda: SpinQuantModifier(rotations=["R4"]),
}


def compressed(model: Any, first: str, output: Path) -> Any:
    recipe = [RECIPES[first](), GPTQModifier(config_groups=GROUPS, ignore=IGNORED)]
    rows = mixtures.rows(4)  # no server turns the inputs of experts: it is not written by default
    return oneshot(model=model, recipe=recipe, dataset=rows, output_dir=output, verify=False)


@pytest.mark.parametrize(("family", "first"), thinned(["qwen3_moe", "llama4_text"], RECIPES))
def test_a_model_and_its_folder_give_the_same_file(family: str, first: str, tmp_path: Path) -> None:
    mixtures.saved(family, tmp_path / "source", intermediate_size=128, intermediate_size_mlp=128)
    compressed(str(tmp_path / "source"), first, tmp_path / "streamed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    compressed(model, first, tmp_path / "in_memory")
    files = sorted((tmp_path / "streamed").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "in_memory" / file.name).read_bytes()


def rotation(location: str, width: int) -> tuple[TransformScheme, TransformArgs, Parameter]:
    arguments = TransformArgs(targets=["Linear"], location=location)
    scheme = TransformScheme(type="random-hadamard", apply=[arguments])
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)) * 2 - 1
    return scheme, arguments, Parameter(hadamard(width).float() * signs)


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("location", ["input", "output"])
def test_in_stages_experts_make_what_they_make_without(location: str, rests: bool) -> None:
    model = mixtures.build("qwen3_moe")
    mixture = find_stacked_moes(model)[0]
    experts = unfuse_experts(mixture, {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"})
    given = (
        torch.randn(24, 128, generator=torch.Generator().manual_seed(0)),
        torch.stack([torch.arange(24) % 4, (torch.arange(24) + 1) % 4], 1),
        torch.full((24, 2), 0.5),
    )
    with torch.no_grad():
        plain = experts(*given)
        for number in range(4):
            for role in (GATE, UP, DOWN):
                linear = experts.linear(number, role)
                width = linear.weight.shape[location == "input"]
                attached = attach_transform(model, linear, role, "r", *rotation(location, width))
                attached.rest(rests=rests)
        whole = experts(*given)
        assert torch.allclose(whole, plain) == rests
        for is_done in (False, True):
            begin_calibration_stages(experts)
            for stage in (one for both in experts.stages for one in both):
                stage.is_done = is_done
            torch.testing.assert_close(experts(*given), whole)
            with stages_bypassed(model):
                torch.testing.assert_close(experts(*given), whole)
            experts.end()
