# SPDX-License-Identifier: Apache-2.0
"""Experts that are modules in a list, called one by one by the model's own code.

Each is called for the tokens that are routed to it, in whatever way that code has. To show each of
them all tokens, as calibration wants, no more has to be known than that an expert is called with
rows of its layer's input and nothing else. That is tried out (:func:`plainly_called`). Then the
forward of the layer is preceded by one call of each expert with all rows (:class:`ShownLists`),
and the calls behind it are those that make its output: whoever watches the experts is not told of
them, as they would be counted twice.

Where experts are calibrated with what is routed to them, one run of the layer counts that first.
An expert that gets too little is then shown all rows in the same way, those that the others get,
or none.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.modeling.alike_experts import form_of_module
from llmcompressor.modeling.call_order import CallOrder, first_tensor
from llmcompressor.modeling.experts import Shown
from llmcompressor.modeling.hooks import HooksMixin, hooks_are_on
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.stubs import Forward, stubbed

__all__ = [
    "ExpertList",
    "ShownLists",
    "lists_of_alike",
    "members_of",
    "plainly_called",
    "starved_of",
    "tokens_of",
]

_COMPARED = 8
"""Rows of each call that are looked for among the tokens."""
_MATRIX = 2


@dataclass(eq=False)
class ExpertList:
    """A list of alike modules inside a block."""

    name: str
    module: Module
    members: Mapping[str, Module]
    """Key in the list → expert."""
    owner: Module
    """The module whose forward calls them, as far as the structure tells."""
    holders: Sequence[Module]
    """What the owner lies in, from the model on, and the owner itself."""


def lists_of_alike(model: Module) -> Iterator[ExpertList]:
    """The lists of alike modules inside a block; those of the blocks themselves lie in no other."""
    for name, module in model.named_modules():
        if not isinstance(module, ModuleList | ModuleDict):
            continue
        members = members_of(module)
        inside = any(part.isdecimal() for part in name.split("."))
        if inside and len(members) > 1 and len(set(map(form_of_module, members.values()))) == 1:
            has_forward = type(module).forward not in (ModuleList.forward, ModuleDict.forward)
            holder = name if has_forward else name.rpartition(".")[0]
            holders = list(_on_the_way(model, holder))
            yield ExpertList(name, module, members, holders[-1], holders)


def members_of(module: Module) -> dict[str, Module]:
    """Key in a list → a module with weights."""
    own = module._modules.items()
    return {key: one for key, one in own if one is not None and _has_weights(one)}


def _on_the_way(model: Module, name: str) -> Iterator[Module]:
    yield model
    parts = name.split(".") if name else []
    for end in range(len(parts)):
        yield model.get_submodule(".".join(parts[: end + 1]))


def _has_weights(module: Module) -> bool:
    return any(part._parameters for part in module.modules())


def plainly_called(lists: Sequence[ExpertList], run: Callable[[], object]) -> list[ExpertList]:
    """Those of ``lists`` whose members are called with rows of their owner's input alone.

    Lists whose members all get all rows are not among them: nothing need be shown to them.

    Args:
        lists: as :func:`lists_of_alike` finds them.
        run: runs the model once, on something small; its weights may be zeros.
    """
    found: dict[ExpertList, bool] = {}

    def trying(owner: Module, forward: Forward) -> Forward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            for one in lists:
                if one.owner is owner and found.get(one, True):
                    found[one] = _is_plain(one, forward, args, kwargs)
            return forward(*args, **kwargs)

        return tried

    with torch.no_grad(), stubbed({one.owner: None for one in lists}, trying):
        run()
    return [one for one in lists if found.get(one)]


def _is_plain(
    one: ExpertList, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Run the owner on other tokens, which can be told apart, and look at how members are called.

    What it makes of them, and where it sends them, does not matter: its weights need not be there.
    Where they are not, what is added to tokens would leave them as they are: all that modules with
    weights return is drawn at random.
    """
    given = first_tensor(args, kwargs)
    if given is None or given.ndim < _MATRIX or not given.is_floating_point():
        return False
    seed = torch.Generator().manual_seed(0)
    marked = torch.rand(given.shape, generator=seed).to(given.device, given.dtype)
    calls: list[tuple[tuple[Any, ...], Mapping[str, Any], Any]] = []

    def recording(member: Module, own: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs, _disturbed(own(*args, **kwargs), seed)))
            return calls[-1][-1]

        return recorded

    def disturbing(_: Module, own: Forward) -> Forward:
        return lambda *args, **kwargs: _disturbed(own(*args, **kwargs), seed)

    copied_args, copied_kwargs = for_another_run(
        (args, dict(kwargs)), lambda tensor: marked if tensor is given else tensor
    )
    try:
        with (
            stubbed(one.members.values(), recording),
            stubbed(_others_with_weights(one), disturbing),
        ):
            forward(*copied_args, **copied_kwargs)
    except Exception:  # whatever a model's own code raises here: how it calls them is not known
        return False
    rows = marked.flatten(0, -2)
    if not calls or not all(_are_rows(*call, rows) for call in calls):
        return False
    return len(calls) < len(one.members) or any(len(args[0]) < len(rows) for args, *_ in calls)


