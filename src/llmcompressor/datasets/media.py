# SPDX-License-Identifier: Apache-2.0
"""Images, videos and audio of multimodal rows.

They are in columns of their own, or within a conversation: a part of a turn has a ``type`` and
holds the medium under one of a few keys. A chat template renders only a placeholder for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcompressor.errors import DatasetError

MEDIA = frozenset({"audio", "audios", "image", "images", "raw_speech", "video", "videos"})
"""Columns with media, as processors call them."""
_COLUMNS = {"image": "images", "video": "videos", "audio": "audio"}
"""Type of a part → the processor's argument."""
_SOURCES = ("url", "path", "base64")
"""Where a part may say what it shows, besides under its own type."""
_OTHER_NAMES = {
    **{"image": "images", "video": "videos", "audio": "audios"},
    **{"images": "image", "videos": "video", "audios": "audio"},
}
_PLACEHOLDERS = {
    "image_token": ("image", "images"),
    "boi_token": ("image", "images"),
    "video_token": ("video", "videos"),
    "audio_token": ("audio", "audios"),
}
"""A processor's attribute → the columns one of which its token stands for."""


class _UnreadImage(str):
    """Unread source of an image in a turn: a path, a URL, or base64 data."""

    __slots__ = ()


def collect_media(conversation: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Collect the media of a conversation in order, by the processor's argument names.

    Nothing is read yet, as the row may be for a tokenizer. ``None`` marks a part without a
    medium.
    """
    found: dict[str, list[Any]] = {}
    for turn in conversation:
        content = turn.get("content")
        for part in content if isinstance(content, Sequence) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _COLUMNS:
                given = (part.get(key) for key in (kind, *_SOURCES))
                shown = next((one for one in given if one is not None), None)
                is_unread = kind == "image" and isinstance(shown, str)
                found.setdefault(_COLUMNS[kind], []).append(
                    _UnreadImage(shown) if is_unread else shown
                )
    return {name: shown for name, shown in found.items() if any(one is not None for one in shown)}


def resolve_media(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Rename media columns for a processor, read the images of turns, and split sounds.

    Args:
        row: a prepared row.
        known: the columns that the processor accepts; others are unchanged.

    Raises:
        DatasetError: only some parts of a conversation have media, or an image cannot be read.
    """
    known, made = frozenset(known), dict(row)
    for name, other in _OTHER_NAMES.items():
        if name not in known and other in known and made.get(other) is None and name in made:
            made[other] = made.pop(name)
    for column in known & {*_OTHER_NAMES} & made.keys():
        shown = made[column]
        if not isinstance(shown, list):
            continue
        if missing := sum(one is None for one in shown):
            raise DatasetError(
                f"{missing} of {len(shown)} parts for {column} in a conversation do not say what "
                "they show.",
                f"Give all of them in the turns, or all in a column {column!r}.",
            )
        read = [_read_image(one) if isinstance(one, _UnreadImage) else one for one in shown]
        made[column] = read or None
    for column in known & {"audio", "audios"} & made.keys():
        _split_sounds(made, column)
    return made


def _split_sounds(row: dict[str, Any], column: str) -> None:
    """Split sounds of the datasets library into arrays and the column ``sampling_rate``."""
    value = row[column]
    sounds = value if isinstance(value, list) else [value]
    decoded = [one for one in sounds if _is_sound(one)]
    rates = {int(one["sampling_rate"]) for one in decoded}
    if len(rates) > 1:
        raise DatasetError(
            f"has sounds of {' and '.join(map(str, sorted(rates)))} samples a second.",
            "Bring them to one rate: datasets.Audio(sampling_rate=…) does.",
        )
    if decoded and row.get("sampling_rate") is None:
        row["sampling_rate"] = rates.pop()
    arrays = [one["array"] if _is_sound(one) else one for one in sounds]
    row[column] = arrays if isinstance(value, list) else arrays[0]


def _is_sound(value: Any) -> bool:
    """Return True for an audio value of the datasets library, decoded or not."""
    if isinstance(value, Mapping):
        return "array" in value and value.get("sampling_rate") is not None
    return hasattr(value, "get_all_samples")


def _read_image(shown: str) -> Any:
    from transformers.image_utils import load_image  # noqa: PLC0415  # rarely needed

    try:
        return load_image(str(shown))
    except Exception as error:  # of the file, its content or the network
        raise DatasetError(
            f"The picture {shown:.80} of a conversation cannot be read: {error!s:.200}.",
            "Check the path, or give the picture itself.",
        ) from error


def placeholder_ids(*owners: Any) -> frozenset[int]:
    """Ids of the placeholder tokens for media that processors or tokenizers define."""
    known = (getattr(owner, f"{name}_id", None) for owner in owners for name in _PLACEHOLDERS)
    return frozenset(number for number in known if isinstance(number, int))


def check_placeholders(processor: Any, row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a text with placeholders for media that are not given.

    The model would run on the bare placeholders.

    Args:
        processor: defines the placeholder tokens.
        row: its inputs.
        known: the columns that it accepts.

    Raises:
        DatasetError: names the placeholder token.
    """
    text, known = row.get("text"), frozenset(known)
    for attribute, columns in _PLACEHOLDERS.items():
        token = getattr(processor, attribute, None)
        if not (isinstance(token, str) and token and isinstance(text, str) and token in text):
            continue
        # for instance a tokenizer, for which the token is an ordinary one
        is_ordinary = known.isdisjoint(columns)
        if not is_ordinary and all(row.get(column) is None for column in columns):
            raise DatasetError(
                f"has {token} in its text, and there is nothing that it stands for.",
                f"Give it in a column {columns[-1]!r} or in the turns of the conversation.",
            )
