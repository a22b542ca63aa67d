# SPDX-License-Identifier: Apache-2.0
"""Mixtures that lost experts: which expert of the original each one that is left was.

A run that drops experts writes to ``compression_report.json`` which ones of each mixture it kept.
The others' tensors are not looked for then, and what has one entry per expert (stacks, the router's
rows, corrections of its scores) is compared entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcompressor.verification.config_changes import Change
from llmcompressor.verification.files import Files
from llmcompressor.verification.history import DROPS, EXPERT, Run, layer_of, without_prefixes

__all__ = ["DroppedExperts", "Kept"]

_NO_COUNT = ("per_tok", "shared", "group", "size", "dim", "layer", "step", "zero", "capacity")


@dataclass(frozen=True)
class Kept:
    """What is left of a mixture.

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
            parent = _parent_of(without_prefixes(stored[0] if stored else name))
            self._by_layer.setdefault(layer_of(parent), []).append((parent, kept))
        self.changed = dict(_changed_counts(changes))
        """Setting → the original's number of experts and the checkpoint's, where they differ."""
        self.is_unrecorded = not self._by_layer and self._are_fewer(checkpoint)
        """Whether there are fewer experts than before, and nothing says which."""

    def _are_fewer(self, checkpoint: Files) -> bool:
        """Whether the files too hold as few as the configuration says."""
        most = max((ours for theirs, ours in self.changed.values() if ours < theirs), default=0)
        found = (EXPERT.match(name) for name in checkpoint.places)
        last = max((int(match["index"]) for match in found if match is not None), default=0)
        return last < most

    def expects(self, setting: str) -> bool:
        """Whether a number of experts has changed as records say, or as R1 says without any."""
        if self.is_unrecorded:
            return setting in self.changed
        every = [kept for records in self._by_layer.values() for _, kept in records]
        theirs, ours = self.changed.get(setting, (0, 0))
        return any((kept.count, len(kept.kept)) == (theirs, ours) for kept in every)

    def of(self, name: str) -> Kept | None:
        """What is left of the mixture that a tensor belongs to, if it has lost any."""
        tail = without_prefixes(name)
        records = self._by_layer.get(layer_of(tail), [])
        if len(records) > 1:
            records = [one for one in records if tail.startswith(one[0])]
        return records[0][1] if len(records) == 1 else None

    def before(self, name: str) -> str | None:
        """The name that a tensor of one expert had; ``None`` if there was no such expert."""
        match, kept = EXPERT.match(name), self.of(name)
        if match is None or kept is None:
            return name
        if int(match["index"]) >= len(kept.kept):
            return None
        return f"{match['experts']}.{kept.kept[int(match['index'])]}.{match['rest']}"

    def is_gone(self, name: str) -> bool:
        """Whether a tensor of the original was an expert's that is not to be there."""
        match, kept = EXPERT.match(name), self.of(name)
        if match is None:
            return False
        if kept is None:
            return self.is_unrecorded
        return int(match["index"]) not in kept.kept

    def is_unknown(self, name: str, theirs: Sequence[int] = (), ours: Sequence[int] = ()) -> bool:
        """Whether it cannot be told what a tensor was, because nothing says which experts are left.

        Args:
            name: one expert's tensor, or any with an entry per expert.
            theirs: the shape of the original's tensor of this name.
            ours: its own shape.
        """
        if not self.is_unrecorded:
            return False
        return EXPERT.match(name) is not None or any(
            _dimension(theirs, ours, *counts) is not None for counts in self.changed.values()
        )

    def entries(self, name: str, theirs: Sequence[int], ours: Sequence[int]) -> int | None:
        """The dimension of the entries that are left, if experts are all that a tensor has lost."""
        kept = self.of(name)
        return None if kept is None else _dimension(theirs, ours, kept.count, len(kept.kept))


def _parent_of(experts: str) -> str:
    """What holds a mixture, with a dot; a stack of it may lie beside the experts' name."""
    return f"{experts.rpartition('.')[0]}." if "." in experts else ""


def _dimension(theirs: Sequence[int], ours: Sequence[int], before: int, now: int) -> int | None:
    """Where one size became another and nothing else changed.

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
    """What is left if a second run took experts from what the first had left.

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
