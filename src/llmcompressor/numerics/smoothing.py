# SPDX-License-Identifier: Apache-2.0
r"""SmoothQuant scales, which move the range of activations into the following weights.

Xiao et al., *SmoothQuant*, arXiv:2211.10438, eq. 4. With a the strength, for every channel j::

    s_j = range(X_j)^a / range(W_j)^(1 - a),     X' = X / s,     W' = W diag(s)

``range`` is the maximum minus the minimum of an activation's channel, and twice the absolute
maximum of the column over all weights with this input. *Log equalization* uses the activations
alone::

    s_j = range(X_j) / log2(2 + range(X_j))

C channels, R rows of a weight. No scale is zero, negative, infinite or NaN, for any input.

A constant channel has no range, but need not be zero: divided by the smallest scale, it would by
far become the greatest value of each token, and rounding would erase the others. It keeps its
scale.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_FLOOR = 1e-5


def column_range(weights: Iterable[Tensor]) -> Tensor:
    """Twice the absolute maximum of each column over several weights ``[R_i, C]``: float32 ``[C]``.

    >>> column_range([torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.0]])])
    tensor([4., 6.])
    """
    columns = [weight_RC.detach().abs().amax(dim=0).float() for weight_RC in weights]
    return 2 * torch.stack(columns).amax(dim=0)


def smoothquant_scales(range_C: Tensor, weight_range_C: Tensor, strength: float) -> Tensor:
    """SmoothQuant's divisors of the activations: float32 ``[C]``; 1 for constant channels.

    Args:
        range_C: of the activations, ``[C]``; not negative.
        weight_range_C: result of :func:`column_range`.
        strength: a, from 0 (the weights' ranges alone) to 1 (the activations' alone).

    >>> ranges = torch.tensor([16.0, 4.0, 0.0])
    >>> smoothquant_scales(ranges, torch.tensor([1.0, 0.0, 1.0]), 0.5)
    tensor([4., 4., 1.])
    """
    range_C, weight_range_C = range_C.float(), weight_range_C.float()
    scale_C = range_C.pow(strength) / weight_range_C.pow(1 - strength)
    return _usable(torch.where(weight_range_C > 0, scale_C, range_C), range_C)


def log_equalization_scales(range_C: Tensor) -> Tensor:
    """The same by log equalization, from the activations' ranges alone.

    >>> log_equalization_scales(torch.tensor([14.0, 2.0, 0.0]))
    tensor([3.5000, 1.0000, 1.0000])
    """
    range_C = range_C.float()
    return _usable(range_C / torch.log2(2 + range_C), range_C)


def _usable(scale_C: Tensor, range_C: Tensor) -> Tensor:
    """The scales, with 1 for channels without a range and for non-finite scales."""
    dead_C = ~torch.isfinite(scale_C) | (range_C <= 0)
    return torch.where(dead_C, 1.0, scale_C.clamp(min=_FLOOR))
