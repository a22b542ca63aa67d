# SPDX-License-Identifier: Apache-2.0
"""MoE layers of a model: structural detection, and removal of experts.

The experts of an MoE layer are a module whose own parameters all have one slice per expert, some of
them matrices, and whose forward takes tokens, expert indices and weights; or the module with one
set of Linears per expert that replaces it for other modifiers. Its router is the module alongside
it with a matrix of one row per expert. Other tensors of the router, or of its parents, with one
entry per expert (a bias, a score correction or scale) are sliced with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.errors import TargetError
from llmcompressor.modeling.weights import text_config
from llmcompressor.moe.linear_experts import LinearExperts

_STACK = 3
_ROUTED_ARGUMENTS = 3
_GROUPS = ("num_group", "n_group", "num_expert_group", "n_expert_group")
_CHOSEN_GROUPS = ("topk_group", "limited_groups")
_CHOSEN = (
    *("top_k", "topk", "num_experts_per_tok", "num_experts_per_token"),
    *("moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
)
_NO_COUNT = ("per_tok", "shared", "group", "size", "dim", "layer", "step", "zero", "capacity")


@dataclass(frozen=True)
class MoeLayer:
    """An MoE layer.

    Attributes:
        name: name of the module that holds the experts.
        experts: that module.
        parent: the module that contains ``experts`` and the router.
        router: the module that scores the experts.
        around: the modules between ``router`` and ``parent``.
        count: number of experts.
        groups: number of routing groups, each of consecutive experts.
        chosen_groups: number of groups that a token may choose from.
        top_k: experts per token; ``None`` if unknown.
    """

    name: str
    experts: Module
    parent: Module
    router: Module
    around: tuple[Module, ...]
    count: int
    groups: int
    chosen_groups: int
    top_k: int | None

    @property
    def products(self) -> int:
        """Multiply-adds for a token that is routed to ``top_k`` experts."""
        modules = list(self.experts.modules())
        every = sum(
            one.numel()
            for module in modules
            for one in module._parameters.values()
            if one is not None and one.ndim > 1
        )
        now = (
            self.experts.num_experts
            if isinstance(self.experts, LinearExperts)
            else _stacked_expert_count(self.experts)
        )
        return (self.top_k or 1) * every // (now or 1)


def find_moe_layers(model: Module) -> list[MoeLayer]:
    """The MoE layers of a model, in model order.

    Raises:
        TargetError: experts are not stacked, or the router of an MoE layer is ambiguous.
    """
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if not _has_routed_forward(module) or not name:
            continue
        count = _stacked_expert_count(module)
        if count is None:
            _refuse_separate(name, module)
            continue
        parent = modules[name.rpartition(".")[0]]
        router, around = _find_router(name, module, parent, count)
        found.append(
            MoeLayer(
                name,
                module,
                parent,
                router,
                around,
                count,
                groups=_first_setting((router, *around, parent), model, _GROUPS) or 1,
                chosen_groups=_first_setting((router, *around, parent), model, _CHOSEN_GROUPS) or 1,
                top_k=_first_setting((router, *around, parent), model, _CHOSEN),
            )
        )
    return found


def expert_count_attributes(model: Any, count: int) -> list[tuple[Any, str]]:
    """Configurations that hold the number of experts, with the name of the attribute."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    return [
        (part, name)
        for part in parts
        if part is not None
        for name, value in vars(part).items()
        if _is_expert_count(name, value, count)
    ]


@torch.no_grad()
def prune_experts(model: Module, layer: MoeLayer, kept: Sequence[int]) -> None:
    """Keep only the experts ``kept`` of an MoE layer; the configuration is not changed.

    A ``range`` stands for a number of experts only: stacks are narrowed without copying.
    """
    inside = {layer.experts}
    if isinstance(layer.experts, LinearExperts):
        layer.experts.keep(kept)
        inside.add(layer.experts.original_without_weights)
    for name, parameter in layer.experts._parameters.items():
        if parameter is not None:
            _slice_tensor(layer.experts, name, parameter, 0, kept)
    for module, name, tensor, dimension in _per_expert_tensors(layer):
        _slice_tensor(module, name, tensor, dimension, kept)
    path = layer.name.split(".")
    holders = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    for module in {*holders, *layer.around, *layer.router.modules(), *inside}:
        for name, value in list(vars(module).items()):
            if _is_expert_count(name, value, layer.count) or (
                module is layer.router and name == "out_features" and value == layer.count
            ):
                setattr(module, name, len(kept))


