# SPDX-License-Identifier: Apache-2.0
"""A Linear with 16-bit operands, on processors that multiply 32-bit ones faster.

x86 processors without an instruction for bfloat16 multiply it at about a quarter of the rate of
float32. The products of 16-bit operands are exact in float32 and are summed there in any case, so
widening the operands, multiplying, and rounding once gives the result of the 16-bit product up to
the order of the sums.

Shapes: T tokens, C input and R output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.instructions import multiplies
from llmcompressor.numerics.products import MANY_ALIKE, matmul
from llmcompressor.threads import each_on_one_thread

__all__ = ["is_slow", "wide_linear"]

_PIECE_TOKENS = 256
_PIECE_WEIGHTS = 2**21
"""Elements of the weight that are widened at once: 8 MiB."""


def is_slow(dtype: torch.dtype) -> bool:
    """Return True if the CPU is known to have no instruction for products of ``dtype``."""
    return multiplies(dtype) is False


def wide_linear(input_TC: Tensor, weight_RC: Tensor, bias_R: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b``, summed in float32 and rounded once.

    The result is the same for any number of threads: the pieces depend on the shapes alone.

    Args:
        input_TC: ``[..., C]``, on the CPU, any floating dtype.
        weight_RC: ``[R, C]``.
        bias_R: ``[R]``, if there is one.

    Returns:
        ``[..., R]`` in the dtype of the input.

    >>> wide_linear(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(1, 3).bfloat16()).tolist()
    [[3.0], [3.0]]
    """
    rows, columns = weight_RC.shape
    flat_TC = input_TC.reshape(-1, columns)
    result_TR = flat_TC.new_empty(len(flat_TC), rows)
    spans = [slice(lo, lo + _PIECE_TOKENS) for lo in range(0, len(flat_TC), _PIECE_TOKENS)]
    step = max(_PIECE_WEIGHTS // columns, 1)
    for lo in range(0, rows, step):
        part = slice(lo, lo + step)
        wide_CR = weight_RC[part].float().T
        bias = None if bias_R is None else bias_R[part].float()

        def multiply(
            span: slice,
            part: slice = part,
            wide_CR: Tensor = wide_CR,
            bias: Tensor | None = bias,
        ) -> None:
            piece_TC = flat_TC[span].float()
            product = matmul(piece_TC, wide_CR, fewest=MANY_ALIKE)
            result_TR[span, part] = product if bias is None else product.add_(bias)

        each_on_one_thread(multiply, spans)
    return result_TR.view(*input_TC.shape[:-1], rows)
