# SPDX-License-Identifier: Apache-2.0
"""Download of a model from the Hugging Face Hub."""

from __future__ import annotations

import glob
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from llmcompressor.checkpoint.extras import SPEAKERS_FILE, module_folders
from llmcompressor.checkpoint.load import loading_error
from llmcompressor.checkpoint.source import CONFIG

__all__ = ["fetch"]

_OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]

_SPEAKING = "qwen2_5_omni"


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Download a model's files into the hub's cache, without its weights in other formats.

    Args:
        model: the model's id.
        revision: a branch, tag or commit.
        cache_dir: the cache's folder.
        token: a token for models that are not public.

    Returns:
        The folder of the snapshot.

    Raises:
        CheckpointError: the hub cannot be reached, or does not have it.
    """
    download = partial(
        snapshot_download, model, revision=revision, cache_dir=cache_dir, token=token
    )
    try:
        found = Path(download(ignore_patterns=_OTHER_FORMATS))
        # these are copied as they are, whatever their format
        further = [f"{glob.escape(folder)}/*" for folder in module_folders(found)]
        if _speaks(found):
            further.append(SPEAKERS_FILE)
        if further:
            download(allow_patterns=further)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise loading_error(model, error) from error
    return found


def _speaks(folder: Path) -> bool:
    """Return True if the model's class loads its voices from a separate file."""
    config = folder / CONFIG
    return config.is_file() and f'"{_SPEAKING}"' in config.read_text(encoding="utf-8")
