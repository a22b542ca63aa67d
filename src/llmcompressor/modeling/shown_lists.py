# SPDX-License-Identifier: Apache-2.0
"""Calibration of listed experts with more tokens than the model routes to them.

Experts that take rows of their layer's input (:class:`Manner.ROWS`) are each called once with all
rows, before the layer's forward. The calls that follow make its output; hooks are disabled in them,
as the tokens would be counted twice.

For experts that take something else (:class:`Manner.CALLS`), each call of one is preceded by calls
of the others with a copy of its input. Where that is impossible (:class:`Manner.MATRICES`), it is
followed by calls of the others' Linears. So each expert is calibrated with all tokens that any of
them gets.

Where experts are calibrated with routed tokens only, one run of the layer counts these first. An
expert with too few is then shown all tokens in the same way, the inputs of the others, or none.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.alike_matrices import AlikeMatrices
from llmcompressor.modeling.call_order import CallOrder, first_tensor
from llmcompressor.modeling.experts import Shown
from llmcompressor.modeling.hooks import HooksMixin, hooks_are_on
from llmcompressor.modeling.listed_experts import ExpertList, Manner, rows_of
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.stubs import Forward, stubbed

__all__ = ["ShownLists", "is_shown_more", "starved_of", "tokens_of"]

_tokens: WeakKeyDictionary[Module, list[int]] = WeakKeyDictionary()
_starved: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()
_shown_more: WeakKeyDictionary[Module, set[int]] = WeakKeyDictionary()


def tokens_of(module: Module) -> list[int]:
    """Number of rows routed to each member of a list in the last calibration.

    Padding is included, as the model's own code selects the rows. Empty where nothing was counted.
    """
    return list(_tokens.get(module, ()))


def starved_of(module: Module) -> dict[int, str]:
    """Members of a list that got too few tokens → the policy that calibrated them."""
    return dict(_starved.get(module, {}))


def is_shown_more(module: Module, place: int) -> bool:
    """Return True if a member of a list is also called with tokens not routed to it."""
    return place in _shown_more.get(module, ())


_ROUTED: ContextVar[dict[Module, int] | None] = ContextVar("routed", default=None)
"""Expert → rows of the calls that make the output of the layer whose forward runs now.

