# SPDX-License-Identifier: Apache-2.0
r"""Second moments of the inputs of a Linear: ``G = XᵀX`` and the cross product of two streams.

T tokens (rows), C columns (input features). G is accumulated in float32, or float64 on request,
whatever the inputs' dtype. What is slow about G is the number of small products, so the callers
gather tokens (:class:`TokenBuffer`) and multiply a few thousand at a time.

=================  =============================================================================
inputs             product
=================  =============================================================================
CUDA, 16 bit       16-bit operands, float32 accumulation and float32 result: exact products
CPU, float32       ``numpy``'s ``x.T @ x``: its BLAS sees one array twice and computes a half
CPU, 16 bit        the same after a cast; a 16-bit result would round each partial sum to 8 bits
float64            as it is
=================  =============================================================================

The cross product has no symmetry to exploit, and it only *corrects* the weight. It may therefore
be taken with 16-bit operands, and a 16-bit result per chunk (:func:`cross_product`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["TokenBuffer", "add_cross_product", "add_symmetric_product", "symmetrize_"]

CHUNK_TOKENS = 4096
"""Tokens that are multiplied at once: enough to run at the machine's matrix rate."""


def add_symmetric_product(gram_CC: Tensor, input_TC: Tensor) -> None:
    """Add ``XᵀX`` to ``gram_CC`` in place.

    Args:
        gram_CC: float32 or float64 ``[C, C]``.
        input_TC: any floating dtype ``[T, C]``, on the same device.

    >>> gram = torch.zeros(2, 2)
    >>> add_symmetric_product(gram, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> gram
    tensor([[10., 14.],
            [14., 20.]])
    """
    if input_TC.device.type == "cpu" and gram_CC.dtype == torch.float32:
        array = input_TC.detach().float().contiguous().numpy()
        # Overflow is no matter for a warning here: whoever reads the sum checks that it is finite.
        with np.errstate(over="ignore", invalid="ignore"):
            gram_CC += torch.from_numpy(array.T @ array)
    elif input_TC.device.type == "cuda" and input_TC.dtype in (torch.float16, torch.bfloat16):
        gram_CC += torch.mm(input_TC.T, input_TC, out_dtype=torch.float32)
    else:
        wide_TC = input_TC.to(gram_CC.dtype)
        gram_CC.addmm_(wide_TC.T, wide_TC)


def add_cross_product(cross_CC: Tensor, input_TC: Tensor, difference_TC: Tensor) -> None:
    """Add ``Yᵀ(X − Y)`` to ``cross_CC`` in place.

    Args:
        cross_CC: float32 or float64 ``[C, C]``; rows belong to Y.
        input_TC: Y, what the Linear gets in the compressed model, ``[T, C]``.
        difference_TC: X − Y with X what it gets in the original model, ``[T, C]``.

    Operands of 16 bits stay so: the product costs as much as a forward of the same size, and an
    error of 2⁻⁹ in a correction that is itself a few per cent of the weight is far below a
    quantization step.
    """
    if input_TC.dtype in (torch.float16, torch.bfloat16) and cross_CC.dtype == torch.float32:
        cross_CC += torch.mm(input_TC.T, difference_TC.to(input_TC.dtype))
    else:
        cross_CC.addmm_(input_TC.to(cross_CC.dtype).T, difference_TC.to(cross_CC.dtype))


def symmetrize_(gram_CC: Tensor) -> Tensor:
    """Make ``gram_CC`` exactly symmetric, in place: the mean of it and its transpose."""
    return gram_CC.add_(gram_CC.T.clone()).mul_(0.5)


class TokenBuffer:
    """Gathers small batches of tokens and hands them on in chunks of about ``CHUNK_TOKENS``.

    Args:
        parallel: how many aligned tensors each call of :meth:`add` brings (1: inputs alone,
            2: inputs and what goes with them token by token).
        chunk: tokens of one chunk.
    """

    def __init__(self, parallel: int = 1, chunk: int = CHUNK_TOKENS) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(parallel)]
        self._chunk = chunk
        self._held = 0

    def add(self, *tensors_TC: Tensor) -> list[Tensor] | None:
        """Take aligned ``[T, C]`` tensors; return a chunk of each when one is full.

        What has to wait is copied: a model may add to its hidden state in place.
        """
        self._held += len(tensors_TC[0])
        is_full = self._held >= self._chunk
        for part, tensor_TC in zip(self._parts, tensors_TC, strict=True):
            part.append(tensor_TC if is_full else tensor_TC.clone())
        return self.drain() if is_full else None

    def drain(self) -> list[Tensor] | None:
        """What is held, concatenated, or ``None``; the buffer is empty afterwards."""
        if not self._held:
            return None
        chunk = [part[0] if len(part) == 1 else torch.cat(part) for part in self._parts]
        self._parts, self._held = [[] for _ in self._parts], 0
        return chunk
