# SPDX-License-Identifier: Apache-2.0
"""Learn the rounding of all Linears of a block from the block's output.

The error of a rounding is the mean squared change of the block's output over the real tokens of all
calls. Each step takes as many calls as make up ``samples`` rows, in an order in which every call
comes once before any comes again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from llmcompressor.modeling.call_graph import CallOrder, copy_arguments, first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.moe.expert_stops import stages_bypassed
from llmcompressor.moe.module_list import ExpertPosition, expert_positions
from llmcompressor.numerics.autoround import Gradients, RoundingParameters, RoundingStart, sign_step
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.collectives import Ranks

# --------------------
# Repeated runs of a block on its recorded calls with replaced weights.
#
# The error of weights is the squared change of the block's output over the real tokens of a call.

_BATCHED = 3
"""Dimensions of ``[batch, tokens, C]``."""


@dataclass(frozen=True)
class Call:
    """Recorded arguments of a block's forward.

    Attributes:
        args: positional arguments; floating-point tensors may be in main memory.
        kwargs: keyword arguments; floating-point tensors may be in main memory.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
        reference: input of the block in the original model, in place of the first tensor; ``None``
            if it is the same.
        number: place of its first sample among those of all ranks.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mask: Tensor | None
    reference: Tensor | None = None
    number: int = 0

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
        """Number of samples in the batch."""
        tensor = first_tensor(self.args, dict(self.kwargs))
        return 1 if tensor is None or tensor.ndim < _BATCHED else len(tensor)


