# SPDX-License-Identifier: Apache-2.0
"""Writer of safetensors shards of limited size, holding one file's tensors at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmcompressor.checkpoint.source import INDEX, SINGLE
from llmcompressor.errors import ArgumentError
from llmcompressor.memory import give_back_freed

__all__ = ["ShardWriter", "natural_key", "parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: int | str) -> int:
    """Parse a file size into bytes.

    >>> parse_size("20GB"), parse_size("1.5MiB"), parse_size(7)
    (20000000000, 1572864, 7)
    """
    if isinstance(size, int) and size > 0:
        return size
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ArgumentError(f"{size!r} is no file size.", 'Give bytes, or text such as "5GB".')
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return max(int(float(number) * base ** _POWER[unit.upper()]), 1)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layers.2`` before ``layers.10``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]


_RETURN_EVERY = 2**25
"""Bytes of packed tensors after which freed memory is given back."""


class ShardWriter:
    """Collect tensors and write a shard whenever the limit would be exceeded.

    The files get their final names (which contain their count) in :meth:`close`.

    Args:
        folder: the folder of the files.
        limit: bytes of tensors per file; a single larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._open: dict[str, Tensor] = {}
        self._open_size = 0
        self._files: list[tuple[Path, list[str]]] = []
        self.total_size = 0
        self._unreturned = 0

    @property
    def names(self) -> set[str]:
        """Names of all tensors so far."""
        return {name for _, names in self._files for name in names} | set(self._open)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors, copied to the CPU if they are elsewhere."""
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._open and self._open_size + size > self._limit:
                self.flush()
            self._open[name] = _storable(tensor)
            self._open_size += size
            self.total_size += size
            self._unreturned += size
        if self._unreturned >= _RETURN_EVERY:
            give_back_freed()  # temporaries of packing fragment the heap
            self._unreturned = 0

    def flush(self) -> None:
        """Write the collected tensors; the next tensor starts a new file."""
        if not self._open:
            return
        file = self._folder / f"shard-{len(self._files):05d}.safetensors"
        save_file(self._open, str(file), metadata={"format": "pt"})
        # safetensors creates files for the owner only; the folder's mode follows the umask
        file.chmod(self._folder.stat().st_mode & 0o666)
        self._files.append((file, list(self._open)))
        self._open, self._open_size = {}, 0

    def close(self) -> None:
        """Write the rest, name the files, and write the index if there are several."""
        self.flush()
        count = len(self._files)
        if count == 1:
            self._files[0][0].rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(self._files, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            file.rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / INDEX).write_text(text, encoding="utf-8")


def _storable(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with its own storage, as safetensors refuses aliases."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = torch.clone(tensor, memory_format=torch.contiguous_format)
    return tensor
