# SPDX-License-Identifier: Apache-2.0
"""Input and output embeddings of a model, which may share one weight."""

from __future__ import annotations

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.modeling.spread import whole

__all__ = ["embeddings", "is_tied", "untie_embeddings"]


def embeddings(model: Module) -> tuple[Module | None, Module | None]:
    """The modules of the input and of the output embeddings, ``None`` where there are none."""
    found: list[Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (NotImplementedError, AttributeError):
            module = None
        found.append(module if isinstance(module, Module) else None)
    return found[0], found[1]


def is_tied(model: Module) -> bool:
    """Whether input and output embeddings, in two modules, have one weight."""
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    return getattr(outputs, "weight", None) is getattr(inputs, "weight", None)


def untie_embeddings(model: PreTrainedModel) -> bool:
    """Give the output head weights of its own and say so in the configuration.

    Returns:
        Whether the embeddings were tied.
    """
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    was_tied = is_tied(model)
    if was_tied:
        weight = outputs.get_parameter("weight")
        values = whole(weight).detach().clone()
        copy = torch.nn.Parameter(values, requires_grad=weight.requires_grad)
        outputs.register_parameter("weight", copy)
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", None):
            config.tie_word_embeddings = False
    if hasattr(model, "all_tied_weights_keys"):
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return was_tied
