# SPDX-License-Identifier: Apache-2.0
"""Learn the rounding of all Linears of a block from the block's output.

The error of a rounding is the mean squared change of the block's output over the real tokens of all
calls. Each step takes as many calls as make up ``samples`` rows, in an order in which every call
comes once before any comes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcompressor.modifiers.autoround.runner import BlockRunner
from llmcompressor.numerics.autoround import Gradients, Rounding, Start, sign_step

__all__ = ["Options", "Tuned", "rounded_errors", "tune_block"]


@dataclass(frozen=True)
class Options:
    """Options for tuning a block.

    Attributes:
        iters: number of steps.
        rate: learning rate of the first step; it decays linearly to zero.
        samples: rows of each step.
        seed: seed of the order in which calls are drawn.
        range_share: share of the learning rate that is used for the factors of ranges.
    """

    iters: int
    rate: float
    samples: int
    seed: int
    range_share: float = 1.0


@dataclass(frozen=True)
class Tuned:
    """Result of tuning a block.

    Attributes:
        roundings: roundings by the name of the weight.
        error: mean squared change of the block's output.
        iteration: number of steps after which the roundings were found; 0: the initial ones.
        unreached: weights that no gradient has reached, except single experts.
    """

    roundings: Mapping[str, Rounding]
    error: float
    iteration: int
    unreached: tuple[str, ...] = ()


def rounded_errors(
    runner: BlockRunner,
    starts: Mapping[str, Start],
    roundings: Mapping[str, Rounding] | None = None,
) -> list[float]:
    """Squared error of each call with ``roundings``; by default with the initial rounding."""
    if roundings is None:
        roundings = {name: Rounding.of(one) for name, one in starts.items()}
    return _Tuner(runner, starts).errors(roundings)


def tune_block(
    runner: BlockRunner, starts: Mapping[str, Start], before: Sequence[float], options: Options
) -> Tuned:
    """Learn the rounding of some weights of a block.

    Args:
        runner: the block and its calls.
        starts: the weights, by their names in the block (``"mlp.up_proj.weight"``).
        before: their :func:`rounded_errors`.
        options: options of the tuning.

    Returns:
        The best of the initial rounding, the roundings with the least error on the calls of their
        own step, and those after the last step. It is never worse than the initial one on all
        calls.
    """
    tuner = _Tuner(runner, starts)
    nearest = {name: Rounding.of(start) for name, start in starts.items()}
    found = Tuned(nearest, sum(before) / runner.values, 0)
    if not 0 < sum(before) < math.inf or not (options.iters and starts):
        return found
    for roundings, iteration in tuner.candidates(before, options):
        error = sum(tuner.errors(roundings)) / runner.values
        if error < found.error:
            found = Tuned(roundings, error, iteration)
    return replace(found, unreached=tuner.unreached())


class _Tuner:
    """Weights of a block, and the error of their roundings."""

    def __init__(self, runner: BlockRunner, starts: Mapping[str, Start]) -> None:
        self._runner, self._starts = runner, starts
        self._reached: set[str] = set()

    def unreached(self) -> tuple[str, ...]:
        """Weights that no gradient has reached so far.

        No token may have chosen a single expert, so experts count only if none of them was reached.
        """
        missing = [name for name in self._starts if name not in self._reached]
        experts = self._runner.experts.keys()
        if experts & self._reached:
            missing = [name for name in missing if name not in experts]
        return tuple(missing)

    @torch.no_grad()
    def errors(self, roundings: Mapping[str, Rounding]) -> list[float]:
        """Squared error of each call."""
        weights = {
            name: self._runner.weight(name, one.apply(self._starts[name]).values)
            for name, one in roundings.items()
        }
        places = range(len(self._runner.calls))
        return [float(self._runner.error(index, weights)) for index in places]

    def candidates(
        self, before: Sequence[float], options: Options
    ) -> Iterator[tuple[dict[str, Rounding], int]]:
        """Yield the roundings with the least error of their own step, then the last ones.

        Calls differ in difficulty, so errors are relative to the initial ones.
        """
        roundings = {name: Rounding.of(start) for name, start in self._starts.items()}
        best, least, best_step = dict[str, Rounding](), 1.0, 0
        picks = _picks([call.rows for call in self._runner.calls], options)
        for step in range(options.iters):
            picked = next(picks)
            found, error = self._gradients(roundings, picked)
            share = error / (sum(before[index] for index in picked) or math.inf)
            if share < least:
                best = {name: one.clone() for name, one in roundings.items()}
                least, best_step = share, step
            rate = options.rate * (1 - step / options.iters)
            for name, gradients in found.items():
                sign_step(roundings[name], gradients, rate, rate * options.range_share)
        if best_step:
            yield best, best_step
        yield roundings, options.iters

    def _gradients(
        self, roundings: Mapping[str, Rounding], picked: Sequence[int]
    ) -> tuple[dict[str, Gradients], float]:
        """Gradients of the error of some calls, and that error."""
        with torch.no_grad():
            rounded = {name: one.apply(self._starts[name]) for name, one in roundings.items()}
            leaves = {name: self._runner.weight(name, one.values) for name, one in rounded.items()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        total, sums = 0.0, dict[str, Tensor]()
        for index in picked:
            with torch.enable_grad():
                error = self._runner.error(index, leaves)
            total += float(error.detach())
            if not error.requires_grad:  # all tokens were routed to experts that are not learned
                continue
            found = torch.autograd.grad(error, list(leaves.values()), allow_unused=True)
            for name, gradient_RC in zip(leaves, found, strict=True):
                if gradient_RC is not None:  # an expert without tokens in the call has none
                    sums[name] = sums.get(name, 0.0) + gradient_RC.float()
        self._reached.update(sums)
        with torch.no_grad():
            by_name = {
                name: rounded[name].gradients(self._starts[name], sums[name], roundings[name])
                for name in sums
            }
        return by_name, total


def _picks(rows: Sequence[int], options: Options) -> Iterator[list[int]]:
    """Indices of the calls of each step."""
    generator = torch.Generator().manual_seed(options.seed)
    waiting: list[int] = []
    while True:
        picked: list[int] = []
        while sum(rows[index] for index in picked) < options.samples and len(picked) < len(rows):
            if not waiting:
                waiting = torch.randperm(len(rows), generator=generator).tolist()
            picked.append(waiting.pop())
        yield picked
