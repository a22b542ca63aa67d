# SPDX-License-Identifier: Apache-2.0
"""Module names in the other classes that load a checkpoint.

transformers matches targets and ignore entries against the names of the class that it builds. That
may be the language model alone (``AutoModelForCausalLM`` of Qwen 3.5), the whole that a model is a
part of, or the class of ``config.json``. These classes are built on the meta device for their
module names, and for the heads that they tie to an embedding, which are unknown where files alone
are quantized.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import Embedding, Linear
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from llmcompressor.checkpoint.layout import checkpoint_names, loaded_names, split_names
from llmcompressor.checkpoint.parts import levels_of
from llmcompressor.logger import logger
from llmcompressor.names import named_modules

__all__ = ["other_names", "readers", "tied_names"]

_NOT_READ = {"quantization_config", "compression_config"}


def readers(model: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
    """Build the other classes that load a model's checkpoint, on the meta device."""
    built = (_built(kind, settings) for kind, settings in _classes(model))
    return tuple(one for one in built if one is not None)


def other_names(
    model: PreTrainedModel, classes: Iterable[PreTrainedModel]
) -> dict[str, tuple[str, ...]]:
    """Return the names that other classes have for each module of the checkpoint.

    Names that the model, or the checkpoint, has for any module are left out.

    Args:
        model: the model that is written.
        classes: the result of :func:`readers`.
    """
    own = [name for name, _ in named_modules(model, remove_duplicate=False)]
    known = {*checkpoint_names(model, own).values()}
    found: dict[str, dict[str, None]] = {}
    for built in classes:
        for name, others in _names(built, known):
            found.setdefault(name, {}).update(dict.fromkeys(others))
    taken = {*own, *known}
    return {
        name: tuple(other for other in others if other not in taken)
        for name, others in found.items()
    }


def tied_names(
    model: PreTrainedModel,
    classes: Iterable[PreTrainedModel],
    others: Mapping[str, Collection[str]],
) -> list[str]:
    """Return the heads that another class ties to an embedding and the model does not have.

    Args:
        model: the model that is written.
        classes: the result of :func:`readers`.
        others: the result of :func:`other_names`.
    """
    named = named_modules(model, remove_duplicate=False)
    own = [name for name, module in named if getattr(module, "weight", None) is not None]
    stored = checkpoint_names(model, own).values()  # a head may have a bias only
    known = {*own, *stored, *(other for name in stored for other in others.get(name, ()))}
    return [name for built in classes for name in _tied_heads(built) if name not in known]


def _tied_heads(built: PreTrainedModel) -> Iterator[str]:
    ties: Mapping[str, str] = getattr(built, "all_tied_weights_keys", None) or {}
    modules = dict(built.named_modules(remove_duplicate=False))
    for target, source in ties.items():
        head, embedding = (one.removesuffix(".weight") for one in (target, source))
        if isinstance(modules.get(head), Linear) and isinstance(modules.get(embedding), Embedding):
            yield head


def _names(built: PreTrainedModel, known: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each checkpoint module with the names of the modules that load its weight."""
    state = built.state_dict()
    weights = loaded_names(built, [f"{name}.weight" for name in known], state)
    split = split_names(built)
    for name, loaded in weights.items():
        places = dict.fromkeys([loaded.target, *split.get(name, ())])
        yield (
            name.removesuffix(".weight"),
            [one.removesuffix(".weight") for one in places if one.endswith(".weight")],
        )


def _classes(model: PreTrainedModel) -> Iterator[tuple[Any, Any]]:
    """Yield the other classes that load the checkpoint, each with its configuration."""
    settings, named = _read(model)
    if settings is None:
        return
    kinds = [getattr(transformers, str(name), None) for name in named[:1]]
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    text = mapping.get(type(settings), None)
    parts = getattr(settings, "sub_configs", None) or {}
    if getattr(text, "config_class", None) is not parts.get("text_config", ...):
        text = None  # as in transformers' auto classes, which pass only the part then
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind is not text:
            yield from () if isinstance(model, kind) else [(kind, settings)]
    if text is not None and not isinstance(model, text):
        yield text, settings.get_text_config()


def _read(model: PreTrainedModel) -> tuple[Any, list[str]]:
    """Return the configuration and the class names that the written checkpoint will have.

    It is the model's own, unless the model is a part of what the file describes, or is made of it.
    """
    place, content = model.config.name_or_path, None
    if place:
        with contextlib.suppress(OSError, ValueError):  # reported where it is needed
            content = json.loads((Path(place) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        content = {}
    is_part = len(levels_of(dict(content), model.config)) > 1
    if model.config.model_type and not is_part:
        return model.config, []  # it is written with its own class
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None, []
    try:
        plain = {key: value for key, value in content.items() if key not in _NOT_READ}
        return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(plain)), content.get(
            "architectures"
        ) or []
    except Exception as error:  # what a class refuses may be of any kind
        logger.debug(f"config.json is not read for other names of modules: {error!r:.200}")
        return None, []


def _built(kind: Any, settings: Any) -> PreTrainedModel | None:
    try:
        with torch.device("meta"):
            found: PreTrainedModel = kind._from_config(copy.deepcopy(settings))
    except Exception as error:  # a class of any kind
        logger.debug(f"{kind.__name__} is not asked for names of modules: {error!r:.200}")
        return None
    return found
