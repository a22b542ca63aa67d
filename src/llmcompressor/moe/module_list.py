# SPDX-License-Identifier: Apache-2.0
"""MoE experts in a module list, and the calling convention of the model's own code.

Each expert is called for the tokens that are routed to it, in whatever way that code has. To
calibrate an expert with more tokens (:mod:`llmcompressor.moe.module_list`), its valid inputs
have to be known. They are found in a small forward (:func:`call_conventions`). An expert that is
called
with rows of its layer's input and nothing else can be called with any rows. One that is called with
something derived from them is called with the inputs of another expert of the list, or its Linears
are called with those of that expert's Linears.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.modeling.blocks import is_plain_container
from llmcompressor.modeling.call_graph import (
    CallOrder,
    copy_arguments,
    first_tensor,
    tensor_version,
)
from llmcompressor.modeling.hooks import HooksMixin, hooks_enabled
from llmcompressor.modeling.patches import Forward, forward_overridden
from llmcompressor.moe.linear_experts import LinearExperts, Shown
from llmcompressor.moe.similar_experts import module_structure_key

__all__ = [
    "CallConvention",
    "ExpertBroadcast",
    "ExpertLinears",
    "ExpertList",
    "ExpertPosition",
    "call_conventions",
    "expert_positions",
    "find_expert_lists",
    "is_linear_like",
    "members_with_weights",
    "num_tokens",
    "routed_tokens",
    "sees_unrouted_tokens",
    "starved_members",
]

_COMPARED = 8
"""Rows of each call that are looked for among the tokens."""
_MATRIX = 2
_DRAWS = 6
"""Inputs that are tried to see whether routes depend on them."""


class CallConvention(Enum):
    """The calling convention of a list's members: what they can be calibrated with."""

    ROWS = "rows"
    """Any rows of their layer's input: they are called with some of them, and nothing else."""
    CALLS = "calls"
    """What the others are called with."""
    MATRICES = "matrices"
    """What the matrices of the others are called with: they take nothing but their own tokens."""


@dataclass(eq=False)
class ExpertList:
    """A list of modules of equal structure inside a block."""

    name: str
    module: Module
    members: Mapping[str, Module]
    """Key in the list → expert."""
    owner: Module
    """The module whose forward calls them, as far as the structure tells."""
    holders: Sequence[Module]
    """What the owner lies in, from the model on, and the owner itself."""


def find_expert_lists(model: Module) -> Iterator[ExpertList]:
    """The lists of equally structured modules inside a block; lists of blocks are left out."""
    for name, module in model.named_modules():
        if not isinstance(module, ModuleList | ModuleDict):
            continue
        members = members_with_weights(module)
        inside = any(part.isdecimal() for part in name.split("."))
        if (
            inside
            and len(members) > 1
            and len(set(map(module_structure_key, members.values()))) == 1
        ):
            holder = name.rpartition(".")[0] if is_plain_container(module) else name
            holders = list(_module_path(model, holder))
            yield ExpertList(name, module, members, holders[-1], holders)


def members_with_weights(module: Module) -> dict[str, Module]:
    """The members of a list that have weights, by key."""
    own = module._modules.items()
    return {key: one for key, one in own if one is not None and _has_weights(one)}


def _module_path(model: Module, name: str) -> Iterator[Module]:
    yield model
    parts = name.split(".") if name else []
    for end in range(len(parts)):
        yield model.get_submodule(".".join(parts[: end + 1]))


def _has_weights(module: Module) -> bool:
    return any(part._parameters for part in module.modules())


def call_conventions(
    lists: Sequence[ExpertList], run: Callable[[], object]
) -> dict[ExpertList, CallConvention]:
    """Find the calling convention of each list of experts in one forward.

    Lists whose members all get all rows are left out, as they need no further tokens. So are lists
    whose calls do not depend on the tokens' values: their members are no experts.

    Args:
        lists: as :func:`find_expert_lists` finds them.
        run: runs the model once, on something small; its weights may be zeros.
    """
    found: dict[ExpertList, set[CallConvention | None]] = {}

    def trying(owner: Module, forward: Forward) -> Forward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            for one in lists:
                if one.owner is owner and None not in found.get(one, ()):
                    found.setdefault(one, set()).add(_call_convention(one, forward, args, kwargs))
            return forward(*args, **kwargs)

        return tried

    with torch.no_grad(), forward_overridden({one.owner: None for one in lists}, trying):
        run()
    narrower = list(CallConvention).index
    return {
        one: max((manner for manner in manners if manner is not None), key=narrower)
        for one, manners in found.items()
        if None not in manners
    }


