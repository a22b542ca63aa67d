# SPDX-License-Identifier: Apache-2.0
"""Models without weights, to try a script or a recipe before the weights are downloaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS

from llmcompressor.utils.devices import best_device

__all__ = [
    "get_high_precision",
    "patch_transformers_logger_level",
    "skip_weights_download",
    "skip_weights_initialize",
]

_OF_BUILDING = ("attn_implementation", "experts_implementation", "trust_remote_code")
_OF_HUB = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")


@contextmanager
def skip_weights_download(model_class: Any = AutoModelForCausalLM) -> Iterator[None]:
    """Make ``model_class.from_pretrained`` build a model with random weights inside.

    Args:
        model_class: the class whose ``from_pretrained`` will be called.
    """
    found = vars(model_class).get("from_pretrained")

    def build(cls: Any, name: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """Return a model with the configuration of ``name``."""
        hub = {key: kwargs[key] for key in _OF_HUB if key in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **hub)
        given = {key: kwargs[key] for key in _OF_BUILDING if key in kwargs}
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "auto"))
        given["dtype"] = config.dtype if dtype in ("auto", None) else dtype
        make = getattr(cls, "from_config", None) or cls._from_config
        model: PreTrainedModel = make(config, **given)
        model.name_or_path = model.config._name_or_path = str(name)
        torch.nn.Module.eval(model)
        return model

    model_class.from_pretrained = classmethod(build)
    try:
        yield
    finally:
        if found is None:
            del model_class.from_pretrained
        else:
            model_class.from_pretrained = found


@contextmanager
def skip_weights_initialize(use_zeros: bool = False) -> Iterator[None]:
    """Disable torch's weight initialization functions inside.

    Args:
        use_zeros: fill tensors with zeros instead of leaving them unchanged.
    """

    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.fill_(0) if use_zeros else tensor

    with ExitStack() as stack, torch.no_grad():
        for name in TORCH_INIT_FUNCTIONS:
            stack.enter_context(patch.object(torch.nn.init, name, skip))
        yield


@contextmanager
def patch_transformers_logger_level(level: int = logging.ERROR) -> Iterator[None]:
    """Set the log level of transformers' model loading inside."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def get_high_precision() -> torch.dtype:
    """Return the widest float dtype of :func:`~llmcompressor.utils.devices.best_device`."""
    return torch.float32 if best_device().type == "mps" else torch.float64
