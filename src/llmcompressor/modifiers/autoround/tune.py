# SPDX-License-Identifier: Apache-2.0
"""Learns the rounding of all Linears of a block from what the block returns.

The error of a rounding is the mean square, over the real tokens of all calls, of the change of the
block's output. Each step takes as many calls as bring ``samples`` rows, in an order that goes
through all of them before any comes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.numerics.autoround import Gradients, Rounded, Rounding, Start, sign_step
from llmcompressor.observers.tokens import real_tokens

__all__ = ["Call", "Options", "Tuned", "tune_block"]

_BATCHED = 3
"""Dimensions of ``[batch, tokens, C]``."""


@dataclass(frozen=True)
class Call:
    """What a block was called with.

    Attributes:
        args: positional arguments; floating tensors may lie in main memory.
        kwargs: named ones, likewise.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
        reference: what it gets in the original model in place of the first tensor; ``None``: that.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mask: Tensor | None
    reference: Tensor | None = None

    @property
    def original(self) -> Call:
        """The same call in the original model."""
        if self.reference is None:
            return self
        for place, value in enumerate(self.args):
            if isinstance(value, Tensor):
                args = (*self.args[:place], self.reference, *self.args[place + 1 :])
                return Call(args, self.kwargs, self.mask)
        first = next(name for name, value in self.kwargs.items() if isinstance(value, Tensor))
        return Call(self.args, {**self.kwargs, first: self.reference}, self.mask)

    @property
    def rows(self) -> int:
        """Samples of the batch."""
        tensor = first_tensor(self.args, dict(self.kwargs))
        return 1 if tensor is None or tensor.ndim < _BATCHED else len(tensor)


@dataclass(frozen=True)
class Options:
    """How a block is tuned.

    Attributes:
        iters: steps.
        rate: of the first step; it falls linearly to zero.
        samples: rows of each step.
        seed: of the order in which calls are taken.
    """

    iters: int
    rate: float
    samples: int
    seed: int


@dataclass(frozen=True)
class Tuned:
    """What was found for a block.

    Attributes:
        roundings: by the name of the weight.
        error: mean square of the output's change.
        error_nearest: the same with rounding to nearest.
        iteration: after how many steps the roundings were found.
    """

    roundings: Mapping[str, Rounding]
    error: float
    error_nearest: float
    iteration: int


def tune_block(
    block: Module, starts: Mapping[str, Start], calls: Sequence[Call], options: Options
) -> Tuned:
    """Learn the rounding of some weights of a block.

    Args:
        block: it is not changed.
        starts: the weights, by their names in the block (``"mlp.up_proj.weight"``).
        calls: at least one.
        options: how.

    Returns:
        The best of: rounding to nearest, the roundings with the least error on the calls of their
        own step, those after the last step. None is worse than rounding to nearest on ``calls``.
    """
    tuner = _Tuner(block, starts, calls)
    nearest = {name: Rounding.of(start) for name, start in starts.items()}
    before = tuner.errors(nearest)
    found = Tuned(nearest, sum(before) / tuner.values, sum(before) / tuner.values, 0)
    if not 0 < sum(before) < math.inf or not options.iters:
        return found
    for roundings, iteration in tuner.candidates(before, options):
        error = sum(tuner.errors(roundings)) / tuner.values
        if error < found.error:
            found = Tuned(roundings, error, found.error_nearest, iteration)
    return found


