# SPDX-License-Identifier: Apache-2.0
"""MoE experts in a module list, which the model's own code calls with their tokens.

An expert that is called with rows of its layer's input and nothing else can be called with any
rows: :func:`lists_called_with_rows` finds such lists in a small forward, and
:class:`ExpertBroadcast` calibrates their experts with more tokens than are routed to them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
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
from llmcompressor.modeling.patches import Forward, forward_overridden, restored
from llmcompressor.moe.linear_experts import LinearExperts, Shown
from llmcompressor.moe.similar_experts import module_structure_key

_COMPARED = 8
"""Rows of each call that are looked for among the tokens."""
_MATRIX = 2


def is_linear_like(module: Module) -> bool:
    """Return True if a module multiplies its input by a weight of its own, like a Linear."""
    return hasattr(module, "in_features")


@dataclass(eq=False)
class ExpertList:
    """A list of modules of equal structure inside a block.

    Attributes:
        name: of the list.
        module: the list.
        members: key in the list → expert.
        owner: the module whose forward calls them, as far as the structure tells.
        holders: the owner and the modules that it lies in, from the model on.
    """

    name: str
    module: Module
    members: Mapping[str, Module]
    owner: Module
    holders: Sequence[Module]


def find_expert_lists(model: Module) -> Iterator[ExpertList]:
    """The lists of equally structured modules inside a block; lists of blocks are left out."""
    for name, module in model.named_modules():
        if not any(part.isdecimal() for part in name.split(".")):
            continue
        members = _listed_members(module)
        if len(members) > 1 and len(set(map(module_structure_key, members.values()))) == 1:
            owner = name.rpartition(".")[0] if is_plain_container(module) else name
            parts = owner.split(".") if owner else []
            paths = [".".join(parts[:end]) for end in range(len(parts) + 1)]
            holders = [model.get_submodule(path) for path in paths]
            yield ExpertList(name, module, members, holders[-1], holders)


def _listed_members(module: Module) -> dict[str, Module]:
    """The members of a list that have weights, by key; empty if the module is no list."""
    if not isinstance(module, ModuleList | ModuleDict):
        return {}
    own = module._modules.items()
    return {key: one for key, one in own if one is not None and _has_weights(one)}


def _has_weights(module: Module) -> bool:
    return any(part._parameters for part in module.modules())


# --------------------
# Detection of lists whose members are called with rows of their layer's input.


def lists_called_with_rows(
    lists: Sequence[ExpertList], run: Callable[[], object]
) -> list[ExpertList]:
    """The lists whose members take some rows of their layer's input, found in one forward.

    Lists whose members all get all rows are left out, as they need no further tokens.

    Args:
        lists: as :func:`find_expert_lists` finds them.
        run: runs the model once, on something small; its weights may be zeros.
    """
    found: dict[ExpertList, bool] = {}

    def trying(owner: Module, forward: Forward) -> Forward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            for one in lists:
                if one.owner is owner and found.get(one, True):
                    found[one] = _is_called_with_rows(one, forward, args, kwargs)
            return forward(*args, **kwargs)

        return tried

    with torch.no_grad(), forward_overridden({one.owner: None for one in lists}, trying):
        run()
    return [one for one in lists if found.get(one)]


def _is_called_with_rows(
    one: ExpertList, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Run the owner on distinguishable tokens, and compare what its members are called with.

    The values that it computes, and the routes, do not matter, so the weights need not be loaded.
    Without weights, residual additions would leave the tokens unchanged; therefore random values
    are added to the output of every module with weights.
    """
    given = first_tensor(args, kwargs)
    if given is None or given.ndim < _MATRIX or not given.is_floating_point():
        return False
    seed = torch.Generator().manual_seed(0)
    marked = torch.rand(given.shape, generator=seed).to(given.device, given.dtype)
    rows, taken = marked.flatten(0, -2), list[int | None]()

    def recording(_: Module, own: Forward) -> Forward:
        return lambda *args, **kwargs: _with_noise(_record(own, args, kwargs, rows, taken), seed)

    def disturbing(_: Module, own: Forward) -> Forward:
        return lambda *args, **kwargs: _with_noise(own(*args, **kwargs), seed)

    inside = {one.owner, *one.module.modules()}
    others = [part for part in one.owner.modules() if part not in inside and _has_weights(part)]
    copied_args, copied_kwargs = copy_arguments(
        (args, dict(kwargs)), lambda tensor: marked.clone() if tensor is given else tensor
    )
    try:
        with (
            forward_overridden(one.members.values(), recording),
            forward_overridden(others, disturbing),
        ):
            forward(*copied_args, **copied_kwargs)
    except Exception:  # a model's own code may raise anything: the calls are unknown
        return False
    counts = [count for count in taken if count is not None]
    is_shared = len(taken) < len(one.members) or any(count < len(rows) for count in counts)
    return bool(taken) and len(counts) == len(taken) and is_shared


