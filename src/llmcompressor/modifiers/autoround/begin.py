# SPDX-License-Identifier: Apache-2.0
"""Initialization of a block's learned rounding: GPTQ's solution of its Linears.

Linears are solved (:mod:`llmcompressor.quantization.column_solver`) in the order of their calls,
each for the inputs that the rounded ones before it produce. A Linear whose output is added to the
block's output (the last one of an MLP) is solved for the whole residual of the block's output; the
others for the output of the original ones.

Learning starts not from the codes, but for each weight from the value that is optimal given all
other codes (:mod:`llmcompressor.numerics.gptq`), clamped to within half a step of its code. With
zero offsets it rounds to GPTQ's code, and its distance to the next code is what moving there would
cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.modeling.call_graph import CallOrder, first_tensor
from llmcompressor.modifiers.autoround.tune import BlockRunner, Call
from llmcompressor.numerics.autoround import RoundingParameters, RoundingStart, start_at_codes
from llmcompressor.numerics.scales import ScaleFormat
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.quantization.column_solver import Options, Problem, solve
from llmcompressor.quantization.parameters import WeightParameters, weight_of
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.schemes.bridge import grid_of, partition_of, scale_dtype_of, scale_format_of

REFINEMENTS = 4
"""Rounds of coordinate descent after each sweep."""
_OPTIONS = Options(128, 0.01, 0.05, refinements=REFINEMENTS, refit=True, settles=True)
_ADDED = 0.02
"""Share that a sum may be off which an output is added to, of the output's norm: products of 16
bits."""


@dataclass(frozen=True)
class InitialRounding:
    """Parameters of a weight and the starting point of its learning.

    Attributes:
        parameters: scales and zero points before any is learned.
        start: the starting point on these parameters.
    """

    parameters: WeightParameters
    start: RoundingStart


def nearest_initialization(module: Module, parameters: WeightParameters) -> InitialRounding:
    """Start from the weight itself: without offsets it is rounded to nearest."""
    args = parameters.args
    stored = scale_dtype_of(args) or parameters.scale.dtype
    start = RoundingStart(
        weight_of(module).detach(),
        parameters.effective_scale,
        None if args.symmetric else parameters.zero_point,
        grid_of(args),
        partition_of(args),
        stored if has_learnable_scales(parameters) else None,
    )
    return InitialRounding(parameters, start)


def has_learnable_scales(parameters: WeightParameters) -> bool:
    """Return True if scales are plain numbers, which small factors can change."""
    return scale_format_of(parameters.args) is ScaleFormat.PLAIN


@torch.no_grad()
def solve_block(
    runner: BlockRunner, nearest: Mapping[str, InitialRounding], order: CallOrder | None
) -> dict[str, InitialRounding]:
    """Solve the Linears of a block one after the other.

    Args:
        runner: the block.
        nearest: starting points for rounding to nearest, by weight (``"mlp.up_proj.weight"``);
            sweeps start from their scales.
        order: the order of calls, and which Linears share an input.

    Returns:
        Starting points under the same names. Weights that no token reaches stay as in ``nearest``.
    """
    found, weights = dict(nearest), dict[str, Tensor]()
    for stage in _solve_stages(runner, nearest, order):
        groups = [
            _InputGroup(names, runner.block.get_submodule(names[0].removesuffix(".weight")))
            for names in stage
        ]
        direct = (
            len(groups) == 1
            and len(stage[0]) == 1
            and _is_added_to_output(runner, groups[0].leader)
        )
        _collect_statistics(runner, groups, weights, direct=direct)
        for group in groups:
            for name, begun in _solve_group(runner, group, nearest):
                found[name] = begun
            group.clear()
        for name in (name for names in stage for name in names):
            rounded = RoundingParameters.of(found[name].start).apply(found[name].start)
            weights[name] = runner.weight(name, rounded.values)
    return found


@torch.no_grad()
def solve_last_linear(
    runner: BlockRunner,
    nearest: Mapping[str, InitialRounding],
    order: CallOrder | None,
    weights: Mapping[str, Tensor],
) -> dict[str, InitialRounding]:
    """Solve the last Linear again, for the inputs that the learned weights before it produce.

    Args:
        runner: the block.
        nearest: as for :func:`solve_block`.
        order: as for :func:`solve_block`.
        weights: all learned weights, in the dtype that the block computes in.

    Returns:
        The new starting point; empty unless it is one Linear whose output is added to the block's.
    """
    last = _solve_stages(runner, nearest, order)[-1]
    if len(last) != 1 or len(last[0]) != 1:
        return {}
    group = _InputGroup(last[0], runner.block.get_submodule(last[0][0].removesuffix(".weight")))
    if not _is_added_to_output(runner, group.leader):
        return {}
    others = {name: weight for name, weight in weights.items() if name not in group.names}
    _collect_statistics(runner, [group], others, direct=True)
    return dict(_solve_group(runner, group, nearest))


@torch.no_grad()
def solve_experts(
    runner: BlockRunner,
    nearest: Mapping[str, InitialRounding],
    shown: Iterable[tuple[Sequence[str], InputStatistics]],
) -> dict[str, InitialRounding]:
    """Solve Linears of experts for all tokens that calibration gave them.

    Args:
        runner: the block.
        nearest: starting points for rounding to nearest, by weight.
        shown: weights that share an input, and the statistics of that input.

    Returns:
        The names of ``nearest``. Weights with fewer tokens than columns stay as they are there.
    """
    found = dict(nearest)
    for sharing, statistics in shown:
        for names in _group_by_grid(runner, sharing, nearest, apart=False):
            group = _InputGroup(names, runner.block.get_submodule(names[0].removesuffix(".weight")))
            group.statistics = statistics
            found |= dict(_solve_group(runner, group, nearest))
    return found


class _InputGroup:
    """Weights that share an input, and the statistics collected for them."""

    def __init__(self, names: Sequence[str], leader: Module) -> None:
        self.names, self.leader = names, leader
        self.statistics: InputStatistics | None = None
        self.missing_CR: Tensor | None = None

    def sum_over(self, ranks: Ranks) -> None:
        """Add what all ranks have collected; one of them may have had no token."""
        own = 0 if self.statistics is None else self.statistics.columns
        what = f"inputs of {self.names[0]}"
        columns = int(ranks.max_all(torch.tensor(own), what=what))
        if columns and self.statistics is None:
            self.statistics = self.new_statistics(columns)
        if self.statistics is not None:
            self.statistics.sum_over(ranks)
        if self.missing_CR is not None:
            self.missing_CR = ranks.sum_all(self.missing_CR, what=what)

    def new_statistics(self, columns: int) -> InputStatistics:
        """Statistics of no tokens yet."""
        device = next(self.leader.parameters()).device
        return InputStatistics(columns, device, twin=True, name=self.names[0])

    def clear(self) -> None:
        """Free the collected statistics."""
        self.statistics = self.missing_CR = None


def _solve_stages(
    runner: BlockRunner, names: Mapping[str, InitialRounding], order: CallOrder | None
) -> list[list[list[str]]]:
    """Groups of weights that share an input; the same position of all experts is one stage.

    While calls are recorded all experts get the same tokens; here each gets its own.
    """
    name_of = {runner.block.get_submodule(name.removesuffix(".weight")): name for name in names}
    shared = [] if order is None else [[m for m in one if m in name_of] for one in order.groups]
    seen = {module for group in shared for module in group}
    shared += [[module] for module in name_of if module not in seen]
    stages: dict[object, list[list[str]]] = {}
    for group in shared:
        for own in _group_by_grid(runner, (name_of[one] for one in group), names, apart=True):
            place = runner.experts.get(own[0])
            key = own[0] if place is None else (place.mixture, place.path)
            stages.setdefault(key, []).append(own)
    return list(stages.values())


def _group_by_grid(
    runner: BlockRunner,
    names: Iterable[str],
    nearest: Mapping[str, InitialRounding],
    *,
    apart: bool,
) -> list[list[str]]:
    """Group weights that share an input by grid and partition, and by expert if ``apart``."""
    found: dict[object, list[str]] = {}
    for name in names:
        place, args = runner.experts.get(name), nearest[name].parameters.args
        expert = (place.mixture, place.expert) if apart and place is not None else None
        found.setdefault((grid_of(args), partition_of(args), expert), []).append(name)
    return list(found.values())


def _is_added_to_output(runner: BlockRunner, linear: Module) -> bool:
    """Return True if a Linear's output is added to the block's output; tested by doubling it."""
    outputs: list[Tensor] = []

    def double(module: Module, args: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        return 2 * output

    call = runner.calls[0]
    before_BTC = runner.run(call, {})
    handle = linear.register_forward_hook(double)
    try:
        after_BTC = runner.run(call, {})
    finally:
        handle.remove()
    found = len(outputs) == 1 and outputs[0].shape == before_BTC.shape
    if found:
        added_BTC = outputs[0].float()
        off_BTC = after_BTC.float() - before_BTC.float() - added_BTC
        found = bool(off_BTC.norm() <= _ADDED * added_BTC.norm())
    return bool(runner.ranks.min_all(torch.tensor(found), what="sum that an output is added to"))


def _collect_statistics(
    runner: BlockRunner,
    groups: Sequence[_InputGroup],
    weights: Mapping[str, Tensor],
    *,
    direct: bool,
) -> None:
    """Accumulate second moments of the groups' inputs, given the weights before them."""
    leaders = [group.leader for group in groups]
    for index, call in enumerate(runner.calls):
        output_BTC, inputs = _run_with_inputs(runner, call, weights, leaders)
        references: dict[Module, list[Tensor]] = {}
        if not direct:
            references = _run_with_inputs(runner, call.original, None, leaders)[1]
        for group in groups:
            own = inputs[group.leader]
            others = references.get(group.leader, [])
            for number, tensor in enumerate(own):
                other = others[number] if len(others) == len(own) else None
                _accumulate_tokens(group, call, tensor, other)
            if direct:
                missing_TC = runner.missing(index, real_tokens(output_BTC, call.mask))
                product_CR = real_tokens(own[0], call.mask).float().mT @ missing_TC
                present = group.missing_CR
                group.missing_CR = product_CR if present is None else present.add_(product_CR)
    for group in groups:
        group.sum_over(runner.ranks)


