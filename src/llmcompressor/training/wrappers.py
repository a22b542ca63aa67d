# SPDX-License-Identifier: Apache-2.0
"""Wrappers that accelerate puts around modules of a distributed model."""

from __future__ import annotations

from torch.nn import Module

__all__ = ["take_off_checkpointing"]

_INNER = "_checkpoint_wrapped_module"


def take_off_checkpointing(model: Module) -> None:
    """Remove FSDP's activation checkpointing wrappers from a model.

    The wrapper removes its name from the names of parameters but not from those of modules, so in a
    checkpoint the two would not match.

    Args:
        model: the trained model; no backward pass may follow.
    """
    for module in list(model.modules()):
        for name, child in module._modules.items():
            while child is not None and _INNER in child._modules:  # one within another
                child = module._modules[name] = child._modules[_INNER]  # noqa: PLW2901
