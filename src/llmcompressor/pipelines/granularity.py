# SPDX-License-Identifier: Apache-2.0
"""Sequential granularity: pauses at every Linear, at attention and MLP, or at every block.

============  ====================================  ========================================
level         runs of the model                     states held per token
============  ====================================  ========================================
linear        one                                   two hidden, two intermediate
sub_block     two (calibrate, then produce)         two hidden
block         two                                   one hidden
============  ====================================  ========================================

Twin streams add one run of the original model and hold everything twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import Granularity
from llmcompressor.core.modifier import Modifier
from llmcompressor.modeling.blocks import block_of, find_blocks, sub_blocks
from llmcompressor.modeling.call_graph import CallOrder
from llmcompressor.runtime.progress import format_bytes

if TYPE_CHECKING:
    from llmcompressor.core.state import State


@dataclass(frozen=True)
class StopUnit:
    """The modules that are calibrated and compressed at one stop."""

    stop: Module
    """The module at which the passes wait."""
    name: str
    modules: tuple[Module, ...]
    """The calibrated modules that belong to the stop, in call order."""
    runs_twice: bool
    """Whether the stop is run once to calibrate and once to go on."""
    is_gate: bool = False
    """Whether nothing is calibrated here: the passes only wait for each other."""

    @property
    def others(self) -> tuple[Module, ...]:
        """Other modules compressed at this stop, with its input; none where it runs twice."""
        if self.runs_twice:
            return ()
        return tuple(module for module in self.modules if module is not self.stop)


@dataclass(frozen=True)
class LevelChoice:
    """A level and the reason for its choice."""

    level: Granularity
    reason: str
    bytes: int
    """About what the suspended passes hold at once."""


@dataclass(frozen=True)
class StopPlan(LevelChoice):
    """The units of a model in call order, and their level."""

    units: tuple[StopUnit, ...]


@dataclass(frozen=True)
class CalibratedModules:
    """The calibrated modules, with their call order."""

    names: Mapping[Module, str]
    """Module → name, in the order of the model."""
    order: CallOrder
    """When they are called, and which of them share an input; other parts of blocks are counted."""
    stages: Mapping[Module, tuple[Module, str]]
    """Linear of an expert → the stage at which it gets its input, and that one's name."""


def count_forwards(level: Granularity, streams: int, *, propagates: bool) -> int:
    """Number of forwards of the model over the data in one pass.

    Args:
        level: where forwards stop. A Linear runs once, after it was compressed; a larger unit
            runs once to be calibrated and once to produce its output.
        streams: 2 if the original model is run as well.
        propagates: the outputs of compressed layers are passed on.
    """
    once = 1 if level is Granularity.LINEAR or not propagates else 2
    return once + (streams - 1)


def infer_level(targets: Iterable[Module], calibrated: Container[Module]) -> Granularity:
    """Return the level that ``sequential_targets`` imply.

    Args:
        targets: the modules that are named.
        calibrated: modules that the recipe calibrates, including those that an earlier attempt
            has finished. Targets of all ``Linear`` imply the Linear level even if the recipe
            ignores one of them, such as the head.
    """
    single = all(target in calibrated or not _has_parts(target) for target in targets)
    return Granularity.LINEAR if single else Granularity.BLOCK


def target_stops(
    model: Module,
    named: Mapping[Module, str],
    calibrated: Container[Module],
    modifiers: Sequence[Modifier],
    state: State,
    asked: Granularity | None,
    *,
    at_blocks: bool = False,
) -> tuple[dict[Module, str], Granularity]:
    """Return the stops of a pass with ``sequential_targets``, and the level they imply.

    Args:
        model: the model being calibrated.
        named: module → name of the targets.
        calibrated: as for :func:`infer_level`.
        modifiers: of the pass.
        state: of the run.
        asked: the level that the user asked for, if any.
        at_blocks: every target is one stop as a whole, single Linears too.
    """
    if not at_blocks and infer_level(named, calibrated) is Granularity.LINEAR:
        return find_blocks(model), asked or Granularity.LINEAR
    own = _own_blocks(model, modifiers, state)
    stops = _replace_by_whole(model, named, own, whole_modules(modifiers, state))
    covered = {inner for stop in named for inner in stop.modules()}
    if any(block not in covered for block in own):  # targets are smaller than the blocks
        return stops, Granularity.SUB_BLOCK
    return stops, asked or Granularity.BLOCK


def whole_modules(modifiers: Iterable[Modifier], state: State) -> set[Module]:
    """Modules that modifiers of a pass compress as a whole, in addition to the model's blocks."""
    return {one for modifier in modifiers for one in modifier.select(state).undivided}


