# SPDX-License-Identifier: Apache-2.0
"""Second moments of the inputs of a Linear: ``G = XᵀX`` and the cross product of two streams.

T tokens, C columns (input features), R rows. Sums are accumulated in float32, or float64 on
request, whatever the inputs' dtype ``[T, C]``, in place, on one device. Many small products are
slow, so the callers buffer tokens (:class:`TokenBuffer`) and multiply two thousand at a time. On a
CPU products have few distinct sizes: each new one costs oneDNN half a megabyte permanently, and
time to prepare.

=================  =============================================================================
inputs             product
=================  =============================================================================
CUDA, 16 bit       16-bit operands, float32 accumulation and float32 result: exact products
CPU                the upper block triangle only, in float32; operands that came from bfloat16
                   are multiplied as bfloat16, which is exact, and summed in float32
CPU, rounded       :class:`Int8Columns`: exact products of 8-bit integers
float64            in float64, on any device
=================  =============================================================================

With Y the input in the compressed model and X that in the original one, the cross product
``Yᵀ(X − Y)`` has no symmetry to exploit; its operands and sums are the same. It only corrects the
weight, but a 16-bit result per chunk costs quality. If a weight has few rows, its output residual
``W (X − Y)ᵀ Y`` takes ``2 R C`` multiplications per token in place of ``C²``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmcompressor.numerics.int8_products import (
    TOKENS,
    Int8Columns,
    add_int8_product,
    int8_columns,
    prefers_int8,
)
from llmcompressor.numerics.products import parallel_matmul
from llmcompressor.runtime.threads import parallel_for

CHUNK_TOKENS = TOKENS
"""Tokens that are multiplied at once: enough to run at the machine's matrix rate."""
_WIDE_TOKENS = 1024
"""Tokens that are widened at once on the CPU: as fast as all, in half of the memory."""
_SQUARED_TOKENS = 256
"""Tokens that are squared at once: few enough for a processor's cache, and for its allocator."""
_EVEN_TOKENS = 64
"""The last of them are filled up with zeros to a multiple of this on the CPU: few sizes."""
_PARTS = 8
"""Block rows of the triangle: 8 leave 36 of 64 blocks to compute."""
_NARROWEST = 128
"""Columns of a block row below which its products are too small to be fast."""


_MASSIVE = 8.0
"""The length, in medians, from which on a token is massive: far from what tokens differ by."""
_COUNTED = 2.0
"""The length, in medians, as which it counts."""
_EXPLODED = 100.0
"""The length, in medians, from which on a gradient is taken for exploded: those of keys that every
token attends to have up to 75 medians, those of a text that began in an unstable way 150 to
6,600."""
_LONGEST = 10.0
"""The length, in medians, as which a longer gradient counts where few tokens stand for all."""


def limit_massive_tokens(input_TC: Tensor, *others_TC: Tensor) -> list[Tensor]:
    r"""Scale massive tokens, so that second moments count them as twice the median.

    A few tokens, the first of a text above all, have activations that are hundreds of times as
    large as those of others (Sun et al., *Massive Activations in Large Language Models*,
    arXiv:2402.17762). Their squares make up most of ``XᵀX``, and a solver that minimizes ``tr(D XᵀX
    Dᵀ)`` then spends the weights on outputs on which predictions hardly depend. Token t gets

    .. math:: w_t = 2 \operatorname{median}_s \lVert x_s \rVert / \lVert x_t \rVert
              \quad\text{if}\quad \lVert x_t \rVert > 8 \operatorname{median}_s \lVert x_s \rVert ,

    where the median is over the tokens with an input that is not zero.

    Args:
        input_TC: the inputs x, floating dtype.
        others_TC: tensors of the same tokens, which get the weights of ``input_TC``.

    Returns:
        All tensors in their dtypes; the given ones where no token is too long.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [300.0, 400.0]])
    >>> limit_massive_tokens(x)[0].tolist()[-1]
    [1.2000000476837158, 1.600000023841858]
    """
    length_T, median = _lengths(input_TC)
    is_massive_T = length_T > _MASSIVE * median  # NaN is not: what is not finite stays so
    if not bool(is_massive_T.any()):
        return [input_TC, *others_TC]
    weight_T1 = torch.where(is_massive_T, _COUNTED * median / length_T, 1).unsqueeze(-1)
    return [one_TC * weight_T1.to(one_TC.dtype) for one_TC in (input_TC, *others_TC)]