def _others_with_weights(one: ExpertList) -> list[Module]:
    """What the owner of a list holds besides it."""
    own = {one.owner, *one.module.modules()}
    return [module for module in one.owner.modules() if module not in own and _has_weights(module)]


def _disturbed(made: Any, seed: torch.Generator) -> Any:
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return made
    return made + torch.rand(made.shape, generator=seed).to(made.device, made.dtype)


def _are_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any, rows: Tensor) -> bool:
    """Whether a call's only argument is a matrix of some of ``rows``, and it returns one like it.

    Zeros like it take the place of what is returned while calls are watched.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return False
    given = args[0]
    if given.ndim != _MATRIX or given.shape[1] != rows.shape[1]:
        return False
    if not isinstance(made, Tensor) or made.shape != given.shape:
        return False
    some = given[:_COMPARED].to(rows.dtype)
    return bool((some[:, None] == rows[None]).all(-1).any(-1).all())


_tokens: WeakKeyDictionary[Module, list[int]] = WeakKeyDictionary()
_starved: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()


def tokens_of(module: Module) -> list[int]:
    """How many rows were routed to each member of a list in the last calibration.

    Padding is included: which rows an expert is called with is the model's own affair. Empty where
    nothing was counted.
    """
    return list(_tokens.get(module, ()))


def starved_of(module: Module) -> dict[int, str]:
    """Which members of a list got too few tokens → the policy by which they were calibrated."""
    return dict(_starved.get(module, {}))


_ROUTED: ContextVar[dict[Module, int] | None] = ContextVar("routed", default=None)
"""Expert → rows of the calls that make the output of the layer whose forward runs now.

