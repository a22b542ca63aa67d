# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training run, and parameters that modifiers add to the model."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.nn import Module, Parameter

from llmcompressor.errors import ArgumentError
from llmcompressor.modeling.sharded import is_dtensor


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer without accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def parameter_ids(model: Module) -> frozenset[int]:
    """Return the ids of a model's parameters, to recognize those added later."""
    return frozenset(id(parameter) for parameter in model.parameters())


def train_new_parameters(
    model: Module, optimizer: Any, before: Set[int], *, has_scheduler: bool = False
) -> list[Parameter]:
    """Add the model's new trainable parameters to the optimizer.

    They are scales and the like, so they join the first group without weight decay, or get a group
    of their own if there is none. No kernel handles them together with sharded parameters.

    Args:
        model: the model with the new parameters.
        optimizer: a torch optimizer, or accelerate's placeholder for one of DeepSpeed.
        before: :func:`parameter_ids` from before they were added.
        has_scheduler: a learning rate scheduler uses the optimizer's groups already.

    Returns:
        The new parameters.

    Raises:
        ArgumentError: the optimizer takes no further parameters.
    """
    new = [each for each in model.parameters() if each.requires_grad and id(each) not in before]
    if not new:
        return new
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        _add_to_placeholder(optimizer, new)
        return new
    undecayed = [
        group
        for group in groups
        if group.get("weight_decay") == 0 and not any(map(is_dtensor, group["params"]))
    ]
    if undecayed or has_scheduler:
        (undecayed or groups[-1:])[0]["params"].extend(new)
    else:
        decay = {"weight_decay": 0.0} if "weight_decay" in groups[0] else {}
        optimizer.add_param_group({"params": new, **decay})
    return new


@contextmanager
def without_new_parameters(model: Module, before: Set[int]) -> Iterator[None]:
    """Remove the parameters that were added to the model, while the body runs.

    Args:
        model: the model with the new parameters; they are restored afterwards.
        before: :func:`parameter_ids` from before they were added.
    """
    taken = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) not in before
    ]
    for module, name, _ in taken:
        del module._parameters[name]
    try:
        yield
    finally:
        for module, name, parameter in taken:
            module._parameters[name] = parameter


def _add_to_placeholder(optimizer: Any, new: list[Parameter]) -> None:
    params = getattr(optimizer, "params", None)
    if not isinstance(params, list):
        raise ArgumentError(
            f"The recipe adds parameters to the model, and the optimizer "
            f"({type(optimizer).__name__}) takes no further ones.",
            "Use an optimizer with param_groups, as those of torch have.",
        )
    grouped = bool(params) and isinstance(params[0], dict)
    params.extend([{"params": new, "weight_decay": 0.0}] if grouped else new)
