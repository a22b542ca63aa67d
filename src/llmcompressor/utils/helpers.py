# SPDX-License-Identifier: Apache-2.0
"""What a script enters around forwards of its own, and the embeddings of a model."""

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

__all__ = [
    "DisableQuantization",
    "calibration_forward_context",
    "disable_cache",
    "eval_context",
    "get_embeddings",
    "targets_embeddings",
    "untie_word_embeddings",
]


@contextmanager
def eval_context(module: Module) -> Iterator[None]:
    """Inside, a module is in evaluation mode; each module in it is as before afterwards."""
    before = [(one, one.training) for one in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for one, training in before:
            one.training = training


@contextmanager
def DisableQuantization(module: Module) -> Iterator[None]:  # noqa: N802  # its name in scripts
    """Inside, quantized modules compute without rounding; as before afterwards."""
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


@contextmanager
def calibration_forward_context(model: Module) -> Iterator[None]:
    """Inside, a model is run to be watched: no gradients, evaluation mode, no cache.

    Attention runs as the model is configured, and its head as well.
    """
    with torch.no_grad(), disable_cache(model), eval_context(model):
        yield


def untie_word_embeddings(model: PreTrainedModel) -> None:
    """Give input and output embeddings weights of their own, and say so in the configuration.

    A model that does not tell its embeddings is left as it is, with a warning.
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
    """Whether modules hold the embeddings of a model.

    Args:
        model: whose embeddings.
        targets: modules, with their names.
        check_input: look for the input embeddings.
        check_output: look for the output embeddings.
    """
    inputs, outputs = get_embeddings(model)
    sought = [inputs] * check_input + [outputs] * check_output
    found = {module for _, module in targets}
    return any(one in found for one in sought if one is not None)
