# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of tensors that it splits, joins or permutes while it loads a model.

A checkpoint with codes holds each module by itself, under its own name. Where the original holds
one tensor for several modules, or several for one, its values are those that transformers' own
operations make of it. One expert is cut out of the stack that they make; experts that are stored
one by one are not looked for here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from llmcompressor.verification.class_model import class_model
from llmcompressor.verification.files import DTYPES, Files
from llmcompressor.verification.layout import EXPERT
from llmcompressor.verification.stacks import USUAL, Source

__all__ = ["Converted", "Made"]


@dataclass(frozen=True)
class Made(Source):
    """The original of a tensor that is made of one or more of other names.

    Attributes:
        values: what they make.
    """

    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def shape(self, stored: object) -> tuple[int, ...]:
        """Its own: what is stored has another one."""
        return tuple(self.values.shape)


@dataclass
class _Group:
    """Tensors of the original that are converted together."""

    converter: Any
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Name in the original, and the pattern by which it is taken."""
    targets: frozenset[str] = frozenset()
    found: set[str] = field(default_factory=set)


class Converted:
    """What can be made of an original's tensors.

    Args:
        files: the original.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = Lock()
        self._last: tuple[str, Mapping[str, Tensor]] | None = None

    def find(self, name: str) -> Made | None:
        """The original of a checkpoint's tensor, made; ``None`` if none is made so."""
        with self._lock:
            found = self._group_of(name)
        if found is None:
            return None
        key, group, target = found
        if any(part in self._files.broken for part, _ in group.parts):
            return Made(group.parts[0][0])
        values = self._values(key, group)[target]
        group.found.add(target)
        return Made(group.parts[0][0], values=values)

    def find_expert(self, stack: str, name: str, shape: Sequence[int]) -> Made | None:
        """The original of one expert's tensor, cut out of a stack that is made.

        Args:
            stack: the name of the stack, of gate and up together or of down.
            name: of the expert's tensor.
            shape: its shape.
        """
        match, made = EXPERT.match(name.rpartition(".")[0]), self.find(stack)
        if match is None or made is None or int(match["index"]) >= len(made.values):
            return None
        values = made.values[int(match["index"])]
        values = values if values.shape[-1] == shape[-1] else values.mT
        own = USUAL.get(match["own"], match["own"])
        if own != "down_proj":
            values = values.chunk(2)[int(own == "up_proj")]
        return Made(made.name, values=values)

    def renamed(self, name: str) -> str | None:
        """The tensor of the original that the class calls as it does ``name``, if there is one."""
        with self._lock:
            tables = self._tables
            return tables.renamed.get(tables.rename(name, ())[0]) if tables.renamed else None

    def _values(self, key: str, group: _Group) -> Mapping[str, Tensor]:
        """What a group makes; the last one is kept, for the experts of a stack come in turn."""
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = None
                parts = {part: self._files.read(part) for part, _ in group.parts}
                self._last = (key, self._convert(key, group, parts))
            return self._last[1]

    def whole(self) -> set[str]:
        """Tensors of the original all of whose parts were looked for."""
        groups = self._tables.groups.values() if "_tables" in self.__dict__ else ()
        return {part for group in groups if group.targets <= group.found for part, _ in group.parts}

    def _group_of(self, name: str) -> tuple[str, _Group, str] | None:
        tables = self._tables
        if not tables.of_target:
            return None
        target, _ = tables.rename(name, ())
        key = tables.of_target.get(target)
        return None if key is None else (key, tables.groups[key], target)

    @cached_property
    def _tables(self) -> _Tables:
        model = class_model(self._files.config)
        tables = _Tables(model)
        if model is None:
            return tables
        for name in sorted(self._files.places):
            target, pattern = tables.rename(name, tables.converters)
            converter = tables.by_pattern.get(pattern or "")
            if pattern is None and target != name:
                tables.renamed[target] = name
            if converter is not None and pattern is not None:
                group = tables.groups.setdefault(target, _Group(converter))
                group.parts.append((name, pattern))
        for key, group in list(tables.groups.items()):
            shapes = {name: self._files.places[name].info for name, _ in group.parts}
            try:
                made = self._convert(key, group, _stand_ins(shapes), model)
            except Exception:  # not what the table expects: nothing is made of it
                del tables.groups[key]
                continue
            group.targets = frozenset(made)
            tables.of_target |= dict.fromkeys(made, key)
        return tables

    def _convert(
        self, key: str, group: _Group, tensors: Mapping[str, Tensor], model: Any = None
    ) -> dict[str, Tensor]:
        model = self._tables.model if model is None else model
        converter = copy.deepcopy(group.converter)
        for name, pattern in group.parts:
            converter.add_tensor(key, name, pattern, tensors[name])
        made = converter.convert(key, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class _Tables:
    """How transformers renames and converts what it loads into a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.groups: dict[str, _Group] = {}
        self.of_target: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.renamings: list[Any] = []
        self.converters: list[Any] = []
        self.by_pattern: dict[str, Any] = {}
        if model is None:
            return
        from transformers.conversion_mapping import (  # noqa: PLC0415  # loads much
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightConverter,
            WeightRenaming,
        )

        every = get_model_conversion_mapping(model)
        self.state = dict.fromkeys(model.state_dict(), True)
        self.renamings = [one for one in every if isinstance(one, WeightRenaming)]
        self.converters = [one for one in every if isinstance(one, WeightConverter)]
        for one in self.converters:
            if not any(".*" in pattern for pattern in one._original_source_patterns):
                self.by_pattern |= dict.fromkeys(one.source_patterns, one)
        if not self.by_pattern:
            self.converters = []

    def rename(self, name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
        """What a tensor becomes, or becomes a part of, and the pattern by which it does."""
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415

        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(
            name, self.renamings, list(converters), prefix, self.state
        )
        return str(target), pattern


def _stand_ins(infos: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
        for name, info in infos.items()
    }
