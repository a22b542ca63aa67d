# SPDX-License-Identifier: Apache-2.0
"""Scratch files for blocks between two passes over a model, one file per block."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from llmcompressor.checkpoint.journal import sync_folder
from llmcompressor.checkpoint.reading import TensorReader
from llmcompressor.checkpoint.source import read_header
from llmcompressor.errors import CheckpointError

__all__ = ["ScratchBlocks"]


class ScratchBlocks:
    """Stores dense blocks, with the parameters that modifiers have added to them.

    Args:
        folder: the folder of the files; created on the first write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, stage: int, block: str, tensors: Mapping[str, Tensor]) -> str:
        """Store a block durably and return its hash.

        Args:
            stage: the pass that produced it.
            block: its name.
            tensors: name in the model → tensor.

        Returns:
            The hash of its data.
        """
        file = self._file(stage, block)
        self._folder.mkdir(exist_ok=True)
        new = file.with_suffix(".new")
        save_file(_apart(tensors), new)
        with new.open("rb") as stream:
            os.fsync(stream.fileno())
        new.replace(file)
        sync_folder(self._folder)
        return self._read(file)[1]

    def read(self, stage: int, block: str) -> dict[str, Tensor]:
        """Return the tensors of a block by their names in the model, on the CPU."""
        return self._read(self._file(stage, block))[0]

    def remove(self, stage: int, block: str) -> None:
        """Delete a block's file, if it exists."""
        self._file(stage, block).unlink(missing_ok=True)

    def digest(self, stage: int, block: str) -> str | None:
        """Return the hash of a block's data; ``None`` if it is missing or damaged."""
        try:
            return self._read(self._file(stage, block))[1]
        except (OSError, CheckpointError):
            return None

    def _file(self, stage: int, block: str) -> Path:
        return self._folder / f"{stage}-{block}.safetensors"

    @staticmethod
    def _read(file: Path) -> tuple[dict[str, Tensor], str]:
        headers = read_header(file)
        reader = TensorReader(headers)
        digest = xxhash.xxh3_128()
        try:
            tensors = {name: reader.read(name, digest) for name in sorted(headers)}
        finally:
            reader.close()
        return tensors, digest.hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        if value.data_ptr() in seen:
            value = value.clone()
        seen.add(value.data_ptr())
        apart[name] = value
    return apart
