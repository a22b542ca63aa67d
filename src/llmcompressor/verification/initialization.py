# SPDX-License-Identifier: Apache-2.0
"""Whose weights transformers names while it initializes a model, found by trying.

After a load transformers passes over every module to initialize what the file did not hold. What
was loaded is not touched, but the ``_init_weights`` of many classes reads ``.weight`` of Linears to
see that, and fails where there is none. So each module is initialized here while no Linear has a
weight, and, where that fails, again without the weight of one Linear at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter

__all__ = ["named_weights"]


def named_weights(model: Any) -> dict[str, str]:
    """The Linears that a model cannot be initialized without the weight of.

    Args:
        model: without data; it is left as it was.

    Returns:
        Path of a Linear → the class whose initialization names its weight.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, Linear)}
    weights = {linear: linear._parameters["weight"] for linear in names}
    flagged = [*model.parameters(), *model.buffers()]
    for tensor in flagged:
        tensor._is_hf_initialized = True  # as a load leaves it
    found = {}
    try:
        for owner, module in _owned(model, model):
            for linear in _named(owner, module, weights):
                found[names[linear]] = type(owner).__name__
    finally:
        for tensor in flagged:
            del tensor._is_hf_initialized
    return found


def _owned(model: Any, owner: Any) -> Iterator[tuple[Any, Module]]:
    """Every module, with the model within the model that initializes it."""
    from transformers import PreTrainedModel  # noqa: PLC0415  # loads much

    for child in model.children():
        yield from _owned(child, child if isinstance(child, PreTrainedModel) else owner)
    yield owner, model


def _named(owner: Any, module: Module, weights: dict[Linear, Parameter | None]) -> list[Linear]:
    """The Linears whose weight one module's initialization names."""
    within = [each for each in module.modules() if isinstance(each, Linear)]
    if not within or not _fails(owner, module, within, weights):
        return []
    return [linear for linear in within if _fails(owner, module, [linear], weights)]


def _fails(
    owner: Any, module: Module, without: list[Linear], weights: dict[Linear, Parameter | None]
) -> bool:
    for linear in without:
        del linear._parameters["weight"]
    try:
        with torch.no_grad():
            owner._init_weights(module)
    except AttributeError as error:
        return error.name == "weight" or "'weight'" in str(error)
    except Exception:  # a class of any kind, of which other rules speak
        return False
    finally:
        for linear in without:
            linear._parameters["weight"] = weights[linear]
    return False
