# SPDX-License-Identifier: Apache-2.0
"""Tensors of the original that hold several modules: stacks of experts, joined weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from llmcompressor.transformers_internals import original_patterns
from llmcompressor.verification.files import (
    DROPS,
    DTYPES,
    OF_EXPERT,
    Files,
    Run,
    layer_of,
    without_prefixes,
)
from llmcompressor.verification.modules import EXPERT, text_settings
from llmcompressor.verification.transformers_model import Change, ModelNames, class_model

USUAL: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ROWS_FIRST = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "jetmoe",
    "minimax",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
LAID: Mapping[str, tuple[bool, bool]] = {
    "gpt_oss": (True, True),
    "openai_privacy_filter": (True, False),
    "llama4": (True, False),
    "llama4_text": (True, False),
    **dict.fromkeys(_ROWS_FIRST, (False, False)),
}
"""Model type → whether its stacks hold [columns, rows], and gate and up row by row in turn."""


@dataclass(frozen=True)
class Source:
    """Place of the original of a tensor.

    Attributes:
        name: the tensor.
        expert: the index within a stack, ``None`` if the tensor is what is looked for itself.
        half: which half of a stack's matrix: 0, 1 or ``None``.
        turned: the stack holds [columns, rows].
        in_turn: the halves lie row by row in turn, not one above the other.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    turned: bool = False
    in_turn: bool = False

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is looked for, in a tensor of the shape ``stored``."""
        if self.expert is None:
            return tuple(stored)
        rows, *columns = reversed(stored[1:]) if self.turned else stored[1:]
        return (rows if self.half is None else rows // 2, *columns)


def stacks_of(name: str) -> Iterator[str]:
    """The names that a stack may have which holds a tensor of one expert.

    >>> list(stacks_of("mlp.experts.3.w2.weight"))
    ['mlp.experts.down_proj', 'mlp.output_linear.weight']
    >>> list(stacks_of("mlp.experts.3.up_proj.bias"))
    ['mlp.experts.gate_up_proj_bias']
    """
    module, _, own = name.rpartition(".")
    match = EXPERT.match(module)
    if match is None or own not in ("weight", "bias"):
        return
    is_down = USUAL.get(match["own"], match["own"]) == "down_proj"
    stack = f"{match['experts']}.{'down_proj' if is_down else 'gate_up_proj'}"
    if own == "bias":
        yield f"{stack}_bias"
        return
    yield stack
    # Granite's experts are Linears of three dimensions
    parent = match["experts"].removesuffix("experts")
    yield f"{parent}{'output_linear' if is_down else 'input_linear'}.weight"


def sources_in(
    files: Files, stack: str, name: str, shape: Sequence[int], config: Mapping[str, Any]
) -> list[Source]:
    """Every way in which a stack may hold a tensor of one expert; one if only one is possible.

    Args:
        files: the original.
        stack: the name of a stack that is there.
        name: the tensor of one expert, as the checkpoint names it.
        shape: its shape.
        config: the original's ``config.json``.
    """
    match = EXPERT.match(name.rpartition(".")[0])
    stored = files.places[stack].info.shape
    if match is None or len(stored) != len(shape) + 1 or int(match["index"]) >= stored[0]:
        return []
    own = USUAL.get(match["own"], match["own"])
    half = None if own == "down_proj" else int(own == "up_proj")
    turns = (False, True) if len(shape) > 1 else (False,)
    every = [
        Source(stack, int(match["index"]), half, turned, in_turn)
        for turned in turns
        for in_turn in ((False,) if half is None else (False, True))
    ]
    # what does not fit at all is compared by the shape alone
    fitting = [each for each in every if each.shape(stored) == tuple(shape)] or every[:1]
    return _known(fitting, config)


def _known(fitting: list[Source], config: Mapping[str, Any]) -> list[Source]:
    """Those that are left once the model type has been asked."""
    types = (str(part.get("model_type") or "") for part in (text_settings(config), config))
    laid = next((LAID[name] for name in types if name in LAID), None)
    if laid is None:
        return fitting
    turned, in_turn = laid
    # a model may be stored the other way round than its class holds it, if the shape says so
    found = [each for each in fitting if each.turned == turned] or fitting
    return [each for each in found if each.half is None or each.in_turn == in_turn] or found


class ExpertRows:
    """Reads rows of one expert's weight out of a stack.

    A stack that holds [columns, rows] has to be read as a whole expert; the last one is kept.

    Args:
        files: the original.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._last = local()

    def read(self, source: Source, start: int, stop: int) -> Tensor:
        """Rows of what ``source`` points to, or values if it is a vector."""
        stored = self.files.places[source.name].info.shape
        expert = source.expert or 0
        if source.turned or len(stored) < 3:
            whole = self._whole(source.name, expert)
            whole = whole.T if source.turned else whole
            return _rows_of(lambda first, last: whole[first:last], source, len(whole), start, stop)
        base = expert * stored[1]

        def flat(first: int, last: int) -> Tensor:
            return self.files.read(source.name, base + first, base + last, flat=True)

        return _rows_of(flat, source, stored[1], start, stop)

    def _whole(self, name: str, expert: int) -> Tensor:
        key = (name, expert)
        if getattr(self._last, "key", None) != key:
            self._last.matrix = self.files.read(name, expert, expert + 1)[0]
            self._last.key = key
        matrix: Tensor = self._last.matrix
        return matrix


