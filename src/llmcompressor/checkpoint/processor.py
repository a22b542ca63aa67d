# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and processors: load one for a model, write it beside the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoProcessor, AutoTokenizer

from llmcompressor.checkpoint.source import local_directory
from llmcompressor.errors import CheckpointError

__all__ = ["PROCESSOR_FILES", "LoadedProcessor", "load_processor", "processor_directory"]

PROCESSOR_FILES = frozenset(
    {
        "added_tokens.json",
        "additional_chat_templates",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


class LoadedProcessor(NamedTuple):
    """A processor or tokenizer, or the reason why there is none."""

    processor: Any | None
    reason: str


def load_processor(
    processor: Any | None,
    model: str | os.PathLike[str] | None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
) -> LoadedProcessor:
    """Load what turns text, images or sound into the model's inputs.

    Args:
        processor: a processor or tokenizer (returned as it is), where to load one from, or
            ``None`` for the model's own.
        model: where the model came from.
        trust_remote_code: run code that comes with the processor.
        revision: the hub's revision.
        cache_dir: the hub's cache.
        token: the hub's token.

    Returns:
        The processor; or ``None`` and the reason, if the model has none of its own. Whether that
        matters is the caller's decision: pre-tokenized data needs none.

    Raises:
        CheckpointError: the processor that was asked for by name cannot be loaded.
    """
    if processor is not None and not isinstance(processor, str | os.PathLike):
        return LoadedProcessor(processor, "")
    place = processor if processor is not None else model
    if place is None or str(place) == "":
        return LoadedProcessor(None, "The model does not say where it was loaded from.")
    arguments = {
        "trust_remote_code": trust_remote_code,
        "revision": revision or "main",
        "cache_dir": cache_dir,
        "token": token,
    }
    reasons = []
    for loader in (AutoProcessor, AutoTokenizer):
        try:
            return LoadedProcessor(loader.from_pretrained(str(place), **arguments), "")
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            reasons.append(f"{loader.__name__}: {_first_line(error)}")
    reason = f"No tokenizer or processor could be loaded from {place} ({'; '.join(reasons)})."
    if processor is not None:
        raise CheckpointError(reason, "Name a folder or hub id that holds one.")
    return LoadedProcessor(None, reason)


def processor_directory(processor: Any) -> Path | None:
    """The local folder that ``processor`` was loaded from, if it is known."""
    tokenizer = getattr(processor, "tokenizer", processor)
    name = getattr(tokenizer, "name_or_path", None) or getattr(processor, "name_or_path", None)
    return local_directory(name) if isinstance(name, str) and name else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
