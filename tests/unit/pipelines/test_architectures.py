# SPDX-License-Identifier: Apache-2.0
"""Every architecture runs through the paused forward as through its own, and is compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, hooks_left, plain_inputs, run_pipeline, stubs_left
from tests.support.thinned import thinned
from torch.nn import Module
from torch.utils.data import DataLoader

from llmcompressor import oneshot
from llmcompressor.core.contract import Granularity
from llmcompressor.modeling.blocks import find_blocks, sub_blocks
from llmcompressor.modeling.paused_forward import Pass, PausedForward
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.pipelines.batches import calibration_mode

NAMES = list(tiny.ARCHITECTURES)
WITH_LINEARS = [name for name in NAMES if tiny.ARCHITECTURES[name].leaf == "Linear"]
LEVELS = ["linear", "sub_block", "block"]


def _targets(model: Module, name: str, level: str) -> dict[Module, str]:
    architecture = tiny.ARCHITECTURES[name]
    leaves = tiny.leaves(model, architecture.leaf, architecture.ignore)
    if level == "linear":
        return leaves
    blocks = {
        block: block_name
        for block, block_name in find_blocks(model).items()
        if any(module in leaves for module in block.modules())
    }
    if level == "block":
        return blocks
    return {
        part: part_name
        for block, block_name in blocks.items()
        for part, part_name in sub_blocks(block, block_name, leaves).items()
    }


def _paused_outputs(model: Module, targets: dict[Module, str], batches: list[Any]) -> list[Any]:
    outputs: dict[int, Any] = {}

    def run(index: int) -> None:
        outputs[index] = model(**batches[index])

    passes = [Pass(index, lambda index=index: run(index)) for index in range(len(batches))]
    stops = []
    with PausedForward(targets, passes) as forward:
        while stop := forward.next_stop():
            stops.append(stop.name)
            assert [one.index for one in stop.passes] == list(range(len(batches)))
            for one in stop.passes:
                forward.execute(one)  # a trial run leaves no trace
            forward.release(stop.module)
            for one in stop.passes:
                forward.resume(one)
    assert sorted(stops) == sorted(targets.values())
    return [outputs[index] for index in range(len(batches))]


@pytest.mark.parametrize(("name", "level"), thinned(NAMES, LEVELS))
def test_a_paused_forward_equals_an_ordinary_one_to_the_bit(name: str, level: str) -> None:
    model, batches = tiny.build(name), tiny.ARCHITECTURES[name].batches()
    with calibration_mode(model):  # without a cache, where a model can do without
        expected = [model(**batch) for batch in batches]
        targets = _targets(model, name, level)
        outputs = _paused_outputs(model, targets, batches)
    for output, ordinary in zip(outputs, expected, strict=True):
        tensors, ordinary_tensors = tiny.tensors_of(output), tiny.tensors_of(ordinary)
        assert len(tensors) == len(ordinary_tensors) > 0
        assert all(map(torch.equal, tensors, ordinary_tensors))
    assert not stubs_left(model)


@pytest.mark.parametrize(("name", "level"), thinned(NAMES, reversed(LEVELS)))
def test_every_level_sees_the_inputs_of_an_ordinary_forward(name: str, level: str) -> None:
    """As long as nothing is changed: the same tensors at every module, once per batch."""
    architecture = tiny.ARCHITECTURES[name]
    model, batches = tiny.build(name), architecture.batches()
    recorder = Recorder(
        targets=[architecture.leaf], ignore=architecture.ignore, granularity=Granularity(level)
    )
    names = tiny.leaves(model, architecture.leaf, architecture.ignore)
    expected = plain_inputs(model, batches, names)
    run_pipeline(model, batches, recorder)
    assert recorder._inputs.keys() == expected.keys()
    for module in expected:
        assert len(recorder._inputs[module]) == len(expected[module]), module
        assert all(map(torch.equal, recorder._inputs[module], expected[module])), module
    assert sorted(recorder._told) == sorted(expected)
    assert set(recorder._seen_when_told.values()) == {len(batches)}
    assert not stubs_left(model)
    assert not hooks_left(model)


@pytest.mark.parametrize(("name", "asymmetric"), thinned(WITH_LINEARS, [True, False]))
def test_gptq_quantizes_every_targeted_linear(name: str, asymmetric: bool) -> None:
    architecture = tiny.ARCHITECTURES[name]
    model, batches = tiny.build(name), architecture.batches()
    recipe = GPTQModifier(
        config_groups={
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "symmetric": True, "strategy": "channel"},
            }
        },
        ignore=architecture.ignore,
        asymmetric=asymmetric,
    )
    oneshot(model=model, recipe=recipe, dataset=DataLoader(batches, batch_size=None))
    modules = tiny.leaves(model, "Linear", architecture.ignore)  # experts are among them now
    for module, module_name in modules.items():
        assert module.quantization_scheme.weights.num_bits == 4, module_name
        codes = module.weight / module.weight_scale
        assert torch.equal(codes.round().clamp(-8, 7) * module.weight_scale, module.weight)
    assert set(recipe.records) == set(modules.values())
    assert all(record.tokens > 0 for record in recipe.records.values())
    with torch.no_grad():
        assert all(
            bool(tensor.isfinite().all())
            for batch in batches
            for tensor in tiny.tensors_of(model(**batch))
        )
    assert not stubs_left(model)
    assert not hooks_left(model)
