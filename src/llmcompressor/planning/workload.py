# SPDX-License-Identifier: Apache-2.0
"""Workload of a run: the forwards of each block, and the statistics and solvers of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Embedding, Linear, Module

from llmcompressor.modeling.blocks import sub_blocks
from llmcompressor.modeling.expert_forms import DOWN
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.fused import fused_partners, is_expert
from llmcompressor.modeling.settings import setting, text_config
from llmcompressor.modifiers.demands import DataSize, Effort
from llmcompressor.modifiers.granularity import Granularity
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.names import own_parameters
from llmcompressor.pipelines.experts import wave_of
from llmcompressor.planning.subject import REST, Part
from llmcompressor.schemes.attention import updates_cache

__all__ = ["BlockWork", "Group", "Unit", "Widths", "block_works", "widths_of"]

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


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


@dataclass(frozen=True)
class Group:
    """Calibrated modules that share an input.

    Attributes:
        modules: the modules.
        effort: of all modifiers that calibrate them.
        elements: number of their weights.
        copied: bytes of their parameters, which are copied with twin streams.
        share: share of the tokens that reach them.
    """

    modules: tuple[Module, ...]
    effort: Effort
    elements: int
    copied: int
    share: float


@dataclass(frozen=True)
class Unit:
    """The groups of modules that are calibrated and solved at one stop."""

    groups: tuple[Group, ...]

    @property
    def statistics(self) -> int:
        """Bytes of statistics."""
        return sum(group.effort.statistics for group in self.groups)

    @property
    def buffered(self) -> int:
        """Bytes of buffered inputs, if batches are too small for an update of statistics."""
        return sum(group.effort.buffered for group in self.groups)

    @property
    def moments(self) -> int:
        """Bytes of the largest second moment (Gram matrix) update."""
        counting = (group for group in self.groups if group.effort.gram)
        columns = (one.in_features for group in counting for one in _linears(group))
        return max((_FLOAT * width**2 for width in columns), default=0)

    def compared(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens of the widest input that is paired with the original one."""
        twins = (group for group in self.groups if group.effort.cross)
        weights = (one.weight for group in twins for one in _linears(group))
        return tokens * max((one.shape[-1] * one.element_size() for one in weights), default=0)

    @property
    def columns(self) -> int:
        """Width of the widest input."""
        columns = (one.in_features for group in self.groups for one in _linears(group))
        return max(columns, default=0)

    @property
    def is_single(self) -> bool:
        """True if the unit has a single module."""
        return sum(len(group.modules) for group in self.groups) == 1

    @property
    def offloads(self) -> bool:
        """True if kept data is offloaded to main memory even if the device has room."""
        return any(group.effort.offloads for group in self.groups)

    def kept(self, tokens: int) -> int:
        """Bytes that are kept of all the data."""
        return tokens * sum(group.effort.kept for group in self.groups)

    def judging(
        self, tokens: int, run_tokens: int, *, device: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield, while groups run again on kept data, its bytes and further bytes.

        Each group frees its data afterwards. Arguments are those of :meth:`solving`, and
        ``tokens`` of all the data.
        """
        efforts = [group.effort for group in self.groups if group.effort.kept]
        for place, effort in enumerate(efforts):
            kept = sum(one.kept for one in efforts[place:]) + effort.outputs
            yield tokens * kept, effort.scaled_on(device=device) + run_tokens * effort.running

    def solving(self, run_tokens: int = 0, *, device: bool = False) -> int:
        """Peak of further bytes while the unit is solved, including solutions of earlier groups.

        Args:
            run_tokens: tokens that run through a block at once.
            device: the model is on an accelerator.
        """
        most = solutions = together = alone = 0
        for (effort, elements), alike in Counter(
            (group.effort, group.elements) for group in self.groups
        ).items():
            runs = effort.scaled_on(device=device) + run_tokens * effort.running
            workspace = effort.workspace_on(device=device)
            own = workspace if effort.kept else max(workspace, runs)
            if effort.together:
                together += alike * runs
                alone = max(alone, workspace)
            elif effort.solve:
                for first in range(0, alike, effort.at_once):
                    batched = min(effort.at_once, alike - first)
                    most = max(most, solutions + batched * own)
                    solutions += batched * _FLOAT * elements
        return max(most + together, alone)

    @property
    def copied(self) -> int:
        """Bytes of the copied original parameters."""
        return sum(group.copied for group in self.groups)


_FLOAT = 4


def _linears(group: Group) -> list[Linear]:
    return [one for one in group.modules if isinstance(one, Linear)]


@dataclass(frozen=True)
class BlockWork:
    """Workload of a block, or of the modules outside of blocks.

    Attributes:
        name: of the block.
        forward: multiply-adds per token of its matrices.
        attention: multiply-adds per token of its attention, per token of context.
        intermediate: elements per token of the widest input of its modules.
        units: units of calibrated modules, one for each stop.
        shown: multiply-adds per token of additional expert inputs during calibration.
        aside: part of ``forward`` outside of stops, which does not run again.
        attention_aside: the same part of ``attention``.
    """

    name: str
    forward: int
    attention: int
    intermediate: int
    units: tuple[Unit, ...]
    shown: int = 0
    aside: int = 0
    attention_aside: int = 0

    def run(self, forwards: int, streams: int) -> tuple[int, int]:
        """Return the multiply-adds per token of matrices, and of attention per token of context.

        Args:
            forwards: number of runs of calibrated modules.
            streams: number of runs of other modules.
        """
        again = forwards - streams
        return (
            forwards * self.forward - again * self.aside,
            forwards * self.attention - again * self.attention_aside,
        )

    @property
    def groups(self) -> Iterator[Group]:
        """Groups of all units."""
        return (group for unit in self.units for group in unit.groups)


def widths_of(config: Any) -> Widths:
    """Read the widths from a configuration of transformers."""
    text = text_config(config)
    heads = int(setting(text, "num_attention_heads") or 0)
    hidden = int(setting(text, "hidden_size") or 0)
    width = int(setting(text, "head_dim") or (hidden // heads if heads else 0))
    experts = _first(text, _EXPERT_COUNTS)
    chosen = _first(text, _EXPERTS_PER_TOKEN)
    share = chosen / experts if experts and chosen else 1.0
    return Widths(heads * width, min(share, 1.0), hidden)


def _first(config: Any, names: Iterable[str]) -> int:
    values = (setting(config, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def block_works(
    parts: Sequence[Part],
    widths: Widths,
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    level: Granularity | None,
    data: DataSize,
    *,
    every_expert: bool = False,
) -> list[BlockWork]:
    """Compute the workload of each part of a model in a pass.

    Args:
        parts: the blocks in order, and the modules outside of blocks.
        widths: of the model's forward.
        modifiers: of the pass.
        owners: module → indices of the modifiers that calibrate it.
        level: where forwards are paused; ``None`` if all modules are calibrated at once.
        data: the calibration data.
        every_expert: experts are calibrated with all tokens.
    """
    seen = 1.0 if every_expert else widths.expert_share
    return [_block_work(part, widths, modifiers, owners, level, data, seen) for part in parts]


def _block_work(
    part: Part,
    widths: Widths,
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    level: Granularity | None,
    data: DataSize,
    seen: float,
) -> BlockWork:
    own = {name: module for name, module in part.modules.items() if module in owners}
    waves = _waves(part, every=seen == 1)
    entering = [enter for enter, _ in waves] if seen == 1 else []
    groups = [
        _group(names, [own[name] for name in names], modifiers, owners, data, seen)
        for names in _shared_inputs(own, entering)
    ]
    forward, attention = _run_once(part.modules, widths)
    forward_aside, attention_aside = _run_once(_aside(part, own, level), widths)
    inputs = [one.in_features for one in part.modules.values() if isinstance(one, Linear)]
    return BlockWork(
        part.name,
        0 if part.name == REST else forward,  # modules outside of blocks run once, or not at all
        attention,
        max(inputs, default=0),
        tuple(_units(part, own, groups, level, [stage for wave in waves for stage in wave])),
        int(seen * sum(_shown(one, owners) for one in part.modules.values())),
        0 if part.name == REST else forward_aside,
        attention_aside,
    )


def _run_once(modules: Mapping[str, Module], widths: Widths) -> tuple[int, int]:
    """Return the multiply-adds per token of matrices, and of attention per token of context."""
    attentions = sum(1 for one in modules.values() if updates_cache(one))
    forward = sum(_multiplications(name, one, widths) for name, one in modules.items())
    return forward, attentions * widths.heads


def _aside(part: Part, own: Mapping[str, Module], level: Granularity | None) -> dict[str, Module]:
    """Modules of a block outside of its stops, at the sub-block level; empty at other levels.

    They are found by name, as modules that were removed from the block still count.
    """
    if level is not Granularity.SUB_BLOCK or part.name == REST or not own:
        return {}
    stops = sub_blocks(part.modules[part.name], part.name, set(own.values())).values()
    return {
        name: one
        for name, one in part.modules.items()
        if not any(f"{name}.".startswith(f"{stop}.") for stop in stops)
    }


def _waves(part: Part, *, every: bool) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names of the input Linears and of the down projections, for each wave of experts."""
    names = {module: name for name, module in part.modules.items()}
    mixtures = [one for one in part.modules.values() if isinstance(one, LinearExperts)]
    waves = [
        (mixture, range(first, min(first + size, mixture.num_experts)))
        for mixture in mixtures
        for size in [wave_of(mixture, every=every)]
        for first in range(0, mixture.num_experts, size)
    ]
    return [
        (
            tuple(names[mixture.linear(one, role)] for one in wave for role in mixture.entrances),
            tuple(names[mixture.linear(one, DOWN)] for one in wave),
        )
        for mixture, wave in waves
    ]


def _shown(module: Module, owners: Mapping[Module, object]) -> int:
    """Multiply-adds for a token that all experts of an MoE module get, if they are calibrated.

    The input Linears of each expert are computed twice.
    """
    if not isinstance(module, LinearExperts):
        return 0
    if all(inner is module or inner not in owners for inner in module.modules()):
        return 0
    form = module.form
    return module.num_experts * form.hidden * form.intermediate * (2 * len(module.entrances) + 1)


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
        if name in taken:
            continue
        partners = [one for one in others.get(name, fused_partners(name, own)) if one != name]
        members = [name, *(partner for partner in partners if partner in own)]
        found = tuple(sorted(members, key=order.__getitem__))
        taken.update(found)
        yield found


def _group(
    names: Sequence[str],
    modules: Sequence[Module],
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    data: DataSize,
    seen: float,
) -> Group:
    efforts = []
    for position, modifier in enumerate(modifiers):
        mine = [module for module in modules if position in owners[module]]
        if mine:
            efforts.append(modifier.effort(mine, data))
    parameters = [one for module in modules for one in own_parameters(module)]
    return Group(
        tuple(modules),
        _sum(efforts),
        sum(one.numel() for one in parameters if one.ndim > 1),
        sum(one.numel() * one.element_size() for one in parameters),
        seen if is_expert(names[0]) else 1.0,
    )


def _sum(efforts: Sequence[Effort]) -> Effort:
    if len(efforts) == 1:
        return efforts[0]
    return Effort(
        gram=sum(one.gram for one in efforts),
        cross=sum(one.cross for one in efforts),
        watch=sum(one.watch for one in efforts),
        solve=sum(one.solve for one in efforts),
        visits=sum(one.visits for one in efforts),
        statistics=sum(one.statistics for one in efforts),
        buffered=sum(one.buffered for one in efforts),
        workspace=max((one.workspace for one in efforts), default=0),
        at_once=max((one.at_once for one in efforts), default=1),
        on_device=max((one.workspace_on(device=True) for one in efforts), default=None),
        kept=sum(one.kept for one in efforts),
        scaled=max((one.scaled for one in efforts), default=0),
        scaled_on_device=max((one.scaled_on(device=True) for one in efforts), default=None),
        outputs=max((one.outputs for one in efforts), default=0),
        running=max((one.running for one in efforts), default=0),
        offloads=any(one.offloads for one in efforts),
        together=any(one.together for one in efforts),
    )


def _units(
    part: Part,
    own: Mapping[str, Module],
    groups: Sequence[Group],
    level: Granularity | None,
    stages: Sequence[Sequence[str]],
) -> Iterator[Unit]:
    if level is Granularity.LINEAR or (level is not None and part.name == REST):
        yield from _by_stage(own, groups, stages)
    elif level is Granularity.SUB_BLOCK:
        block = part.modules[part.name]
        stops = list(sub_blocks(block, part.name, set(own.values())))
        for stop in stops:
            inside = set(stop.modules())
            members = tuple(group for group in groups if group.modules[0] in inside)
            if members:
                yield Unit(members)
    elif groups:
        yield Unit(tuple(groups))


def _by_stage(
    own: Mapping[str, Module], groups: Sequence[Group], stages: Sequence[Sequence[str]]
) -> Iterator[Unit]:
    """Yield a unit for each group, but a single one for the groups of a wave of experts."""
    stage_of = {
        own[name]: place for place, names in enumerate(stages) for name in names if name in own
    }
    found: dict[object, list[Group]] = {}
    for group in groups:
        found.setdefault(stage_of.get(group.modules[0], group.modules), []).append(group)
    yield from (Unit(tuple(members)) for members in found.values())


def _multiplications(name: str, module: Module, widths: Widths) -> int:
    """Return the multiply-adds per token of a module's own matrices."""
    if isinstance(module, Embedding):
        return 0
    found = 0
    for parameter in own_parameters(module):
        if parameter.ndim == 2:
            found += int(parameter.numel() * (widths.expert_share if is_expert(name) else 1))
        elif parameter.ndim == 3:  # stacked matrices of experts
            found += int(parameter.numel() * widths.expert_share)
    return found