def _run_with_inputs(
    runner: BlockRunner, call: Call, weights: Mapping[str, Tensor] | None, leaders: Sequence[Module]
) -> tuple[Tensor, dict[Module, list[Tensor]]]:
    """The block's output for a call, and the inputs of some of its modules."""
    inputs: dict[Module, list[Tensor]] = {leader: [] for leader in leaders}

    def keep(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args, kwargs)
        if tensor is not None:
            inputs[module].append(tensor)

    handles = [one.register_forward_pre_hook(keep, with_kwargs=True) for one in leaders]
    try:
        return runner.run(call, weights), inputs
    finally:
        for handle in handles:
            handle.remove()


def _accumulate_tokens(
    group: _InputGroup, call: Call, tensor: Tensor, other: Tensor | None
) -> None:
    """Accumulate the tokens of one call, without the reference if they may be routed otherwise."""
    if other is not None:
        given = first_tensor(call.args, dict(call.kwargs))
        # the rows may not be the block's tokens in their order
        routed = tensor.ndim == 2 and given is not None and len(tensor) != given[..., 0].numel()
        if routed or other.shape != tensor.shape:
            other = None
    if group.statistics is None:
        group.statistics = group.new_statistics(tensor.shape[-1])
    reference = None if other is None else real_tokens(other, call.mask)
    group.statistics.update(real_tokens(tensor, call.mask), reference)


