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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError

# --------------------
# Radix selection of the smallest scores within an exact budget, in bounded memory.
#
# The bits of a non-negative float, read as an integer, have the order of the floats. So the
# threshold is found digit by digit (radix selection, 16 bits a digit): count how often each first
# digit occurs, find the one in which the budget ends, count the second digits of the scores that
# begin with it, and so on. Every score is read once per digit, in chunks and one pool after
# another; nothing is sorted, joined or kept except 65 536 counts. Counts are integers, so the
# result depends neither on the device nor on the chunks.
#
# Ties: scores are taken in the order of the pools, and within one by position in memory.

_SELECTION_CHUNK = 1 << 22
_CPU_CHUNK_ELEMENTS = 1 << 19
"""On a CPU, where what is made of a chunk should fit into the cache."""
_DIGIT = 16
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
_LARGEST_KEY = 1 << 63


@dataclass(frozen=True)
class Pool:
    """Units of one tensor from which the smallest are selected.

    Attributes:
        score_U: floating dtype, any shape; the absolute value counts. No NaN.
        free_U: bool, same shape; false for units that may not be selected.
        size: cost of one unit in the budget.
    """

    score_U: Tensor
    free_U: Tensor
    size: int = 1


@dataclass(frozen=True)
class SelectionThreshold:
    """Units with a smaller key are selected, and those with this key while ``spare`` lasts.

    Keys are the bits of float32 or float64.
    """

    key: int
    spare: int
    dtype: torch.dtype


def find_threshold(
    pools: Callable[[], Iterable[Pool]], budget: int, dtype: torch.dtype
) -> SelectionThreshold:
    """Find the score at which ``budget``, a sum of sizes, is exhausted, from the smallest on.

    A unit that does not fit ends the selection: the next one is not tried in its place. ``pools``
    is called once per digit, so that they can be computed one at a time. Scores are compared in
    ``dtype``, float32 or float64. :func:`select_below` of every pool, in the same order, selects
    the units.
    """
    if budget <= 0:
        return SelectionThreshold(0, 0, dtype)
    key, spare = 0, budget
    bits = torch.finfo(dtype).bits
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
        for pool in pools():
            counts += _digit_counts(pool, key, shift, dtype).cpu() * pool.size
        sums = counts.cumsum(0)
        digit = int(torch.searchsorted(sums, spare, right=True))
        if digit == len(sums):  # all fit; only of the first digit
            return SelectionThreshold(_LARGEST_KEY, 0, dtype)
        spare -= int(sums[digit - 1]) if digit else 0
        key = (key << _DIGIT) | digit
    return SelectionThreshold(key, spare, dtype)


