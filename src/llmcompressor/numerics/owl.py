# SPDX-License-Identifier: Apache-2.0
r"""OWL: per-layer sparsities, lower for layers with more outliers.

Yin et al., arXiv:2310.05175, Eq. 1 and Sec. 3.2. With A the scores of all weights of a layer
(:func:`~llmcompressor.numerics.wanda.wanda_score`) and A̅ their mean, the layer's outlier ratio is

.. math:: D = \frac{|\{A_{rc} > M \bar A\}|}{R\,C} .

Ratios are scaled to a range of 2λ, the sparsity of a layer falls as its ratio rises, and the mean
over all weights is the target S:

.. math:: s_i = S + \overline d - d_i, \qquad d_i = 2\lambda\,\frac{D_i - \min D}{\max D - \min D} .

Here each s is also clamped to S ± λ and to [0, 1], and the difference is distributed over the
layers that are not at a bound, so that the mean, weighted by parameters, is S.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["outlier_count", "sparsities"]

_HALVINGS = 200


def outlier_count(score: Tensor, multiple: float, mean: float) -> int:
    """Number of scores above ``multiple`` times the mean of their layer.

    >>> import torch
    >>> outlier_count(torch.tensor([1.0, 1.0, 1.0, 5.0]), multiple=2.0, mean=2.0)
    1
    """
    return int((score > multiple * mean).sum())


def sparsities(
    ratios: Sequence[float], weights: Sequence[int], target: float, spread: float
) -> list[float]:
    """The sparsity of each layer.

    Args:
        ratios: D of each layer.
        weights: parameters of each layer.
        target: S, in [0, 1].
        spread: λ, at least 0.

    Returns:
        Values within ``target ± spread`` and [0, 1], lower where the ratio is higher, whose mean
        weighted by parameters is ``target``.

    >>> [round(s, 6) for s in sparsities([0.0, 0.1], [100, 100], 0.5, 0.08)]
    [0.58, 0.42]
    """
    least, most = min(ratios), max(ratios)
    if most == least or spread == 0:
        return [target] * len(ratios)
    keeps = [2 * spread * (ratio - least) / (most - least) for ratio in ratios]
    low, high = max(0.0, target - spread), min(1.0, target + spread)

    def clipped(shift: float) -> list[float]:
        return [min(high, max(low, shift - keep)) for keep in keeps]

    def mean(shift: float) -> float:
        total = sum(one * weight for one, weight in zip(clipped(shift), weights, strict=True))
        return total / sum(weights)

    # The mean increases with the shift: from low, where all are at the lower bound, to high.
    below, above = low, high + 2 * spread
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        below, above = (middle, above) if mean(middle) < target else (below, middle)
    return clipped(above)
