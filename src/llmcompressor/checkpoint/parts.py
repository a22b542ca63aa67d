# SPDX-License-Identifier: Apache-2.0
"""Models that are a part of what their folder holds, such as the text of a vision-language model.

Such a model is written into a copy of the whole: its tensors under the names that they have there,
its settings where the whole's ``config.json`` has them, and all else as it was.
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
    """Where a ``config.json`` describes a model: the levels from its top down to that.

    It is the top alone for a model that is no part of a larger one. As transformers does when it
    reads a part, it goes by the key that a class of configurations names, and by model types.
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
    """Let a part remember what transformers took off its tensors' names when it was loaded.

    Of a prefix that a class's own table takes off it does so itself, of the one that is common to
    all of a class (``language_model`` of Llama 4's text) it does not.
    """
    place, prefix = model.config.name_or_path, model.base_model_prefix
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if not place or not prefix or conversions is None:
        return  # it was loaded from nowhere
    folder = local_directory(place, revision=getattr(model.config, "_commit_hash", None))
    if folder is None:
        return
    try:
        source = inspect_source(folder, allow_quantized=True)
    except CheckpointError:
        return  # the model was complete when it was loaded; saving speaks of it
    is_part = len(levels_of(dict(source.config), model.config)) > 1
    if is_part and _is_lost(prefix, _stored(model), source.tensors):
        # the first that is done while loading, and the last while saving
        conversions[:0] = [PrefixChange(prefix_to_remove=prefix)]


def _stored(model: PreTrainedModel) -> Collection[str]:
    weights = [name for name in model.state_dict() if name.endswith(".weight")]
    modules = checkpoint_names(model, [name.removesuffix(".weight") for name in weights])
    return [f"{name}.weight" for name in modules.values()]


def _is_lost(prefix: str, names: Collection[str], source: Mapping[str, Any]) -> bool:
    """Whether a folder has tensors of these names behind a prefix only."""
    behind = sum(f"{prefix}.{name}" in source for name in names)
    return behind > sum(name in source for name in names)
