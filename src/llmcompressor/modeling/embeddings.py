# SPDX-License-Identifier: Apache-2.0
"""Input and output embeddings of a model, and the tying of their weights."""

from __future__ import annotations

from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from llmcompressor.modeling.settings import text_config
from llmcompressor.modeling.spread import whole

__all__ = ["embeddings", "is_tied", "says_tied", "untie_embeddings"]


def embeddings(model: Module) -> tuple[Module | None, Module | None]:
    """The modules of the input and of the output embeddings; ``None`` where there is none."""
    found: list[Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (NotImplementedError, AttributeError):
            module = None
        found.append(module if isinstance(module, Module) else None)
    return found[0], found[1]


def is_tied(model: Module) -> bool:
    """Return True if input and output embeddings are two modules that share one weight."""
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    return getattr(outputs, "weight", None) is getattr(inputs, "weight", None)


def says_tied(model: PreTrainedModel) -> bool:
    """Return True if the configuration, or its text part, ties input and output embeddings."""
    holders = (model.config, text_config(model.config))
    return any(getattr(one, "tie_word_embeddings", None) for one in holders)


def untie_embeddings(model: PreTrainedModel) -> bool:
    """Give the output head weights of its own, and update the configuration.

    Other tied weights (the embeddings of an encoder and a decoder, say) are untied too: a loader of
    the new configuration expects each of them.

    Returns:
        True if the embeddings were tied before.
    """
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    was_tied = is_tied(model)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():
        path, _, own = target.rpartition(".")
        module = model.get_submodule(path)
        if own in module._parameters and module._parameters[own] is _parameter(model, source):
            _give_own(module, own)
    if is_tied(model):
        _give_own(outputs, "weight")
    for config in (model.config, text_config(model.config)):
        if getattr(config, "tie_word_embeddings", None):
            config.tie_word_embeddings = False
    if hasattr(model, "all_tied_weights_keys"):
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return was_tied


def _parameter(model: Module, name: str) -> Parameter | None:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(own)


def _give_own(module: Module, name: str) -> None:
    parameter = module.get_parameter(name)
    values = whole(parameter).detach().clone()
    module.register_parameter(name, Parameter(values, requires_grad=parameter.requires_grad))
