# SPDX-License-Identifier: Apache-2.0
"""Workload of a run: the forwards of each block, the costs of its stops, and their time."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import Cost, DataSize, Edits, Granularity, Solving, Traits
from llmcompressor.core.modifier import Modifier
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import sub_blocks
from llmcompressor.modeling.fused import fused_partners, is_expert
from llmcompressor.modeling.names import own_parameters
from llmcompressor.modeling.patches import float32_linears
from llmcompressor.modeling.weights import config_value, text_config
from llmcompressor.moe.layouts import DOWN
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.pipelines.moe_routing import experts_per_wave
from llmcompressor.planning.result import Estimate, Operations, PassPlan, Rates
from llmcompressor.planning.subject import REST, Part
from llmcompressor.schemes.attention import updates_kv_cache

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_FLOAT = 4


@dataclass(frozen=True)
class Widths:
    """Widths of a model's forward from its configuration.

    Attributes:
        heads: total width of the heads of a layer.
        expert_share: share of the experts that a token is routed to.
        hidden: width of the residual stream.
    """

    heads: int
    expert_share: float
    hidden: int = 0


def read_widths(config: Any) -> Widths:
    """Read the widths from a configuration of transformers."""
    text = text_config(config)

    def first(names: Iterable[str]) -> int:
        values = (config_value(text, name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    heads, hidden = first(["num_attention_heads"]), first(["hidden_size"])
    width = first(["head_dim"]) or (hidden // heads if heads else 0)
    experts, chosen = first(_EXPERT_COUNTS), first(_EXPERTS_PER_TOKEN)
    share = chosen / experts if experts and chosen else 1.0
    return Widths(heads * width, min(share, 1.0), hidden)


@dataclass(frozen=True)
class GroupShare:
    """What one group of modules adds to a stop, if ranks share the run.

    Attributes:
        names: of the modules.
        solving: multiply-adds of the rank that owns it, which do not grow with the data.
        repeated: the same of what all ranks do.
        summed: bytes of statistics that the owner needs, as a rank sends them.
        spread: the same of those that all ranks need.
        changes: the owner changes weights at the stop, which the others get.
        divides: ranks may solve it together, each a part of the rows.
    """

    names: Sequence[str]
    solving: int
    repeated: int
    summed: int
    spread: int
    changes: bool
    divides: bool = True

    def more(self, traits: Traits, flops: int, summed: int) -> GroupShare:
        """Return this with what a modifier adds."""
        if traits.over_ranks is Solving.ALL:
            return replace(self, repeated=self.repeated + flops, spread=self.spread + summed)
        return replace(
            self,
            solving=self.solving + flops,
            summed=self.summed + summed,
            changes=self.changes or Edits.AT_ONCE in traits.edits,
            divides=self.divides and traits.divides_rows,
        )


_NO_SHARE = GroupShare((), 0, 0, 0, 0, changes=False)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Modules that are calibrated and solved while forwards wait at one place.

    Attributes:
        groups: the modules, those that share an input together.
        cost: of all modifiers that calibrate them.
        data_on_host: kept data lies in main memory, however much room an accelerator has.
        shares: of each group; empty unless they were asked for.
    """

    groups: Sequence[Sequence[Module]] = ()
    cost: Cost = field(default_factory=Cost)
    data_on_host: bool = False
    shares: Sequence[GroupShare] = ()

    @property
    def columns(self) -> int:
        """Width of the widest input."""
        modules = (one for group in self.groups for one in group)
        return max((one.in_features for one in modules if isinstance(one, Linear)), default=0)

    @property
    def moments(self) -> int:
        """Bytes of the largest second moment (Gram matrix), if any is held."""
        square = _FLOAT * self.columns**2
        return square if self.cost.held_bytes >= square else 0

    @property
    def solutions(self) -> int:
        """Bytes of the float32 solutions of all groups but the last."""
        solved = self.groups[:-1] if self.moments else ()
        return _FLOAT * sum(matrix_elements(one) for group in solved for one in group)

    @property
    def copied(self) -> int:
        """Bytes of the original parameters, which are copied with twin streams."""
        modules = (one for group in self.groups for one in group)
        return sum(each.nbytes for one in modules for each in own_parameters(one))


def matrix_elements(module: Module) -> int:
    """Return the number of weights of a module's own matrices and stacks of them."""
    return sum(one.numel() for one in own_parameters(module) if one.ndim > 1)


