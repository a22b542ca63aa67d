# SPDX-License-Identifier: Apache-2.0
"""What hooks see: the compressed model's inputs, and beside them those of the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, plain_inputs, run_pipeline
from tests.support.thinned import thinned
from torch import nn
from torch.nn import Module

from llmcompressor.core.contract import Granularity
from llmcompressor.modeling.paused_forward import Pass
from llmcompressor.pipelines.watchers import OriginalWeights

LEVELS = list(Granularity)
NAMES = ["llama", "gemma3", "mixtral", "t5", "llava", "mamba"]


def _recorded(
    name: str, level: Granularity, **fields: Any
) -> tuple[Module, list[Any], dict[Module, str], Recorder]:
    """A run of a recorder that changes every weight."""
    architecture = tiny.ARCHITECTURES[name]
    model, batches = tiny.build(name), architecture.batches()
    recorder = Recorder(
        targets=["Linear"],
        ignore=architecture.ignore,
        granularity=level,
        round_to=2,
        **fields,
    )
    run_pipeline(model, batches, recorder)
    names = tiny.leaves(model, "Linear", architecture.ignore)
    return model, batches, names, recorder


@pytest.mark.parametrize(("name", "level"), thinned(NAMES, LEVELS))
def test_references_are_the_original_inputs_to_the_bit(name: str, level: Granularity) -> None:
    _, batches, names, recorder = _recorded(name, level, twin=True)
    original = tiny.build(name)
    expected = plain_inputs(
        original, batches, tiny.leaves(original, "Linear", tiny.ARCHITECTURES[name].ignore)
    )
    assert set(recorder._references) == set(names.values())
    for module, references in recorder._references.items():
        assert all(map(torch.equal, references, expected[module])), module


@pytest.mark.parametrize(("name", "twin"), thinned(NAMES, [False, True]))
def test_at_linear_level_inputs_are_those_of_the_finished_model(name: str, twin: bool) -> None:
    """What a Linear gets depends only on those before it, which are compressed already."""
    model, batches, _, recorder = _recorded(name, Granularity.LINEAR, twin=twin)
    architecture = tiny.ARCHITECTURES[name]
    expected = plain_inputs(model, batches, tiny.leaves(model, "Linear", architecture.ignore))
    for module, inputs in recorder._inputs.items():
        assert all(map(torch.equal, inputs, expected[module])), module


@pytest.mark.parametrize("level", LEVELS)
def test_without_propagation_inputs_are_the_original_ones(level: Granularity) -> None:
    batches = tiny.text_batches()
    model, original = tiny.build("llama"), tiny.build("llama")
    recorder = Recorder(granularity=level, round_to=2, twin=True)
    run_pipeline(model, batches, recorder, propagate_error=False)
    expected = plain_inputs(original, batches, tiny.leaves(original, "Linear", ["lm_head"]))
    assert recorder._inputs.keys() == expected.keys()
    for name, inputs in expected.items():
        assert all(map(torch.equal, recorder._inputs[name], inputs)), name
    assert not torch.equal(
        model.model.layers[0].mlp.up_proj.weight, original.model.layers[0].mlp.up_proj.weight
    )


class Shared(nn.Module):
    """A loop over one layer, and a layer that some batches call more often."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.loop, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = torch.tanh(self.loop(x))
        return self.last(x)


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("times", [(2, 2, 2), (1, 3, 2), (3, 1, 1)])
def test_a_shared_module_is_compressed_at_its_first_call(times: Any, twin: bool) -> None:
    model, batches = Shared(), [{"x": torch.randn(2, 3, 4), "times": t} for t in times]
    recorder = Recorder(round_to=1, twin=twin)
    run_pipeline(model, batches, recorder)
    assert recorder._told == ["first", "loop", "last"]
    assert recorder._seen_when_told == {"first": 3, "loop": 3, "last": 3}
    inputs = plain_inputs(model, batches, dict(zip(model.children(), recorder._told, strict=True)))
    assert all(map(torch.equal, recorder._inputs["last"], inputs["last"]))
    if twin:
        original = Shared()
        names = dict(zip(original.children(), recorder._told, strict=True))
        expected = plain_inputs(original, batches, names)["last"]
        assert all(map(torch.equal, recorder._references["last"], expected))


def test_streams_on_different_routes_have_no_common_reference() -> None:
    class Router(nn.Module):
        """Rounding changes the sign that decides the route."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(3))
            self.first.weight.data.fill_(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            goes_left = bool(self.first(x).sum() > 0)
            return self.left(x.clone()) if goes_left else self.right(x.clone())

    model = Router()

    class Flip(Recorder):
        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
            super().on_sequential_epoch_end(state, event, modules, **kw)
            if model.first in list(modules):
                model.first.weight.data = model.first.weight.data * -1

    recorder = Flip(twin=True)
    batches = [{"x": torch.full((1, 1), value)} for value in (1.0, -1.0, 2.0)]
    run_pipeline(model, batches, recorder)
    assert [float(x) for x in recorder._inputs["right"]] == [1.0, 2.0]
    assert [float(x) for x in recorder._inputs["left"]] == [-1.0]
    assert recorder._references["right"] == [None, None]
    assert recorder._references["left"] == [None]


def test_original_weights_are_dropped_after_the_last_pass() -> None:
    linear = nn.Linear(2, 2)
    weights = OriginalWeights(2, {linear: 1})
    weights.keep([linear])
    linear.weight.data = torch.zeros(2, 2)
    first, second = Pass(0, list, "original"), Pass(1, list, "original")
    for _ in range(3):  # one pass that calls it often does not use up the other's turn
        with weights.in_place(first, linear):
            assert linear.weight.any()
    weights.keep([])
    assert weights._saved
    for _ in range(2):  # nor is a pass cut short
        with weights.in_place(second, linear):
            assert linear.weight.any()
    weights.keep([])
    assert not weights._saved
    weights.keep([linear])  # nobody is left to want them
    assert not weights._saved
