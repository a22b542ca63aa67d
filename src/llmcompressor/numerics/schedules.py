# SPDX-License-Identifier: Apache-2.0
r"""Sparsity schedules of a training, in closed form.

With s_i the sparsity at the start, s_f that at the end and t in [0, 1] the progress:

===================  ====================================================
linear               s_i + (s_f - s_i) t
polynomial           s_i + (s_f - s_i) t^k
polynomial_decay     s_f + (s_i - s_f) (1 - t)^k
multi_step           the sparsity of the last step that was reached
===================  ====================================================

``polynomial_decay`` with k = 3 is the cubic schedule of Zhu & Gupta, *To prune, or not to prune*
(arXiv:1710.01878), eq. 1: fast at first, when many weights are redundant, slow in the end. There
t = (i - start) / (n dt). All are exact at both ends, independent of rounding in between.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["linear", "multi_step", "polynomial", "polynomial_decay", "progress"]


def progress(index: float, start: float, end: float) -> float:
    """The fraction of the window from ``start`` to ``end`` completed at ``index``, in [0, 1].

    All three have the same unit, epochs or steps. An empty window is a jump.

    >>> progress(3, 2, 4), progress(1, 2, 4), progress(9, 2, 4)
    (0.5, 0.0, 1.0)
    >>> progress(1.9, 2, 2), progress(2, 2, 2)
    (0.0, 1.0)
    """
    if index >= end:
        return 1.0
    return max(0.0, (index - start) / (end - start)) if index > start else 0.0


def linear(t: float, init: float, final: float) -> float:
    """Linear schedule: the same increase at every step.

    >>> linear(0.5, 0.25, 0.75)
    0.5
    """
    return _between(init, final, t)


def polynomial(t: float, init: float, final: float, exponent: float = 2.0) -> float:
    """Polynomial schedule: slow at first, fast in the end, for an exponent above 1.

    >>> polynomial(0.5, 0.0, 0.8), polynomial(0.5, 0.0, 0.8, exponent=1)
    (0.2, 0.4)
    """
    return _between(init, final, t**exponent)


def polynomial_decay(t: float, init: float, final: float, exponent: float = 3.0) -> float:
    """Polynomial decay: fast at first, slow in the end, for an exponent above 1; cubic by default.

    >>> polynomial_decay(0.5, 0.0, 1.0), polynomial_decay(0.5, 0.0, 1.0, exponent=1)
    (0.875, 0.5)
    """
    return _between(init, final, 1.0 - (1.0 - t) ** exponent)


def multi_step(index: float, steps: Iterable[tuple[float, float]], init: float) -> float:
    """Step schedule: the sparsity of the last of ``steps`` already reached, else ``init``.

    Args:
        index: current position in the training.
        steps: pairs of an index and the sparsity from there on, in any order.
        init: the sparsity before the first.

    >>> [multi_step(i, [(2, 0.5), (4, 0.75)], 0.1) for i in (1, 2, 3.9, 4)]
    [0.1, 0.5, 0.5, 0.75]
    """
    behind = [(at, sparsity) for at, sparsity in steps if at <= index]
    return max(behind, key=lambda step: step[0])[1] if behind else init


def _between(init: float, final: float, share: float) -> float:
    """Interpolate with exact ends: ``init`` at share 0 and ``final`` at share 1."""
    return final if share >= 1.0 else init + (final - init) * share
