# SPDX-License-Identifier: Apache-2.0
"""Loading of a model's tokenizer or processor, and writing it alongside the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from llmcompressor.checkpoint.source import local_directory
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger

__all__ = [
    "PROCESSOR_FILES",
    "LoadedProcessor",
    "is_as_stored",
    "load_processor",
    "processor_directory",
    "replaced_files",
    "write_processor",
]

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

_BEYOND_TOKENIZERS = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Of :data:`PROCESSOR_FILES`, what no tokenizer writes: of pictures, sound, and what joins them."""
_TEMPLATES = frozenset({"additional_chat_templates", "chat_template.jinja", "chat_template.json"})
_OF_A_CALL = frozenset({"padding", "truncation"})
"""What a fast tokenizer remembers of its last call, and would have every reader do."""
_OF_BATCHES = frozenset(
    {
        "max_length",
        "model_max_length",
        "pad_to_multiple_of",
        "pad_token",
        "pad_token_type_id",
        "padding_side",
        "stride",
        "truncation_side",
        "truncation_strategy",
    }
)
"""How samples are put together: scripts set it to calibrate, and no reader needs it."""
_NO_CLASS = "Unrecognized processing class"
_OF_A_PLACE = frozenset({"_commit_hash", "_name_or_path", "name_or_path", "tokenizer_file"})


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
    """Load the tokenizer or processor of a model.

    Args:
        processor: a processor or tokenizer (returned unchanged), the folder or id to load one
            from, or ``None`` for the model's own.
        model: the folder or id that the model was loaded from.
        trust_remote_code: run code that comes with the processor.
        revision: the hub's revision.
        cache_dir: the hub's cache.
        token: the hub's token.

    Returns:
        The processor; or ``None`` and the reason, if the model has none of its own. The caller
        decides if that matters: pre-tokenized data needs none.

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
    if _NO_CLASS in reasons[0]:  # as of any folder whose tokenizer cannot be loaded
        del reasons[0]
    reason = f"No tokenizer or processor could be loaded from {place} ({'; '.join(reasons)})."
    if processor is not None:
        raise CheckpointError(reason, "Name a folder or hub id that holds one.")
    return LoadedProcessor(None, reason)


def processor_directory(processor: Any) -> Path | None:
    """Return the local folder that ``processor`` was loaded from, if it is known."""
    tokenizer = getattr(processor, "tokenizer", processor)
    name = getattr(tokenizer, "name_or_path", None) or getattr(processor, "name_or_path", None)
    return local_directory(name) if isinstance(name, str) and name else None


def replaced_files(processor: Any, source: Path | None) -> frozenset[str]:
    """Return the names of the source's files that the files of ``processor`` replace.

    A tokenizer alone keeps the source's files for images and sound, and a processor's template if
    it has none itself.
    """
    if source is None or not isinstance(processor, PreTrainedTokenizerBase):
        return PROCESSOR_FILES
    kept = {name for name in _BEYOND_TOKENIZERS if (source / name).is_file()}
    if kept and not getattr(processor, "chat_template", None):
        kept |= {name for name in _TEMPLATES if (source / name).exists()}
    return PROCESSOR_FILES - kept


def is_as_stored(processor: Any, folder: Path) -> bool:
    """Return True if ``processor`` would be saved as ``folder`` holds it.

    A token may have been added, its chat template replaced, or a processor assembled from parts.
    Padding and truncation settings are ignored. Where its class finds no files of its own in
    ``folder``, the result is False.
    """
    try:
        stored = type(processor).from_pretrained(str(folder))
        return _written(processor) == _written(stored)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        logger.debug(f"{type(processor).__name__} is not that of {folder}: {error!r:.200}")
        return False


def write_processor(processor: Any, folder: Path) -> None:
    """Write a processor's files, without the padding and truncation of its last call.

    Otherwise loaders would truncate prompts to the length of calibration samples.
    """
    processor.save_pretrained(folder)
    stored = folder / "tokenizer.json"
    if stored.is_file():
        held = json.loads(stored.read_text(encoding="utf-8"))
        if any(held.get(key) is not None for key in _OF_A_CALL):
            held |= dict.fromkeys(_OF_A_CALL & held.keys())
            text = json.dumps(held, ensure_ascii=False, indent=2)
            stored.write_text(text, encoding="utf-8")


def _written(processor: Any) -> dict[str, Any]:
    """Return the content of each file that ``processor`` writes, without its origin."""
    with TemporaryDirectory(prefix="llmcompressor-") as place:
        processor.save_pretrained(place)
        files = (file for file in Path(place).rglob("*") if file.is_file())
        return {str(file.relative_to(place)): _content(file) for file in files}


def _content(file: Path) -> Any:
    if file.suffix != ".json":
        return file.read_bytes()
    held = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        return held
    return {key: held[key] for key in held.keys() - _OF_A_CALL - _OF_BATCHES - _OF_A_PLACE}


def _first_line(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "it brings its own code, which runs with trust_remote_code_model=True"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
