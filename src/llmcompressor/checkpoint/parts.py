# SPDX-License-Identifier: Apache-2.0
"""Submodels: models that are a part of their folder's model, such as its language model.

Such a model is written into a copy of the whole: its tensors under their names there, its settings
in their place in the whole's ``config.json``, and all else unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import PrefixChange

from llmcompressor.checkpoint.layout import checkpoint_names
from llmcompressor.checkpoint.source import inspect_source, local_directory
from llmcompressor.errors import CheckpointError

__all__ = ["keep_prefix", "levels_of"]


def levels_of(config: dict[str, Any], current: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the levels of a ``config.json`` from its top down to that of ``current``.

    It is the top alone for a model that is no submodel. As in transformers, the submodel is found
    by the ``base_config_key`` of its configuration class, and by model types.
    """
    kind = current.model_type
    if not kind or config.get("model_type") in (None, kind):
        return [config]
    found = _within(config, kind, getattr(current, "base_config_key", "") or "")
    return [config] if found is None else [config, *found]


def _within(config: dict[str, Any], kind: str, key: str) -> list[dict[str, Any]] | None:
    named = config.get(key)
    if isinstance(named, dict) and named.get("model_type") in (None, kind):
        return [named]
    for level in config.values():
        if not isinstance(level, dict):
            continue
        if level.get("model_type") == kind:
            return [level]
        deeper = _within(level, kind, key)
        if deeper is not None:
            return [level, *deeper]
    return None


def keep_prefix(model: PreTrainedModel) -> None:
    """Record the prefix that transformers removed from a submodel's tensor names while loading.

    transformers records a prefix from a class's own table itself, but not the base model prefix
    (``language_model`` of Llama 4's text model).
    """
    place, prefix = model.config.name_or_path, model.base_model_prefix
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if not place or not prefix or conversions is None:
        return  # it was not loaded from a folder
    folder = local_directory(place, revision=getattr(model.config, "_commit_hash", None))
    if folder is None:
        return
    try:
        source = inspect_source(folder, allow_quantized=True)
    except CheckpointError:
        return  # the model was complete when it was loaded; saving reports it
    is_part = len(levels_of(dict(source.config), model.config)) > 1
    if is_part and _is_lost(prefix, _stored(model), source.tensors):
        # applied first while loading, and last while saving
        conversions[:0] = [PrefixChange(prefix_to_remove=prefix)]


def _stored(model: PreTrainedModel) -> Collection[str]:
    weights = [name for name in model.state_dict() if name.endswith(".weight")]
    modules = checkpoint_names(model, [name.removesuffix(".weight") for name in weights])
    return [f"{name}.weight" for name in modules.values()]


def _is_lost(prefix: str, names: Collection[str], source: Mapping[str, Any]) -> bool:
    """Return True if a folder has most of these tensors only after a prefix."""
    behind = sum(f"{prefix}.{name}" in source for name in names)
    return behind > sum(name in source for name in names)
