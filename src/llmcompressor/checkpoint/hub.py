# SPDX-License-Identifier: Apache-2.0
"""A model of the hub as a folder on this machine."""

from __future__ import annotations

import glob
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from llmcompressor.checkpoint.extras import module_folders
from llmcompressor.checkpoint.load import loading_error

__all__ = ["fetch"]

_OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Bring a model's files into the hub's cache, without its weights in other formats.

    Args:
        model: its id.
        revision: a branch, tag or commit.
        cache_dir: where the cache is.
        token: for models that are not public.

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
        folders = module_folders(found)
        if folders:  # these are copied as they are, whatever the format of their weights
            download(allow_patterns=[f"{glob.escape(folder)}/*" for folder in folders])
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise loading_error(model, error) from error
    return found
