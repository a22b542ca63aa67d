# SPDX-License-Identifier: Apache-2.0
"""Detection of MoEs with stacked experts, verified on a small copy of each.

Layouts are defined in :mod:`llmcompressor.modeling.expert_forms`. A small copy of an MoE is run to
verify that it computes ``down(act(gate(x)) * up(x))``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from transformers.pytorch_utils import Conv1D

from llmcompressor.logger import logger
from llmcompressor.modeling.expert_forms import Mixture, StackForm, form_of, is_stack
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.settings import text_config

__all__ = ["departure", "find_mixtures"]

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOLERANCE = 1e-4
_TOKENS = 5


def find_mixtures(model: Module) -> list[Mixture]:
    """The MoEs of a model with stacked experts, in order.

    Those that cannot be unfused are included where they are recognizable as experts: their stacks
    have as many matrices as the configuration has experts, or lie below ``experts``. Below
    ``experts``, matrices that belong to no Linear are included, too.
    """
    counts = _expert_counts(model)
    tried: dict[tuple[type[Module], StackForm], str] = {}
    found = []
    for name, module in model.named_modules():
        stacks = {key: one for key, one in module._parameters.items() if is_stack(one)}
        if not stacks:
            if matrices := _matrices_of_experts(name, module, counts):
                found.append(Mixture(name, module, None, _not_of_linears(module, matrices)))
            continue
        form = form_of(module)
        if isinstance(form, StackForm):
            key = (type(module), form)
            if key not in tried:
                tried[key] = departure(module, form)
            problem = tried[key]
            found.append(Mixture(name, module, None if problem else form, problem))
        elif _holds_experts(name, module, stacks, counts):
            found.append(Mixture(name, module, None, form))
    return found


def _expert_counts(model: Module) -> set[int]:
    config = getattr(model, "config", None)
    if config is None:
        return set()
    configs = [config, text_config(config)]
    values = [getattr(one, key, None) for one in configs for key in _COUNTS]
    return {value for value in values if isinstance(value, int) and value > 1}


def _holds_experts(name: str, module: Module, stacks: dict[str, Any], counts: set[int]) -> bool:
    if hasattr(module, "kernel_size"):  # a convolution
        return False
    below = any("experts" in part for part in name.split("."))
    return below or any(stack.shape[0] in counts for stack in stacks.values())


def _matrices_of_experts(name: str, module: Module, counts: set[int]) -> list[str]:
    """Names of matrices below ``experts`` that cannot become Linears.

    The matrices of all experts may be concatenated in one. A matrix with one row for each expert is
    a router's.
    """
    if not any("experts" in part for part in name.split(".")):
        return []
    if isinstance(module, Linear | Embedding | Conv1D):
        return []
    return [
        key
        for key, one in module._parameters.items()
        if one is not None and one.ndim == 2 and one.shape[0] not in counts and min(one.shape) > 1
    ]


def _not_of_linears(module: Module, names: Sequence[str]) -> str:
    return (
        f"{' and '.join(names)} of {type(module).__name__} are neither Linears nor stacks of one "
        "matrix per expert"
    )


@dataclass
class _Trial:
    """A small copy of an MoE.

    Attributes:
        module: with stacks of few and small matrices.
        form: its layout.
        arguments: of its forward.
    """

    module: Module
    form: StackForm
    arguments: list[Tensor] = field(default_factory=list)


def departure(module: Module, form: StackForm) -> str:
    """Why an MoE does not compute what :class:`LinearExperts` does; empty if it does.

    A small copy of it is run. One that cannot be run small is trusted if it declares its layout, as
    transformers' MoEs do.
    """
    try:
        trial = _small(module, form)
        own = getattr(type(module).forward, "__wrapped__", type(module).forward)
        with torch.no_grad():
            wanted = own(trial.module, *(one.clone() for one in trial.arguments))
            names = {part.role: part.role for part in form.parts}
            made = LinearExperts(trial.module, trial.form, names)
            found = made(*(one.clone() for one in trial.arguments))
    except Exception as error:  # a model's own forward may raise anything
        if hasattr(module, "is_transposed"):
            logger.warning(
                f"{type(module).__name__} could not be tried out on small matrices "
                f"({type(error).__name__}: {str(error)[:200]}); its experts are computed as the "
                "layout that it declares says. Compare the model's outputs before and after."
            )
            return ""
        return f"its forward cannot be tried out ({type(error).__name__}: {error})"
    if isinstance(wanted, Tensor) and wanted.shape == found.shape:
        scale = float(wanted.abs().max())
        if float((wanted - found).abs().max()) <= _TOLERANCE * scale:
            return ""
    return "its forward computes something else than down(act(gate(x)) * up(x))"


def _small(module: Module, form: StackForm) -> _Trial:
    """A copy with few and small matrices; sizes that are equal stay equal."""
    hidden = 8
    between = 8 if form.intermediate == form.hidden else 6
    if form.hidden == 2 * form.intermediate:
        between = 4
    sizes = {form.hidden: hidden, form.intermediate: between, 2 * form.intermediate: 2 * between}
    experts = sizes.get(form.experts, 3)
    small = copy.copy(module)
    for key, value in vars(module).items():
        if type(value) is int and value in {*sizes, form.experts}:
            object.__setattr__(small, key, experts if value == form.experts else sizes[value])
    shape = replace(form, experts=experts, hidden=hidden, intermediate=between)
    random = torch.Generator().manual_seed(0)
    small._parameters = dict(_random_stacks(shape, random))
    small._modules = {
        name: None if child is None else _small_child(child, sizes, random)
        for name, child in module._modules.items()
    }
    if form.routed:
        index = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(_TOKENS)])
        weights = torch.rand(_TOKENS, 2, generator=random)
        return _Trial(small, shape, [_normal(random, _TOKENS, hidden), index, weights])
    return _Trial(small, shape, [_normal(random, experts * _TOKENS, hidden)])


def _small_child(child: Module, sizes: Mapping[int, int], random: torch.Generator) -> Module:
    """A copy of another child of an MoE, such as a norm, for vectors of the small sizes."""
    own = list(child.named_parameters())
    if not own or any(one.ndim != 1 or len(one) not in sizes for _, one in own):
        return child
    small = copy.deepcopy(child)
    for name, one in own:
        path, _, key = name.rpartition(".")
        value = _normal(random, sizes[len(one)])
        small.get_submodule(path)._parameters[key] = Parameter(value, requires_grad=False)
    return small


def _random_stacks(form: StackForm, random: torch.Generator) -> Iterator[tuple[str, Parameter]]:
    for name in form.stacks:
        yield name, Parameter(_normal(random, *form.shape_of(name)))


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)
