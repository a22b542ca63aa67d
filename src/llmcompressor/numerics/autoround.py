# SPDX-License-Identifier: Apache-2.0
r"""AutoRound: learned rounding directions of weights and learned clipping of ranges.

Cheng et al., *Optimize Weight Rounding via Signed Gradient Descent*, arXiv:2309.05516. With an
offset V of at most half a step for every weight and factors α, β of at most 1 for the ends of
every range,

.. math:: W' = s\,(\operatorname{clamp}(\operatorname{round}(W / s + V + z)) - z),

    s = (α b - β a) / (q_{max} - q_{min}), \qquad
    z = \operatorname{round}(\operatorname{clamp}(q_{min} - β a / s))

where [a, b] is the range of the initial scale and zero point: V = 0 and α = β = 1 reproduce them.
On symmetric grids z = 0 and s is α times its initial value. On floating grids V is in units of the
spacing of the values around W / s.

Gradients are straight through. With G the gradient by W', and
r = round(W / s + V + z) - z, an element has

==========  ================  ===================  ===========
            by V              by s                 by z
==========  ================  ===================  ===========
inside      G s spacing       G (r - W / s)        0
clamped     0                 G (end - z)          - G s
==========  ================  ===================  ===========

and s and z propagate theirs to α and β. Only signs of gradients are used: V, α and β move by the
learning rate, which falls linearly to zero.

Shapes: R rows, C columns; scales, zero points and factors have the shape of the partition's
cells, written ``YX``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition

_LEAST_FACTOR = 1e-3
_LARGEST_OFFSET = 0.499
"""Less than half a step: a weight of exactly 0, which may have been pruned, stays 0."""


@dataclass(frozen=True)
class RoundingStart:
    """A weight with its initial scale and zero point.

    Args:
        weight_RC: W, the weight, or another to be rounded in its place; floating dtype.
        scale: effective scale, in the shape of the partition's cells.
        zero: zero point, same shape; ``None`` on symmetric grids.
        grid: the grid of the codes.
        partition: the cells of weights that share a scale.
        scale_dtype: dtype in which scales are stored; ``None`` keeps every scale fixed (scales of
            8-bit floats with a global scale, powers of two).
    """

    weight_RC: Tensor
    scale: Tensor
    zero: Tensor | None
    grid: Grid
    partition: Partition
    scale_dtype: torch.dtype | None

    def expand(self, values: Tensor) -> Tensor:
        """The value of its cell for each element, [R, C]."""
        return self.partition.expand(values, *self.weight_RC.shape)

    def sums(self, values_RC: Tensor) -> Tensor:
        """Sums over cells, in the shape of the scale."""
        return self.partition.cells(values_RC).sum(-1).reshape(self.scale.shape)


@dataclass(frozen=True)
class RoundingParameters:
    """The learned parameters.

    Attributes:
        offset_RC: V, float32 within [-1/2, 1/2].
        high: α, float32 within (0, 1], in the shape of the scale.
        low: β, the same; unused on symmetric grids.
    """

    offset_RC: Tensor
    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, start: RoundingStart) -> RoundingParameters:
        """The initial parameters, without offset or clipping: rounding to nearest."""
        ones = torch.ones_like(start.scale, dtype=torch.float32)
        return cls(torch.zeros_like(start.weight_RC, dtype=torch.float32), ones, ones.clone())

    def clone(self) -> RoundingParameters:
        """A copy that :func:`sign_step` does not change."""
        return RoundingParameters(self.offset_RC.clone(), self.high.clone(), self.low.clone())

    def parameters(self, start: RoundingStart) -> tuple[Tensor, Tensor | None]:
        """The scale as stored, in float32, and the zero point, float32 or ``None``."""
        scale = start.scale.float()
        if start.scale_dtype is None:
            return scale, None if start.zero is None else start.zero.float()
        if start.zero is None:
            return _stored(scale * self.high, start), None
        grid, scale = start.grid, start.scale.float()
        least, greatest = _range(start)
        stored = _stored(scale * ((greatest * self.high - least * self.low) / _steps(grid)), start)
        zero = (grid.qmin - least * self.low * (scale / stored)).clamp(grid.qmin, grid.qmax)
        return stored, zero.round()

    def apply(self, start: RoundingStart) -> Rounded:
        """Round the weight with these parameters."""
        scale, zero = self.parameters(start)
        grid, scale_RC = start.grid, start.expand(scale)
        wide_RC = start.weight_RC.float() / scale_RC
        spacing_RC, moved_RC = None, self.offset_RC
        if grid.floats is not None:
            exponent_RC = wide_RC.abs().clamp(grid.floats.smallest, grid.qmax).log2_().floor_()
            spacing_RC = exponent_RC.sub_(grid.floats.mantissa).exp2_()
            moved_RC = moved_RC * spacing_RC
        moved_RC = wide_RC + moved_RC
        zero_RC = 0.0 if zero is None else start.expand(zero)
        if grid.kind == "int":
            free_RC = moved_RC.add_(zero_RC).round_()
            code_RC = free_RC.clamp(grid.qmin, grid.qmax)
        else:
            free_RC = moved_RC
            code_RC = grid.round(moved_RC)
        inside_RC = (free_RC >= grid.qmin) & (free_RC <= grid.qmax)
        return Rounded(
            code_RC - zero_RC, wide_RC, inside_RC, spacing_RC, scale, zero, scale_RC=scale_RC
        )


class Gradients(NamedTuple):
    """The gradients of a :class:`RoundingParameters`; ``None`` for parts that are not learned."""

    offset_RC: Tensor
    high: Tensor | None
    low: Tensor | None


@dataclass(frozen=True)
class Rounded:
    """A rounded weight and the intermediate values that its gradients need.

    Attributes:
        level_RC: codes less the zero point.
        wide_RC: W / s.
        inside_RC: bool, not clamped.
        spacing_RC: of the grid's values; ``None`` if it is 1.
        scale: as stored, float32.
        zero: float32, or ``None``.
        scale_RC: the scale of each element.
    """

    level_RC: Tensor
    wide_RC: Tensor
    inside_RC: Tensor
    spacing_RC: Tensor | None
    scale: Tensor
    zero: Tensor | None
    scale_RC: Tensor

    @property
    def values(self) -> Tensor:
        """W', float32."""
        return self.level_RC * self.scale_RC

    def gradients(
        self, start: RoundingStart, gradient_RC: Tensor, rounding: RoundingParameters
    ) -> Gradients:
        """Backpropagate the gradient by W', [R, C] of any floating dtype, to the parameters."""
        gradient_RC = gradient_RC.float()
        inside_RC = torch.where(self.inside_RC, gradient_RC, 0.0)
        offset_RC = inside_RC * self.scale_RC
        if self.spacing_RC is not None:
            offset_RC *= self.spacing_RC
        if start.scale_dtype is None:
            return Gradients(offset_RC, None, None)
        by_scale = start.sums(gradient_RC * self.level_RC - inside_RC * self.wide_RC)
        if start.zero is None:
            return Gradients(offset_RC, by_scale * start.scale.float(), None)
        by_zero = -start.sums((gradient_RC - inside_RC) * self.scale_RC)
        least, greatest = (end * start.scale.float() for end in _range(start))
        # z = qmin - beta a / s: its own dependence on beta, and the one by way of s
        by_scale = by_scale + by_zero * least * rounding.low / self.scale.square()
        steps = _steps(start.grid)
        low = -by_scale * least / steps - by_zero * least / self.scale
        return Gradients(offset_RC, by_scale * greatest / steps, low)