def massive_tokens(input_TC: Tensor) -> Tensor:
    """Which tokens :func:`limit_massive_tokens` scales, bool ``[T]``."""
    length_T, median = _lengths(input_TC)
    return length_T > _MASSIVE * median


def limit_exploded_gradients(gradient_TR: Tensor) -> Tensor:
    """Shorten exploded gradients of tokens to the median length.

    A loss is no quadratic function there: it is felt as if the token cost thousands of nats, and
    would outweigh all others. The given tensor where there is none.

    Args:
        gradient_TR: gradients of a loss at some outputs, floating dtype ``[..., R]``; those of zero
            do not count for the median.

    >>> limit_exploded_gradients(torch.tensor([[1.0, 0.0], [0.0, -1.0], [300.0, 400.0]]))
    tensor([[ 1.0000,  0.0000],
            [ 0.0000, -1.0000],
            [ 0.6000,  0.8000]])
    """
    return _shortened(gradient_TR, _EXPLODED, 1.0)


def limit_long_gradients(gradient_TR: Tensor) -> Tensor:
    """Shorten gradients of tokens to ten medians: winsorized.

    The mean of squares of a few thousand tokens is otherwise that of the few with the longest
    gradients, and another one for other texts. The given tensor where none is longer.

    Args:
        gradient_TR: as :func:`limit_exploded_gradients` takes them.

    >>> limit_long_gradients(torch.tensor([[1.0, 0.0], [0.0, -1.0], [300.0, 400.0]]))
    tensor([[ 1.,  0.],
            [ 0., -1.],
            [ 6.,  8.]])
    """
    return _shortened(gradient_TR, _LONGEST, _LONGEST)


def _shortened(gradient_TR: Tensor, longest: float, counted: float) -> Tensor:
    length_T, median = _lengths(gradient_TR)
    is_long_T = length_T > longest * median
    if not bool(is_long_T.any()):
        return gradient_TR
    share_T = torch.where(is_long_T, counted * median / length_T, 1)
    return gradient_TR * share_T.unsqueeze(-1).to(gradient_TR.dtype)