def run_experts(experts: Module, *routed: Tensor) -> Tensor:
    """The output of the experts, given tokens, expert indices and weights.

    It calls the forward of their class, because a pipeline may have replaced that of the module.
    """
    if isinstance(experts, LinearExperts):
        return experts.mixed(*routed)
    output: Tensor = type(experts).forward(experts, *routed)
    return output


# ---------------------------------------------------------------------- finding


def _has_routed_forward(module: Module) -> bool:
    """Return True if a forward takes tokens, expert indices and weights."""
    if isinstance(module, LinearExperts):
        return module.form.routed
    if type(module).forward is Module.forward or not (module._parameters or module._modules):
        return False
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [one.name for one in parameters]
    return len(names) == _ROUTED_ARGUMENTS and any(
        word in name for name in names[1:] for word in ("index", "indices", "rout", "top_k")
    )


def _stacked_expert_count(module: Module) -> int | None:
    """Number of experts that a module holds (or held) as stacks; ``None`` if it holds none."""
    if isinstance(module, LinearExperts):
        return module.num_experts
    parameters = [one for one in module._parameters.values() if one is not None]
    counts = {len(one) if one.ndim else 0 for one in parameters}
    if len(counts) != 1 or not any(one.ndim == _STACK for one in parameters):
        return None
    return counts.pop()


def _refuse_separate(name: str, module: Module) -> None:
    numbered = [key for key in module._modules if key.isdecimal()]
    if numbered:
        raise TargetError(
            f"REAPPruningModifier drops experts that transformers keeps stacked in one tensor, and "
            f"the {type(module).__name__} {name} has modules of its own for each.",
            "Put it on the ignore list, or leave REAPPruningModifier out.",
        )


def _find_router(
    name: str, experts: Module, parent: Module, count: int
) -> tuple[Module, tuple[Module, ...]]:
    """The module with a row per expert, and the modules between it and ``parent``, inner first."""
    inside = set(experts.modules())
    beside: dict[str, Module] = {
        key: one for key, one in parent.named_modules() if one not in inside
    }
    found: dict[str, Module] = {
        key: one
        for key, one in beside.items()
        if isinstance(weight := one._parameters.get("weight"), Tensor)
        and weight.ndim == 2  # a matrix
        and len(weight) == count
    }
    if len(found) > 1:  # another matrix may happen to have as many rows
        found = {key: one for key, one in found.items() if "." not in key}
    if len(found) != 1:
        shown = f"{len(found)} modules beside it have" if found else "no module beside it has"
        raise TargetError(
            f"The router of {name} cannot be told: {shown} a matrix with {count} rows.",
            "Put the experts on the ignore list, or leave REAPPruningModifier out.",
        )
    [(key, router)] = found.items()
    parts = key.split(".")
    holders = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return router, tuple(beside[holder] for holder in holders)


def _first_setting(modules: Sequence[Module], model: Any, names: Sequence[str]) -> int | None:
    """The first positive integer attribute among ``names``; modules before the configuration."""
    config: Any = getattr(model, "config", None)
    text = text_config(config)
    for holder in (*modules, text):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _is_expert_count(name: str, value: object, count: int) -> bool:
    """Return True if an attribute is the number of experts."""
    if type(value) is not int or value != count or "expert" not in name:
        return False
    return not any(word in name for word in _NO_COUNT)


# ---------------------------------------------------------------------- cutting


def _per_expert_tensors(layer: MoeLayer) -> Iterator[tuple[Module, str, Tensor, int]]:
    """Tensors of the router and of the layer with one entry per expert, and that dimension."""
    for module in (*layer.router.modules(), *layer.around, layer.parent):
        tensors: Mapping[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.ndim and len(tensor) == layer.count:
                yield module, name, tensor, 0
            elif tensor.ndim == 2 and tensor.shape == (1, layer.count):  # one row
                yield module, name, tensor, 1


def _slice_tensor(
    module: Module, name: str, old: Tensor, dimension: int, kept: Sequence[int]
) -> None:
    if isinstance(kept, range):
        new = old.detach().narrow(dimension, kept.start, len(kept))
    else:
        new = old.detach().index_select(dimension, torch.tensor(kept, device=old.device))
    if isinstance(old, Parameter):
        module._parameters[name] = Parameter(new, requires_grad=old.requires_grad)
    else:
        module._buffers[name] = new