@dataclass(frozen=True)
class BlockWork:
    """Workload of a block, or of the modules outside of blocks.

    Attributes:
        name: of the block.
        forward: multiply-adds per token of its matrices.
        attention: multiply-adds per token of its attention, per token of context.
        intermediate: elements per token of the widest input of its modules.
        stops: where forwards wait in it.
        shown: multiply-adds per token of additional expert inputs during calibration.
        aside: part of ``forward`` outside of stops, which does not run again.
        attention_aside: the same part of ``attention``.
    """

    name: str
    forward: int
    attention: int
    intermediate: int
    stops: Sequence[Stop]
    shown: int = 0
    aside: int = 0
    attention_aside: int = 0

    def flops(self, one: PassPlan, context: int) -> int:
        """Multiply-adds per token of all forwards of a pass, given the tokens of a sample."""
        again = one.forwards - one.streams
        matrices = one.forwards * self.forward - again * self.aside
        attention = one.forwards * self.attention - again * self.attention_aside
        return matrices + attention * context + one.streams * self.shown


@dataclass(frozen=True)
class BlockWorks:
    """Computes the workload of each part of a model in a pass.

    Attributes:
        widths: of the model's forward.
        modifiers: of the pass.
        owners: module → indices of the modifiers that calibrate it.
        level: where forwards are paused; ``None`` if all modules are calibrated at once.
        data: the calibration data.
        every_expert: experts are calibrated with all tokens.
        by_group: also find the share of each group of a stop.
    """

    widths: Widths
    modifiers: Sequence[Modifier]
    owners: Mapping[Module, Sequence[int]]
    level: Granularity | None
    data: DataSize
    every_expert: bool = False
    by_group: bool = False

    @property
    def seen(self) -> float:
        """Share of the tokens that an expert is calibrated with."""
        return 1.0 if self.every_expert else self.widths.expert_share

    def __call__(self, part: Part) -> BlockWork:
        """Return the workload of a block, or of what lies outside of blocks."""
        own = {name: module for name, module in part.modules.items() if module in self.owners}
        waves = _expert_waves(part, every=self.seen == 1)
        entering = [enter for enter, _ in waves] if self.seen == 1 else []
        groups = list(_shared_inputs(own, entering))
        stages = [stage for wave in waves for stage in wave]
        stops = [self._stop(members, own) for members in self._stops(part, own, groups, stages)]
        forward, attention = _forward_flops(part.modules, self.widths)
        aside, attention_aside = _forward_flops(self._outside_stops(part, own), self.widths)
        inputs = [one.in_features for one in part.modules.values() if isinstance(one, Linear)]
        shown = sum(_all_token_flops(one, self.owners) for one in part.modules.values())
        in_block = part.name != REST  # modules outside of blocks run once, or not at all
        return BlockWork(
            part.name,
            in_block * forward,
            attention,
            max(inputs, default=0),
            stops,
            int(self.seen * shown),
            in_block * aside,
            attention_aside,
        )

    def _stops(
        self,
        part: Part,
        own: Mapping[str, Module],
        groups: Sequence[Sequence[str]],
        stages: Sequence[Sequence[str]],
    ) -> list[list[Sequence[str]]]:
        """Groups by stop: one, one of each sub-block, or all of a block or a wave of experts."""
        found: dict[object, list[Sequence[str]]] = {}
        if self.level is Granularity.LINEAR or (self.level and part.name == REST):
            stage_of = {name: place for place, names in enumerate(stages) for name in names}
            for group in groups:
                found.setdefault(stage_of.get(group[0], group), []).append(group)
        elif self.level is Granularity.SUB_BLOCK:
            stops = sub_blocks(part.modules[part.name], part.name, set(own.values()))
            stop_of = {inner: name for stop, name in stops.items() for inner in stop.modules()}
            for group in groups:
                if own[group[0]] in stop_of:
                    found.setdefault(stop_of[own[group[0]]], []).append(group)
        elif groups:
            found[part.name] = list(groups)
        return list(found.values())

    def _outside_stops(self, part: Part, own: Mapping[str, Module]) -> dict[str, Module]:
        """Modules of a block outside of its stops, at the sub-block level; empty at other levels.

        They are found by name, as modules that were removed from the block still count.
        """
        if self.level is not Granularity.SUB_BLOCK or part.name == REST or not own:
            return {}
        stops = sub_blocks(part.modules[part.name], part.name, set(own.values())).values()
        return {
            name: one
            for name, one in part.modules.items()
            if not any(f"{name}.".startswith(f"{stop}.") for stop in stops)
        }

    def _stop(self, groups: Sequence[Sequence[str]], own: Mapping[str, Module]) -> Stop:
        cost, found = Cost(), [_NO_SHARE] * len(groups)
        for place, modifier, members, data in self._solved(groups, own):
            one = modifier.cost(members, data)
            cost += one
            if self.by_group:
                fixed = modifier.cost(members, replace(data, tokens=0)).flops
                found[place] = found[place].more(modifier.traits, fixed, one.summed_bytes)
        inside = {
            position for group in groups for name in group for position in self.owners[own[name]]
        }
        places = [one for at in inside for one in self.modifiers[at].traits.devices.values()]
        return Stop(
            groups=[[own[name] for name in group] for group in groups],
            cost=cost,
            data_on_host=any(str(one).startswith("cpu") for one in places),
            shares=[
                replace(one, names=tuple(group)) for one, group in zip(found, groups, strict=True)
            ]
            if self.by_group
            else (),
        )

    def _solved(
        self, groups: Sequence[Sequence[str]], own: Mapping[str, Module]
    ) -> Iterator[tuple[int, Modifier, list[Module], DataSize]]:
        """Yield what each modifier solves at once: the place of its group, modules and data.

        What is solved for a whole block at once is at the first place.
        """
        names = {own[name]: name for group in groups for name in group}
        for position, modifier in enumerate(self.modifiers):
            chosen = [
                (place, [own[name] for name in group if position in self.owners[own[name]]])
                for place, group in enumerate(groups)
            ]
            mine = {place: group for place, group in chosen if group}
            if mine and modifier.traits.whole_blocks:
                yield 0, modifier, [one for group in mine.values() for one in group], self.data
                continue
            alike = Counter(map(_shapes, mine.values()))
            for place, group in mine.items():
                share = self.seen if is_expert(names[group[0]]) else 1.0
                tokens = int(self.data.tokens * share)
                data = replace(self.data, tokens=tokens, alike=alike[_shapes(group)])
                yield place, modifier, group, data


