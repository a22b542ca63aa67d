# SPDX-License-Identifier: Apache-2.0
"""What a module is, by its class: the model that ``config.json`` names is built without data.

The names of a file tell a Linear from an embedding most of the time only: ``patch_embedding`` is a
Linear in some models, and ``embed`` an embedding in others. Nor do they tell whether a class takes
experts that are stored one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from llmcompressor.verification.built import class_of_type, every_name, renamed_names
from llmcompressor.verification.class_model import class_model
from llmcompressor.verification.families import text_settings
from llmcompressor.verification.initialization import named_weights
from llmcompressor.verification.tried_loads import renamed_keep_their_dtype

__all__ = [
    "Own",
    "dtype_by_class",
    "experts_by_class",
    "kind_by_class",
    "led_astray",
    "modules_by_class",
    "named_by_class",
    "takes_experts",
]

Own = tuple[str, str]
"""Path of a module in the class, and what it is: ``linear``, ``embedding``, ``other`` or empty."""

_DIMENSIONS_OF_STACK = 3


@dataclass(frozen=True)
class _Class:
    """What is kept of a model without data.

    Attributes:
        kinds: path of a module → what it is.
        tensors: its parameters and stored buffers, each with its shape.
        names: name of a tensor in the file → the names here of what it becomes.
        kept: name of a dtype → what the names match of the tensors that become float32 all the
            same; ``None`` if there are none.
        model: the model itself.
    """

    kinds: Mapping[str, str]
    tensors: Mapping[str, tuple[int, ...]]
    names: Callable[[str], tuple[str, ...]]
    kept: Mapping[str, re.Pattern[str] | None]
    model: Any

    def stored(self, name: str) -> str:
        """The name here of a tensor in the file; the first, if it becomes several."""
        return self.names(name)[0]

    def renamed(self, others: Iterable[str]) -> Callable[[str], str]:
        """Name of a tensor in the file → its name here, where the class has ``others`` too."""
        return renamed_names(self.model, others)

    @cached_property
    def named(self) -> Mapping[str, str]:
        """The Linears whose weight initialization names, each with the class that does."""
        return named_weights(self.model)


def kind_by_class(config: Mapping[str, Any]) -> Callable[[str], str] | None:
    """Ask the class of a configuration what its modules are.

    Args:
        config: the content of ``config.json``.

    Returns:
        Path of a module in the file → ``linear``, ``embedding``, ``other`` (a norm), or nothing
        where the class has no such module, or one of a class of its own. ``None`` where the
        class cannot be built.
    """
    found = _class_of(config)
    if found is None:
        return None

    def kind(path: str) -> str:
        own = found.stored(f"{path}.weight").rpartition(".")[0]
        return found.kinds.get(own, found.kinds.get(path, ""))

    return kind


def modules_by_class(config: Mapping[str, Any]) -> Callable[[str], tuple[Own, ...]] | None:
    """Ask the class of a configuration which of its modules have their weight from one of a file.

    transformers looks for targets, and for what is ignored, among the names of the class. A file
    may hold one tensor for several of its modules, or several for one.

    Args:
        config: the content of ``config.json``.

    Returns:
        Path of a module in the file → the modules of the class; none where it has none for it.
        ``None`` where the class cannot be built.
    """
    found = _class_of(config)
    if found is None:
        return None

    def modules(path: str) -> tuple[Own, ...]:
        names = (name for name in found.names(f"{path}.weight") if name in found.tensors)
        owners = (name.rpartition(".")[0] for name in names)
        return tuple((owner, found.kinds.get(owner, "")) for owner in owners)

    return modules


def led_astray(
    config: Mapping[str, Any], modules: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Which tensors of modules transformers gives another name than the module's.

    Some names are renamed for a weight alone, and the codes and scales of the same module are not.

    Args:
        config: the content of ``config.json``.
        modules: path of a module in the file → own names of its tensors.

    Returns:
        Path → those tensors, without modules that have none; nothing where the class cannot be
        built or has no such module.
    """
    found = _class_of(config)
    if found is None:
        return {}
    owners = {path: found.stored(f"{path}.weight").rpartition(".")[0] for path in modules}
    linked = {
        path: owner
        for path, owner in owners.items()
        if found.kinds.get(owner) in ("linear", "embedding")
    }
    place = found.renamed(f"{own}.{each}" for path, own in linked.items() for each in modules[path])
    lost = {
        path: [each for each in modules[path] if place(f"{path}.{each}") != f"{own}.{each}"]
        for path, own in linked.items()
    }
    return {path: names for path, names in lost.items() if names}


