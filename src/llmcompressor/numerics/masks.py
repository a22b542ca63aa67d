# SPDX-License-Identifier: Apache-2.0
r"""Magnitude pruning masks: zero the weights of least magnitude, singly or in structures.

A structure divides a weight [R, C, ...] (R outputs, C inputs, then a convolution's kernel) into
units that are zeroed as one, and scores each by the mean magnitude of its weights:

===================  ===========================================  =====================
name                 unit                                         zeros
===================  ===========================================  =====================
``unstructured``     one weight                                   anywhere
``filter``           all weights of one output, w[r]              whole rows
``channel``          all weights of one input, w[:, c]            whole columns
``block_a,b``        a x b weights of the matrix [R, C ...]       whole blocks
``N:M``              one weight                                   at most N of each M in a row
===================  ===========================================  =====================

For the last two the dimensions after the first are flattened, so a row is one output. N:M is the
number of zeros: 2:4 has two zeros in four. It is reached gradually: only the N smallest of each M
weights may be zeroed, and among those the smallest of all are zeroed first. So at every sparsity on
the way the number of zeros is exact, no group has more than N, and at N / M each has N.

Masks only grow. Masked weights stay masked, and new ones are chosen among the rest.

Shapes: R rows, C columns; U units; G groups of M weights; a, b sides of a block.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.selection import Pool, find_cut, take

__all__ = [
    "Blocks",
    "NofM",
    "Slices",
    "Source",
    "Structure",
    "Unstructured",
    "grow_masks",
    "parse_structure",
    "zeros_of",
]

_CHUNK_ELEMENTS = 1 << 20


def zeros_of(sparsity: float, units: int) -> int:
    """Number of zeros among ``units`` at a sparsity in [0, 1].

    >>> zeros_of(0.5, 10), zeros_of(0.26, 10), zeros_of(1.0, 10)
    (5, 3, 10)
    """
    return min(units, round(sparsity * units))


class Structure(ABC):
    """The partition of a weight into units that are zeroed as one."""

    @property
    def full_sparsity(self) -> float | None:
        """The only final sparsity that the structure supports; ``None`` for any."""
        return None

    @abstractmethod
    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot have this structure; ``None`` if it can."""

    @abstractmethod
    def unit(self, shape: Sequence[int]) -> int:
        """The number of weights in one unit of a weight of this shape."""

    @abstractmethod
    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """The units of ``weight`` with their scores; those masked in ``pruned`` are not free."""

    def spread(self, chosen_U: Tensor, shape: Sequence[int]) -> Tensor:
        """Expand a bool choice of units to a bool mask of the weights, of ``shape``."""
        return chosen_U