Passes that wait inside such a forward have contexts of their own, so each sees its own.
"""


@contextlib.contextmanager
def _routes(routed: dict[Module, int] | None) -> Iterator[None]:
    """Calls of experts in the body are counted as routed to them; shown to them where ``None``."""
    before = _ROUTED.set(routed)
    try:
        yield
    finally:
        _ROUTED.reset(before)


class ShownLists:
    """Shows every expert of some lists all tokens of their layers, or those that get too few.

    Args:
        lists: of whose members :func:`plainly_called` holds.
        wanted: tells whether a batch is run, so that tokens are to be shown.
        every: every expert is shown all tokens; else it gets what is routed to it until its list
            is :meth:`decided`.

    Attributes:
        pending: the modules where passes are still to wait; ``None`` while nothing waits anywhere.
        silent: no expert runs for its routed tokens (their outputs are zeros): calls are watched.
    """

    def __init__(
        self, lists: Sequence[ExpertList], wanted: Callable[[], bool], *, every: bool = True
    ) -> None:
        self.lists = list(lists)
        self.every = every
        self.pending: Collection[Module] | None = None
        self.silent = False
        self._wanted = wanted
        self._shown: dict[Module, Shown] = {}
        self._undecided = [] if every else list(lists)
        self._in_survey = False
        if every:
            members = (member for one in lists for member in one.members.values())
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
        """Show tokens while the body runs."""
        for one in self.lists:
            _tokens[one.module] = [0] * len(one.members)
            _starved.pop(one.module, None)
            self._places[one.owner] = {*one.holders, *one.owner.modules()}
        owners = {one.owner: None for one in self.lists}
        members = [member for one in self.lists for member in one.members.values()]
        with stubbed(owners, self._showing), stubbed(members, self._routed):
            yield

    @contextlib.contextmanager
    def calls_watched(self) -> Iterator[None]:
        """Have each expert that is shown all tokens seen once, with them, by who watches calls."""
        self.silent = self.every
        try:
            yield
        finally:
            self.silent = False

    def counted(self, order: CallOrder) -> CallOrder:
        """``order`` with those calls of experts alone that every batch makes: the ones shown."""
        seen = {
            member: order.calls.get(one.owner, 1)
            for one in (self.lists if self.every else ())
            for member in one.members.values()
            if member in order.calls
        }
        return CallOrder(order.groups, {**order.calls, **seen})

    def may_be_called(self, module: Module) -> bool:
        """Whether ``module`` is part of an expert whose layer some pass has not left yet.

        How often the layer's own code calls an expert is known when it has returned.
        """
        return any(self._inside[owner] for owner in self._owners.get(module, ()))

    # ------------------------------------------------------------------ too few tokens

    @property
    def any_undecided(self) -> bool:
        """Whether there are lists of which nothing is decided."""
        return bool(self._undecided)

    def undecided(self, modules: Collection[Module]) -> list[ExpertList]:
        """The lists whose owners are among ``modules``, and of which nothing is decided."""
        return [one for one in self._undecided if one.owner in modules]

    @contextlib.contextmanager
    def surveying(self) -> Iterator[None]:
        """Count the tokens that are routed to experts while the body runs; it shows them none."""
        self._in_survey = True
        try:
            yield
        finally:
            self._in_survey = False

    def decided(self, one: ExpertList, starved: Mapping[int, Shown], policy: str) -> None:
        """The tokens of a list were counted: settle what is shown to its members.

        Args:
            one: the list.
            starved: place in the list of who gets too few → what it is shown; the others are
                calibrated with what is routed to them.
            policy: what that is called in a report.
        """
        self._undecided.remove(one)
        members = list(one.members.values())
        self._shown |= {members[place]: shown for place, shown in starved.items()}
        _starved[one.module] = dict.fromkeys(starved, policy)

    # ------------------------------------------------------------------ forwards

    def _is_on(self, owner: Module) -> bool:
        if self.silent or self._in_survey:
            return True
        if not self._wanted():
            return False
        return self.pending is None or not self._places[owner].isdisjoint(self.pending)

    def _showing(self, owner: Module, forward: Forward) -> Forward:
        members = [
            member for one in self.lists if one.owner is owner for member in one.members.values()
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
        """Call those of ``members`` that are shown these rows; what they return is dropped."""
        for member in members:
            if self._shown.get(member) == shown:
                member(rows)

    def _routed(self, member: Module, forward: Forward) -> Forward:
        lists = (list(one.members.values()) for one in self.lists)
        others = [one for one in next(own for own in lists if member in own) if one is not member]

        def called(*args: Any, **kwargs: Any) -> Any:
            routed, given = _ROUTED.get(), first_tensor(args, kwargs)
            if routed is None or member not in routed or given is None:
                return forward(*args, **kwargs)
            routed[member] += len(given)
            if self.silent:
                return torch.zeros_like(given)
            if not self._in_survey:
                with _routes(None):
                    self._show(others, "neighbours", given)
            if member not in self._shown:
                return forward(*args, **kwargs)
            with HooksMixin.disable_hooks():
                return forward(*args, **kwargs)

        return called

    def _count(self, owner: Module, routed: Mapping[Module, int]) -> None:
        for one in self.lists:
            if one.owner is owner and not self.silent:
                counted = _tokens[one.module]
                for place, member in enumerate(one.members.values()):
                    counted[place] += routed[member]