def _rows_of(
    read: Callable[[int, int], Tensor], source: Source, rows: int, start: int, stop: int
) -> Tensor:
    """The rows of a half, by what reads rows of the whole."""
    if source.half is None:
        return read(start, stop)
    if source.in_turn:
        return read(2 * start, 2 * stop)[source.half :: 2]
    shift = source.half * (rows // 2)
    return read(shift + start, shift + stop)


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
    """Tensors that are made of an original's.

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
            tables = self._tables
            target = tables.rename(name, ())[0] if tables.of_target else ""
            key = tables.of_target.get(target)
        if key is None:
            return None
        group = tables.groups[key]
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
        """Tensors of a group; the last are kept, for the experts of a stack come in turn."""
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
            infos = {name: self._files.places[name].info for name, _ in group.parts}
            try:
                stand_ins = {
                    name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
                    for name, info in infos.items()
                }
                made = self._convert(key, group, stand_ins, model)
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
    """Conversions of transformers for what it loads into a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.groups: dict[str, _Group] = {}
        self.of_target: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.by_pattern: dict[str, Any] = {}
        if model is None:
            return
        self._names = ModelNames(model)
        for one in self._names.converters:
            if not any(".*" in pattern for pattern in original_patterns(one)[0]):
                self.by_pattern |= dict.fromkeys(one.source_patterns, one)
        self.converters = self._names.converters if self.by_pattern else []

    def rename(self, name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
        """New name of a tensor or of what it becomes a part of, and the pattern that matched."""
        return self._names.rename(name, converters)


_NO_COUNT = ("per_tok", "shared", "group", "size", "dim", "layer", "step", "zero", "capacity")


@dataclass(frozen=True)
class Kept:
    """Experts that are left of a mixture.

    Attributes:
        count: how many experts the original has.
        kept: the original's index of each one that is left, in the checkpoint's order.
    """

    count: int
    kept: tuple[int, ...]


class DroppedExperts:
    """The experts that a checkpoint no longer has.

    Args:
        checkpoint: what is left.
        changes: of its ``config.json`` against that of the model before.
        runs: those since that model, the latest first.
    """

    def __init__(self, checkpoint: Files, changes: Iterable[Change], runs: Iterable[Run]) -> None:
        self._by_layer: dict[str, list[tuple[str, Kept]]] = {}
        runs = list(runs)
        for name, kept in _mixtures(runs).items():
            stored = [one for run in runs for one in run.names_of(name)[1:]]
            # a stack may lie beside the experts' name: below their parent
            above, dot, _ = without_prefixes(stored[0] if stored else name).rpartition(".")
            parent = above + dot
            self._by_layer.setdefault(layer_of(parent), []).append((parent, kept))
        self.changed = dict(_changed_counts(changes))
        """Setting → the original's number of experts and the checkpoint's, where they differ."""
        self.is_unrecorded = not self._by_layer and self._are_fewer(checkpoint)
        """True if there are fewer experts than before, and nothing says which."""

    def _are_fewer(self, checkpoint: Files) -> bool:
        """True if the files too hold as few as the configuration says."""
        most = max((ours for theirs, ours in self.changed.values() if ours < theirs), default=0)
        found = (OF_EXPERT.match(name) for name in checkpoint.places)
        last = max((int(match["index"]) for match in found if match is not None), default=0)
        return last < most

    def expects(self, setting: str) -> bool:
        """True if a number of experts has changed as records say, or as R1 says without any."""
        if self.is_unrecorded:
            return setting in self.changed
        every = [kept for records in self._by_layer.values() for _, kept in records]
        theirs, ours = self.changed.get(setting, (0, 0))
        return any((kept.count, len(kept.kept)) == (theirs, ours) for kept in every)

    def of(self, name: str) -> Kept | None:
        """Experts left of the mixture that a tensor belongs to, if it has lost any."""
        tail = without_prefixes(name)
        records = self._by_layer.get(layer_of(tail), [])
        if len(records) > 1:
            records = [one for one in records if tail.startswith(one[0])]
        return records[0][1] if len(records) == 1 else None

    def before(self, name: str) -> str | None:
        """The name that a tensor of one expert had; ``None`` if there was no such expert."""
        match, kept = OF_EXPERT.match(name), self.of(name)
        if match is None or kept is None:
            return name
        if int(match["index"]) >= len(kept.kept):
            return None
        return f"{match['experts']}.{kept.kept[int(match['index'])]}.{match['rest']}"

    def is_gone(self, name: str) -> bool:
        """True if a tensor of the original was an expert's that is not to be there."""
        match, kept = OF_EXPERT.match(name), self.of(name)
        if match is None:
            return False
        if kept is None:
            return self.is_unrecorded
        return int(match["index"]) not in kept.kept

    def is_unknown(self, name: str, theirs: Sequence[int] = (), ours: Sequence[int] = ()) -> bool:
        """True if it cannot be told what a tensor was, because nothing says which experts are left.

        Args:
            name: one expert's tensor, or any with an entry per expert.
            theirs: the shape of the original's tensor of this name.
            ours: its own shape.
        """
        if not self.is_unrecorded:
            return False
        return OF_EXPERT.match(name) is not None or any(
            _dimension(theirs, ours, *counts) is not None for counts in self.changed.values()
        )

    def entries(self, name: str, theirs: Sequence[int], ours: Sequence[int]) -> int | None:
        """The dimension of the entries that are left, if experts are all that a tensor has lost."""
        kept = self.of(name)
        return None if kept is None else _dimension(theirs, ours, kept.count, len(kept.kept))


def _dimension(theirs: Sequence[int], ours: Sequence[int], before: int, now: int) -> int | None:
    """The dimension where one size became another and nothing else changed.

    >>> _dimension((8, 96, 32), (4, 96, 32), 8, 4), _dimension((1, 8), (1, 4), 8, 4)
    (0, 1)
    """
    if len(theirs) != len(ours):
        return None
    changed = [
        index for index, pair in enumerate(zip(theirs, ours, strict=True)) if len({*pair}) > 1
    ]
    fits = len(changed) == 1 and (theirs[changed[0]], ours[changed[0]]) == (before, now)
    return changed[0] if fits else None


def _mixtures(runs: Iterable[Run]) -> dict[str, Kept]:
    """Mixture → what is left of it after all runs, the latest of which comes first."""
    found: dict[str, Kept] = {}
    for run in runs:
        for name, mixtures in run.records.items():
            if not str(name).startswith(DROPS) or not isinstance(mixtures, Mapping):
                continue
            for path, record in mixtures.items():
                kept = _kept(record)
                if kept is not None:
                    found[str(path)] = _after(kept, found.get(str(path)))
    return found


def _after(first: Kept, then: Kept | None) -> Kept:
    """Experts that are left after a second run took some of what the first had left.

    >>> _after(Kept(8, (0, 3, 5, 6)), Kept(4, (1, 2)))
    Kept(count=8, kept=(3, 5))
    """
    if then is None or then.count != len(first.kept):
        return then or first
    return Kept(first.count, tuple(first.kept[index] for index in then.kept))


def _kept(record: Any) -> Kept | None:
    if not isinstance(record, Mapping):
        return None
    count, kept = record.get("experts"), record.get("kept")
    if type(count) is not int or not isinstance(kept, list) or not kept:
        return None
    if any(type(index) is not int or not 0 <= index < count for index in kept):
        return None
    return Kept(count, tuple(kept))


def _changed_counts(changes: Iterable[Change]) -> Iterator[tuple[str, tuple[int, int]]]:
    for one in changes:
        key = one.path.rpartition(".")[2]
        is_count = "expert" in key and not any(word in key for word in _NO_COUNT)
        if is_count and type(one.before) is int and type(one.now) is int:
            yield one.path, (one.before, one.now)
