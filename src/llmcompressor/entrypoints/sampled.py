# SPDX-License-Identifier: Apache-2.0
"""What of much data is hashed, to tell it from other data: all of a little, parts of the rest."""

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
    """Which bytes are hashed: all up to a size, else windows that lie evenly over the whole.

    What changes between two windows only is not seen.

    Attributes:
        all_up_to: bytes of which every one is hashed.
        windows: how many there are of more than that, the first and the last bytes among them.
        window: bytes of each.
    """

    all_up_to: int
    windows: int
    window: int

    def parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """First byte and number of bytes of each part that is hashed.

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
    """Add the values of a tensor to a hash; what is on an accelerator is fetched in parts.

    Args:
        digest: of what came before.
        tensor: any shape and dtype, on any device that holds values.
        sampling: which of its bytes.
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
    """Add the bytes of a file, or of one stretch of it, to a hash.

    Args:
        digest: of what came before.
        file: which.
        sampling: which of the bytes.
        start: where the stretch begins.
        nbytes: how long it is; negative for all that follows.
    """
    length = file.stat().st_size - start if nbytes < 0 else nbytes
    with file.open("rb", buffering=0) as stream:
        for first, count in sampling.parts(length):
            stream.seek(start + first)
            digest.update(stream.read(count))


def file_print(file: Path, sampling: Sampling) -> str:
    """A file's size and a hash of its bytes."""
    digest = xxhash.xxh3_128()
    update_with_file(digest, file, sampling)
    return f"{file.stat().st_size} bytes, {digest.hexdigest()}"
