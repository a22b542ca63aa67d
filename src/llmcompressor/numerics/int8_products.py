# SPDX-License-Identifier: Apache-2.0
r"""Second moments from 8-bit integers: a product at several times the rate of float32.

A chunk of tokens X is rounded to integers with a scale for each column, which are multiplied and
summed exactly in 32 bits:

.. math:: X^\top X \approx \operatorname{diag}(s)\, Z^\top Z \operatorname{diag}(s), \qquad
      Z = \operatorname{round}(X \operatorname{diag}(s)^{-1}), \quad s_c = \max_t |x_{tc}| / 127 .

That is the exact Gram matrix of rounded inputs, hence positive semidefinite, and a column is zero
where X is. Rounding adds some ``T s² / 12`` to an element of the diagonal; a column's largest value
is in its sum, so that this is at most ``T / 193548`` of it: 1.1 percent for the 2048 tokens of a
chunk, and that where all values but one are small. Of a normal distribution it is less than one in
ten thousand. It acts as a dampening, whose usual value is one percent of the mean of all columns.

Shapes: T tokens, C columns (input features).
"""

from __future__ import annotations

import contextlib
import functools
import platform
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.runtime.threads import parallel_for

TOKENS = 2048
"""Tokens whose columns share a scale. Fewer, at the end of the data, are multiplied in float32."""
_FEWEST_COLUMNS = 256
"""Below these the product is too small for a gain."""
_PIECE_TOKENS = 128
"""Tokens that are rounded at once: few enough for a processor's cache."""
_TILE_COLUMNS = 128
"""Columns of a block row of a product: its sums of 32 bits stay in the cache."""
_LARGEST = 127
_LEAST_STEP = 1e-30
"""Squares of smaller values are zero in float32."""


class Int8Columns(NamedTuple):
    """Tokens rounded to integers, with a scale for each column."""

    codes_TC: Tensor
    """Z, int8 ``[T, C]``."""
    step_C: Tensor
    """s, float32 ``[C]``."""


def prefers_int8(input_TC: Tensor, sums: torch.dtype) -> bool:
    """Return True for products of these tokens that are much faster by 8-bit integers.

    That depends on the processor, the dtypes and the shape alone. What came from float32 is
    multiplied in float32.
    """
    tokens, columns = input_TC.shape
    return (
        input_TC.device.type == "cpu"
        and input_TC.dtype in (torch.bfloat16, torch.float16)
        and sums == torch.float32
        and tokens == TOKENS
        and columns >= _FEWEST_COLUMNS
        and has_int8_products()
    )


@functools.cache
def has_int8_products() -> bool:
    """Return True on x86 processors with instructions for sums of 8-bit products (VNNI)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    has = getattr(torch.cpu, "_is_vnni_supported", None)
    if has is None or not has():
        return False
    with contextlib.suppress(AttributeError, RuntimeError):
        one_NN = torch.full((32, 32), -_LARGEST, dtype=torch.int8)
        return bool((torch._int_mm(one_NN, one_NN) == 32 * _LARGEST**2).all())
    return False


def int8_columns(input_TC: Tensor) -> Int8Columns:
    """Round tokens of 16 bits, at most 2048 of them, to integers from -127 to 127.

    A column that holds NaN or infinity gets a scale that is not finite, and so do its products.

    >>> codes_TC, step_C = int8_columns(torch.tensor([[2.0, 0.0], [-1.0, 0.0]]).bfloat16())
    >>> codes_TC.tolist(), (127 * step_C[0]).tolist()
    ([[127, 0], [-64, 0]], 2.0)
    """
    pieces = torch.split(input_TC, _PIECE_TOKENS)
    # magnitudes of 16 bits are in the order of their bits, and NaN is above infinity
    magnitudes = (piece.view(torch.int16).bitwise_and(0x7FFF) for piece in pieces)
    largest_PC = torch.stack([piece_KC.amax(0) for piece_KC in magnitudes])
    largest_C = largest_PC.amax(0).view(input_TC.dtype).float()
    inverse_C = _LARGEST / largest_C.clamp(min=_LEAST_STEP)
    codes_TC = torch.empty(input_TC.shape, dtype=torch.int8)
    places = torch.split(codes_TC, _PIECE_TOKENS)

    def round_piece(number: int) -> None:
        places[number].copy_((pieces[number] * inverse_C).round_())

    parallel_for(round_piece, range(len(pieces)))
    return Int8Columns(codes_TC, largest_C / _LARGEST)


def add_int8_product(
    total_CC: Tensor, left: Int8Columns, right: Int8Columns, *, upper: bool = False
) -> None:
    """Add ``LᵀR`` to float32 sums; with ``upper``, the lower triangle need not be right."""

    def add(lo: int) -> None:
        rows, columns = slice(lo, lo + _TILE_COLUMNS), slice(lo if upper else 0, None)
        sums_KC = torch._int_mm(left.codes_TC[:, rows].T, right.codes_TC[:, columns])
        wide_KC = sums_KC.float().mul_(left.step_C[rows].unsqueeze(-1))
        total_CC[rows, columns].addcmul_(wide_KC, right.step_C[columns])

    parallel_for(add, range(0, len(total_CC), _TILE_COLUMNS))