def _solve_group(
    runner: BlockRunner, group: _InputGroup, nearest: Mapping[str, InitialRounding]
) -> Iterator[tuple[str, InitialRounding]]:
    """Solve the sweep of a group; yield nothing if it could only be rounded to nearest.

    An expert that gets fewer tokens than it has columns would be overfitted to them.
    """
    statistics, routed = group.statistics, group.names[0] in runner.experts
    if statistics is None or statistics.tokens < (statistics.gram.shape[-1] if routed else 1):
        return
    members = [
        (name, runner.block.get_submodule(name.removesuffix(".weight"))) for name in group.names
    ]
    problem = Problem(
        weights=[weight_of(module).detach() for _, module in members],
        parameters=[nearest[name].parameters for name in group.names],
        gram_CC=statistics.gram,
        cross_CC=None if group.missing_CR is not None else statistics.cross,
        tokens=statistics.tokens,
        ordered=True,
        missing_CR=group.missing_CR,
    )
    (solution,) = solve([problem], _OPTIONS)
    if solution.settled is None:
        return
    for number, (name, module) in enumerate(members):
        assert isinstance(module, Linear)
        parameters = nearest[name].parameters
        if solution.scales is not None:
            parameters = replace(parameters, scale=solution.scales[number])
        plain = nearest_initialization(module, parameters)
        codes_RC, wanted_RC = solution.weights[number], solution.settled[number]
        yield name, InitialRounding(parameters, start_at_codes(plain.start, codes_RC, wanted_RC))
