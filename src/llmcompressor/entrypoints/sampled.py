# SPDX-License-Identifier: Apache-2.0
"""Sampled hashing of large data: small data is hashed completely, larger data in windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from llmcompressor.checkpoint.reading import bytes_of

__all__ = ["DATA", "WEIGHTS", "Sampling", "file_print", "update_with_file", "update_with_tensor"]


@dataclass(frozen=True)
class Sampling:
    """Selection of bytes to hash: all up to a size, else evenly spread windows.

    A change between two windows is not detected.

    Attributes:
        all_up_to: size in bytes up to which all bytes are hashed.
        windows: number of windows for larger data, including the first and the last bytes.
        window: bytes of each window.
    """

    all_up_to: int
    windows: int
    window: int

    def parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the number of bytes of each hashed part.

        >>> list(Sampling(8, 3, 2).parts(8)), list(Sampling(8, 3, 2).parts(100))
        ([(0, 8)], [(0, 2), (49, 2), (98, 2)])
        """
        if nbytes <= self.all_up_to:
            yield 0, nbytes
            return
        for place in range(self.windows):
            yield place * (nbytes - self.window) // (self.windows - 1), self.window


WEIGHTS = Sampling(all_up_to=2**18, windows=16, window=2**12)
"""Of each tensor of a model."""

DATA = Sampling(all_up_to=2**26, windows=256, window=2**16)
"""Of each file of a data set."""


def update_with_tensor(digest: xxhash.xxh3_128, tensor: Tensor, sampling: Sampling) -> None:
    """Add the sampled values of a tensor to a hash; only the sampled parts are moved to the CPU.

    Args:
        digest: hash to update.
        tensor: any shape and dtype, on any device but meta.
        sampling: selects the bytes.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return
    raw = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element has any stride
    parts = [raw[start : start + count] for start, count in sampling.parts(raw.numel())]
    digest.update(bytes_of(torch.cat(parts).cpu() if len(parts) > 1 else parts[0].cpu()))


def update_with_file(
    digest: xxhash.xxh3_128, file: Path, sampling: Sampling, start: int = 0, nbytes: int = -1
) -> None:
    """Add the sampled bytes of a file, or of a range in it, to a hash.

    Args:
        digest: hash to update.
        file: the file.
        sampling: selects the bytes.
        start: first byte of the range.
        nbytes: length of the range; negative for the rest of the file.
    """
    length = file.stat().st_size - start if nbytes < 0 else nbytes
    with file.open("rb", buffering=0) as stream:
        for first, count in sampling.parts(length):
            stream.seek(start + first)
            digest.update(stream.read(count))


def file_print(file: Path, sampling: Sampling) -> str:
    """Return a file's size and a hash of its sampled bytes."""
    digest = xxhash.xxh3_128()
    update_with_file(digest, file, sampling)
    return f"{file.stat().st_size} bytes, {digest.hexdigest()}"
