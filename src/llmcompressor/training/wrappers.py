# SPDX-License-Identifier: Apache-2.0
"""What accelerate has put around modules to spread a model over processes."""

from __future__ import annotations

from torch.nn import Module

__all__ = ["take_off_checkpointing"]

_INNER = "_checkpoint_wrapped_module"


def take_off_checkpointing(model: Module) -> None:
    """Put what FSDP's activation checkpointing wraps back in its place, under its own name.

    The wrapper hides its name from the names of parameters, and not from those of modules: in a
    checkpoint the two would not fit.

    Args:
        model: trained; no backward pass comes any more.
    """
    for module in list(model.modules()):
        for name, child in module._modules.items():
            while child is not None and _INNER in child._modules:  # one within another
                child = module._modules[name] = child._modules[_INNER]  # noqa: PLW2901