def _shapes(modules: Sequence[Module]) -> tuple[Any, ...]:
    return tuple(one.shape for module in modules for one in own_parameters(module))


def part_cost(modifier: Modifier, part: Part, data: DataSize) -> Cost:
    """Return the cost of a modifier that collects no data, for a block or what lies outside."""
    modules = list(part.modules.values())
    if part.name != REST:
        return modifier.cost(modules, data)
    costs = [modifier.cost([one], data) for one in modules]
    return Cost(
        flops=sum(one.flops for one in costs),
        held_bytes=max((one.held_bytes for one in costs), default=0),
        peak_bytes=max((one.peak_bytes for one in costs), default=0),
    )


def _forward_flops(modules: Mapping[str, Module], widths: Widths) -> tuple[int, int]:
    """Return the multiply-adds per token of matrices, and of attention per token of context."""
    attentions = sum(1 for one in modules.values() if updates_kv_cache(one))
    forward = 0
    for name, module in modules.items():
        for one in () if isinstance(module, Embedding) else own_parameters(module):
            if one.ndim in (2, 3):  # stacked matrices of experts have three dimensions
                routed = one.ndim == 3 or is_expert(name)
                forward += int(one.numel() * (widths.expert_share if routed else 1))
    return forward, attentions * widths.heads


def _expert_waves(part: Part, *, every: bool) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names of the input Linears and of the down projections, for each wave of experts."""
    names = {module: name for name, module in part.modules.items()}
    found = []
    for mixture in part.modules.values():
        if not isinstance(mixture, LinearExperts):
            continue
        size = experts_per_wave(mixture, every=every)
        for first in range(0, mixture.num_experts, size):
            wave, roles = range(first, min(first + size, mixture.num_experts)), mixture.input_roles
            entering = tuple(names[mixture.linear(one, role)] for one in wave for role in roles)
            found.append((entering, tuple(names[mixture.linear(one, DOWN)] for one in wave)))
    return found


def _all_token_flops(module: Module, owners: Mapping[Module, object]) -> int:
    """Multiply-adds for a token that all experts of an MoE module get, if they are calibrated.

    The input Linears of each expert are computed twice.
    """
    if not isinstance(module, LinearExperts):
        return 0
    if all(inner is module or inner not in owners for inner in module.modules()):
        return 0
    form = module.form
    return module.num_experts * form.hidden * form.intermediate * (2 * len(module.input_roles) + 1)


def _shared_inputs(
    own: Mapping[str, Module], together: Iterable[Sequence[str]] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the names of modules that share an input: fused sets, and all others alone.

    Args:
        own: the modules.
        together: further sets of names that share an input.
    """
    taken: set[str] = set()
    order = {name: place for place, name in enumerate(own)}
    others = {name: names for names in together for name in names}
    for name in own:
        if name not in taken:
            partners = others.get(name, fused_partners(name, own))
            members = {name, *(partner for partner in partners if partner in own)}
            found = tuple(sorted(members, key=order.__getitem__))
            taken.update(found)
            yield found


# --------------------
# Time of a run from its operations, its traffic and the machine's measured rates. It is an order of
# magnitude. Reading and writing overlap with the computation of a streamed run; only their excess
# adds time.

_STEP_SECONDS = 0.003
"""Of Python, for one batch at one stop."""
_DOUBT = 3.0
"""The factor that measured runs stay within, besides the spread of the measurement."""