@dataclass(frozen=True)
class Unstructured(Structure):
    """Single weights."""

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Always ``None``: every weight fits."""
        return None

    def unit(self, shape: Sequence[int]) -> int:
        """Always 1."""
        return 1

    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """The single weights, scored by magnitude."""
        free = torch.ones_like(weight, dtype=torch.bool) if pruned is None else ~pruned
        return Pool(weight, free)


@dataclass(frozen=True)
class Slices(Structure):
    """Slices along a dimension: filters for 0, channels for 1."""

    dim: int

    def misfit(self, shape: Sequence[int]) -> str | None:
        """A reason unless the weight has rows and columns."""
        return None if len(shape) >= 2 else "it is no matrix"

    def unit(self, shape: Sequence[int]) -> int:
        """The size of one slice."""
        return math.prod(shape) // shape[self.dim]

    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """Mean magnitudes [R] or [C]."""
        others = [dim for dim in range(weight.ndim) if dim != self.dim]
        score_U = _mean_magnitude(weight, others)
        return Pool(score_U, _unpruned(pruned, others, score_U), self.unit(weight.shape))

    def spread(self, chosen_U: Tensor, shape: Sequence[int]) -> Tensor:
        """Expand to whole slices."""
        sizes = [-1 if dim == self.dim else 1 for dim in range(len(shape))]
        return chosen_U.view(sizes).expand(*shape).contiguous()


@dataclass(frozen=True)
class Blocks(Structure):
    """Blocks of a x b weights."""

    rows: int
    columns: int

    def misfit(self, shape: Sequence[int]) -> str | None:
        """A reason unless the sides divide the rows and columns."""
        if len(shape) < 2:
            return "it is no matrix"
        R, C = shape[0], math.prod(shape[1:])
        fits = R % self.rows == 0 and C % self.columns == 0
        return None if fits else f"{R} x {C} is no multiple of {self.rows} x {self.columns}"

    def unit(self, shape: Sequence[int]) -> int:
        """The size of a block."""
        return self.rows * self.columns

    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """Mean magnitudes [R / a, C / b]."""
        blocks_YaXb = self._blocks(weight)
        rows = max(1, _CHUNK_ELEMENTS // blocks_YaXb[0].numel())
        # Chunk by chunk: a norm over two dimensions at once takes many times as long.
        parts = (blocks_YaXb[low : low + rows] for low in range(0, len(blocks_YaXb), rows))
        sums = [_wide(part.abs()).sum(3).sum(1) for part in parts]
        score_U = torch.cat(sums) / self.unit(weight.shape)
        masked = None if pruned is None else self._blocks(pruned)
        return Pool(score_U, _unpruned(masked, [1, 3], score_U), self.unit(weight.shape))

    def spread(self, chosen_U: Tensor, shape: Sequence[int]) -> Tensor:
        """Expand to whole blocks."""
        Y, X = chosen_U.shape
        chosen_YaXb = chosen_U[:, None, :, None].expand(Y, self.rows, X, self.columns)
        return chosen_YaXb.reshape(tuple(shape))

    def _blocks(self, tensor: Tensor) -> Tensor:
        matrix = tensor.flatten(1)
        R, C = matrix.shape
        return matrix.reshape(R // self.rows, self.rows, C // self.columns, self.columns)


@dataclass(frozen=True)
class NofM(Structure):
    """At most N zeros in each M consecutive weights of a row."""

    zeros: int
    group: int

    @property
    def full_sparsity(self) -> float | None:
        """N / M."""
        return self.zeros / self.group

    def misfit(self, shape: Sequence[int]) -> str | None:
        """A reason unless M divides the columns."""
        if len(shape) < 2:
            return "it is no matrix"
        C = math.prod(shape[1:])
        return None if C % self.group == 0 else f"{C} columns are no multiple of {self.group}"

    def unit(self, shape: Sequence[int]) -> int:
        """Always 1: weights are chosen singly, among those that the groups allow."""
        return 1

    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """The single weights; the N smallest of each group are free unless already pruned."""
        weight_GM = weight.reshape(-1, self.group)
        free_GM = torch.empty_like(weight_GM, dtype=torch.bool)
        masked_GM = None if pruned is None else pruned.reshape(-1, self.group)
        groups = max(1, _CHUNK_ELEMENTS // self.group)
        for low in range(0, len(weight_GM), groups):
            at = slice(low, low + groups)
            size_GM = weight_GM[at].abs()
            if masked_GM is not None:  # pruned weights are below all others
                size_GM = size_GM.masked_fill(masked_GM[at], -1.0)
            free_GM[at] = self._least(size_GM)
            if masked_GM is not None:
                free_GM[at] &= ~masked_GM[at]
        return Pool(weight_GM, free_GM)

    def spread(self, chosen_U: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape to the shape of the weight."""
        return chosen_U.reshape(tuple(shape))

    def _least(self, size_GM: Tensor) -> Tensor:
        """Mask of the N smallest of each group; of equal values the first are chosen."""
        least_GM = torch.empty_like(size_GM, dtype=torch.bool)
        for column in range(self.group):
            own_G1 = size_GM[:, column : column + 1]
            rank_G = (size_GM < own_G1).sum(1) + (size_GM[:, :column] == own_G1).sum(1)
            least_GM[:, column] = rank_G < self.zeros
        return least_GM


