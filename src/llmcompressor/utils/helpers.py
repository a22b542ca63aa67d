# SPDX-License-Identifier: Apache-2.0
"""Contexts for forward passes in user scripts, and a model's embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.logger import logger
from llmcompressor.modeling.embeddings import embeddings as get_embeddings
from llmcompressor.modeling.embeddings import untie_embeddings
from llmcompressor.modeling.inputs import without_cache as disable_cache
from llmcompressor.modeling.modes import evaluating as eval_context
from llmcompressor.modeling.modes import unrounded as DisableQuantization  # noqa: N812  # its name in scripts

__all__ = [
    "DisableQuantization",
    "calibration_forward_context",
    "disable_cache",
    "eval_context",
    "get_embeddings",
    "get_no_split_params",
    "targets_embeddings",
    "untie_word_embeddings",
]


@contextmanager
def calibration_forward_context(model: Module) -> Iterator[None]:
    """Run a model for calibration inside: no gradients, evaluation mode, no cache.

    Attention and the output head run as the model is configured.
    """
    with torch.no_grad(), disable_cache(model), eval_context(model):
        yield


def untie_word_embeddings(model: PreTrainedModel) -> None:
    """Untie the input and output embeddings, in the model and in its configuration.

    A model without accessible embeddings is left unchanged, with a warning.
    """
    if None in get_embeddings(model):
        logger.warning(
            "{} does not tell its input and output embeddings: they cannot be untied.",
            type(model).__name__,
        )
        return
    untie_embeddings(model)


def targets_embeddings(
    model: PreTrainedModel,
    targets: Iterable[tuple[str, Module]],
    check_input: bool = True,
    check_output: bool = True,
) -> bool:
    """Return True if any of the modules is an embedding of the model.

    Args:
        model: the model.
        targets: modules, with their names.
        check_input: look for the input embeddings.
        check_output: look for the output embeddings.
    """
    inputs, outputs = get_embeddings(model)
    sought = [inputs] * check_input + [outputs] * check_output
    found = {module for _, module in targets}
    return any(one in found for one in sought if one is not None)


def get_no_split_params(model: Module) -> str | list[str]:
    """The classes of modules that are to stay on one device: decoder layers.

    Returns:
        Their names; ``"__ALL__"`` for a model that names none.
    """
    return sorted(getattr(model, "_no_split_modules", None) or ()) or "__ALL__"