def _own_blocks(model: Module, modifiers: Iterable[Modifier], state: State) -> set[Module]:
    """Blocks of the model that are stops of their own, whatever the user's targets are."""
    taking = [one for one in modifiers if one.traits.whole_blocks]
    wanted = {module for one in taking for module in one.select(state).modules}
    blocks = find_blocks(model) if wanted else {}
    return {block for block in blocks if not wanted.isdisjoint(block.modules())}


def _replace_by_whole(
    model: Module, stops: Mapping[Module, str], own: set[Module], undivided: set[Module]
) -> dict[Module, str]:
    """Replace stops by the whole modules that contain them, where modifiers need these.

    Args:
        model: the model being calibrated.
        stops: module → name of the user's targets.
        own: blocks that are stops, also in place of a module that contains several of them.
        undivided: modules that are stops in place of their parts.

    Returns:
        The stops, in the order of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model) if own else {}
    above = {stop for stop in stops if stop not in own and not own.isdisjoint(stop.modules())}
    added = {one for stop in above for one in stop.modules() if one in blocks} | own
    covered = {inner for stop in {*stops, *added} - above for inner in stop.modules()}
    added |= undivided - covered
    within = {inner for one in added for inner in one.modules()}
    found = {*(stop for stop in stops if stop not in within | above), *added}
    return {module: names[module] for module in model.modules() if module in found}


def estimate_bytes(level: Granularity, modules: Sequence[Module], tokens: int, streams: int) -> int:
    """Estimate the bytes of activations that suspended passes hold at once.

    Args:
        level: where they are paused.
        modules: the calibrated modules; their widths are those of the activations.
        tokens: of all calibration batches.
        streams: 1, or 2 with twin streams.
    """
    matrices = [matrix for module in modules for matrix in _weight_matrices(module)]
    columns = [matrix.shape[-1] for matrix in matrices]
    if not columns:
        return 0
    itemsize = max(matrix.element_size() for matrix in matrices)
    # Outputs of a Linear are inputs of another one; outputs of the head are not held at all.
    hidden, widest = Counter(columns).most_common(1)[0][0], max(columns)
    states = {
        Granularity.LINEAR: 2 * hidden + 2 * widest,
        Granularity.SUB_BLOCK: 2 * hidden,
        Granularity.BLOCK: hidden,
    }[level]
    return tokens * states * itemsize * streams


def _weight_matrices(module: Module) -> list[Tensor]:
    """The weight of a module, or all matrices of one without a weight (experts, attention)."""
    weight = getattr(module, "weight", None)
    held = module.parameters() if weight is None else [weight]
    return [one for one in held if isinstance(one, Tensor) and one.ndim > 1]


def choose_level(
    modules: Sequence[Module],
    *,
    finest: Granularity,
    forced: Granularity | None,
    tokens: int,
    streams: int,
    budget: int,
) -> LevelChoice:
    """Choose the finest level that is allowed and whose activations fit.

    Args:
        modules: the calibrated modules; only the shapes of their weights are used.
        finest: the finest level that every modifier's declarations allow.
        forced: the level the user asked for, if any.
        tokens: of all calibration batches.
        streams: 1, or 2 with twin streams.
        budget: bytes for activations.
    """
    levels = [level for level in Granularity if level >= finest]
    sizes = {level: estimate_bytes(level, modules, tokens, streams) for level in levels}
    if forced is not None:
        level = max(forced, finest)
        reason = "asked for" if level is forced else f"the finest that the recipe allows is {level}"
    else:
        level = next((one for one in levels if sizes[one] <= budget), Granularity.BLOCK)
        allowed = format_bytes(budget)
        reason = (
            f"the finest that the recipe allows ({finest}) and whose activations, about "
            f"{format_bytes(sizes[level])}, fit {allowed}"
            if sizes[level] <= budget
            else f"activations exceed {allowed} at any level; what exceeds it goes to files"
        )
    return LevelChoice(level, reason, sizes[level])


def plan_stops(
    calibrated: CalibratedModules,
    blocks: dict[Module, str],
    *,
    finest: Granularity,
    forced: Granularity | None,
    tokens: int,
    streams: int,
    budget: int,
    every_block: bool = False,
    gates: Mapping[Module, str] = MappingProxyType({}),
    to_end: bool = False,
    undivided: Container[Module] = (),
) -> StopPlan:
    """Choose the finest level that is allowed and fits, and lay out its units.

    Args:
        calibrated: the calibrated modules and their call order.
        blocks: the model's blocks.
        finest: as for :func:`choose_level`, like the next four.
        forced: see there.
        tokens: see there.
        streams: see there.
        budget: see there.
        every_block: stop at all blocks, also at those without a calibrated module.
        gates: blocks to stop at if they contain no stop, so that all passes are in the same block.
        to_end: the passes go on after the last calibrated module.
        undivided: blocks that have no parts to stop at.
    """
    names, order = calibrated.names, calibrated.order
    chosen = choose_level(
        list(names),
        finest=Granularity.BLOCK if every_block else finest,
        forced=forced,
        tokens=tokens,
        streams=streams,
        budget=budget,
    )
    level = chosen.level
    if level is Granularity.LINEAR:
        stops = _linear_units(names, order, calibrated.stages)
    else:
        stops = _units(level, names, order, blocks, every_block=every_block, undivided=undivided)
    units = tuple(_with_gates(stops, order, gates, to_end=to_end))
    return StopPlan(level, chosen.reason, chosen.bytes, units)


def _linear_units(
    names: Mapping[Module, str], order: CallOrder, stages: Mapping[Module, tuple[Module, str]]
) -> list[StopUnit]:
    """Make one unit for each shared input, but a single one for experts solved together."""
    units: dict[Module, StopUnit] = {}
    for group in _with_uncalled(names, order):
        stop, name = stages.get(group[0], (group[0], names[group[0]]))
        present = units.get(stop)
        together = (*present.modules, *group) if present else group
        units[stop] = StopUnit(stop, name, together, runs_twice=group[0] in stages)
    return list(units.values())


def _units(
    level: Granularity,
    names: Mapping[Module, str],
    order: CallOrder,
    blocks: dict[Module, str],
    *,
    every_block: bool,
    undivided: Container[Module],
) -> list[StopUnit]:
    groups = list(_with_uncalled(names, order))
    stops = dict(blocks)
    if level is Granularity.SUB_BLOCK:
        stops = {
            part: part_name
            for block, name in blocks.items()
            for part, part_name in (
                {block: name} if block in undivided else sub_blocks(block, name, names)
            ).items()
        }
    called = {module: position for position, module in enumerate(order.calls)}
    every = sorted((stop for stop in stops if stop in called), key=called.__getitem__)
    units: dict[Module, list[Module]] = {stop: [] for stop in every} if every_block else {}
    by_name = {name: stop for stop, name in stops.items()}
    for group in groups:
        outside: Module | None = None  # the first that lies in no block is the stop
        for module in group:
            inside = block_of(stops, names[module])
            outside = outside or (module if inside is None else None)
            stop = outside if inside is None else by_name[inside]
            assert stop is not None
            units.setdefault(stop, []).append(module)
    labels = {**names, **stops}
    # With modifiers that declare no modules, every stop runs twice, even a single Linear.
    return [
        StopUnit(
            stop, labels[stop], tuple(members), stop in stops and (every_block or _has_parts(stop))
        )
        for stop, members in units.items()
    ]


def _with_gates(
    units: list[StopUnit], order: CallOrder, gates: Mapping[Module, str], *, to_end: bool
) -> Iterator[StopUnit]:
    """Yield the units, with gates that contain none of them inserted in call order."""
    called = {module: position for position, module in enumerate(order.calls)}
    stops = {unit.stop for unit in units}
    within = {inner for stop in stops for inner in stop.modules()}
    free = [
        gate
        for gate in gates
        if gate not in within and not any(inner in stops for inner in gate.modules())
    ]
    free.sort(key=lambda gate: called.get(gate, len(called)))
    for unit in units:
        position = called.get(unit.stop, -1)
        while free and called.get(free[0], len(called)) < position:
            gate = free.pop(0)
            yield StopUnit(gate, gates[gate], (), runs_twice=False, is_gate=True)
        yield unit
    for gate in free:
        if to_end and gate in called:
            yield StopUnit(gate, gates[gate], (), runs_twice=False, is_gate=True)


def _has_parts(module: Module) -> bool:
    return any(True for _ in module.children())


def _with_uncalled(names: Mapping[Module, str], order: CallOrder) -> Iterator[tuple[Module, ...]]:
    """Yield the groups in call order, with modules that were not called after their neighbour.

    Other batches may take other routes. A module that only they reach has to be compressed before
    later modules, so that these see all batches; its position in the model is the best guess of
    its place in the call order.
    """
    behind: dict[Module | None, list[Module]] = {}
    neighbour: Module | None = None
    for module in names:
        if module in order.calls:
            neighbour = module
        else:
            behind.setdefault(neighbour, []).append(module)
    yield from ((module,) for module in behind.get(None, ()))
    for group in order.groups:
        yield group
        yield from ((module,) for seen in group for module in behind.get(seen, ()))
