# SPDX-License-Identifier: Apache-2.0
"""Images, videos and audio of multimodal rows.

They are in columns of their own, or within a conversation: a part of a turn has a ``type`` and
holds the medium under one of a few keys. A chat template renders only a placeholder for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcompressor.errors import DatasetError

__all__ = ["check_placeholders", "media_of", "placeholder_ids", "with_media"]

_COLUMNS = {"image": "images", "video": "videos", "audio": "audio"}
"""Type of a part → the processor's argument."""
_SOURCES = ("url", "path", "base64")
"""Where a part may say what it shows, besides under its own type."""
_OTHER_NAMES = {
    "image": "images",
    "images": "image",
    "video": "videos",
    "videos": "video",
    "audio": "audios",
    "audios": "audio",
}
_PLACEHOLDERS = {
    "image_token": ("image", "images"),
    "boi_token": ("image", "images"),
    "video_token": ("video", "videos"),
    "audio_token": ("audio", "audios"),
}
"""A processor's attribute → the columns one of which its token stands for."""


class _Unread(str):
    """Unread source of an image in a turn: a path, a URL, or base64 data."""

    __slots__ = ()


def media_of(conversation: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
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
                found.setdefault(_COLUMNS[kind], []).append(_shown(part, kind))
    return {
        column: shown for column, shown in found.items() if any(one is not None for one in shown)
    }


def _shown(part: Mapping[str, Any], kind: str) -> Any:
    given = (part.get(key) for key in (kind, *_SOURCES))
    shown = next((one for one in given if one is not None), None)
    return _Unread(shown) if kind == "image" and isinstance(shown, str) else shown


def with_media(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Rename media columns for a processor, and read the images of turns.

    Args:
        row: a prepared row.
        known: the columns that the processor accepts; others are unchanged.

    Raises:
        DatasetError: only some parts of a conversation have media, or an image cannot be read.
    """
    known = frozenset(known)
    made = _by_known_names(row, known)
    for column in known & {*_OTHER_NAMES} & made.keys():
        value = made[column]
        if isinstance(value, list) and not value:
            made[column] = None
        elif isinstance(value, list) and any(one is None for one in value):
            missing = sum(one is None for one in value)
            raise DatasetError(
                f"{missing} of {len(value)} parts for {column} in a conversation do not say what "
                "they show.",
                f"Give all of them in the turns, or all in a column {column!r}.",
            )
        elif isinstance(value, list):
            made[column] = [_read(one) if isinstance(one, _Unread) else one for one in value]
    return _sampled(made, known)


def _sampled(row: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Split audio values into arrays and the column ``sampling_rate``.

    The datasets library has both in one value.
    """
    for column in known & {"audio", "audios"} & row.keys():
        value = row[column]
        sounds = [one for one in (value if isinstance(value, list) else [value]) if _is_sound(one)]
        rates = {int(one["sampling_rate"]) for one in sounds}
        if len(rates) > 1:
            raise DatasetError(
                f"its sounds have {' and '.join(map(str, sorted(rates)))} samples a second.",
                "Bring them to one rate: datasets.Audio(sampling_rate=…) does.",
            )
        if sounds and row.get("sampling_rate") is None:
            row["sampling_rate"] = rates.pop()
        if isinstance(value, list):
            row[column] = [one["array"] if _is_sound(one) else one for one in value]
        elif sounds:
            row[column] = value["array"]
    return row


def _is_sound(value: Any) -> bool:
    """Return True for an audio value of the datasets library, decoded or not."""
    if isinstance(value, Mapping):
        return "array" in value and value.get("sampling_rate") is not None
    return hasattr(value, "get_all_samples")


def _read(shown: str) -> Any:
    from transformers.image_utils import load_image  # noqa: PLC0415  # rarely needed

    try:
        return load_image(str(shown))
    except Exception as error:  # of the file, its content or the network
        raise DatasetError(
            f"The picture {shown:.80} of a conversation cannot be read: {error!s:.200}.",
            "Check the path, or give the picture itself.",
        ) from error


def _by_known_names(row: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Rename media columns to the processor's names, such as ``image`` to ``images``."""
    named = dict(row)
    for name, other in _OTHER_NAMES.items():
        if name not in known and other in known and named.get(other) is None and name in named:
            named[other] = named.pop(name)
    return named


def placeholder_ids(*owners: Any) -> frozenset[int]:
    """Ids of the placeholder tokens for images, videos and audio.

    Args:
        owners: processors or tokenizers that may define them.
    """
    known = (getattr(owner, f"{name}_id", None) for owner in owners for name in _PLACEHOLDERS)
    return frozenset(number for number in known if isinstance(number, int))


def check_placeholders(processor: Any, row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a text with placeholders for images, videos or audio that are not given.

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
        if not isinstance(token, str) or not token or not isinstance(text, str):
            continue
        if known.isdisjoint(columns):
            continue  # for instance a tokenizer, for which the token is an ordinary one
        if token in text and all(row.get(column) is None for column in columns):
            raise DatasetError(
                f"the text has {token}, and there is nothing that it stands for.",
                f"Give it in a column {columns[-1]!r} or in the turns of the conversation.",
            )
