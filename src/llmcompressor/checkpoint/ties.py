# SPDX-License-Identifier: Apache-2.0
"""Parameters that the configuration ties and the checkpoint holds twice: one if they are equal.

transformers decides so too, but it has to see the values, which a model that is built without its
weights has not.
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
    """Two tensors of the files that are taken for one unseen.

    Attributes:
        source: the parameter that stays.
        target: the one that the configuration ties to it.
        nbytes: of one of them, in the model's dtype.
    """

    source: str
    target: str
    nbytes: int


def settle_ties(model: PreTrainedModel, equal: Callable[[str, str], bool | None]) -> None:
    """Make one of two parameters that the configuration ties, if they are equal.

    Args:
        model: the model.
        equal: whether two parameters, by name, are equal; ``None`` where nothing is to be done.
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
    """What :func:`settle_ties` does when the weights are loaded, by the configuration's word.

    Nothing is read: of two tensors in files only the shapes are known to be equal.

    Args:
        blueprint: the model, without weights.

    Returns:
        The pairs that are taken for one, though the files hold both.
    """
    headers = blueprint.source.tensors
    rest = blueprint.tensors_of(None, list(find_blocks(blueprint.model).values()))
    places = {blueprint.names[name].target: name for name in rest}
    believed = []

    def equal(source: str, target: str) -> bool | None:
        if source not in places or target not in places:
            return None  # a block's are never both there
        if headers[places[source]].shape != headers[places[target]].shape:
            return False
        nbytes = blueprint.model.get_parameter(target).nbytes
        believed.append(BelievedTie(source, target, nbytes))
        return True

    settle_ties(blueprint.model, equal)
    return believed


def same_values(model: PreTrainedModel, source: str, target: str) -> bool | None:
    """Whether two parameters are equal; ``None`` where one of them has no values here."""
    first, second = model.get_parameter(source), model.get_parameter(target)
    return None if first.is_meta or second.is_meta else torch.equal(first, second)
