# SPDX-License-Identifier: Apache-2.0
"""Resolution of tied parameters that the checkpoint stores twice: tied only if equal.

transformers decides so too, but it needs the values, which a model built on the meta device does
not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks

__all__ = ["BelievedTie", "same_values", "settle_ties", "settle_ties_by_config"]


@dataclass(frozen=True)
class BelievedTie:
    """Two stored tensors that are assumed to be tied without reading them.

    Attributes:
        source: the parameter that is kept.
        target: the parameter that the configuration ties to it.
        nbytes: the bytes of one of them, in the model's dtype.
    """

    source: str
    target: str
    nbytes: int


def settle_ties(model: PreTrainedModel, equal: Callable[[str, str], bool | None]) -> None:
    """Tie two parameters as configured if they are equal, and untie them otherwise.

    Args:
        model: the model.
        equal: return if two parameters, by name, are equal; ``None`` to leave them as they are.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        path, _, own = target.rpartition(".")
        first, second = model.get_parameter(source), model.get_parameter(target)
        if first is second:
            continue
        same = equal(source, target)
        if same:
            model.get_submodule(path)._parameters[own] = first
        elif same is not None:
            logger.warning(
                f"The configuration ties {target} to {source}, but they have different values: "
                "they stay apart."
            )
            tied.pop(target)


def settle_ties_by_config(blueprint: Blueprint) -> list[BelievedTie]:
    """Do the same as :func:`settle_ties`, by the configuration alone.

    Nothing is read: stored tensors are assumed to be equal if their shapes are.

    Args:
        blueprint: the model, without weights.

    Returns:
        The pairs that are assumed to be tied, though the files hold both.
    """
    headers = blueprint.source.tensors
    rest = blueprint.tensors_of(None, list(find_blocks(blueprint.model).values()))
    places = {blueprint.names[name].target: name for name in rest}
    believed = []

    def equal(source: str, target: str) -> bool | None:
        if source not in places or target not in places:
            return None  # those of a block are never both stored
        if headers[places[source]].shape != headers[places[target]].shape:
            return False
        nbytes = blueprint.model.get_parameter(target).nbytes
        believed.append(BelievedTie(source, target, nbytes))
        return True

    settle_ties(blueprint.model, equal)
    return believed


def same_values(model: PreTrainedModel, source: str, target: str) -> bool | None:
    """Return True if two parameters are equal; ``None`` where one of them is on the meta device."""
    first, second = model.get_parameter(source), model.get_parameter(target)
    return None if first.is_meta or second.is_meta else torch.equal(first, second)
