# SPDX-License-Identifier: Apache-2.0
"""Parameters that the configuration ties and the checkpoint holds twice: one if they are equal.

transformers decides so too, but it has to see the values, which a model that is built without its
weights has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.reading import TensorReader
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks

__all__ = ["same_values", "settle_ties", "settle_ties_of_files"]

_ELEMENTS = 2**21
"""Elements that are compared at once."""


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


def settle_ties_of_files(blueprint: Blueprint, *, is_hollow: bool) -> None:
    """What :func:`settle_ties` does when the weights are loaded, before they are.

    It reads tensors that are tied and stored twice, a few MiB at a time, and no others.

    Args:
        blueprint: the model, without weights.
        is_hollow: its files hold headers and no data; then the configuration is believed.

    Raises:
        CheckpointError: a file cannot be read.
    """
    headers = blueprint.source.tensors
    rest = blueprint.tensors_of(None, list(find_blocks(blueprint.model).values()))
    places = {blueprint.names[name].target: name for name in rest}

    def equal(source: str, target: str) -> bool | None:
        if source not in places or target not in places:
            return None  # a block's are never both there
        first, second = headers[places[source]], headers[places[target]]
        if first.shape != second.shape:
            return False
        dtype = blueprint.model.get_parameter(source).dtype
        return is_hollow or all(
            torch.equal(one.to(dtype), other.to(dtype)) for one, other in _pieces(first, second)
        )

    settle_ties(blueprint.model, equal)


def same_values(model: PreTrainedModel, source: str, target: str) -> bool | None:
    """Whether two parameters are equal; ``None`` where one of them has no values here."""
    first, second = model.get_parameter(source), model.get_parameter(target)
    return None if first.is_meta or second.is_meta else torch.equal(first, second)


def _pieces(first: TensorHeader, second: TensorHeader) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, some elements at a time."""
    count = prod(first.shape)
    begins = range(0, count, _ELEMENTS)
    pieces = {
        f"{begin} {key}": _piece(whole, begin, min(_ELEMENTS, count - begin))
        for begin in begins
        for key, whole in (("first", first), ("second", second))
    }
    reader = TensorReader(pieces)
    try:
        for begin in begins:
            yield reader.read(f"{begin} first"), reader.read(f"{begin} second")
    finally:
        reader.close()


def _piece(whole: TensorHeader, begin: int, length: int) -> TensorHeader:
    size = whole.nbytes // prod(whole.shape)
    return replace(whole, shape=(length,), offset=whole.offset + begin * size, nbytes=length * size)
