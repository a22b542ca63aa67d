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
from torch import distributed as dist

from llmcompressor import oneshot
from llmcompressor.errors import InputError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import MemorylessMinMaxObserver, Observer
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
    ("name", "ours"),
    [
        ("widening", "static_minmax"),
        ("drifting", "minmax"),
        ("earlier", "static_minmax"),
        ("earliest", "static_minmax"),
    ],
)
@pytest.mark.parametrize(("base", "args"), CASES)
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


def test_statistics_that_cannot_be_merged_name_the_remedy():
    @Observer.register("counting")
    class Counting(Widening):
        _stats_attrs: ClassVar = ["min_vals", "max_vals", "count"]

        def update_statistics_from_observed(self, observed):
            super().update_statistics_from_observed(observed)
            self.count = torch.ones(1)

    one, other = (
        make("counting", "input", ARGS["input"][0]).observe(seen("input")[0]) for _ in "ab"
    )
    with pytest.raises(InputError, match=r"Counting does not say how its count .*_act_sync_dict"):
        one.merge(other)


def test_what_a_step_of_training_has_shown_is_one_observation():
    tensors = seen("input", 2)
    observer = make("drifting", "input", ARGS["input"][0], averaging_constant=0.5)
    observer.observe(tensors[0])
    before = observer.max_vals.clone()
    for tensor in tensors:
        observer.collect(tensor)
    observer.commit()
    largest = torch.cat(tensors).amax().reshape(1)
    assert torch.allclose(observer.max_vals, (before + largest) / 2)
    assert observer.observations == 2


def test_an_observer_of_ours_may_be_given_statistics():
    @Observer.register("halving")
    class Halving(MemorylessMinMaxObserver):
        def update_statistics_from_observed(self, observed):
            self.min_vals = observed.amin(dim=(0, -1)) / 2
            self.max_vals = observed.amax(dim=(0, -1)) / 2

    args, tensor = ARGS["weight"][1], seen("weight")[0]
    found = make("halving", "weight", args)(tensor)[0]
    assert torch.allclose(found * 2, make("memoryless_minmax", "weight", args)(tensor)[0])


def test_parameters_by_name():
    observer = make("widening", "weight", ARGS["weight"][-1]).observe(seen("weight")[0])
    found: QParamsDict = observer.get_qparams()
    assert torch.equal(found["scale"], observer.qparams()[0])
    assert torch.equal(found["global_scale"], observer.global_scale())


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


@Observer.register("tighter")
class Tighter(Widening):
    """Starts from the scales that every observer would find, and may leave zeros out."""

    def get_qparams(self) -> QParamsDict:
        """As there, and narrower."""
        found = super().get_qparams()
        own: QParamsDict = {"scale": found["scale"] * 0.5}
        return own if self.args.symmetric else {**own, "zero_point": found["zero_point"]}


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_it_may_start_from_the_scales_of_every_observer(place):
    x, args = seen("weight")[0], ARGS["weight"][place]
    (scale, zero), usual = (make(name, "weight", args)(x) for name in ("tighter", "widening"))
    assert torch.equal(scale, usual[0] * 0.5)
    assert zero.dtype is usual[1].dtype
    assert torch.equal(zero.float(), usual[1].float())


@pytest.mark.parametrize(
    ("place", "found", "told"),
    [(1, (1, 0), "tuple without scale"), (0, {"scale": 1}, "dict without zero_point")],
)
def test_scales_that_are_not_given_by_name_are_refused(place, found, told):
    class Nameless(Spread):
        def get_qparams(self):
            return found

    Observer.register("nameless")(Nameless)
    with pytest.raises(InputError, match=rf"Nameless.get_qparams gives {told}"):
        make("nameless", "weight", ARGS["weight"][place])(seen("weight")[0])


def test_scales_under_a_global_one_follow_from_ranges():
    with pytest.raises(InputError, match="Keep min_vals and max_vals"):
        make("spread", "weight", ARGS["weight"][-1])


def test_statistics_of_another_shape_are_refused_by_name():
    class Flat(Observer):
        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            self.min_vals, self.max_vals = observed.amin(), observed.amax()

    Observer.register("flat")(Flat)
    with pytest.raises(InputError, match=r"Flat gives min_vals of the shape \(\), and"):
        make("flat", "weight", ARGS["weight"][1])(seen("weight")[0])


def test_a_class_that_lacks_what_makes_an_observer_is_refused_as_it_is_registered():
    class Empty(Observer):
        def calculate_qparams(self, observed: torch.Tensor) -> None:
            """Of a release before all of them."""

    with pytest.raises(InputError, match="Empty does not say how a tensor"):
        Observer.register("empty")(Empty)


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