def parse_structure(text: str) -> Structure:
    """Parse the name of a structure.

    >>> parse_structure("block_1,4"), parse_structure("2:4")
    (Blocks(rows=1, columns=4), NofM(zeros=2, group=4))

    Raises:
        InputError: there is no structure of this name.
    """
    plain = {"unstructured": Unstructured(), "filter": Slices(0), "channel": Slices(1)}
    name = text.strip().lower()
    if name in plain:
        return plain[name]
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    if re.fullmatch(r"block_\d+\s*,\s*\d+", name) and min(numbers) > 0:
        return Blocks(*numbers)
    if re.fullmatch(r"\d+:\d+", name) and 0 < numbers[0] < numbers[1]:
        return NofM(*numbers)
    raise InputError(
        f"There is no mask structure {text!r}.",
        "Choose unstructured, channel, filter, block_a,b (as block_1,4) or N:M with N below M (as "
        "2:4, which has two zeros in four).",
    )


@dataclass(frozen=True)
class Source:
    """A weight that is loaded when it is needed.

    Attributes:
        shape: of the weight, [R, C, ...].
        dtype: of the weight.
        zeros: number of its weights that are masked already.
        read: returns the weight, and a bool mask of its shape of the masked weights, or ``None``.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    zeros: int
    read: Callable[[], tuple[Tensor, Tensor | None]]

    @classmethod
    def of(cls, weight: Tensor, pruned: Tensor | None = None) -> Source:
        """A source for a weight in memory."""
        zeros = 0 if pruned is None else int(pruned.sum())
        return cls(weight.shape, weight.dtype, zeros, lambda: (weight, pruned))


@torch.no_grad()
def grow_masks(
    sources: Sequence[Source], structure: Structure, sparsity: float
) -> Iterator[Tensor]:
    """Masks under which the weights together have a sparsity, by increasing magnitude.

    The number of zeros is exact: ``round(sparsity n)`` of n weights; with units of u weights, all
    of one size, ``u round(sparsity n / u)``. If units differ in size (filters or channels of
    several weights) they are taken as long as the next one fits. Of equal scores the first in
    memory are taken, in the order of the sources. If more is masked already, nothing is added.

    Args:
        sources: one weight for a threshold of its own, several for a common one.
        structure: the units that are zeroed as one.
        sparsity: the fraction of zeros, in [0, 1].

    Yields:
        The mask of each source, bool [R, C, ...], true where the weight is to be zero.
    """
    weights = sum(math.prod(source.shape) for source in sources)
    unit = math.gcd(*(structure.unit(source.shape) for source in sources))
    budget = zeros_of(sparsity, weights // unit) * unit - sum(source.zeros for source in sources)
    wide = any(source.dtype == torch.float64 for source in sources)

    # The pool of a single weight is kept; those of many would not fit into memory together.
    kept = [structure.pool(*sources[0].read())] if len(sources) == 1 else None

    def pools() -> Iterable[Pool]:
        return kept or (structure.pool(*source.read()) for source in sources)

    cut = find_cut(pools, budget, torch.float64 if wide else torch.float32)
    for source in sources:
        weight, pruned = source.read()
        taken_U, cut = take(kept[0] if kept else structure.pool(weight, pruned), cut)
        mask = structure.spread(taken_U, weight.shape)
        yield mask if pruned is None else mask | pruned


def _mean_magnitude(weight: Tensor, dims: Sequence[int]) -> Tensor:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    sums: Tensor = torch.linalg.vector_norm(weight, ord=1, dim=list(dims), dtype=dtype)
    return sums / math.prod(weight.shape[dim] for dim in dims)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that is wide enough for sums."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _unpruned(pruned: Tensor | None, dims: Sequence[int], score_U: Tensor) -> Tensor:
    """Mask of the units that are not pruned; each is masked as a whole or not at all."""
    if pruned is None:
        return torch.ones_like(score_U, dtype=torch.bool)
    return ~pruned.amax(dim=list(dims))