def named_by_class(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Ask the class of a configuration whose weights its initialization names.

    Where it names no class, or one that is not of its model type, transformers goes by the type.

    Args:
        config: the content of ``config.json``.

    Returns:
        Path of a Linear in the class → the class whose initialization names its weight. None
        where the class cannot be built.
    """
    found = _class_of(config)
    if found is None:
        name = class_of_type(config)
        found = _class_of({**config, "architectures": [name]}) if name else None
    return {} if found is None else found.named


def takes_experts(config: Mapping[str, Any], path: str) -> bool:
    """Whether transformers has a place for one expert's weight: in a stack, or as it is.

    Which table makes stacks depends on the class and on its parts: that of a whole model may have
    one where the class of its language model, loaded alone, has none. Where the class cannot be
    built, the tables of the model types are looked at.

    Args:
        config: the content of ``config.json``.
        path: of an expert's projection in the file.
    """
    found = _class_of(config)
    if found is not None:
        return found.stored(f"{path}.weight") in found.tensors
    return any(_has_table(holder.get("model_type")) for holder in (config, text_settings(config)))


def experts_by_class(config: Mapping[str, Any], path: str) -> int | None:
    """How many experts the class stacks of one list of them, in one stack or in several.

    Args:
        config: the content of ``config.json``.
        path: of one expert's projection in the file.

    Returns:
        Their number. ``None`` where the class makes no stack of it, or cannot be built.
    """
    found = _class_of(config)
    shapes = (
        [found.tensors.get(name, ()) for name in found.names(f"{path}.weight")] if found else []
    )
    stacks = [shape[0] for shape in shapes if len(shape) == _DIMENSIONS_OF_STACK]
    return sum(stacks) or None


def dtype_by_class(config: Mapping[str, Any], dtype: str) -> Callable[[str], str] | None:
    """Ask the class what dtype tensors are loaded as, where anything is quantized.

    What is renamed keeps the dtype of the file in some releases. Some others become float32: a
    class lists parts of their names, and these may match more than was meant.

    Args:
        config: the content of ``config.json``.
        dtype: of the model.

    Returns:
        Name of a tensor in the file → its dtype, empty for that of the file. ``None`` where the
        class cannot be built.
    """
    found = _class_of(config)
    if found is None:
        return None
    pattern = found.kept.get(dtype)

    def loaded(name: str) -> str:
        own = found.stored(name)
        if own != name and renamed_keep_their_dtype():
            return ""
        return "float32" if pattern is not None and pattern.search(own) else dtype

    return loaded


def _has_table(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: PLC0415

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return True  # code of the checkpoint's own: nothing is known of it
    table: Any = get_checkpoint_conversion_mapping
    entries = table(model_type) or ()
    return any(_EXPERT.search(source) for entry in entries for source in entry.source_patterns)


_EXPERT = re.compile(r"experts\W{0,3}\*")


def _class_of(config: Mapping[str, Any]) -> _Class | None:
    model = class_model(config)
    return None if model is None else _asked(model)


@lru_cache(maxsize=4)
def _asked(model: Any) -> _Class:
    kinds = {name: _kind(module) for name, module in model.named_modules()}
    kept = {name: _kept(model, getattr(torch, name)) for name in ("float16", "bfloat16")}
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return _Class(kinds, tensors, every_name(model), kept, model)


def _kept(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415

    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0] if plan else None


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "other" if "norm" in type(module).__name__.lower() else ""
