# SPDX-License-Identifier: Apache-2.0
"""Calibration of experts in a ModuleList, which the model's own code calls with their tokens.

Stacked experts are unfused and called by code of this package, which can give all tokens to each.
How a model's own code calls the members of a list has to be detected
(:mod:`llmcompressor.moe.module_list`). If it calls them with rows of tokens, each expert
gets all tokens. If it calls them with something computed from tokens, each expert gets the inputs
of all others, or each of its matrices gets the inputs of the same matrix of the others. If it
cannot be detected, experts are calibrated with their routed tokens, with a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.equalization.probe import token_id_inputs
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import first_tensor, model_inputs
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.moe.module_list import (
    CallConvention,
    ExpertBroadcast,
    ExpertList,
    call_conventions,
    find_expert_lists,
    is_linear_like,
    routed_tokens,
)
from llmcompressor.observers.tokens import count_tokens
from llmcompressor.pipelines.batches import CalibrationBatches, small_batch
from llmcompressor.pipelines.moe_routing import StarvationPolicy
from llmcompressor.pipelines.targets import dry_run_context
from llmcompressor.runtime.progress import join_names

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.modifier import Modifier
    from llmcompressor.core.state import State

__all__ = [
    "apply_starvation_policy",
    "broadcast_expert_inputs",
    "count_listed_experts",
    "needs_block_level",
]

_BY_CALLS = {CallConvention.CALLS, CallConvention.MATRICES}
"""Members of such lists are shown something when others are called."""


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
    manners: dict[ExpertList, CallConvention] = {}
    if found:
        with dry_run_context(model, batches[0]):
            manners = call_conventions(found, lambda: batches.run(small_batch(batches[0])))
    only_tried: set[ExpertList] = set()
    if not every or blocks is not None:  # where passes wait, or would have to, at whole blocks
        only_tried = set(found) - set(_lists_inside(found, blocks or ()))
    if every:
        only_tried = {one for one in only_tried if manners.get(one) in _BY_CALLS}
    lists = ExpertBroadcast(
        manners, lambda: state.batch_data is not None, every=every, only_tried=only_tried
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

    They do if routed tokens have to be counted first, or if experts get the inputs of others. The
    latter is tested by a forward on token ids, for models that take these.

    Args:
        model: the model to calibrate; its weights may be on any device.
        state: of the run.
        modifiers: those that calibrate it.
        blocks: where passes can wait.
        every: calibrate each expert with all tokens.
    """
    found = _lists_inside(
        _lists_of_calibrated(model, _calibrated_modules(modifiers, state)), blocks
    )
    if not found or not every:
        return bool(found)
    return any(
        not _BY_CALLS.isdisjoint(_call_conventions(model, found, ids).values())
        for ids in token_id_inputs(model)
    )


def _call_conventions(
    model: Module, lists: Sequence[ExpertList], batch: Mapping[str, Any]
) -> dict[ExpertList, CallConvention]:
    """Like :func:`call_conventions`, but empty if the forward fails on ``batch``."""
    try:
        with dry_run_context(model, batch):
            return call_conventions(lists, lambda: model(**model_inputs(model, batch)))
    except DatasetError as error:
        logger.debug(f"How experts in lists are called is not known: {error}")
        return {}


def apply_starvation_policy(
    lists: Sequence[ExpertList], shown: ExpertBroadcast, starvation: StarvationPolicy
) -> None:
    """Apply the policy for starved experts to ``lists``, whose tokens were counted.

    Raises:
        DatasetError: an expert got too few tokens and the policy is ``error``.
    """
    for one in lists:
        names = [f"{one.name}.{key}" for key in one.members]
        counts = dict(zip(names, routed_tokens(one.module), strict=True))
        starved = starvation.settle(counts)
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
    counts = [count for one in lists.lists for count in routed_tokens(one.module)]
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
    counter = _ListedExpertCounter()
    calibrated = _calibrated_modules(modifiers, state)
    counter.watch([one for one in find_expert_lists(model) if one not in shown], state, calibrated)
    try:
        yield
    finally:
        counter.remove_hooks()
    counts = {name: own for name, own in counter.counts().items() if len(set(own.values())) > 1}
    if counts:
        _report(counts, StarvationPolicy.from_arguments(args, batches), args)


class _ListedExpertCounter(HooksMixin):
    """Counts tokens with hooks that are switched on and off together with those of modifiers."""

    _seen: dict[Module, int] = PrivateAttr(default_factory=dict)
    _members: dict[str, dict[str, list[Module]]] = PrivateAttr(default_factory=dict)

    def watch(self, lists: Iterable[ExpertList], state: State, calibrated: set[Module]) -> None:
        """Count the tokens of the calibrated modules of lists."""

        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if isinstance(tensor, Tensor):
                self._seen[module] += count_tokens(tensor, state.calibration.token_mask)

        for found in lists:
            if own := _linears_of(found, calibrated):
                self._members[found.name] = own
        for module in {one for own in self._members.values() for of in own.values() for one in of}:
            self._seen[module] = 0
            self.register_hook(module, count, "forward_pre", with_kwargs=True)

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of tokens by list and member: the largest count among the member's modules."""
        return {
            name: {member: max(self._seen[one] for one in of) for member, of in own.items()}
            for name, own in self._members.items()
        }


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