@dataclass(frozen=True)
class _MemberCall:
    """A call of a member, with its output."""

    member: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Any
    wrote: bool
    """Whether it wrote to what it got."""

    @property
    def rows(self) -> int:
        given = first_tensor(self.args, self.kwargs)
        return 0 if given is None else num_tokens(given)


def num_tokens(given: Tensor) -> int:
    """Number of tokens in a tensor ``[..., H]``."""
    return given.shape[:-1].numel() if given.ndim else 1


def _call_convention(
    one: ExpertList, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CallConvention | None:
    """Run the owner on distinguishable tokens, and classify how its members are called.

    The values that it computes, and the routes, do not matter, so the weights need not be loaded.
    Without weights, residual additions would leave the tokens unchanged; therefore random values
    are added to the output of every module with weights.
    """
    given = first_tensor(args, kwargs)
    if given is None or given.ndim < _MATRIX or not given.is_floating_point():
        return None

    def tried(draw: int) -> tuple[list[_MemberCall], Tensor]:
        return _record_member_calls(one, forward, args, kwargs, given, draw)

    try:
        calls, rows = tried(0)
        if not calls:
            return None
        if all(_takes_rows(call, rows) for call in calls):
            shared = len(calls) < len(one.members) or any(call.rows < len(rows) for call in calls)
            return CallConvention.ROWS if shared else None
        if not _depends_on_tokens(one, [calls, *(tried(draw)[0] for draw in range(1, _DRAWS))]):
            return None
    except Exception:  # a model's own code may raise anything: the convention is unknown
        return None
    return CallConvention.CALLS if _accept_same_call(one, calls[0]) else CallConvention.MATRICES


def _accept_same_call(one: ExpertList, call: _MemberCall) -> bool:
    """Return True if every member accepts the arguments that one of them was called with."""
    try:
        for member in one.members.values():
            args, kwargs = copy_arguments((call.args, dict(call.kwargs)), Tensor.clone)
            member.forward(*args, **kwargs)
    except Exception:  # a model's own code may raise anything
        return False
    return True


def _record_member_calls(
    one: ExpertList,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Tensor,
    draw: int,
) -> tuple[list[_MemberCall], Tensor]:
    """The calls of members with random tokens in place of ``given``, and these tokens."""
    seed = torch.Generator().manual_seed(draw)
    marked = torch.rand(given.shape, generator=seed).to(given.device, given.dtype)
    calls: list[_MemberCall] = []

    def recording(member: Module, own: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            kept_args, kept_kwargs = copy_arguments((args, kwargs), Tensor.clone)
            versions = _tensor_versions(args, kwargs)
            made = _with_noise(own(*args, **kwargs), seed)
            wrote = versions != _tensor_versions(args, kwargs)
            calls.append(_MemberCall(member, kept_args, kept_kwargs, made, wrote))
            return made

        return recorded

    def disturbing(_: Module, own: Forward) -> Forward:
        return lambda *args, **kwargs: _with_noise(own(*args, **kwargs), seed)

    copied_args, copied_kwargs = copy_arguments(
        (args, dict(kwargs)), lambda tensor: marked.clone() if tensor is given else tensor
    )
    with (
        forward_overridden(one.members.values(), recording),
        forward_overridden(_siblings_with_weights(one), disturbing),
    ):
        forward(*copied_args, **copied_kwargs)
    return calls, marked.flatten(0, -2)


def _depends_on_tokens(one: ExpertList, draws: Sequence[Sequence[_MemberCall]]) -> bool:
    """Return True if the number of tokens per member depends on the tokens' values.

    Consecutive layers, or one layer per position or scale, have equal structure, too, and are
    called with more than rows. They would never get each other's inputs.
    """
    counts = {
        tuple(
            sum(call.rows for call in calls if call.member is own) for own in one.members.values()
        )
        for calls in draws
    }
    return len(counts) > 1


def _tensor_versions(*values: Any) -> list[int]:
    """Number of in-place writes to each tensor among the arguments of a call."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor_version(tensor))
        return tensor

    copy_arguments(values, note)
    return found


def _siblings_with_weights(one: ExpertList) -> list[Module]:
    """Modules with weights that the owner of a list has outside of it."""
    own = {one.owner, *one.module.modules()}
    return [module for module in one.owner.modules() if module not in own and _has_weights(module)]


def _with_noise(made: Any, seed: torch.Generator) -> Any:
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return made
    return made + torch.rand(made.shape, generator=seed).to(made.device, made.dtype)


def _takes_rows(call: _MemberCall, rows: Tensor) -> bool:
    """Return True if a call takes one matrix of some of ``rows``, and returns the same shape.

    While calls are recorded, zeros of that shape replace its output.
    """
    if len(call.args) != 1 or call.kwargs or call.wrote or not isinstance(call.args[0], Tensor):
        return False
    given, made = call.args[0], call.made
    if given.ndim != _MATRIX or given.shape[1] != rows.shape[1]:
        return False
    if not isinstance(made, Tensor) or made.shape != given.shape:
        return False
    some = given[:_COMPARED].to(rows.dtype)
    return bool((some[:, None] == rows[None]).all(-1).any(-1).all())


# --------------------
# Calibration of expert Linears with the inputs of the same Linears in other experts.
#
# Some experts accept nothing but their own tokens, because their code depends on which expert they
# are. They cannot be called with another expert's input, but their Linears can: the experts of one
# list have equal structure, so each Linear has a counterpart in every other expert with the same
# input features.


def is_linear_like(module: Module) -> bool:
    """Return True if a module multiplies its input by a weight of its own, like a Linear."""
    return hasattr(module, "in_features")


@dataclass
class _RecordedInput:
    """An input tensor of an expert's Linears."""

    tensor: Tensor
    version: int
    copy: Tensor
    """As it was then: the expert's own code may write to it."""
    paths: list[str]
    """Which matrices get it, by their names in the expert."""


class ExpertLinears:
    """The Linears of the experts of some lists.

    Args:
        lists: those whose members are called with their own tokens alone.
    """

    def __init__(self, lists: Iterable[ExpertList]) -> None:
        members = [member for one in lists for member in one.members.values()]
        self._paths = {
            member: {part: path for path, part in member.named_modules() if is_linear_like(part)}
            for member in members
        }
        self._heard: dict[Module, list[_RecordedInput]] = {}

    def __contains__(self, member: Module) -> bool:
        return member in self._paths

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the inputs of expert Linears in the body, while :meth:`hearing` is active."""

        def hear(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = first_tensor(args, kwargs)
            for member, heard in self._heard.items():
                path = self._paths[member].get(module)
                if path is not None and given is not None:
                    _record_input(heard, given, path)

        matrices = {part for paths in self._paths.values() for part in paths}
        handles = [  # before input rotations: the other Linears apply their own
            one.register_forward_pre_hook(hear, prepend=True, with_kwargs=True) for one in matrices
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def replay_inputs(self, member: Module, others: Sequence[Module]) -> Iterator[None]:
        """Record the inputs of ``member``'s Linears, then call those of ``others`` with them."""
        heard = self._heard[member] = []
        try:
            yield
        finally:
            del self._heard[member]
        for other in others:
            for given in heard:
                copy = given.copy.clone()  # or hooks would take it for another expert's input
                for path in given.paths:
                    other.get_submodule(path)(copy)


def _record_input(heard: list[_RecordedInput], tensor: Tensor, path: str) -> None:
    version = tensor_version(tensor)
    for given in heard:
        if given.tensor is tensor and given.version == version:
            given.paths.append(path)
            return
    heard.append(_RecordedInput(tensor, version, tensor.detach().clone(), [path]))


# --------------------
# Calibration of listed experts with more tokens than the model routes to them.
#
# Experts that take rows of their layer's input (:class:`Manner.ROWS`) are each called once with
# all rows, before the layer's forward. The calls that follow make its output; hooks are disabled
# in them, as the tokens would be counted twice.
#
# For experts that take something else (:class:`Manner.CALLS`), each call of one is preceded by
# calls of the others with a copy of its input. Where that is impossible
# (:class:`Manner.MATRICES`), it is followed by calls of the others' Linears. So each expert is
# calibrated with all tokens that any of them gets.
#
# Where experts are calibrated with routed tokens only, one run of the layer counts these first. An
# expert with too few is then shown all tokens in the same way, the inputs of the others, or none.

_tokens: WeakKeyDictionary[Module, list[int]] = WeakKeyDictionary()
_starved: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()
_shown_more: WeakKeyDictionary[Module, set[int]] = WeakKeyDictionary()


def routed_tokens(module: Module) -> list[int]:
    """Number of rows routed to each member of a list in the last calibration.

    Padding is included, as the model's own code selects the rows. Empty where nothing was counted.
    """
    return list(_tokens.get(module, ()))


def starved_members(module: Module) -> dict[int, str]:
    """Members of a list that got too few tokens → the policy that calibrated them."""
    return dict(_starved.get(module, {}))


def sees_unrouted_tokens(module: Module, place: int) -> bool:
    """Return True if a member of a list is also called with tokens not routed to it."""
    return place in _shown_more.get(module, ())


_ROUTED: ContextVar[dict[Module, int] | None] = ContextVar("routed", default=None)
"""Expert → rows of the calls that make the output of the layer whose forward runs now.

Passes that wait inside such a forward have contexts of their own, so each sees its own.
"""


@contextlib.contextmanager
def _counting_routes(routed: dict[Module, int] | None) -> Iterator[None]:
    """Count calls of experts in the body in ``routed``; ``None``: they are calibration calls."""
    before = _ROUTED.set(routed)
    try:
        yield
    finally:
        _ROUTED.reset(before)


class ExpertBroadcast:
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
        lists: Mapping[ExpertList, CallConvention],
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
        by_calls = [one for one, manner in lists.items() if manner is not CallConvention.ROWS]
        self._by_calls = {member for one in by_calls for member in one.members.values()}
        self._by_matrices = ExpertLinears(
            one for one, manner in lists.items() if manner is CallConvention.MATRICES
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
            forward_overridden(owners, self._broadcast_forward),
            forward_overridden(members, self._member_forward),
            self._by_matrices.watching(),
        ):
            try:
                yield
            finally:
                for one in self.lists:
                    _shown_more.pop(one.module, None)

    @contextlib.contextmanager
    def all_members_called(self) -> Iterator[None]:
        """Call each expert once, whatever is routed to it, while calls are recorded in the body.

        So the modules that share an input are known for all experts.
        """
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial = False
            self._made_in_trial.clear()

    def with_shown_calls(self, order: CallOrder) -> CallOrder:
        """``order`` with only those calls of experts that every batch makes: the shown ones."""
        seen = {
            member: order.calls.get(one.owner, 1)
            for one in (self.lists if self.every else ())
            for member in one.members.values()
            if member in order.calls and member not in self._by_calls
        }
        return CallOrder(order.groups, {**order.calls, **seen})

    def is_layer_active(self, module: Module) -> bool:
        """Return True if ``module`` is part of an expert whose layer some pass has not left yet.

        The number of an expert's calls is known only once its layer has returned.
        """
        return any(self._inside[owner] for owner in self._owners.get(module, ()))

    @property
    def waits_at_blocks(self) -> bool:
        """Return True if passes have to wait at whole blocks.

        Routes are counted there, and a single Linear may be called any number of times.
        """
        return bool(self._undecided) or self._wait_at_blocks

    def drop_unpaired(self, references: Mapping[Module, Tensor]) -> dict[Module, Tensor]:
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
    def counting_tokens(self) -> Iterator[None]:
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

    def _is_active(self, owner: Module) -> bool:
        if self._in_trial:
            return True
        places = self._places.get(owner)
        if places is None:
            return False
        if self._in_survey:
            return True
        return self._wanted() and (self.pending is None or not places.isdisjoint(self.pending))

    def _broadcast_forward(self, owner: Module, forward: Forward) -> Forward:
        members = [
            member for one in self._all if one.owner is owner for member in one.members.values()
        ]

        def shown(*args: Any, **kwargs: Any) -> Any:
            tokens = first_tensor(args, kwargs)
            if tokens is None or not self._is_active(owner):
                return forward(*args, **kwargs)
            routed = dict.fromkeys(members, 0)
            self._inside[owner] += 1
            try:
                if not self._in_survey:
                    self._show(members, "all_tokens", tokens.flatten(0, -2))
                with _counting_routes(routed):
                    made = forward(*args, **kwargs)
            finally:
                self._inside[owner] -= 1
            if hooks_enabled() if self.every else self._in_survey:
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
    def _broadcast_call(
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
            with self._by_matrices.replay_inputs(member, wanting):
                yield
            return
        with _counting_routes(None):
            for one in wanting:
                copied_args, copied_kwargs = copy_arguments((args, dict(kwargs)), Tensor.clone)
                one(*copied_args, **copied_kwargs)
        yield

    def _skips_hooks(self, member: Module) -> bool:
        """Return True if hooks skip a member's own calls, as its tokens were shown besides."""
        shown = self._shown.get(member)
        if member in self._by_calls and shown == "all_tokens":
            return False  # the others' inputs were shown before; these are its own tokens
        return shown is not None

    def _member_forward(self, member: Module, forward: Forward) -> Forward:
        own_list = next(one for one in self._all if member in one.members.values())
        others = [one for one in own_list.members.values() if one is not member]

        def called(*args: Any, **kwargs: Any) -> Any:
            routed, given = _ROUTED.get(), first_tensor(args, kwargs)
            if routed is None or member not in routed or given is None:
                return forward(*args, **kwargs)
            routed[member] += num_tokens(given)
            if self._in_trial:
                if member not in self._by_calls:
                    return torch.zeros_like(given)
                return self._tried(member, own_list, forward, args, kwargs)
            with contextlib.ExitStack() as around:
                if member in self._by_calls and not self._in_survey:
                    around.enter_context(self._broadcast_call(member, others, args, kwargs))
                elif not self._in_survey:
                    with _counting_routes(None):
                        self._show(others, "neighbours", given)
                if self._skips_hooks(member):
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
        with self._broadcast_call(member, others, args, kwargs):
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


# --------------------
# Position of modules in MoE experts, with the calibration tokens of each expert.


@dataclass(frozen=True)
class ExpertPosition:
    """The position of a module in an MoE, whose experts are stacked or in a list."""

    mixture: Module
    expert: int
    path: str
    """Its name in the expert: the same in all of them."""

    @property
    def tokens(self) -> int:
        """Number of tokens routed to the expert in this calibration so far."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.tokens[self.expert]
        counted = routed_tokens(self.mixture)
        return counted[self.expert] if counted else 0

    @property
    def policy(self) -> str | None:
        """The policy for an expert with too few tokens; ``None`` if it has enough."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.starved.get(self.expert)
        return starved_members(self.mixture).get(self.expert)

    @property
    def sees_unrouted_tokens(self) -> bool:
        """Return True if the expert is also calibrated with tokens not routed to it."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.shown[self.expert] in ("all_tokens", "neighbours")
        return sees_unrouted_tokens(self.mixture, self.expert)


def expert_positions(block: Module) -> dict[Module, ExpertPosition]:
    """Map each module of an expert in ``block`` to its place; for nested experts, the inner one.

    The members of any list may be experts. Whether they are shown further tokens, or have too few,
    is known only once calibration has reached them.
    """
    found: dict[Module, ExpertPosition] = {}
    for module in block.modules():
        for number, member in enumerate(_expert_members(module)):
            for path, part in member.named_modules():
                found[part] = ExpertPosition(module, number, path)
    return found


def _expert_members(module: Module) -> list[Module]:
    if isinstance(module, LinearExperts):
        return [module.get_submodule(str(one)) for one in range(module.num_experts)]
    is_list = isinstance(module, ModuleList | ModuleDict)
    members = list(members_with_weights(module).values()) if is_list else []
    return members if len(members) > 1 else []
