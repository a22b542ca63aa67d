# SPDX-License-Identifier: Apache-2.0
r"""Rescaling of channels before a rotation mixes them.

After a rotation V has made entries similar in size, the error of rounding the weight
:math:`W D V` and its inputs :math:`x D^{-1} V` is proportional to the sizes of both. With diagonal
D, column j of the weight of norm :math:`w_j` and channel j of the inputs of mean square :math:`h_j`
these are

.. math:: \| W D \|_F^2 = \sum_j w_j^2 d_j^2, \qquad E \| x D^{-1} \|^2 = \sum_j h_j / d_j^2

whose product is least, :math:`(\sum_j w_j \sqrt{h_j})^2`, if the terms of the two sums are
proportional: :math:`d_j^4 = h_j / w_j^2`, and any multiple of d (Chee et al., *QuIP*,
arXiv:2307.13304, the rescaling of its incoherence processing). Without D a channel with large
values and small weights is mixed with all others, which then share its rounding error.

Legend: C channels, R rows of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["column_squares", "rescaling"]

_CHUNK = 1 << 20
"""Elements that are made wide at once: 8 MiB, twice."""


def column_squares(weights: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of each column over several weights.

    Args:
        weights: at least one, each ``[R_i, C]``, any floating dtype.

    Returns:
        float64 ``[C]``.

    >>> column_squares([torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.0]])])
    tensor([5., 9.], dtype=torch.float64)
    """
    parts = [
        part_RC.double().square().sum(dim=0)
        for weight_RC in weights
        for part_RC in torch.split(weight_RC.detach(), max(1, _CHUNK // weight_RC.shape[1]))
    ]
    return torch.stack(parts).sum(dim=0)


def rescaling(square_C: Tensor, column_square_C: Tensor) -> Tensor:
    """Factors on columns, and divisors of channels: powers of two, exact in any dtype.

    Args:
        square_C: mean squares of the channels, ``[C]``, h in the module's equation.
        column_square_C: squared norms of the columns, ``[C]``, from :func:`column_squares`.

    Returns:
        float64 ``[C]``; 1 for most channels if their optima are similar, and for channels that are
        zero or have only zero weights.

    >>> rescaling(torch.tensor([1.0, 1.0, 4096.0, 0.0]), torch.tensor([1.0, 1.0, 2**-12, 1.0]))
    tensor([ 1.,  1., 64.,  1.], dtype=torch.float64)
    """
    fourth_C = square_C.double() / column_square_C.double()
    counts_C = fourth_C.isfinite() & (fourth_C > 0)
    exponent_C = torch.where(counts_C, fourth_C, 1.0).log2() / 4
    if not bool(counts_C.any()):
        return torch.ones_like(exponent_C)
    exponent_C = exponent_C - exponent_C[counts_C].median()
    return torch.where(counts_C, exponent_C.round(), 0.0).exp2()