class BlockRunner:
    """A block and the calls that it is run on.

    A CPU takes several times as long for 16-bit products and their gradients, so there the block
    computes in float32, with its own weights cast.

    Args:
        block: it is not changed.
        calls: at least one.
        ranks: the ranks of the run, which all run the same blocks, each with calls of its own.

    Attributes:
        block: the same.
        calls: the same.
        ranks: the same.
        targets: output of the original block for each call, ``[tokens, C]``, in main memory.
        rows: number of samples in each call of all ranks, in the order of the samples.
        values: number of values in ``targets`` of all ranks.
        seen: number of tokens of all ranks.
        experts: weight → its place in the MoE, for weights of experts.
    """

    def __init__(self, block: Module, calls: Sequence[Call], ranks: Ranks | None = None) -> None:
        self.block, self.calls, self.ranks = block, calls, ranks or Ranks()
        parameters = dict(block.named_parameters())
        self._device = next(iter(parameters.values())).device
        self._dtype = torch.float32 if self._device.type == "cpu" else None
        self._own = {name: one.dtype for name, one in parameters.items()}
        self._plain = {
            name: self._to_compute_dtype(one.detach()) for name, one in parameters.items()
        }
        self.held: dict[str, Tensor] = {}
        places = expert_positions(block)
        self.experts = {
            f"{name}.weight": places[module]
            for name, module in block.named_modules()
            if module in places
        }
        with torch.no_grad():
            self.targets = [self.tokens(call.original, None).cpu() for call in calls]
        own = [sum(target.numel() for target in self.targets), sum(map(len, self.targets))]
        values, self.seen = self.ranks.sum_all(torch.tensor(own), what="outputs").tolist()
        self.values = max(1, values)
        told = self.ranks.exchange([(one.number, one.rows) for one in calls], what="calls")
        every = [
            (number, rank, index, rows)
            for rank, each in enumerate(told)
            for index, (number, rows) in enumerate(each)
        ]
        every.sort(key=lambda one: one[:3])
        self.rows = [rows for _, _, _, rows in every]
        self._places = [(rank, index) for _, rank, index, _ in every]

    def own(self, places: Iterable[int]) -> list[int]:
        """The calls of this rank among those at some places in the order of all ranks."""
        found = (self._places[place] for place in places)
        return [index for rank, index in found if rank == self.ranks.rank]

    def in_order(self, errors: Sequence[float]) -> list[float]:
        """The errors of the calls of all ranks, given those of this one."""
        every = self.ranks.exchange(list(errors), what="errors of calls")
        return [every[rank][index] for rank, index in self._places]

    def weight(self, name: str, values: Tensor) -> Tensor:
        """A weight's new values, rounded to its dtype and cast to the compute dtype."""
        weight_RC: Tensor = self._to_compute_dtype(values.to(self._own[name]))
        return weight_RC

    def is_nearest_expert(self, name: str) -> bool:
        """Return True if a weight is of a starved expert with the policy ``rtn``."""
        return name in self.experts and self.experts[name].policy == "rtn"

    def error(self, index: int, weights: Mapping[str, Tensor]) -> Tensor:
        """Squared error of the output of a call, float32."""
        return self.missing(index, self.tokens(self.calls[index], weights)).square().sum()

    def missing(self, index: int, output_TC: Tensor) -> Tensor:
        """Residual of a call's output: the original output minus this one, float32."""
        return (self.targets[index].to(self._device) - output_TC).float()

    def tokens(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """The block's output for the real tokens of a call, with weights as in :meth:`run`."""
        return real_tokens(self.run(call, weights), call.mask)

    def run(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """The first output tensor of the block with replaced weights.

        Args:
            call: the recorded call.
            weights: replacements, in addition to the held ones; ``None``: the original weights
                only.
        """
        args, kwargs = self._to_compute_dtype(call.args), self._to_compute_dtype(dict(call.kwargs))
        others = {} if weights is None else {**self.held, **weights}
        # experts get only their routed tokens, as outside of calibration
        with HooksMixin.disable_hooks(), stages_bypassed(self.block):
            output = functional_call(
                self.block, {**self._plain, **others}, args, kwargs, tie_weights=False
            )
        if isinstance(output, Mapping):
            output = tuple(output.values())
        tensor = first_tensor(tuple(output) if isinstance(output, tuple | list) else (output,), {})
        assert tensor is not None
        return tensor

    def _to_compute_dtype(self, value: Any) -> Any:
        """Move floating-point tensors to the block's device and compute dtype."""

        def cast(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point()
            return tensor.to(self._device, self._dtype or tensor.dtype) if floating else tensor

        return copy_arguments(value, cast)


# --------------------
# Learn the rounding of all Linears of a block from the block's output.


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
class TuningResult:
    """Result of tuning a block.

    Attributes:
        roundings: roundings by the name of the weight.
        error: mean squared change of the block's output.
        iteration: number of steps after which the roundings were found; 0: the initial ones.
        unreached: weights that no gradient has reached, except single experts.
    """

    roundings: Mapping[str, RoundingParameters]
    error: float
    iteration: int
    unreached: tuple[str, ...] = ()


def rounded_errors(
    runner: BlockRunner,
    starts: Mapping[str, RoundingStart],
    roundings: Mapping[str, RoundingParameters] | None = None,
) -> list[float]:
    """Squared errors of the calls of all ranks; by default with the initial rounding."""
    if roundings is None:
        roundings = {name: RoundingParameters.of(one) for name, one in starts.items()}
    return _Tuner(runner, starts).errors(roundings)


def tune_block(
    runner: BlockRunner,
    starts: Mapping[str, RoundingStart],
    before: Sequence[float],
    options: Options,
) -> TuningResult:
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
    nearest = {name: RoundingParameters.of(start) for name, start in starts.items()}
    found = TuningResult(nearest, sum(before) / runner.values, 0)
    if not 0 < sum(before) < math.inf or not (options.iters and starts):
        return found
    for roundings, iteration in tuner.candidates(before, options):
        error = sum(tuner.errors(roundings)) / runner.values
        if error < found.error:
            found = TuningResult(roundings, error, iteration)
    return replace(found, unreached=tuner.unreached())


class _Tuner:
    """Weights of a block, and the error of their roundings."""

    def __init__(self, runner: BlockRunner, starts: Mapping[str, RoundingStart]) -> None:
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
    def errors(self, roundings: Mapping[str, RoundingParameters]) -> list[float]:
        """Squared error of each call of all ranks."""
        weights = {
            name: self._runner.weight(name, one.apply(self._starts[name]).values)
            for name, one in roundings.items()
        }
        places = range(len(self._runner.calls))
        own = [float(self._runner.error(index, weights)) for index in places]
        return self._runner.in_order(own)

    def candidates(
        self, before: Sequence[float], options: Options
    ) -> Iterator[tuple[dict[str, RoundingParameters], int]]:
        """Yield the roundings with the least error of their own step, then the last ones.

        Calls differ in difficulty, so errors are relative to the initial ones.
        """
        roundings = {name: RoundingParameters.of(start) for name, start in self._starts.items()}
        best, least, best_step = dict[str, RoundingParameters](), 1.0, 0
        picks = _step_batches(self._runner.rows, options)
        for step in range(options.iters):
            picked = next(picks)
            found, error = self._gradients(roundings, self._runner.own(picked))
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
        self, roundings: Mapping[str, RoundingParameters], picked: Sequence[int]
    ) -> tuple[dict[str, Gradients], float]:
        """Gradients of the error of some calls of this rank and the others, and that error."""
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
        total, sums = self._sum_over_ranks(total, sums, leaves)
        self._reached.update(sums)
        with torch.no_grad():
            by_name = {
                name: rounded[name].gradients(self._starts[name], sums[name], roundings[name])
                for name in sums
            }
        return by_name, total

    def _sum_over_ranks(
        self, error: float, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """Add the errors of all ranks, and the gradients of weights that any of them has."""
        ranks = self._runner.ranks
        if ranks.count == 1:
            return error, dict(gradients)
        told = [error, *(float(name in gradients) for name in weights)]
        total, *has = ranks.sum_all(torch.tensor(told).double(), what="errors of a step").tolist()
        found = {}
        for name in (name for name, number in zip(weights, has, strict=True) if number):
            own = gradients.get(name)
            own = torch.zeros_like(weights[name], dtype=torch.float32) if own is None else own
            found[name] = ranks.sum_all(own, what=f"gradient of {name}")
        return total, found


def _step_batches(rows: Sequence[int], options: Options) -> Iterator[list[int]]:
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


# --------------------
# Batch preparation that AutoRound scripts call.

_Batch = TypeVar("_Batch")


def fix_batch_if_needed(batch: _Batch) -> _Batch:
    """Return the batch unchanged: its mask determines which tokens count."""
    return batch


# --------------------
# Input statistics of experts that too few tokens are routed to.
#
# The objective of learning is the block's output, on which an expert acts only through the tokens
# routed to it. If these are few, the learned rounding generalizes poorly. Calibration passes more
# tokens through such an expert; their statistics are collected here, to solve it instead.

_MOST = 2**32
"""Bytes of second moments at once. Whole blocks are tuned: no waves of experts bound them here."""
_FLOAT = 4
_INPUTS = 2
"""Of an expert: before its first matrices, and before the last."""


def expert_input_bytes(columns: int, experts: int) -> int:
    """Upper bound of the bytes for the second moments of one expert input, within the total budget.

    >>> expert_input_bytes(1024, 8), expert_input_bytes(7168, 256)
    (4194304, 8388608)
    """
    return min(_FLOAT * columns**2, _MOST // (_INPUTS * experts))


class ExpertInputs:
    """Second moments of the inputs of experts with few tokens.

    Few means fewer than the widest Linear of the expert has columns, or too few by the policy for
    starved experts. Statistics of experts that turn out to have enough tokens are dropped on the
    way.

    Args:
        places: Linears of experts and their places in the MoE.
        order: which of them share an input; ``None``: none do.
    """

    def __init__(self, places: Mapping[Module, ExpertPosition], order: CallOrder | None) -> None:
        self._places = places
        self._groups: dict[Module, list[Module]] = {}
        self._leaders: dict[Module, Module] = {}
        for module in places:
            group = (module,) if order is None else order.group_of(module)
            leader = next(one for one in group if one in places)
            self._groups.setdefault(leader, []).append(module)
            self._leaders[module] = leader
        self._found: dict[Module, InputStatistics] = {}
        self._left_out: set[Module] = set()
        self._widest: dict[tuple[Module, int], int] = {}
        for module, place in places.items():
            expert, columns = (place.mixture, place.expert), weight_of(module).shape[-1]
            self._widest[expert] = max(columns, self._widest.get(expert, 0))

    @property
    def leaders(self) -> Sequence[Module]:
        """The first Linear of each group that shares an input."""
        return list(self._groups)

    def add(self, leader: Module, input_TC: Tensor) -> None:
        """Accumulate an input of a group, as long as one of its experts has few tokens.

        Args:
            leader: one of :attr:`leaders`.
            input_TC: real tokens, ``[T, C]``.
        """
        if not any(map(self._has_few_tokens, self._groups[leader])):
            self._found.pop(leader, None)
        elif leader in self._found or self._start_within_budget(leader):
            self._found[leader].update(input_TC)

    def held(self, modules: Collection[Module]) -> list[Module]:
        """The subset of ``modules`` that is not learned.

        That is every starved expert, and every other expert with few tokens that has statistics.
        """
        return [
            one
            for one in modules
            if self._has_few_tokens(one)
            and (self._places[one].policy is not None or self._leaders[one] in self._found)
        ]

    def over_budget(self, modules: Collection[Module]) -> list[Module]:
        """The subset of ``modules`` whose statistics exceeded the memory budget."""
        return [one for one in modules if self._leaders.get(one) in self._left_out]

    def of(self, modules: Sequence[Module]) -> Iterator[tuple[list[Module], InputStatistics]]:
        """Groups of ``modules`` that share an input, with its statistics, if there are any."""
        groups: dict[Module, list[Module]] = {}
        for module in modules:
            groups.setdefault(self._leaders[module], []).append(module)
        for leader, members in groups.items():
            if leader in self._found:
                yield members, self._found[leader]

    def drop(self, modules: Collection[Module]) -> None:
        """Free the statistics of ``modules``."""
        for module in modules:
            self._found.pop(self._leaders.get(module, module), None)

    def sum_over(self, ranks: Ranks, modules: Collection[Module]) -> None:
        """Add what all ranks have accumulated of the inputs of ``modules``, on each of them."""
        if ranks.count == 1:
            return
        inside = set(modules)
        for leader in (one for one in self._groups if one in inside):
            own = torch.tensor([leader in self._found, leader in self._left_out])
            has, lacks = ranks.max_all(own, what="inputs of experts").tolist()
            if lacks:
                self._left_out.add(leader)
                self._found.pop(leader, None)
            elif has:
                if leader not in self._found:
                    self._found[leader] = self._new_statistics(leader)
                self._found[leader].sum_over(ranks)

    def _new_statistics(self, leader: Module) -> InputStatistics:
        weight_RC, name = weight_of(leader), self._places[leader].path
        return InputStatistics(weight_RC.shape[-1], weight_RC.device, name=name)

    def _has_few_tokens(self, module: Module) -> bool:
        place = self._places.get(module)
        if place is None or not place.sees_unrouted_tokens:
            return False
        return place.policy is not None or place.tokens < self._widest[place.mixture, place.expert]

    def _start_within_budget(self, leader: Module) -> bool:
        """Start statistics for a group, if they fit the memory budget."""
        weight_RC = weight_of(leader)
        widths = [weight_RC.shape[-1], *(weight_of(one).shape[-1] for one in self._found)]
        if leader in self._left_out or _FLOAT * sum(one**2 for one in widths) > _MOST:
            self._left_out.add(leader)
            return False
        self._found[leader] = self._new_statistics(leader)
        return True