@dataclass(frozen=True)
class Traffic:
    """Disk traffic and overhead of a run.

    Attributes:
        read: bytes of weights to read, the first ``first`` of them before any computation.
        written: bytes of the output.
        rounding: seconds to round and pack all weights, and of Python.
        is_streamed: reading and writing overlap with computation.
    """

    read: int
    written: int
    rounding: float
    first: int
    is_streamed: bool


def count_operations(
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
    tokens: int,
    context: int,
    *,
    rounded: int = 0,
    beside: int = 0,
    learn: int = 0,
) -> Operations:
    """Count the multiply-adds of all passes.

    Args:
        passes: over the model, with the work of each part.
        tokens: number of tokens of the calibration data.
        context: number of tokens of a sample.
        rounded: number of weights that are rounded.
        beside: multiply-adds of modifiers that collect no data.
        learn: multiply-adds of the learning before passes.
    """
    running = [(one, work) for one, works in passes if one.forwards for work in works]
    forward = sum(tokens * work.flops(one, context) for one, work in running)
    solve = beside + sum(stop.cost.flops for _, work in running for stop in work.stops)
    return Operations(forward=forward, solve=solve, rounded=rounded, learn=learn)


def estimate_time(
    rates: Rates,
    operations: Operations,
    steps: int,
    traffic: Traffic,
    travelling: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, float], Estimate]:
    """Estimate the seconds of each phase, and their total with its range.

    Args:
        rates: measured rates of this machine.
        operations: result of :func:`count_operations`.
        steps: number of batches at all stops.
        traffic: disk traffic and overhead.
        travelling: seconds of further phases, between solving and learning: bytes between ranks.
    """
    calibrate = operations.forward / rates.model_products + steps * _STEP_SECONDS
    solve = operations.solve / rates.float32_products
    learn = operations.learn / rates.model_products
    reading, writing = traffic.read / rates.disk_read, traffic.written / rates.disk_write
    if traffic.is_streamed:
        computing = calibrate + solve + learn + traffic.rounding + sum(travelling.values())
        first = traffic.first / rates.disk_read
        reading = first + max(reading - first - computing, 0.0)
        writing = max(writing - computing, 0.0)
    seconds = {"load": reading, "calibrate": calibrate, "solve": solve}
    seconds |= {**travelling, "learn": learn, "save": traffic.rounding + writing}
    whole, doubt = sum(seconds.values()), _DOUBT * rates.spread
    return seconds, Estimate(whole, whole / doubt, whole * doubt)


# --------------------
# Benchmark of this machine: products and disk, measured in less than a second.

_SECONDS = 0.15
"""Of each measurement of products."""
_TOKENS, _WIDTH = 512, 1024
_WRITTEN, _WRITES = 2**25, 3


def measure_rates(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Rates:
    """Measure products and the disk.

    Args:
        device: the device to compute on.
        dtype: of the model.
        folder: a folder on the disk of the output; by default that for temporary files.
    """
    with float32_linears():
        model_products, spread = _rate(_product(device, dtype), device)
        float32_products, other = _rate(_product(device, torch.float32), device)
    read, write = _disk_rates(folder)
    return Rates(str(device), model_products, float32_products, read, write, max(spread, other))


def _product(device: torch.device, kind: torch.dtype) -> Callable[[], object]:
    inputs = torch.ones(_TOKENS, _WIDTH, dtype=kind, device=device)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=kind, device=device)
    return lambda: torch.nn.functional.linear(inputs, weight)


def _rate(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the median rate of several trials, and the ratio of the best to the worst."""
    work()
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(_TOKENS * _WIDTH**2 / max(time.perf_counter() - start, 1e-9))
    rates.sort()
    tenth = len(rates) // 10
    return rates[len(rates) // 2], rates[-1 - tenth] / rates[tenth]


def _disk_rates(folder: Path | None) -> tuple[float, float]:
    """Measure bytes per second of reading and writing; defaults if writing fails."""
    data = os.urandom(_WRITTEN)
    reads, writes = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".llmcompressor-plan-") as file:
            descriptor = file.fileno()
            for _ in range(_WRITES):
                start = time.perf_counter()
                os.pwrite(descriptor, data, 0)
                os.fsync(descriptor)
                writes.append(_WRITTEN / max(time.perf_counter() - start, 1e-9))
                if hasattr(os, "posix_fadvise"):  # drop the written data from the page cache
                    os.posix_fadvise(descriptor, 0, _WRITTEN, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                done = len(os.pread(descriptor, _WRITTEN, 0))
                reads.append(done / max(time.perf_counter() - start, 1e-9))
    except OSError as error:
        logger.debug(f"The disk could not be measured: {error}")
        return 1e9, 5e8
    return sorted(reads)[_WRITES // 2], sorted(writes)[_WRITES // 2]
