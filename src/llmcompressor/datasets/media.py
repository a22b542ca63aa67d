# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos and sounds that belong to a row of text.

They stand in columns of their own, or within a conversation: a part of a turn has a ``type`` and,
under one of a few keys, what it shows. A chat template renders a placeholder of it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcompressor.errors import DatasetError

__all__ = ["by_known_names", "check_placeholders", "media_of"]

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


def media_of(conversation: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What the turns of a conversation show, in their order, by the processor's arguments.

    Pictures that are named by a path, an address or in base64 are read.

    Raises:
        DatasetError: some parts of a type bring what they show and others do not, or a picture
            cannot be read.
    """
    found: dict[str, list[Any]] = {}
    for turn in conversation:
        content = turn.get("content")
        for part in content if isinstance(content, Sequence) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _COLUMNS:
                found.setdefault(_COLUMNS[kind], []).append(_shown(part, kind))
    for column, shown in found.items():
        missing = sum(one is None for one in shown)
        if 0 < missing < len(shown):
            raise DatasetError(
                f"{missing} of {len(shown)} parts for {column} in a conversation do not say what "
                "they show.",
                f"Give all of them in the turns, or all in a column {column!r}.",
            )
    return {column: shown for column, shown in found.items() if shown[0] is not None}


def _shown(part: Mapping[str, Any], kind: str) -> Any:
    given = (part.get(key) for key in (kind, *_SOURCES))
    shown = next((one for one in given if one is not None), None)
    if kind != "image" or not isinstance(shown, str):
        return shown
    from transformers.image_utils import load_image  # noqa: PLC0415  # few data hold pictures

    try:
        return load_image(shown)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"The picture {shown:.80} of a conversation cannot be read: {error!s:.200}.",
            "Check the path, or give the picture itself.",
        ) from error


def by_known_names(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """``row`` with its media under the names that a processor knows: ``image`` as ``images``."""
    known = frozenset(known)
    named = dict(row)
    for name, other in _OTHER_NAMES.items():
        if name not in known and other in known and named.get(other) is None and name in named:
            named[other] = named.pop(name)
    return named


def check_placeholders(processor: Any, row: Mapping[str, Any]) -> None:
    """Refuse a text that stands for a picture, video or sound where none is given.

    The model would run on the bare placeholders.

    Args:
        processor: knows their tokens.
        row: what it is called with.

    Raises:
        DatasetError: names the token.
    """
    text = row.get("text")
    for attribute, columns in _PLACEHOLDERS.items():
        token = getattr(processor, attribute, None)
        if not isinstance(token, str) or not token or not isinstance(text, str):
            continue
        if token in text and all(row.get(column) is None for column in columns):
            raise DatasetError(
                f"the text has {token}, and there is nothing that it stands for.",
                f"Give it in a column {columns[-1]!r} or in the turns of the conversation.",
            )
