# SPDX-License-Identifier: Apache-2.0
"""Splits: which one is meant, and the slices in ``"train[:5%]"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcompressor.datasets.rows import Chain, Rows, Slice, Stream
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger

__all__ = ["Part", "cut", "parse_split", "pick_split", "split_for"]

_PART = re.compile(
    r"(?P<name>[^\[\]+]+?)\s*"
    r"(?:\[\s*(?P<start>-?\d+%?)?\s*:\s*(?P<stop>-?\d+%?)?\s*\])?"
)

_WHOLE = 100
"""Per cent."""


@dataclass(frozen=True)
class Part:
    """One piece of a split's description: ``train[10:20]`` or ``train[:5%]``.

    Attributes:
        name: the split.
        start: its first row as written, ``None`` for the first of all.
        stop: the row after its last one as written, ``None`` for the end.
    """

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.start is None and self.stop is None

    def bounds(self, size: int) -> tuple[int, int]:
        """First row and the row after the last, of ``size`` rows.

        >>> Part("train", None, "5%").bounds(200), Part("train", "-10", None).bounds(200)
        ((0, 10), (190, 200))
        """
        return _place(self.start, size, 0), _place(self.stop, size, size)


def _place(text: str | None, size: int, default: int) -> int:
    if text is None:
        return default
    place = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return min(size, max(0, place + size if place < 0 else place))


def parse_split(text: str) -> list[Part]:
    """The pieces of ``"train[:5%]+test"``.

    Raises:
        DatasetError: for a description that is not of this form.
    """
    parts = []
    for piece in text.split("+"):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise DatasetError(
                f"The split {text!r} cannot be read.",
                "Write it as 'train', 'train[:512]', 'train[10%:20%]' or 'train[:5%]+test'.",
            )
        part = Part(match["name"].strip(), match["start"], match["stop"])
        for place in (part.start, part.stop):
            if place and place.endswith("%") and abs(int(place[:-1])) > _WHOLE:
                raise DatasetError(
                    f"The split {text!r} goes to {place} of its rows.",
                    "A split has 100% of them.",
                )
        parts.append(part)
    return parts


def split_for(role: str, splits: str | Sequence[str] | Mapping[str, str] | None) -> str | None:
    """The split that plays a role, of the user's ``splits`` in any of its forms.

    A string is the split. Of a dict it is the role's entry. Of a list it is the element whose
    name is the role's, or else the first.

    Args:
        role: "calibration" or "train".
        splits: what the user gave.
    """
    if splits is None or isinstance(splits, str):
        return splits
    if isinstance(splits, Mapping):
        if role not in splits:
            raise DatasetError(
                f"The argument 'splits' has no key {role!r}, only {', '.join(sorted(splits))}.",
                f"Name the split to use, for instance splits={{'{role}': 'train[:5%]'}}.",
            )
        if ignored := sorted(set(splits) - {role}):
            logger.warning(f"The splits {', '.join(ignored)} are not used for {role}.")
        return splits[role]
    named = [split for split in splits if parse_split(split)[0].name == role]
    return (named or list(splits))[0]


def pick_split(splits: Mapping[str, Rows | Stream], wanted: str | None, what: str) -> Rows | Stream:
    """The rows of one split: the wanted one, the only one, or ``train``.

    Args:
        splits: rows by the name of their split.
        wanted: a description such as ``"train[:5%]"``, or ``None``.
        what: the data's name, for an error.
    """
    if not splits:
        raise DatasetError(f"{what} has no splits.", "Give data that is not empty.")
    if wanted is None:
        if len(splits) == 1:
            return next(iter(splits.values()))
        if "train" not in splits:
            raise DatasetError(
                f"{what} has several splits: {', '.join(sorted(splits))}.",
                f"Choose one, for instance splits={min(splits)!r}.",
            )
        return splits["train"]
    pieces = []
    for part in parse_split(wanted):
        if part.name not in splits:
            raise DatasetError(
                f"{what} has no split {part.name!r}; its splits are {', '.join(sorted(splits))}.",
                did_you_mean(part.name, splits),
            )
        pieces.append(_cut_part(splits[part.name], part))
    return _join(pieces, wanted)


def cut(rows: Rows | Stream, wanted: str | None) -> Rows | Stream:
    """Data that has no splits, cut by the slice in ``wanted``; the name before it says nothing."""
    if wanted is None:
        return rows
    return _join([_cut_part(rows, part) for part in parse_split(wanted)], wanted)


def _cut_part(rows: Rows | Stream, part: Part) -> Rows | Stream:
    if part.whole:
        return rows
    if isinstance(rows, Stream):
        return _cut_stream(rows, part)
    return Slice(rows, *part.bounds(len(rows)))


def _cut_stream(rows: Stream, part: Part) -> Stream:
    if any(
        place and (place.startswith("-") or place.endswith("%"))
        for place in (part.start, part.stop)
    ):
        raise DatasetError(
            f"A stream cannot be cut at {part.start or ''}:{part.stop or ''}: its length is "
            "not known.",
            "Give row numbers such as 'train[100:600]', or streaming=False.",
        )
    start = int(part.start) if part.start else 0
    return rows.cut(start, int(part.stop) if part.stop else None)


def _join(pieces: list[Rows | Stream], wanted: str) -> Rows | Stream:
    if len(pieces) == 1:
        return pieces[0]
    sized = [piece for piece in pieces if not isinstance(piece, Stream)]
    if len(sized) < len(pieces):
        raise DatasetError(
            f"Streams cannot be joined as in {wanted!r}.", "Name one split, or streaming=False."
        )
    return Chain(sized)
