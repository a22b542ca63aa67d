# SPDX-License-Identifier: Apache-2.0
"""A model of the hub as a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

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
    """Bring a model's files into the hub's cache, without weights in other formats.

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
    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            ignore_patterns=_OTHER_FORMATS,
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise loading_error(model, error) from error
    return Path(found)