def select_below(pool: Pool, cut: SelectionThreshold) -> tuple[Tensor, SelectionThreshold]:
    """The units below the cut, bool of the pool's shape, and the cut for the next pool."""
    taken_U = torch.zeros_like(pool.free_U, memory_format=torch.contiguous_format)
    flat_U, spare = taken_U.view(-1), cut.spare
    for at, key_U, free_U in _chunks(pool, cut.dtype):
        if cut.key == _LARGEST_KEY:
            flat_U[at] = free_U
            continue
        chosen_U = (key_U < cut.key) & free_U
        if spare >= pool.size:
            level_U = (key_U == cut.key) & free_U
            found = int(level_U.sum())
            fit = min(found, spare // pool.size)
            if fit < found:
                level_U[level_U.nonzero()[fit:]] = False
            chosen_U |= level_U
            spare -= fit * pool.size
        flat_U[at] = chosen_U
    return taken_U, SelectionThreshold(cut.key, spare, cut.dtype)


def _digit_counts(pool: Pool, prefix: int, shift: int, dtype: torch.dtype) -> Tensor:
    """Count of each digit that follows ``prefix`` in the keys of the free units, int64 [2^16]."""
    counts = torch.zeros(1 << _DIGIT, dtype=torch.int64, device=pool.score_U.device)
    first = shift == torch.finfo(dtype).bits - _DIGIT
    for _, key_U, free_U in _chunks(pool, dtype):
        head_U = key_U >> shift
        counted_U = free_U if first else free_U & ((head_U >> _DIGIT) == prefix)
        digit_U = (head_U & ((1 << _DIGIT) - 1))[counted_U]
        counts += torch.bincount(digit_U, minlength=1 << _DIGIT)
    return counts


def _chunks(pool: Pool, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Positions, keys (int32 or int64) and free masks of a bounded number of units at a time."""
    score_U, free_U = pool.score_U.reshape(-1), pool.free_U.reshape(-1)
    step = _CPU_CHUNK_ELEMENTS if score_U.device.type == "cpu" else _SELECTION_CHUNK
    for low in range(0, len(score_U), step):
        at = slice(low, low + step)
        # abs() clears the sign, so that zero has one key; the copy also makes it contiguous.
        yield at, score_U[at].to(dtype).abs().view(_KEYS[dtype]), free_U[at]


# --------------------
# Structures.

_CHUNK_ELEMENTS = 1 << 20


def num_zeros(sparsity: float, units: int) -> int:
    """Number of zeros among ``units`` at a sparsity in [0, 1].

    >>> num_zeros(0.5, 10), num_zeros(0.26, 10), num_zeros(1.0, 10)
    (5, 3, 10)
    """
    return min(units, round(sparsity * units))


@dataclass(frozen=True)
class Structure:
    """The partition of a weight into units that are zeroed as one: here single weights."""

    @property
    def full_sparsity(self) -> float | None:
        """The only final sparsity that the structure supports; ``None`` for any."""
        return None

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot have this structure; ``None`` if it can."""
        return None

    def unit(self, shape: Sequence[int]) -> int:
        """The number of weights in one unit of a weight of this shape."""
        return 1

    def pool(self, weight: Tensor, pruned: Tensor | None) -> Pool:
        """The units of ``weight`` with their scores; those masked in ``pruned`` are not free."""
        return Pool(weight, _unpruned(pruned, (), weight))

    def spread(self, chosen_U: Tensor, shape: Sequence[int]) -> Tensor:
        """Expand a bool choice of units to a bool mask of the weights, of ``shape``."""
        return chosen_U.reshape(tuple(shape))


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
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        sums_U: Tensor = torch.linalg.vector_norm(weight, ord=1, dim=others, dtype=dtype)
        score_U = sums_U / math.prod(weight.shape[dim] for dim in others)
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
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        sums = [part.abs().to(wide).sum(3).sum(1) for part in parts]
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
    plain = {"unstructured": Structure(), "filter": Slices(0), "channel": Slices(1)}
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
class LazyWeight:
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
    def of(cls, weight: Tensor, pruned: Tensor | None = None) -> LazyWeight:
        """A source for a weight in memory."""
        zeros = 0 if pruned is None else int(pruned.sum())
        return cls(weight.shape, weight.dtype, zeros, lambda: (weight, pruned))


@torch.no_grad()
def grow_masks(
    sources: Sequence[LazyWeight], structure: Structure, sparsity: float
) -> Iterator[Tensor]:
    """Masks under which the weights together have a sparsity in [0, 1], by increasing magnitude.

    The number of zeros is exact: ``round(sparsity n)`` of n weights; with units of u weights, all
    of one size, ``u round(sparsity n / u)``. If units differ in size (filters or channels of
    several weights) they are taken as long as the next one fits. Of equal scores the first in
    memory are taken, in the order of the sources, which have one threshold in common. If more is
    masked already, nothing is added.

    Yields:
        The mask of each source, bool [R, C, ...], true where the weight is to be zero.
    """
    weights = sum(math.prod(source.shape) for source in sources)
    unit = math.gcd(*(structure.unit(source.shape) for source in sources))
    budget = num_zeros(sparsity, weights // unit) * unit - sum(source.zeros for source in sources)
    wide = any(source.dtype == torch.float64 for source in sources)

    # The pool of a single weight is kept; those of many would not fit into memory together.
    kept = [structure.pool(*sources[0].read())] if len(sources) == 1 else None

    def pools() -> Iterable[Pool]:
        return kept or (structure.pool(*source.read()) for source in sources)

    cut = find_threshold(pools, budget, torch.float64 if wide else torch.float32)
    for source in sources:
        weight, pruned = source.read()
        taken_U, cut = select_below(kept[0] if kept else structure.pool(weight, pruned), cut)
        mask = structure.spread(taken_U, weight.shape)
        yield mask if pruned is None else mask | pruned


def _unpruned(pruned: Tensor | None, dims: Sequence[int], score_U: Tensor) -> Tensor:
    """Mask of the units that are not pruned; each is masked as a whole or not at all."""
    if pruned is None:
        return torch.ones_like(score_U, dtype=torch.bool)
    return ~(pruned.amax(dim=list(dims)) if dims else pruned)


# --------------------
# Sparsity schedules of a training, in closed form.
#
# With s_i the sparsity at the start, s_f that at the end and t in [0, 1] the progress:
#
# ===================  ====================================================
# linear               s_i + (s_f - s_i) t
# polynomial           s_i + (s_f - s_i) t^k
# polynomial_decay     s_f + (s_i - s_f) (1 - t)^k
# multi_step           the sparsity of the last step that was reached
# ===================  ====================================================
#
# ``polynomial_decay`` with k = 3 is the cubic schedule of Zhu & Gupta, *To prune, or not to prune*
# (arXiv:1710.01878), eq. 1, with t = (i - start) / (n dt): fast at first, when many weights are
# redundant, slow in the end. All are exact at both ends, independent of rounding in between.


def progress(index: float, start: float, end: float) -> float:
    """The fraction of the window from ``start`` to ``end`` completed at ``index``, in [0, 1].

    An empty window is a jump.

    >>> progress(3, 2, 4), progress(1, 2, 4), progress(9, 2, 4)
    (0.5, 0.0, 1.0)
    >>> progress(1.9, 2, 2), progress(2, 2, 2)
    (0.0, 1.0)
    """
    if index >= end:
        return 1.0
    return max(0.0, (index - start) / (end - start)) if index > start else 0.0


def linear(t: float, init: float, final: float) -> float:
    """The same increase at every step.

    >>> linear(0.5, 0.25, 0.75)
    0.5
    """
    return _interpolate(init, final, t)


def polynomial(t: float, init: float, final: float, exponent: float = 2.0) -> float:
    """Slow at first, fast in the end, for an exponent above 1.

    >>> polynomial(0.5, 0.0, 0.8), polynomial(0.5, 0.0, 0.8, exponent=1)
    (0.2, 0.4)
    """
    return _interpolate(init, final, t**exponent)


def polynomial_decay(t: float, init: float, final: float, exponent: float = 3.0) -> float:
    """Fast at first, slow in the end, for an exponent above 1; cubic by default.

    >>> polynomial_decay(0.5, 0.0, 1.0), polynomial_decay(0.5, 0.0, 1.0, exponent=1)
    (0.875, 0.5)
    """
    return _interpolate(init, final, 1.0 - (1.0 - t) ** exponent)


def multi_step(index: float, steps: Iterable[tuple[float, float]], init: float) -> float:
    """The sparsity of the last of ``steps`` reached at ``index``, pairs of an index and a sparsity.

    >>> [multi_step(i, [(2, 0.5), (4, 0.75)], 0.1) for i in (1, 2, 3.9, 4)]
    [0.1, 0.5, 0.5, 0.75]
    """
    behind = [(at, sparsity) for at, sparsity in steps if at <= index]
    return max(behind, key=lambda step: step[0])[1] if behind else init


def _interpolate(init: float, final: float, share: float) -> float:
    """Interpolate with exact ends: ``init`` at share 0 and ``final`` at share 1."""
    return final if share >= 1.0 else init + (final - init) * share


# --------------------
# Selection of the weights to keep by score, with an exact number of zeros.
#
# Scores are transposed (``[..., C, R]``), as the solvers hold a weight, and the rows of several
# weights may be stacked: each of them (a :class:`Share`) has its own sparsity.
#
# Shapes: R rows, C columns; M weights of a group, N of them zero; S rows of one share.


@dataclass(frozen=True)
class Share:
    """Some rows of a stack, and the fraction of their weights that is to be zero."""

    rows: int
    sparsity: float


@dataclass(frozen=True)
class Sparsity:
    """The target sparsity of a stack of weights.

    Attributes:
        shares: sparsities of its rows, from the first on.
        group: N zeros in each M consecutive weights of a row, overriding the shares; ``None`` for
            zeros anywhere.
    """

    shares: tuple[Share, ...]
    group: NofM | None = None

    def spans(self) -> Iterator[tuple[slice, float]]:
        """The rows of each share, and its sparsity."""
        start = 0
        for share in self.shares:
            yield slice(start, start + share.rows), share.sparsity
            start += share.rows

    def zeros(self, columns: int) -> list[int]:
        """Number of zeros of each share in its first ``columns``."""
        return [num_zeros(share.sparsity, share.rows * columns) for share in self.shares]


def keep_mask(
    score_CR: Tensor,
    sparsity: Sparsity,
    *,
    gone_CR: Tensor | None = None,
    budgets: Sequence[int] | None = None,
) -> Tensor:
    """Keep the weights with the highest scores in each share, or in each group of it.

    Args:
        score_CR: at least 0 and finite, float32 ``[..., C, R]``.
        sparsity: the number of weights to remove.
        gone_CR: bool, same shape: weights that are zero in any case, included in the number.
        budgets: number of weights to remove of each share, for every member of a batch; by default
            from ``sparsity``.

    Returns:
        Bool ``[..., C, R]``, true for kept weights. Of equal scores the first in memory are
        removed.

    >>> score = torch.tensor([[3.0], [1.0], [2.0], [4.0]])
    >>> keep_mask(score, Sparsity((Share(1, 0.5),), NofM(2, 4))).flatten().tolist()
    [True, False, False, True]
    """
    if sparsity.group is not None:
        return keep_mask_by_group(score_CR, sparsity.group, gone_CR).bool()
    kept_CR = torch.empty_like(score_CR, dtype=torch.bool)
    if budgets is None:
        budgets = sparsity.zeros(score_CR.shape[-2])
    flat = (-1, *score_CR.shape[-2:])
    gone_BCR = None if gone_CR is None else gone_CR.view(flat)
    pairs = zip(score_CR.reshape(flat), kept_CR.view(flat), strict=True)
    for batch, (each_CR, kept) in enumerate(pairs):
        for (rows, _), budget in zip(sparsity.spans(), budgets, strict=True):
            score_CS = each_CR[:, rows]
            free_CS = torch.ones_like(score_CS, dtype=torch.bool)
            if gone_BCR is not None:
                free_CS = ~gone_BCR[batch, :, rows]
                budget -= free_CS.numel() - int(free_CS.sum())  # noqa: PLW2901 - what is left
            pool = [Pool(score_CS, free_CS)]
            cut = find_threshold(pool.copy, budget, torch.float32)
            kept[:, rows] = free_CS & ~select_below(pool[0], cut)[0]
    return kept_CR


def keep_mask_by_row(score_RC: Tensor, sparsity: float) -> Tensor:
    """Keep the weights with the highest scores, at least 0, in each row of ``[..., R, C]``.

    Every row loses the same fraction.

    >>> keep_mask_by_row(torch.tensor([[3.0, 1.0], [5.0, 6.0]]), 0.5).tolist()
    [[True, False], [False, True]]
    """
    zeros = num_zeros(sparsity, score_RC.shape[-1])
    least_RZ = score_RC.topk(zeros, dim=-1, largest=False, sorted=False).indices
    return torch.ones_like(score_RC, dtype=torch.bool).scatter_(-1, least_RZ, False)


def keep_mask_by_group(score_CR: Tensor, group: NofM, gone_CR: Tensor | None = None) -> Tensor:
    """Mask of 1 for kept weights: all but the N lowest scores of each group of M columns.

    Of equal scores, at least 0, the first are removed; weights in ``gone_CR`` rank below every
    other and are never kept. Computed by M (M - 1) / 2 comparisons of whole columns, which needs no
    sorting and reads memory in order. The mask has the dtype of ``score_CR``, since a CPU
    vectorizes only numbers here.

    Raises:
        InputError: M does not divide the columns.

    >>> score = torch.tensor([[3.0], [1.0], [2.0], [4.0]])
    >>> keep_mask_by_group(score, NofM(2, 4)).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    M, C = group.group, score_CR.shape[-2]
    if C % M:
        raise InputError(
            f"{C} columns do not make groups of {M}, which {group.zeros}:{M} asks for.",
            "Leave this weight out, or choose groups whose size divides its columns.",
        )
    if gone_CR is not None:
        score_CR = score_CR.masked_fill(gone_CR, -1)
    score_GMR = score_CR.reshape(*score_CR.shape[:-2], -1, M, score_CR.shape[-1])
    rank_GMR = torch.empty_like(score_GMR)
    each_GR, ranks_GR = score_GMR.unbind(-2), rank_GMR.unbind(-2)
    for number, rank_GR in enumerate(ranks_GR):
        rank_GR.fill_(M - 1 - number)  # as if it were before all that follow
    behind_GR = torch.empty_like(each_GR[0])
    for later in range(1, M):
        for earlier in range(later):
            torch.le(each_GR[earlier], each_GR[later], out=behind_GR)
            ranks_GR[later].add_(behind_GR)
            ranks_GR[earlier].sub_(behind_GR)
    kept_CR = rank_GMR.ge_(group.zeros).flatten(-3, -2)
    return kept_CR if gone_CR is None else kept_CR.mul_(~gone_CR)
