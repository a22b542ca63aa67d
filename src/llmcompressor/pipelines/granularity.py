# SPDX-License-Identifier: Apache-2.0
"""Where a forward is paused: at every Linear, at attention and MLP, or at every block.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Module

from llmcompressor.modeling.blocks import block_of, sub_blocks
from llmcompressor.modeling.call_order import CallOrder
from llmcompressor.modifiers.modifier import Granularity

__all__ = ["Plan", "Unit", "estimate_bytes", "make_plan"]


@dataclass(frozen=True)
class Unit:
    """What is calibrated and compressed at one stop."""

    stop: Module
    """The module at which the passes wait."""
    name: str
    modules: tuple[Module, ...]
    """The calibrated modules that belong to the stop, in call order."""
    runs_twice: bool
    """Whether the stop is run once to calibrate and once to go on."""


@dataclass(frozen=True)
class Plan:
    """The units of a model in the order in which they are reached, and why these."""

    level: Granularity
    units: tuple[Unit, ...]
    reason: str


def estimate_bytes(
    level: Granularity, modules: Sequence[Module], tokens: int, streams: int
) -> int:
    """Bytes that the suspended passes hold at once.

    Args:
        level: where they are paused.
        modules: the calibrated modules; their widths are those of the activations.
        tokens: of all calibration batches.
        streams: 1, or 2 with twin streams.
    """
    shapes = [module.weight.shape for module in modules if getattr(module, "weight", None) is not None]
    if not shapes:
        return 0
    itemsize = max(module.weight.element_size() for module in modules)
    hidden = Counter(shape[-1] for shape in shapes).most_common(1)[0][0]
    widest = max(max(shape) for shape in shapes)
    states = {
        Granularity.LINEAR: 2 * hidden + 2 * widest,
        Granularity.SUB_BLOCK: 2 * hidden,
        Granularity.BLOCK: hidden,
    }[level]
    return tokens * states * itemsize * streams


def make_plan(
    names: Mapping[Module, str],
    order: CallOrder,
    blocks: dict[Module, str],
    *,
    finest: Granularity,
    forced: Granularity | None,
    tokens: int,
    streams: int,
    budget: int,
) -> Plan:
    """Choose the finest level that is allowed and fits, and lay out its units.

    Args:
        names: calibrated module → name.
        order: which of them are called when, and which share an input.
        blocks: the model's blocks.
        finest: the finest level that every modifier's declarations allow.
        forced: the level the user asked for, if any.
        tokens: of all calibration batches.
        streams: 1, or 2 with twin streams.
        budget: bytes for activations.
    """
    modules = list(names)
    levels = [level for level in Granularity if level >= finest]
    sizes = {level: estimate_bytes(level, modules, tokens, streams) for level in levels}
    if forced is not None:
        level = max(forced, finest)
        reason = "asked for" if level is forced else f"the finest that the recipe allows is {level}"
    else:
        level = next((one for one in levels if sizes[one] <= budget), Granularity.BLOCK)
        reason = (
            f"the finest that the recipe allows ({finest}) and whose activations, about "
            f"{_mib(estimate_bytes(level, modules, tokens, streams))}, fit {_mib(budget)}"
            if estimate_bytes(level, modules, tokens, streams) <= budget
            else f"activations exceed {_mib(budget)} at any level; what exceeds it goes to files"
        )
    return Plan(level, tuple(_units(level, names, order, blocks)), reason)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _units(
    level: Granularity, names: Mapping[Module, str], order: CallOrder, blocks: dict[Module, str]
) -> list[Unit]:
    unseen = [(module,) for module in names if module not in order.calls]
    groups = [*order.groups, *unseen]
    if level is Granularity.LINEAR:
        return [Unit(group[0], names[group[0]], group, False) for group in groups]
    stops = dict(blocks)
    if level is Granularity.SUB_BLOCK:
        stops = {
            part: part_name
            for block, name in blocks.items()
            for part, part_name in sub_blocks(block, name, names).items()
        }
    units: dict[Module, list[Module]] = {}
    by_name = {name: stop for stop, name in stops.items()}
    for group in groups:
        for module in group:
            inside = block_of(stops, names[module])
            stop = module if inside is None else by_name[inside]
            units.setdefault(stop, []).append(module)
    labels = {**names, **stops}
    return [
        Unit(stop, labels[stop], tuple(members), stop not in names)
        for stop, members in units.items()
    ]
