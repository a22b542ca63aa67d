# SPDX-License-Identifier: Apache-2.0
"""Temporary modes of a model: evaluation mode, and quantization disabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module

__all__ = ["evaluating", "unrounded"]


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Put a module in eval mode in the body, and restore each submodule's mode afterwards."""
    before = [(one, one.training) for one in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for one, training in before:
            one.training = training


@contextmanager
def unrounded(module: Module) -> Iterator[None]:
    """Disable quantization of the modules in the body, and restore it afterwards."""
    quantized = [one for one in module.modules() if hasattr(one, "quantization_scheme")]
    before = [vars(one).get("quantization_enabled") for one in quantized]
    try:
        for one in quantized:
            one.quantization_enabled = False  # type: ignore[assignment]
        yield
    finally:
        for one, enabled in zip(quantized, before, strict=True):
            if enabled is None:
                vars(one).pop("quantization_enabled", None)
            else:
                one.quantization_enabled = enabled
