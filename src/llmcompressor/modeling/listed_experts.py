# SPDX-License-Identifier: Apache-2.0
"""MoE experts in a module list, and the calling convention of the model's own code.

Each expert is called for the tokens that are routed to it, in whatever way that code has. To
calibrate an expert with more tokens (:mod:`llmcompressor.modeling.shown_lists`), its valid inputs
have to be known. They are found in a small forward (:func:`manners_of`). An expert that is called
with rows of its layer's input and nothing else can be called with any rows. One that is called with
something derived from them is called with the inputs of another expert of the list, or its Linears
are called with those of that expert's Linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.modeling.alike_experts import form_of_module
from llmcompressor.modeling.blocks import is_bare_list
from llmcompressor.modeling.call_order import first_tensor, version_of
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.stubs import Forward, stubbed

__all__ = ["ExpertList", "Manner", "lists_of_alike", "manners_of", "members_of", "rows_of"]

_COMPARED = 8
"""Rows of each call that are looked for among the tokens."""
_MATRIX = 2
_DRAWS = 6
"""Inputs that are tried to see whether routes depend on them."""


class Manner(Enum):
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


def lists_of_alike(model: Module) -> Iterator[ExpertList]:
    """The lists of equally structured modules inside a block; lists of blocks are left out."""
    for name, module in model.named_modules():
        if not isinstance(module, ModuleList | ModuleDict):
            continue
        members = members_of(module)
        inside = any(part.isdecimal() for part in name.split("."))
        if inside and len(members) > 1 and len(set(map(form_of_module, members.values()))) == 1:
            holder = name.rpartition(".")[0] if is_bare_list(module) else name
            holders = list(_on_the_way(model, holder))
            yield ExpertList(name, module, members, holders[-1], holders)


def members_of(module: Module) -> dict[str, Module]:
    """The members of a list that have weights, by key."""
    own = module._modules.items()
    return {key: one for key, one in own if one is not None and _has_weights(one)}


def _on_the_way(model: Module, name: str) -> Iterator[Module]:
    yield model
    parts = name.split(".") if name else []
    for end in range(len(parts)):
        yield model.get_submodule(".".join(parts[: end + 1]))


def _has_weights(module: Module) -> bool:
    return any(part._parameters for part in module.modules())


def manners_of(lists: Sequence[ExpertList], run: Callable[[], object]) -> dict[ExpertList, Manner]:
    """Find the calling convention of each list of experts in one forward.

    Lists whose members all get all rows are left out, as they need no further tokens. So are lists
    whose calls do not depend on the tokens' values: their members are no experts.

    Args:
        lists: as :func:`lists_of_alike` finds them.
        run: runs the model once, on something small; its weights may be zeros.
    """
    found: dict[ExpertList, set[Manner | None]] = {}

    def trying(owner: Module, forward: Forward) -> Forward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            for one in lists:
                if one.owner is owner and None not in found.get(one, ()):
                    found.setdefault(one, set()).add(_manner(one, forward, args, kwargs))
            return forward(*args, **kwargs)

        return tried

    with torch.no_grad(), stubbed({one.owner: None for one in lists}, trying):
        run()
    narrower = list(Manner).index
    return {
        one: max((manner for manner in manners if manner is not None), key=narrower)
        for one, manners in found.items()
        if None not in manners
    }


@dataclass(frozen=True)
class _Call:
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
        return 0 if given is None else rows_of(given)


def rows_of(given: Tensor) -> int:
    """Number of tokens in a tensor ``[..., H]``."""
    return given.shape[:-1].numel() if given.ndim else 1


def _manner(
    one: ExpertList, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Manner | None:
    """Run the owner on distinguishable tokens, and classify how its members are called.

    The values that it computes, and the routes, do not matter, so the weights need not be loaded.
    Without weights, residual additions would leave the tokens unchanged; therefore random values
    are added to the output of every module with weights.
    """
    given = first_tensor(args, kwargs)
    if given is None or given.ndim < _MATRIX or not given.is_floating_point():
        return None

    def tried(draw: int) -> tuple[list[_Call], Tensor]:
        return _calls_of(one, forward, args, kwargs, given, draw)

    try:
        calls, rows = tried(0)
        if not calls:
            return None
        if all(_are_rows(call, rows) for call in calls):
            shared = len(calls) < len(one.members) or any(call.rows < len(rows) for call in calls)
            return Manner.ROWS if shared else None
        if not _are_routed(one, [calls, *(tried(draw)[0] for draw in range(1, _DRAWS))]):
            return None
    except Exception:  # a model's own code may raise anything: the convention is unknown
        return None
    return Manner.CALLS if _all_take(one, calls[0]) else Manner.MATRICES


def _all_take(one: ExpertList, call: _Call) -> bool:
    """Return True if every member accepts the arguments that one of them was called with."""
    try:
        for member in one.members.values():
            args, kwargs = for_another_run((call.args, dict(call.kwargs)), Tensor.clone)
            member.forward(*args, **kwargs)
    except Exception:  # a model's own code may raise anything
        return False
    return True


def _calls_of(
    one: ExpertList,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Tensor,
    draw: int,
) -> tuple[list[_Call], Tensor]:
    """The calls of members with random tokens in place of ``given``, and these tokens."""
    seed = torch.Generator().manual_seed(draw)
    marked = torch.rand(given.shape, generator=seed).to(given.device, given.dtype)
    calls: list[_Call] = []

    def recording(member: Module, own: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            kept_args, kept_kwargs = for_another_run((args, kwargs), Tensor.clone)
            versions = _versions(args, kwargs)
            made = _disturbed(own(*args, **kwargs), seed)
            wrote = versions != _versions(args, kwargs)
            calls.append(_Call(member, kept_args, kept_kwargs, made, wrote))
            return made

        return recorded

    def disturbing(_: Module, own: Forward) -> Forward:
        return lambda *args, **kwargs: _disturbed(own(*args, **kwargs), seed)

    copied_args, copied_kwargs = for_another_run(
        (args, dict(kwargs)), lambda tensor: marked.clone() if tensor is given else tensor
    )
    with (
        stubbed(one.members.values(), recording),
        stubbed(_others_with_weights(one), disturbing),
    ):
        forward(*copied_args, **copied_kwargs)
    return calls, marked.flatten(0, -2)


def _are_routed(one: ExpertList, draws: Sequence[Sequence[_Call]]) -> bool:
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


def _versions(*values: Any) -> list[int]:
    """Number of in-place writes to each tensor among the arguments of a call."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(version_of(tensor))
        return tensor

    for_another_run(values, note)
    return found


def _others_with_weights(one: ExpertList) -> list[Module]:
    """Modules with weights that the owner of a list has outside of it."""
    own = {one.owner, *one.module.modules()}
    return [module for module in one.owner.modules() if module not in own and _has_weights(module)]


def _disturbed(made: Any, seed: torch.Generator) -> Any:
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return made
    return made + torch.rand(made.shape, generator=seed).to(made.device, made.dtype)


def _are_rows(call: _Call, rows: Tensor) -> bool:
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
