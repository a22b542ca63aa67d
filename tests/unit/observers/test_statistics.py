# SPDX-License-Identifier: Apache-2.0
"""Observers that keep statistics of their own, as third parties write them."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from tests.support.thinned import thinned
from torch import distributed as dist

from llmcompressor import oneshot
from llmcompressor.errors import InputError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import Observer
from llmcompressor.observers.base import MinMaxTuple, QParamsDict

ARGS = {
    "weight": [
        QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False),
        QuantizationArgs(num_bits=8, strategy="channel"),
        QuantizationArgs(num_bits=8, strategy="tensor"),
        QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[3, 10]),
        PRESET_SCHEMES["NVFP4"]["weights"],
    ],
    "input": [
        QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False),
        QuantizationArgs(num_bits=8, strategy="group", group_size=16),
    ],
    "k": [
        QuantizationArgs(num_bits=8, strategy="tensor"),
        QuantizationArgs(num_bits=8, strategy="attn_head"),
    ],
}
SHAPES = {"weight": (8, 32), "input": (2, 5, 32), "k": (2, 4, 5, 16)}
CASES = [(base, args) for base, every in ARGS.items() for args in every]


@Observer.register("widening")
class Widening(Observer):
    """The extremes of all that was seen."""

    _act_sync_dict: ClassVar = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """As in the documentation of such observers."""
        low, high = observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1))
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


@Observer.register("drifting")
class Drifting(Observer):
    """A moving average, with an option."""

    _act_sync_dict: ClassVar = {"min_vals": dist.ReduceOp.AVG, "max_vals": dist.ReduceOp.AVG}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.constant = self.args.observer_kwargs.get("averaging_constant", 0.01)

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """A step towards the extremes."""
        low, high = observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1))
        if hasattr(self, "min_vals"):
            low = torch.lerp(self.min_vals, low, self.constant)
            high = torch.lerp(self.max_vals, high, self.constant)
        self.min_vals, self.max_vals = low, high


@Observer.register("earlier")
class Earlier(Observer):
    """The extremes of all that was seen, in the form of an earlier release."""

    def update_statistics(self, observed: torch.Tensor) -> None:
        """As in the documentation of such observers."""
        Widening.update_statistics_from_observed(self, observed)


@Observer.register("earliest")
class Earliest(Observer):
    """The same in the form before that, kept by names of its own."""

    def __init__(self, base_name, args, module=None, **observer_kwargs):
        super().__init__(base_name, args, module, **observer_kwargs)
        self.low = self.high = None

    def get_min_max(self, observed: torch.Tensor) -> MinMaxTuple:
        """As in the documentation of such observers."""
        low, high = observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1))
        if self.low is not None:
            low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
        self.low, self.high = low, high
        return low, high

    def get_global_min_max(self, observed: torch.Tensor) -> MinMaxTuple:
        """Nobody asks for it: a global scale follows from the ranges."""
        raise NotImplementedError


def seen(base: str, number: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPES[base], generator=generator) for _ in range(number)]


def make(name: str, base: str, args: QuantizationArgs, **options):
    return Observer.load_from_registry(name, base_name=base, args=args, **options)


def alike(one: Observer, other: Observer) -> bool:
    return all(map(torch.equal, one.qparams(), other.qparams()))


@pytest.mark.parametrize(
    ("name", "ours", "base", "args"),
    thinned(
        [
            ("widening", "static_minmax"),
            ("drifting", "minmax"),
            ("earlier", "static_minmax"),
            ("earliest", "static_minmax"),
        ],
        CASES,
    ),
)
def test_it_finds_what_one_of_ours_finds(name, ours, base, args):
    theirs, own, again = make(name, base, args), make(ours, base, args), make(name, base, args)
    *first, last = seen(base)
    for tensor in first:
        theirs.observe(tensor)
        own.observe(tensor)
    again.observe(10 * last).load_state_dict(theirs.state_dict())
    for observer in (theirs, own, again):
        observer.observe(last)
    pairs = zip(theirs.qparams(), own.qparams(), strict=True)
    assert all(torch.allclose(found.float(), wanted.float()) for found, wanted in pairs)
    assert alike(again, theirs)
    assert alike(copy.deepcopy(theirs), theirs)
    assert alike(pickle.loads(pickle.dumps(theirs)), theirs)
    theirs.reset()
    with pytest.raises(InputError, match="has not seen any value"):
        theirs.qparams()


def test_rows_of_an_activation_are_observations():
    shapes = []

    @Observer.register("looking")
    class Looking(Widening):
        def update_statistics_from_observed(self, observed):
            shapes.append(tuple(observed.shape))
            super().update_statistics_from_observed(observed)

    for base, args in CASES:
        make("looking", base, args).observe(seen(base)[0])
    assert shapes == [
        (1, 8, 2, 16),
        (1, 8, 1, 32),
        (1, 1, 256),
        (1, 3, 4, 30),
        (1, 8, 2, 16),
        (10, 1, 32),
        (10, 2, 16),
        (1, 1, 640),
        (1, 4, 1, 1, 160),
    ]


@pytest.mark.parametrize("name", ["widening", "drifting"])
def test_two_halves_are_merged_as_it_says(name):
    args = ARGS["input"][0]
    halves = [make(name, "input", args, averaging_constant=0.5) for _ in range(2)]
    for half, tensor in zip(halves, seen("input", 2), strict=True):
        half.observe(tensor)
    low = torch.stack([half.min_vals for half in halves])
    merged = halves[0].merge(halves[1])
    expected = low.amin(dim=0) if name == "widening" else low.mean(dim=0)
    assert torch.allclose(merged.range()[0], expected)


@Observer.register("spread")
class Spread(Observer):
    """Two standard deviations around the mean, and scales of its own."""

    @property
    def has_statistics(self) -> bool:
        """As in the documentation of such observers."""
        return hasattr(self, "mean")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """As there."""
        self.mean, self.spread = observed.mean((0, -1)), observed.std((0, -1))

    def get_qparams(self) -> QParamsDict:
        """As there."""
        reach = self.mean.abs() + self.args.observer_kwargs.get("k", 2.0) * self.spread
        zero = torch.zeros(reach.shape, dtype=torch.int8)
        return {"scale": reach / 127.5, "zero_point": zero, "global_scale": None}


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_it_may_find_scales_by_itself(place):
    (x, *_), args = seen("weight"), ARGS["weight"][place]
    observer = make("spread", "weight", args)
    scale, zero = observer(x)
    assert torch.equal(scale, observer.get_qparams()["scale"].reshape(scale.shape))
    assert scale.shape == make("memoryless_minmax", "weight", args)(x)[0].shape
    assert observer.qparams(dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    low, high = observer.range()
    assert not zero.any()
    assert bool(((low < 0) & (high > 0)).all())


def test_a_recipe_names_it():
    def linear() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"a": torch.nn.Linear(32, 8)})

    scales = []
    for name in ("widening", "memoryless_minmax"):
        weights = {"num_bits": 8, "strategy": "channel", "observer": name}
        groups = {"g": {"targets": ["Linear"], "weights": weights}}
        model = oneshot(model=linear(), recipe=QuantizationModifier(config_groups=groups))
        scales.append(model["a"].weight_scale)
    assert torch.equal(*scales)