def _record(
    own: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: Tensor,
    taken: list[int | None],
) -> Any:
    """Call a member, and note how many of ``rows`` it takes; ``None`` for another kind of call."""
    given = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(given, Tensor) or not _are_rows(given, rows):
        taken.append(None)
        return own(*args, **kwargs)
    version = tensor_version(given)
    made = own(*args)
    # a member that writes to its input cannot be called with shared rows
    is_kept = version == tensor_version(given) and isinstance(made, Tensor)
    taken.append(len(given) if is_kept and made.shape == given.shape else None)
    return made


def _are_rows(given: Tensor, rows: Tensor) -> bool:
    if given.ndim != _MATRIX or given.shape[1] != rows.shape[1]:
        return False
    some = given[:_COMPARED].to(rows.dtype)
    return bool((some[:, None] == rows[None]).all(-1).any(-1).all())


def _with_noise(made: Any, seed: torch.Generator) -> Any:
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return made
    return made + torch.rand(made.shape, generator=seed).to(made.device, made.dtype)


# --------------------
# Calibration of listed experts with more tokens than the model routes to them.
#
# Each expert is called once with all rows, before the layer's forward. The calls that follow make
# its output; hooks are disabled in them, as the tokens would be counted twice.
#
# Where experts are calibrated with routed tokens only, one run of the layer counts these first. An
# expert with too few is then shown all tokens in the same way, those of the others, or none.


@dataclass
class ExpertRouting:
    """The routing of a list in the last calibration; :class:`LinearExperts` has the same.

    Attributes:
        tokens: rows routed to each expert, padding included, as the model's own code selects them.
        shown: the tokens that each expert is shown during calibration.
        starved: experts that got too few tokens → the policy applied to them.
    """

    tokens: list[int]
    shown: list[Shown]
    starved: dict[int, str] = field(default_factory=dict)


_routing: WeakKeyDictionary[Module, ExpertRouting] = WeakKeyDictionary()


