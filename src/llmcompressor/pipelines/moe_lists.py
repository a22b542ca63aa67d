# SPDX-License-Identifier: Apache-2.0
"""Calibration of experts in a ModuleList, which the model's own code calls with their tokens.

Stacked experts are unfused and called by code of this package, which can give all tokens to each.
Members of a list can get all tokens if the model's own code calls them with rows of tokens
(:mod:`llmcompressor.moe.module_list`). Others are calibrated with their routed tokens, with a
warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.nn import Module

from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.moe.module_list import (
    ExpertBroadcast,
    ExpertList,
    find_expert_lists,
    is_linear_like,
    lists_called_with_rows,
)
from llmcompressor.pipelines.batches import CalibrationBatches, small_batch
from llmcompressor.pipelines.moe_routing import StarvationPolicy
from llmcompressor.pipelines.targets import TokenCounter, dry_run_context
from llmcompressor.runtime.progress import join_names

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.modifier import Modifier
    from llmcompressor.core.state import State


@contextlib.contextmanager
def broadcast_expert_inputs(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    batches: CalibrationBatches,
    args: DatasetArguments,
    *,
    blocks: Iterable[Module] | None = None,
) -> Iterator[ExpertBroadcast]:
    """Broadcast the tokens of a layer to experts in lists while the body runs, as requested.

    All experts get all tokens with ``moe_calibrate_all_experts``, else only starved ones, by the
    policy ``starved_experts``.

    Args:
        model: the model being calibrated.
        state: tells whether a calibration batch is running.
        modifiers: those that calibrate it.
        batches: the calibration batches.
        args: of the run.
        blocks: stops at which all passes can wait to count routed tokens; ``None`` if the
            pipeline does not pause.
    """
    every = args.moe_calibrate_all_experts
    found = _lists_of_calibrated(model, _calibrated_modules(modifiers, state))
    if found:
        with dry_run_context(model, batches.first):
            run = partial(batches.run, small_batch(batches.first))
            found = lists_called_with_rows(found, run)
    # routes are counted where passes wait at whole blocks
    only_tried = [] if every else set(found).difference(_lists_inside(found, blocks or ()))
    lists = ExpertBroadcast(
        found, lambda: state.batch_data is not None, every=every, only_tried=only_tried
    )
    with lists.watching():
        yield lists
    _log_routed_counts(lists)


def needs_block_level(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    blocks: Iterable[Module],
    *,
    every: bool,
) -> bool:
    """Return True if experts in lists may require block granularity.

    They may if routed tokens have to be counted first.

    Args:
        model: the model to calibrate; its weights may be on any device.
        state: of the run.
        modifiers: those that calibrate it.
        blocks: where passes can wait.
        every: calibrate each expert with all tokens.
    """
    if every:
        return False
    found = _lists_of_calibrated(model, _calibrated_modules(modifiers, state))
    return bool(_lists_inside(found, blocks))


def apply_starvation_policy(
    lists: Sequence[ExpertList], shown: ExpertBroadcast, starvation: StarvationPolicy
) -> None:
    """Apply the policy for starved experts to ``lists``, whose tokens were counted.

    Raises:
        DatasetError: an expert got too few tokens and the policy is ``error``.
    """
    for one in lists:
        names = [f"{one.name}.{key}" for key in one.members]
        starved = starvation.settle(dict(zip(names, shown.tokens_of(one), strict=True)))
        places = {names.index(name): starvation.shown for name in starved}
        shown.decided(one, places, starvation.policy)


def _lists_of_calibrated(model: Module, calibrated: set[Module]) -> list[ExpertList]:
    """Lists whose experts have calibrated matrices and are not single matrices themselves."""
    return [
        one
        for one in find_expert_lists(model)
        if _linears_of(one, calibrated) and not any(map(is_linear_like, one.members.values()))
    ]


def _lists_inside(lists: Iterable[ExpertList], blocks: Iterable[Module]) -> list[ExpertList]:
    within = {inner for block in blocks for inner in block.modules()}
    return [one for one in lists if one.owner in within]


def _calibrated_modules(modifiers: Sequence[Modifier], state: State) -> set[Module]:
    needing = (modifier for modifier in modifiers if modifier.traits.needs_data)
    return {module for modifier in needing for module in modifier.select(state).modules}


def _linears_of(one: ExpertList, calibrated: set[Module]) -> dict[str, list[Module]]:
    """Calibrated matrices by name of expert, for experts that have any."""
    own = {
        f"{one.name}.{key}": [
            part for part in member.modules() if part in calibrated and is_linear_like(part)
        ]
        for key, member in one.members.items()
    }
    return {name: matrices for name, matrices in own.items() if matrices}


def _log_routed_counts(lists: ExpertBroadcast) -> None:
    counts = [count for one in lists.lists for count in lists.tokens_of(one)]
    if any(counts):
        all_tokens = " Their statistics are made of all tokens." if lists.every else ""
        logger.info(
            f"Tokens routed to each of {len(counts)} experts in {len(lists.lists)} layers, padding "
            f"included: {min(counts)} to {max(counts)}, {sum(counts) / len(counts):.0f} on "
            f"average; {counts.count(0)} got none.{all_tokens}"
        )


@contextlib.contextmanager
def count_listed_experts(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    batches: CalibrationBatches,
    args: DatasetArguments,
    shown: ExpertBroadcast,
) -> Iterator[None]:
    """Count and report the routed tokens of experts in lists that get no broadcast inputs.

    Args:
        model: the model being calibrated.
        state: holds the token mask of the current batch.
        modifiers: those that calibrate it.
        batches: the calibration batches.
        args: of the run.
        shown: lists with broadcast inputs, which are left out.

    Raises:
        DatasetError: an expert got too few tokens and the policy is ``error``.
    """
    calibrated = _calibrated_modules(modifiers, state)
    lists = {
        one.name: _linears_of(one, calibrated)
        for one in find_expert_lists(model)
        if one not in shown
    }
    counter = TokenCounter()
    every = (part for own in lists.values() for parts in own.values() for part in parts)
    counter.watch(dict.fromkeys(every), state)
    try:
        yield
    finally:
        counter.remove_hooks()
    counter.sum_over(state.run.ranks)
    counts = {
        name: {member: max(map(counter.seen.__getitem__, own[member])) for member in own}
        for name, own in lists.items()
    }
    counts = {name: own for name, own in counts.items() if len(set(own.values())) > 1}
    if counts:
        _report(counts, StarvationPolicy.from_arguments(args, batches), args)


def _report(
    counts: dict[str, dict[str, int]], starvation: StarvationPolicy, args: DatasetArguments
) -> None:
    every = {member: count for own in counts.values() for member, count in own.items()}
    starved, few = starvation.told(every)
    if starved and starvation.policy == "error":
        raise DatasetError(
            few, "Calibrate with more data, or choose another policy for starved_experts."
        )
    if not starved and not args.moe_calibrate_all_experts:
        return
    fewest, most = min(every.values()), max(every.values())
    without = "Those without tokens are rounded to nearest or pruned by magnitude. "
    asked = "moe_calibrate_all_experts" if args.moe_calibrate_all_experts else "starved_experts"
    logger.warning(
        f"The experts in {join_names(counts)} are modules that the model's own code calls, each "
        "with "
        f"its tokens alone ({fewest} to {most}): {asked}={getattr(args, asked)!r} has no effect on "
        f"them. They were calibrated with what they got. {'' if fewest else without}"
        f"{few + ' ' if starved else ''}Calibrate with more data if that is too little."
    )