def _lengths(input_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The length of each token, float32, and the median of those that are not zero."""
    length_T = torch.linalg.vector_norm(input_TC, dim=-1).float()
    present_T = length_T[length_T > 0]
    return length_T, present_T.median() if len(present_T) else length_T.new_tensor(torch.inf)


def fast_operand(input_TC: Tensor, sums: torch.dtype) -> Tensor | Int8Columns:
    """Tokens as they are multiplied fastest for sums of that dtype: rounded, or as they are."""
    return int8_columns(input_TC.detach()) if prefers_int8(input_TC, sums) else input_TC


def add_upper_product(gram_CC: Tensor, input_TC: Tensor | Int8Columns) -> None:
    """Add ``XᵀX`` to the upper triangle of ``gram_CC``; the lower one is undefined afterwards.

    :func:`mirror_upper_` completes the matrix: once, after many of these.
    """
    if isinstance(input_TC, Int8Columns):
        add_int8_product(gram_CC, input_TC, input_TC, upper=True)
        return
    input_TC = input_TC.detach()
    _add_product(gram_CC, input_TC, input_TC, upper=True)


def _add_product(total_CC: Tensor, left_TC: Tensor, right_TC: Tensor, *, upper: bool) -> None:
    """Add ``LᵀR``; with ``upper``, the lower triangle need not be right."""
    if left_TC.device.type == "cpu":
        _add_by_rows(total_CC, left_TC, right_TC, upper=upper)
    elif left_TC.device.type == "cuda" and left_TC.dtype in (torch.float16, torch.bfloat16):
        total_CC += torch.mm(left_TC.T, right_TC, out_dtype=torch.float32)
    else:
        wide_TC = left_TC.to(total_CC.dtype)
        other_TC = wide_TC if right_TC is left_TC else right_TC.to(total_CC.dtype)
        total_CC.addmm_(wide_TC.T, other_TC)


def add_column_squares(squares_C: Tensor, input_TC: Tensor) -> None:
    """Add the sum of squares of each column to ``squares_C``, float32: the diagonal of ``XᵀX``.

    >>> squares = torch.zeros(2)
    >>> add_column_squares(squares, torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    >>> squares
    tensor([10.,  5.])
    """
    pieces = torch.split(input_TC, _SQUARED_TOKENS)
    sums_NC = squares_C.new_empty(len(pieces), len(squares_C))

    def add_up(number: int) -> None:
        wide_TC = pieces[number].to(torch.float32, copy=True)
        wide_TC.mul_(wide_TC)
        sums_NC[number] = wide_TC.sum(dim=0)

    if input_TC.device.type == "cpu":
        parallel_for(add_up, range(len(pieces)))
    else:
        for number in range(len(pieces)):
            add_up(number)
    for sum_C in sums_NC:
        squares_C += sum_C


def triangle_bytes(columns: int) -> int:
    """Bytes of a float32 Gram matrix without what its symmetry repeats.

    >>> triangle_bytes(3)
    24
    """
    return 4 * (columns * (columns + 1) // 2)


def mirror_upper_(gram_CC: Tensor) -> Tensor:
    """Copy the upper triangle of ``gram_CC`` to the lower one in place.

    >>> gram = torch.zeros(2, 2)
    >>> add_upper_product(gram, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> mirror_upper_(gram)
    tensor([[10., 14.],
            [14., 20.]])
    """
    for lo, hi in _spans(gram_CC.shape[0]):
        corner_KK = gram_CC[lo:hi, lo:hi]
        corner_KK.copy_(corner_KK.triu() + corner_KK.triu(1).T)
        gram_CC[hi:, lo:hi] = gram_CC[lo:hi, hi:].T
    return gram_CC


def packed_upper(gram_CC: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row, ``[C (C + 1) / 2]``.

    >>> packed_upper(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    tensor([1., 2., 3.])
    """
    return torch.cat([row_C[place:] for place, row_C in enumerate(gram_CC)])


def unpacked_upper(packed: Tensor, columns: int) -> Tensor:
    """The symmetric matrix ``[C, C]`` of :func:`packed_upper`.

    >>> unpacked_upper(torch.tensor([1.0, 2.0, 3.0]), 2)
    tensor([[1., 2.],
            [2., 3.]])
    """
    gram_CC = packed.new_zeros(columns, columns)
    parts = torch.split(packed, list(range(columns, 0, -1)))
    for place, part in enumerate(parts):
        gram_CC[place, place:] = part
    return mirror_upper_(gram_CC)


def _add_by_rows(total_CC: Tensor, left_TC: Tensor, right_TC: Tensor, *, upper: bool) -> None:
    """Add ``LᵀR`` by block rows; with ``upper``, each from its diagonal block on."""
    lefts, rights = (torch.split(one, _WIDE_TOKENS) for one in (left_TC, right_TC))
    with _allow_bfloat16_products(left_TC.dtype, total_CC.dtype):
        for left, right in zip(lefts, rights, strict=True):
            wide_TC = _pad_tokens(left).to(total_CC.dtype)
            other_TC = wide_TC if right_TC is left_TC else _pad_tokens(right).to(total_CC.dtype)

            def add(
                span: tuple[int, int], wide_TC: Tensor = wide_TC, other_TC: Tensor = other_TC
            ) -> None:
                lo, hi = span
                first = lo if upper else 0
                total_CC[lo:hi, first:].addmm_(wide_TC[:, lo:hi].T, other_TC[:, first:])

            parallel_for(add, _spans(len(total_CC)))


def _pad_tokens(tokens_TC: Tensor) -> Tensor:
    """The tokens, padded with rows of zeros, which add nothing to a sum over tokens."""
    lacking = -len(tokens_TC) % _EVEN_TOKENS
    return functional.pad(tokens_TC, (0, 0, 0, lacking)) if lacking else tokens_TC


def _spans(columns: int) -> list[tuple[int, int]]:
    """First and last column of each part; they depend on the width alone."""
    width = max(-(-columns // _PARTS), _NARROWEST)
    return [(lo, min(lo + width, columns)) for lo in range(0, columns, width)]


@contextlib.contextmanager
def _allow_bfloat16_products(operands: torch.dtype, sums: torch.dtype) -> Iterator[None]:
    """Allow bfloat16 operands in float32 products on a CPU, if operands came from bfloat16.

    Nothing is lost, the sums are in float32, and processors with such instructions are up to four
    times as fast.
    """
    if operands != torch.bfloat16 or sums != torch.float32:
        yield
        return
    products: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - torch does not declare it
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def add_cross_product(
    cross_CC: Tensor, input_TC: Tensor | Int8Columns, difference_TC: Tensor
) -> None:
    """Add ``Yᵀ(X − Y)`` to ``cross_CC``, whose rows belong to Y, from Y and X − Y in one dtype.

    If Y is rounded to integers, so is X − Y.
    """
    if isinstance(input_TC, Int8Columns):
        add_int8_product(cross_CC, input_TC, int8_columns(difference_TC))
        return
    _add_product(cross_CC, input_TC, difference_TC, upper=False)


def add_residual_product(
    missing_RC: Tensor,
    weight_RC: Tensor,
    input_TC: Tensor | Int8Columns,
    difference_TC: Tensor,
) -> None:
    """Add ``W (X − Y)ᵀ Y``, the output residual by input column, to ``missing_RC``.

    It equals ``W Cᵀ`` with C the cross product, which is not computed. The residual of a token has
    the dtype of the activations, as all outputs and ``weight_RC`` do; the sums are as in the cross
    product.
    """
    if isinstance(input_TC, Int8Columns):
        lacking_TR = parallel_matmul(difference_TC, weight_RC.T)
        add_int8_product(missing_RC, int8_columns(lacking_TR), input_TC)
        return
    if input_TC.device.type == "cuda" and input_TC.dtype == torch.bfloat16:
        lacking_TR = difference_TC @ weight_RC.T
        missing_RC += torch.mm(lacking_TR.T, input_TC, out_dtype=torch.float32)
        return
    inputs, differences = (torch.split(one, _WIDE_TOKENS) for one in (input_TC, difference_TC))
    with _allow_bfloat16_products(input_TC.dtype, missing_RC.dtype):
        for input_SC, difference_SC in zip(inputs, differences, strict=True):
            wide_SC = _pad_tokens(input_SC).to(missing_RC.dtype)
            change_SC = _pad_tokens(difference_SC)

            def add(
                span: tuple[int, int], wide_SC: Tensor = wide_SC, change_SC: Tensor = change_SC
            ) -> None:
                rows = slice(*span)
                lacking_SK = (change_SC @ weight_RC[rows].T).to(missing_RC.dtype)
                missing_RC[rows].addmm_(lacking_SK.T, wide_SC)

            if input_TC.device.type == "cpu":
                parallel_for(add, _spans(len(missing_RC)))
            else:
                add((0, len(missing_RC)))


class TokenBuffer:
    """Buffers tokens and returns them in multiples of ``chunk``, until it is drained.

    ``parallel`` is the number of aligned tensors in each call of :meth:`add`.
    """

    def __init__(self, parallel: int = 1, chunk: int = CHUNK_TOKENS) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(parallel)]
        self._chunk = chunk
        self._held = 0

    def add(self, *tensors_TC: Tensor) -> list[Tensor] | None:
        """Add aligned ``[T, C]`` tensors; return whole chunks of each once one is full.

        Buffered tokens are copied: a model may add to its hidden state in place.
        """
        self._held += len(tensors_TC[0])
        is_full = self._held >= self._chunk
        for part, tensor_TC in zip(self._parts, tensors_TC, strict=True):
            part.append(tensor_TC if is_full else tensor_TC.clone())
        if not is_full:
            return None
        left = self._held % self._chunk
        joined = self._joined()
        if left:
            self._parts = [[one[-left:].clone()] for one in joined]
            self._held = left
        return [one[: len(one) - left] for one in joined]

    def drain(self) -> list[Tensor] | None:
        """Return the buffered tokens, concatenated, or ``None``, and clear the buffer."""
        return self._joined() if self._held else None

    def _joined(self) -> list[Tensor]:
        joined = [part[0] if len(part) == 1 else torch.cat(part) for part in self._parts]
        self._parts, self._held = [[] for _ in self._parts], 0
        return joined