class _Tuner:
    """A block, and the calls that it is run on again and again.

    A CPU takes several times as long for products of 16 bits, and for their gradients: there the
    block computes in float32, with the weights that it has.
    """

    def __init__(self, block: Module, starts: Mapping[str, Start], calls: Sequence[Call]) -> None:
        self._block, self._starts, self._calls = block, starts, calls
        self._device = next(iter(starts.values())).weight_RC.device
        self._dtype = torch.float32 if self._device.type == "cpu" else None
        self._plain = {name: self._cast(one.detach()) for name, one in block.named_parameters()}
        with torch.no_grad():
            self._targets = [
                real_tokens(self._run(call.original, {}), call.mask).cpu() for call in calls
            ]
        self.values = max(1, sum(target.numel() for target in self._targets))

    @torch.no_grad()
    def errors(self, roundings: Mapping[str, Rounding]) -> list[float]:
        """The squared error of each call."""
        weights = {
            name: self._weight(name, one.apply(self._starts[name]))
            for name, one in roundings.items()
        }
        return [float(self._error(index, weights)) for index in range(len(self._calls))]

    def candidates(
        self, before: Sequence[float], options: Options
    ) -> Iterator[tuple[dict[str, Rounding], int]]:
        """The best roundings by the error of their own step, and the last ones, with their step.

        Calls differ in how hard they are: errors are compared to those of rounding to nearest.
        """
        roundings = {name: Rounding.of(start) for name, start in self._starts.items()}
        best, least, best_step = dict[str, Rounding](), 1.0, 0
        picks = _picks([call.rows for call in self._calls], options)
        for step in range(options.iters):
            picked = next(picks)
            found, error = self._gradients(roundings, picked)
            share = error / (sum(before[index] for index in picked) or math.inf)
            if share < least:
                best = {name: one.clone() for name, one in roundings.items()}
                least, best_step = share, step
            for name, gradients in found.items():
                sign_step(roundings[name], gradients, options.rate * (1 - step / options.iters))
        if best_step:
            yield best, best_step
        yield roundings, options.iters

    def _gradients(
        self, roundings: Mapping[str, Rounding], picked: Sequence[int]
    ) -> tuple[dict[str, Gradients], float]:
        """Gradients of the error of some calls, and that error."""
        with torch.no_grad():
            rounded = {name: one.apply(self._starts[name]) for name, one in roundings.items()}
            leaves = {name: self._weight(name, one) for name, one in rounded.items()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        total, sums = 0.0, dict[str, Tensor]()
        for index in picked:
            with torch.enable_grad():
                error = self._error(index, leaves)
            total += float(error.detach())
            found = torch.autograd.grad(error, list(leaves.values()), allow_unused=True)
            for name, gradient_RC in zip(leaves, found, strict=True):
                if gradient_RC is not None:  # an expert that no token of the call chose has none
                    sums[name] = sums.get(name, 0.0) + gradient_RC.float()
        with torch.no_grad():
            by_name = {
                name: rounded[name].gradients(self._starts[name], sums[name], roundings[name])
                for name in sums
            }
        return by_name, total

    def _weight(self, name: str, rounded: Rounded) -> Tensor:
        """A rounded weight with the values that it will have, in the dtype to compute in."""
        weight_RC: Tensor = self._cast(rounded.values.to(self._starts[name].weight_RC.dtype))
        return weight_RC

    def _error(self, index: int, weights: Mapping[str, Tensor]) -> Tensor:
        """Squared change of the output of a call, float32."""
        call = self._calls[index]
        output_TC = real_tokens(self._run(call, weights), call.mask)
        return (output_TC - self._targets[index].to(self._device)).float().square().sum()

    def _run(self, call: Call, weights: Mapping[str, Tensor]) -> Tensor:
        """The first tensor that the block returns with some other weights."""
        args, kwargs = self._cast(call.args), self._cast(dict(call.kwargs))
        with HooksMixin.disable_hooks():
            output = functional_call(
                self._block, {**self._plain, **weights}, args, kwargs, tie_weights=False
            )
        if isinstance(output, Mapping):
            output = tuple(output.values())
        tensor = first_tensor(tuple(output) if isinstance(output, tuple | list) else (output,), {})
        assert tensor is not None
        return tensor

    def _cast(self, value: Any) -> Any:
        """Floating tensors where, and in the dtype, that the block computes in."""
        if isinstance(value, Tensor):
            floating = value.is_floating_point()
            return value.to(self._device, self._dtype or value.dtype) if floating else value
        if type(value) is dict:
            return {key: self._cast(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cast(item) for item in value)
        return value


def _picks(rows: Sequence[int], options: Options) -> Iterator[list[int]]:
    """Which calls each step takes."""
    generator = torch.Generator().manual_seed(options.seed)
    waiting: list[int] = []
    while True:
        picked: list[int] = []
        while sum(rows[index] for index in picked) < options.samples and len(picked) < len(rows):
            if not waiting:
                waiting = torch.randperm(len(rows), generator=generator).tolist()
            picked.append(waiting.pop())
        yield picked