@torch.no_grad()
def start_at_codes(start: RoundingStart, codes_RC: Tensor, wanted_RC: Tensor) -> RoundingStart:
    """A start that rounds to given codes and otherwise is as close as possible to other values.

    ``start`` says how to round; its weight is ignored. ``codes_RC`` are values on its grid, float32
    ``[R, C]``, and ``wanted_RC`` those to approach within half a step of them.
    """
    on_codes = replace(start, weight_RC=codes_RC)
    own = RoundingParameters.of(on_codes).apply(on_codes)
    reach_RC = _LARGEST_OFFSET * own.scale_RC
    if own.spacing_RC is not None:
        reach_RC = reach_RC * own.spacing_RC
    away_RC = (wanted_RC - own.values).nan_to_num_(0, 0, 0)
    found = replace(start, weight_RC=own.values + away_RC.clamp_(-reach_RC, reach_RC))
    # next to powers of two the grid of a float is finer on one side
    kept_RC = RoundingParameters.of(found).apply(found).level_RC == own.level_RC
    return replace(start, weight_RC=torch.where(kept_RC, found.weight_RC, own.values))


@torch.no_grad()
def sign_step(
    rounding: RoundingParameters, gradients: Gradients, rate: float, range_rate: float | None = None
) -> None:
    """Move every parameter against the sign of its gradient, in place, within its bounds.

    ``rate`` is the learning rate of offsets, ``range_rate`` that of range factors, by default the
    same.
    """
    range_rate = rate if range_rate is None else range_rate
    offset_RC = rounding.offset_RC
    offset_RC.sub_(gradients.offset_RC.sign_(), alpha=rate)
    offset_RC.clamp_(-_LARGEST_OFFSET, _LARGEST_OFFSET)
    for factor, gradient in ((rounding.high, gradients.high), (rounding.low, gradients.low)):
        if gradient is not None:
            factor.sub_(gradient.sign(), alpha=range_rate).clamp_(_LEAST_FACTOR, 1.0)


def _steps(grid: Grid) -> float:
    return grid.qmax - grid.qmin


def _range(start: RoundingStart) -> tuple[Tensor, Tensor]:
    """The initial ends a and b of the range, in steps."""
    assert start.zero is not None
    zero = start.zero.float()
    return start.grid.qmin - zero, start.grid.qmax - zero


def _stored(scale: Tensor, start: RoundingStart) -> Tensor:
    """``scale`` rounded to its stored dtype; one that would underflow keeps its initial value."""
    assert start.scale_dtype is not None
    stored = scale.to(start.scale_dtype).float()
    return torch.where(stored > 0, stored, start.scale.float())
