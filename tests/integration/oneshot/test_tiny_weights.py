# SPDX-License-Identifier: Apache-2.0
"""Models in float16 with weights so small that the nearest scale in float16 is zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.thinned import thinned
from torch import Tensor
from transformers import PreTrainedModel

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

NAME = "model.layers.0.mlp.up_proj"
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
GROUPS = {"strategy": "group", "group_size": 32}
ARGUMENTS = {
    "int8 channel": {**INT8, "strategy": "channel"},
    "int4 group": {"num_bits": 4, **GROUPS},
    "int4 group asymmetric": {"num_bits": 4, **GROUPS, "symmetric": False},
    "int8 group asymmetric": {**INT8, **GROUPS, "symmetric": False},
    "float8 channel": {**FLOAT8, "strategy": "channel"},
    "float8 block": {**FLOAT8, "strategy": "block", "block_structure": [16, 32]},
}


def model() -> PreTrainedModel:
    """The rows of one Linear begin at four times the smallest number of float16."""
    found = small.llama(num_hidden_layers=1)
    for parameter in found.parameters():
        parameter.data = parameter.data.half()
    found.config.dtype = torch.float16
    weight_RC = found.get_submodule(NAME).weight
    size_R1 = torch.logspace(-22, -6, len(weight_RC), base=2).unsqueeze(-1)
    generator = torch.Generator().manual_seed(1)
    weight_RC.data = ((torch.rand(weight_RC.shape, generator=generator) * 2 - 1) * size_R1).half()
    return found


def readable(tensors: dict[str, Tensor], key: str) -> Tensor:
    """A tensor; floats of 8 bits as what they stand for: several may be one in float16."""
    tensor = tensors[key]
    if tensor.dtype is not torch.float8_e4m3fn:
        return tensor
    scale = tensors[f"{key}_scale"]
    rows, columns = (of // by for of, by in zip(tensor.shape, scale.shape, strict=True))
    return tensor.half() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@pytest.mark.parametrize(
    ("name", "modifier"), thinned(ARGUMENTS, [QuantizationModifier, GPTQModifier])
)
def test_tiny_weights_in_float16_are_kept_in_memory_and_on_disk(
    name: str, modifier: Any, tmp_path: Path, warned: list[str]
) -> None:
    arguments: dict[str, Any] = ARGUMENTS[name]
    exact, rounded = model(), model()
    exact.save_pretrained(tmp_path / "source")
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    run: dict[str, Any] = {"dataset": small.token_rows(), "max_seq_length": 16}
    for start, output in ((rounded, "memory"), (str(tmp_path / "source"), "streamed")):
        oneshot(
            model=start,
            recipe=modifier(config_groups=groups, ignore=["lm_head"]),
            output_dir=tmp_path / output,
            verify=False,  # which the next line does, beside the source
            **run,
        )
        found = verify(tmp_path / output, reference=tmp_path / "source").findings
        assert not [one for one in found if one.severity == "error"], found
    assert not [one for one in warned if "changed the weights" in one]
    own, other = (load_file(tmp_path / f / "model.safetensors") for f in ("memory", "streamed"))
    assert own.keys() == other.keys()
    for key in own:
        assert torch.equal(readable(own, key), readable(other, key)), key
    assert bool((own[f"{NAME}.weight_scale"].float() > 0).all())
    was_RC, is_RC = (each.get_submodule(NAME).weight.double() for each in (exact, rounded))
    size_R = was_RC.norm(dim=1)
    if "block" not in name:
        assert bool(((is_RC - was_RC).norm(dim=1) < 0.25 * size_R).all())
