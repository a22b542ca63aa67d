# SPDX-License-Identifier: Apache-2.0
"""Representative experts: a few experts of an MoE that stand for all of equal structure.

A block of 256 experts is probed at the cost of two: :func:`to_few` routes all tokens of a run to
the first experts of an MoE, and :class:`RepresentativeExperts` maps these to the experts that they
represent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.fused import ExpertModuleName, parse_expert_name
from llmcompressor.modeling.names import named_modules
from llmcompressor.moe.linear_experts import LinearExperts

_FEW = 2
"""With one expert alone, weights that are made to sum to one would hide what a router does."""
_SHARE = 0.25
"""Weight with which an expert of the few takes part in what was not routed to it."""


def module_structure_key(module: Module) -> Any:
    """Return a key that is equal for modules with the same submodules, classes and shapes."""
    return tuple(
        (
            name,
            type(part),
            tuple((key, p.shape) for key, p in dict.items(part._parameters) if p is not None),
        )
        for name, part in named_modules(module)
    )


class RepresentativeExperts:
    """Finds the experts of equal structure in a block, which can represent each other.

    Args:
        modules: of the block, by name.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._forms: dict[str, dict[str, Any]] = {}
        self._mixtures = [
            name for name, one in modules.items() if name and isinstance(one, LinearExperts)
        ]

    def parse_name(self, name: str) -> ExpertModuleName | None:
        """Like :func:`parse_expert_name`, also where the module of the experts has another name."""
        for mixture in self._mixtures:
            number, _, own = name.removeprefix(f"{mixture}.").partition(".")
            if name.startswith(f"{mixture}.") and number.isdigit() and own:
                return ExpertModuleName(mixture, number, own)
        return parse_expert_name(name)

    def expert_of(self, name: str) -> tuple[str, str] | None:
        """The expert that a module belongs to: the first two parts of its name."""
        part = self.parse_name(name)
        return None if part is None else part[:2]

    def is_within_one_expert(self, names: Collection[str]) -> bool:
        """Return True if all named modules belong to one expert."""
        experts = set(map(self.expert_of, names))
        return len(experts) == 1 and None not in experts

    def equivalent_names(self, name: str, *, of_any_form: bool = False) -> list[str]:
        """Names of the corresponding module in every expert of equal structure, in order.

        Args:
            name: of a module; one outside of experts is returned alone.
            of_any_form: also in experts of other parts or shapes.
        """
        part = self.parse_name(name)
        if part is None:
            return [name]
        forms = self._structure_keys(part.experts)
        names = {index: f"{part.experts}.{index}.{part.own}" for index in forms}
        return [
            other
            for index, other in names.items()
            if other in self._modules and (of_any_form or forms[index] == forms[part.number])
        ]

    def copies_in_all_experts(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Repeat modules of one expert for every expert of equal structure."""
        return list(zip(*(self.equivalent_names(name) for name in names), strict=True))

    def left_out(self, names: Collection[str]) -> str | None:
        """The first module of another expert that belongs to ``names`` and is missing, if any."""
        known = set(names)
        seen: set[tuple[str, str]] = set()
        for part in filter(None, map(self.parse_name, names)):
            if (part.experts, part.own) in seen:
                continue
            seen.add((part.experts, part.own))
            every = self.equivalent_names(".".join(part), of_any_form=True)
            if missing := [other for other in every if other not in known]:
                return missing[0]
        return None

    def _structure_keys(self, experts: str) -> dict[str, Any]:
        if experts not in self._forms:
            members = self._modules[experts]._modules
            self._forms[experts] = {
                index: module_structure_key(member)
                for index, member in members.items()
                if index.isdigit() and member is not None
            }
        return self._forms[experts]


@contextlib.contextmanager
def route_to_representatives(modules: Collection[Module]) -> Iterator[None]:
    """Route all tokens of each MoE to a few of its experts while the body runs.

    The router's choices and weights still determine the output.

    Args:
        modules: those that are :class:`~llmcompressor.moe.linear_experts.LinearExperts` are
            rerouted.
    """
    mixtures = [module for module in modules if isinstance(module, LinearExperts)]
    handles = [
        one.register_forward_pre_hook(_redirect_routes, with_kwargs=True) for one in mixtures
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _redirect_routes(
    mixture: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an MoE's forward, with all routes redirected to a few experts."""
    assert isinstance(mixture, LinearExperts)
    names = ("hidden_states", "top_k_index", "top_k_weights")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: named[name] for name in names if name in named}
    few = min(_FEW, mixture.num_experts)
    index_TK, weights_TK = given.get("top_k_index"), given.get("top_k_weights")
    if index_TK is None or weights_TK is None:
        given["hidden_states"] = _sum_into_few(given["hidden_states"], mixture.num_experts, few)
        return (), given
    is_here_TK = index_TK < mixture.num_experts
    spread_TF = weights_TK.new_full((len(index_TK), few), _SHARE)
    spread_TF.scatter_add_(1, index_TK.long() % few, weights_TK * is_here_TK)
    every_TF = torch.arange(few, device=index_TK.device).expand(len(index_TK), few)
    return (), {**given, "top_k_index": every_TF.to(index_TK.dtype), "top_k_weights": spread_TF}


def _sum_into_few(rows: Tensor, experts: int, few: int) -> Tensor:
    """Sum rows that are ordered by expert into the rows of a few experts."""
    each_ETH = rows.view(experts, -1, rows.shape[-1])
    gathered_ETH = torch.zeros_like(each_ETH)
    place_E = torch.arange(experts, device=rows.device) % few
    gathered_ETH.index_add_(0, place_E, each_ETH)
    gathered_ETH[:few] += _SHARE * each_ETH.sum(0)
    return gathered_ETH.view_as(rows)