def expert_routing(module: Module) -> ExpertRouting | LinearExperts | None:
    """The routing of an MoE in the last calibration; ``None`` for what is none."""
    return module if isinstance(module, LinearExperts) else _routing.get(module)


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
        lists: those whose members are called with rows.
        wanted: tells whether a batch is run, so that tokens are to be shown.
        every: every expert is shown all tokens; else it gets what is routed to it until its list
            is :meth:`decided`.
        only_tried: those of ``lists`` whose members are shown something while calls are recorded,
            and nothing else.

    Attributes:
        pending: the modules where passes are still to wait; ``None`` while nothing waits anywhere.
    """

    def __init__(
        self,
        lists: Sequence[ExpertList],
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
        self._routing = {
            one: ExpertRouting(
                [0] * len(one.members), ["all_tokens" if every else "routed"] * len(one.members)
            )
            for one in self.lists
        }
        self._undecided = [] if every else list(self.lists)
        self._mode: Literal["calibration", "survey", "trial"] = "calibration"
        self._places = {one.owner: {*one.holders, *one.owner.modules()} for one in self.lists}
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
            _routing.pop(one.module, None)
        _routing.update((one.module, routing) for one, routing in self._routing.items())
        owners = {one.owner: None for one in self._all}
        members = [member for one in self._all for member in one.members.values()]
        try:
            with (
                forward_overridden(owners, self._broadcast_forward),
                forward_overridden(members, self._member_forward),
            ):
                yield
        finally:
            for routing in self._routing.values():
                routing.shown = ["routed"] * len(routing.tokens)

    @contextlib.contextmanager
    def all_members_called(self) -> Iterator[None]:
        """Call each expert once, whatever is routed to it, while calls are recorded in the body.

        So the modules that share an input are known for all experts.
        """
        with restored([self], "_mode"):
            self._mode = "trial"
            yield

    def with_shown_calls(self, order: CallOrder) -> CallOrder:
        """``order`` with only those calls of experts that every batch makes: the shown ones."""
        seen = {
            member: order.calls.get(one.owner, 1)
            for one in (self.lists if self.every else ())
            for member in one.members.values()
            if member in order.calls
        }
        return CallOrder(order.groups, {**order.calls, **seen})

    def is_layer_active(self, module: Module) -> bool:
        """Return True if ``module`` is part of an expert whose layer some pass has not left yet.

        The number of an expert's calls is known only once its layer has returned.
        """
        return any(self._inside[owner] for owner in self._owners.get(module, ()))

    @property
    def waits_at_blocks(self) -> bool:
        """Return True if passes have to wait at whole blocks, where routes are counted."""
        return bool(self._undecided)

    # ------------------------------------------------------------------ too few tokens

    def tokens_of(self, one: ExpertList) -> list[int]:
        """Number of rows routed to each member of a list."""
        return self._routing[one].tokens

    def undecided(self, modules: Collection[Module]) -> list[ExpertList]:
        """The lists owned by ``modules`` whose tokens were not counted and settled yet."""
        return [one for one in self._undecided if one.owner in modules]

    @contextlib.contextmanager
    def counting_tokens(self) -> Iterator[None]:
        """Count the tokens routed to experts while the body runs, without showing them any."""
        with restored([self], "_mode"):
            self._mode = "survey"
            yield

    def decided(self, one: ExpertList, starved: Mapping[int, Shown], policy: str) -> None:
        """Set what the members of a list are shown, after its tokens were counted.

        Args:
            one: the list.
            starved: index of a member with too few tokens → what it is shown; the others are
                calibrated with what is routed to them.
            policy: what that is called in a report.
        """
        self._undecided.remove(one)
        routing = self._routing[one]
        for place, shown in starved.items():
            routing.shown[place], routing.starved[place] = shown, policy

    # ------------------------------------------------------------------ forwards

    def _is_active(self, owner: Module) -> bool:
        if self._mode == "trial" or owner not in self._places:
            return self._mode == "trial"
        pending = self.pending
        is_near = pending is None or not self._places[owner].isdisjoint(pending)
        return self._mode == "survey" or (self._wanted() and is_near)

    def _broadcast_forward(self, owner: Module, forward: Forward) -> Forward:
        own_lists = [one for one in self._all if one.owner is owner]

        def shown(*args: Any, **kwargs: Any) -> Any:
            tokens = first_tensor(args, kwargs)
            if tokens is None or not self._is_active(owner):
                return forward(*args, **kwargs)
            routed = {member: 0 for one in own_lists for member in one.members.values()}
            self._inside[owner] += 1
            try:
                if self._mode != "survey":
                    for one in own_lists:
                        self._show(one, "all_tokens", tokens.flatten(0, -2))
                with _counting_routes(routed):
                    made = forward(*args, **kwargs)
            finally:
                self._inside[owner] -= 1
            if hooks_enabled() if self.every else self._mode == "survey":
                for one in self._routing.keys() & set(own_lists):
                    for place, member in enumerate(one.members.values()):
                        self._routing[one].tokens[place] += routed[member]
            return made

        return shown

    def _show(
        self, one: ExpertList, shown: Shown, rows: Tensor, besides: Module | None = None
    ) -> None:
        """Call the members that are shown these rows, and drop their outputs."""
        for place, member in enumerate(one.members.values()):
            is_shown = self._mode == "trial" or self._shown(one, place) == shown
            if is_shown and member is not besides:
                member(rows if self.every else rows.clone())  # unshared: experts get other rows

    def _shown(self, one: ExpertList, place: int) -> Shown:
        return self._routing[one].shown[place] if one in self._routing else "routed"

    def _member_forward(self, member: Module, forward: Forward) -> Forward:
        own_list = next(one for one in self._all if member in one.members.values())
        place = list(own_list.members.values()).index(member)

        def called(*args: Any, **kwargs: Any) -> Any:
            routed, given = _ROUTED.get(), first_tensor(args, kwargs)
            if routed is None or member not in routed or given is None:
                return forward(*args, **kwargs)
            routed[member] += given.shape[:-1].numel()
            if self._mode == "trial":
                return torch.zeros_like(given)
            if self._mode != "survey":
                with _counting_routes(None):
                    self._show(own_list, "neighbours", given, besides=member)
            if self._shown(own_list, place) == "routed":
                return forward(*args, **kwargs)
            with HooksMixin.disable_hooks():  # its tokens were shown besides
                return forward(*args, **kwargs)

        return called


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
        routing = expert_routing(self.mixture)
        return 0 if routing is None else routing.tokens[self.expert]

    @property
    def policy(self) -> str | None:
        """The policy for an expert with too few tokens; ``None`` if it has enough."""
        routing = expert_routing(self.mixture)
        return None if routing is None else routing.starved.get(self.expert)

    @property
    def sees_unrouted_tokens(self) -> bool:
        """Return True if the expert is also calibrated with tokens not routed to it."""
        routing = expert_routing(self.mixture)
        return routing is not None and routing.shown[self.expert] in ("all_tokens", "neighbours")


def expert_positions(block: Module) -> dict[Module, ExpertPosition]:
    """Map each module of an expert in ``block`` to its place; for nested experts, the inner one.

    The members of any list may be experts. Whether they are shown further tokens, or have too few,
    is known only once calibration has reached them.
    """
    found: dict[Module, ExpertPosition] = {}
    for module in block.modules():
        if isinstance(module, LinearExperts):
            members = [module.get_submodule(str(one)) for one in range(module.num_experts)]
        else:
            members = list(_listed_members(module).values())
            if len(members) == 1:
                continue
        for number, member in enumerate(members):
            for path, part in member.named_modules():
                found[part] = ExpertPosition(module, number, path)
    return found