Passes that wait inside such a forward have contexts of their own, so each sees its own.
"""


@contextlib.contextmanager
def _routes(routed: dict[Module, int] | None) -> Iterator[None]:
    """Count calls of experts in the body in ``routed``; ``None``: they are calibration calls."""
    before = _ROUTED.set(routed)
    try:
        yield
    finally:
        _ROUTED.reset(before)


class ShownLists:
    """Shows every expert of some lists all tokens of their layers, or only those with too few.

    Args:
        lists: list → calling convention of its members, as :func:`manners_of` finds it.
        wanted: tells whether a batch is run, so that tokens are to be shown.
        every: every expert is shown all tokens; else it gets what is routed to it until its list
            is :meth:`decided`.
        only_tried: those of ``lists`` whose members are shown something while calls are watched,
            and nothing else.

    Attributes:
        pending: the modules where passes are still to wait; ``None`` while nothing waits anywhere.
    """

    def __init__(
        self,
        lists: Mapping[ExpertList, Manner],
        wanted: Callable[[], bool],
        *,
        every: bool = True,
        only_tried: Collection[ExpertList] = (),
    ) -> None:
        self.lists = [one for one in lists if one not in only_tried]
        self.every = every
        self.pending: Collection[Module] | None = None
        self._all = list(lists)
        self._wanted = wanted
        self._shown: dict[Module, Shown] = {}
        self._undecided = [] if every else list(self.lists)
        self._in_survey = False
        self._in_trial = False
        self._made_in_trial: dict[ExpertList, Any] = {}
        by_calls = [one for one, manner in lists.items() if manner is not Manner.ROWS]
        self._by_calls = {member for one in by_calls for member in one.members.values()}
        self._by_matrices = AlikeMatrices(
            one for one, manner in lists.items() if manner is Manner.MATRICES
        )
        self._wait_at_blocks = any(one in self.lists for one in by_calls)
        if every:
            members = (member for one in self.lists for member in one.members.values())
            self._shown = dict.fromkeys(members, "all_tokens")
        self._places: dict[Module, set[Module]] = {}
        self._inside: Counter[Module] = Counter()
        self._owners: dict[Module, set[Module]] = {}
        for one in self.lists:
            for member in one.members.values():
                for inner in member.modules():  # an expert may hold experts
                    self._owners.setdefault(inner, set()).add(one.owner)

    def __contains__(self, one: ExpertList) -> bool:
        return any(other.module is one.module for other in self.lists)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Show tokens to experts while the body runs."""
        for one in self._all:  # drop the results of an earlier run
            for kept in (_tokens, _starved, _shown_more):
                kept.pop(one.module, None)
        for one in self.lists:
            _tokens[one.module] = [0] * len(one.members)
            _shown_more[one.module] = set(range(len(one.members))) if self.every else set()
            self._places[one.owner] = {*one.holders, *one.owner.modules()}
        owners = {one.owner: None for one in self._all}
        members = [member for one in self._all for member in one.members.values()]
        with (
            stubbed(owners, self._showing),
            stubbed(members, self._routed),
            self._by_matrices.watching(),
        ):
            try:
                yield
            finally:
                for one in self.lists:
                    _shown_more.pop(one.module, None)

    @contextlib.contextmanager
    def calls_watched(self) -> Iterator[None]:
        """Call each expert once, whatever is routed to it, while calls are recorded in the body.

        So the modules that share an input are known for all experts.
        """
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial = False
            self._made_in_trial.clear()

    def counted(self, order: CallOrder) -> CallOrder:
        """``order`` with only those calls of experts that every batch makes: the shown ones."""
        seen = {
            member: order.calls.get(one.owner, 1)
            for one in (self.lists if self.every else ())
            for member in one.members.values()
            if member in order.calls and member not in self._by_calls
        }
        return CallOrder(order.groups, {**order.calls, **seen})

    def may_be_called(self, module: Module) -> bool:
        """Return True if ``module`` is part of an expert whose layer some pass has not left yet.

        The number of an expert's calls is known only once its layer has returned.
        """
        return any(self._inside[owner] for owner in self._owners.get(module, ()))

    @property
    def at_blocks(self) -> bool:
        """Return True if passes have to wait at whole blocks.

        Routes are counted there, and a single Linear may be called any number of times.
        """
        return bool(self._undecided) or self._wait_at_blocks

    def without_unpaired(self, references: Mapping[Module, Tensor]) -> dict[Module, Tensor]:
        """Drop the ``references`` of experts that are called with the inputs of other experts.

        Their calls in the two passes are not of the same tokens, nor of the same expert.
        """
        inside = {inner for member in self._by_calls for inner in member.modules()}
        return {module: one for module, one in references.items() if module not in inside}

    # ------------------------------------------------------------------ too few tokens

    def undecided(self, modules: Collection[Module]) -> list[ExpertList]:
        """The lists owned by ``modules`` whose tokens were not counted and settled yet."""
        return [one for one in self._undecided if one.owner in modules]

    @contextlib.contextmanager
    def surveying(self) -> Iterator[None]:
        """Count the tokens routed to experts while the body runs, without showing them any."""
        self._in_survey = True
        try:
            yield
        finally:
            self._in_survey = False

    def decided(self, one: ExpertList, starved: Mapping[int, Shown], policy: str) -> None:
        """Set what the members of a list are shown, after its tokens were counted.

        Args:
            one: the list.
            starved: index of a member with too few tokens → what it is shown; the others are
                calibrated with what is routed to them.
            policy: what that is called in a report.
        """
        self._undecided.remove(one)
        members = list(one.members.values())
        self._shown |= {members[place]: shown for place, shown in starved.items()}
        _starved[one.module] = dict.fromkeys(starved, policy)
        _shown_more[one.module] = {place for place in starved if starved[place] != "nothing"}

    # ------------------------------------------------------------------ forwards

    def _is_on(self, owner: Module) -> bool:
        if self._in_trial:
            return True
        places = self._places.get(owner)
        if places is None:
            return False
        if self._in_survey:
            return True
        return self._wanted() and (self.pending is None or not places.isdisjoint(self.pending))

    def _showing(self, owner: Module, forward: Forward) -> Forward:
        members = [
            member for one in self._all if one.owner is owner for member in one.members.values()
        ]

        def shown(*args: Any, **kwargs: Any) -> Any:
            tokens = first_tensor(args, kwargs)
            if tokens is None or not self._is_on(owner):
                return forward(*args, **kwargs)
            routed = dict.fromkeys(members, 0)
            self._inside[owner] += 1
            try:
                if not self._in_survey:
                    self._show(members, "all_tokens", tokens.flatten(0, -2))
                with _routes(routed):
                    made = forward(*args, **kwargs)
            finally:
                self._inside[owner] -= 1
            if hooks_are_on() if self.every else self._in_survey:
                self._count(owner, routed)
            return made

        return shown

    def _show(self, members: Sequence[Module], shown: Shown, rows: Tensor) -> None:
        """Call the members that are shown these rows, and drop their outputs."""
        for member in members:
            is_shown = self._in_trial or self._shown.get(member) == shown
            if is_shown and member not in self._by_calls:
                member(rows if self.every else rows.clone())  # unshared: experts get other rows

    @contextlib.contextmanager
    def _shown_call(
        self,
        member: Module,
        others: Sequence[Module],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Iterator[None]:
        """Call those of ``others`` that are shown ``member``'s input with a copy of it."""
        wanting = [
            one
            for one in others
            if self._in_trial or self._shown.get(one) in ("all_tokens", "neighbours")
        ]
        if member in self._by_matrices:
            with self._by_matrices.hearing(member, wanting):
                yield
            return
        with _routes(None):
            for one in wanting:
                copied_args, copied_kwargs = for_another_run((args, dict(kwargs)), Tensor.clone)
                one(*copied_args, **copied_kwargs)
        yield

    def _is_muted(self, member: Module) -> bool:
        """Return True if hooks skip a member's own calls, as its tokens were shown besides."""
        shown = self._shown.get(member)
        if member in self._by_calls and shown == "all_tokens":
            return False  # the others' inputs were shown before; these are its own tokens
        return shown is not None

    def _routed(self, member: Module, forward: Forward) -> Forward:
        own_list = next(one for one in self._all if member in one.members.values())
        others = [one for one in own_list.members.values() if one is not member]

        def called(*args: Any, **kwargs: Any) -> Any:
            routed, given = _ROUTED.get(), first_tensor(args, kwargs)
            if routed is None or member not in routed or given is None:
                return forward(*args, **kwargs)
            routed[member] += rows_of(given)
            if self._in_trial:
                if member not in self._by_calls:
                    return torch.zeros_like(given)
                return self._tried(member, own_list, forward, args, kwargs)
            with contextlib.ExitStack() as around:
                if member in self._by_calls and not self._in_survey:
                    around.enter_context(self._shown_call(member, others, args, kwargs))
                elif not self._in_survey:
                    with _routes(None):
                        self._show(others, "neighbours", given)
                if self._is_muted(member):
                    around.enter_context(HooksMixin.disable_hooks())
                return forward(*args, **kwargs)

        return called

    def _tried(
        self,
        member: Module,
        own_list: ExpertList,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run all members in a list's first call; later calls return zeros where possible."""
        given, template = first_tensor(args, kwargs), self._made_in_trial.get(own_list)
        if given is None or (own_list in self._made_in_trial and template is None):
            return forward(*args, **kwargs)
        if template is not None:
            return template.new_zeros((*given.shape[:-1], template.shape[-1]))
        others = [one for one in own_list.members.values() if one is not member]
        with self._shown_call(member, others, args, kwargs):
            made = forward(*args, **kwargs)
        is_by_row = isinstance(made, Tensor) and made.shape[:-1] == given.shape[:-1]
        self._made_in_trial[own_list] = made if is_by_row else None
        return made

    def _count(self, owner: Module, routed: Mapping[Module, int]) -> None:
        for one in self.lists:
            if one.owner is owner and not self._in_trial:
                counted = _tokens[one.module]
                for place, member in enumerate(one.members.values()):
                    counted[place] += routed[member]
