# SPDX-License-Identifier: Apache-2.0
r"""Straight-through fake quantization for training.

The forward is :meth:`Grid.fake_quantize`, in the same arithmetic, with t = x / s + z::

    q = round(clamp(t, qmin, qmax)),    x' = (q - z) s

Rounding has a derivative of zero almost everywhere, so the backward treats it as the identity
(the straight-through estimator: Bengio et al., arXiv:1308.3432, section 4; for quantized networks
Jacob et al., arXiv:1712.05877, section 3). Clamping keeps its derivative::

    dx'/dx = 1   where qmin <= t <= qmax,    0   elsewhere

For a learned scale, the same definition gives the gradient of learned step sizes (LSQ, Esser et
al., arXiv:1902.08153, equation 3, there with z = 0)::

    dx'/ds = q - t   where qmin <= t <= qmax,    q - z   elsewhere

It is multiplied by g = 1 / sqrt(N qmax) (section 2.2), with N the elements that share the scale.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition
from llmcompressor.numerics.scales import ScaleFormat

_E4M3_LEAST, _E4M3_LARGEST = 2.0**-9, 448.0
_E8M0_LEAST, _E8M0_LARGEST = -126.0, 127.0  # 2^-127 is no normal float32


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    grid: Grid,
    *,
    through: torch.dtype | None = None,
    gradient_scale: float = 1.0,
) -> Tensor:
    """Fake-quantize x, of any shape and floating dtype, with straight-through gradients.

    Args:
        x: values.
        scale: effective scale, broadcastable to ``x``. If it requires a gradient it gets that of
            LSQ; otherwise it is a constant.
        zero: zero point, broadcastable to ``x``; ``None`` for none. Always a constant.
        grid: the grid to round to.
        through: an intermediate dtype of the values, as in loaders of packed floats.
        gradient_scale: g, see :func:`lsq_gradient_scale`.

    >>> x = torch.tensor([0.3, 9.0], requires_grad=True)
    >>> fake_quantize(x, torch.tensor(0.5), None, Grid("int", 4)).sum().backward()
    >>> x.grad.tolist()
    [1.0, 0.0]
    """
    if not torch.is_grad_enabled() or not (x.requires_grad or scale.requires_grad):
        codes = grid.round_(grid.limit(x, scale, zero))
        return _values(codes, x.dtype, scale, zero, through)
    result: Tensor = _FakeQuantize.apply(  # type: ignore[no-untyped-call]  # torch's own
        x, scale, zero, grid, through, gradient_scale
    )
    return result


def fake_quantize_matrix(
    matrix: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    grid: Grid,
    partition: Partition,
    *,
    through: torch.dtype | None = None,
    gradient_scale: float = 1.0,
) -> Tensor:
    """Fake-quantize a matrix [..., R, C] with one scale per cell; see :func:`fake_quantize`."""
    return partition.apply(
        lambda x, s, z: fake_quantize(
            x, s, z, grid, through=through, gradient_scale=gradient_scale
        ),
        matrix,
        scale,
        zero,
    )


def lsq_gradient_scale(elements: int, grid: Grid) -> float:
    """LSQ's g = 1 / sqrt(N qmax) for N elements that share the scale.

    It keeps updates of scales and of values in proportion.

    >>> lsq_gradient_scale(14, Grid("int", 4)) == 1 / 98**0.5
    True
    """
    return 1.0 / math.sqrt(max(elements, 1) * max(grid.qmax, 1.0))


def learned_scale(log_ratio: Tensor, start: Tensor) -> Tensor:
    """The scale s = start · exp(p), which is positive for any p, in the dtype of ``start``.

    In the logarithm, an update changes a scale by a fraction of itself, however small it is: an
    optimizer that normalizes gradients (Adam) changes all scales by similar fractions. Weight decay
    on p, initially zero, pulls the scale to its initial value, a positive constant.

    >>> learned_scale(torch.zeros(1), torch.tensor([0.25])).tolist()
    [0.25]
    """
    return start * log_ratio.to(start.dtype).exp()


def storable_scale(
    scale: Tensor,
    scale_format: ScaleFormat,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """A positive scale rounded to its storage format, with straight-through gradients.

    The stored scale is multiplied by ``global_scale``, float32 [1], which ``E4M3`` has.

    >>> storable_scale(
    ...     torch.tensor([0.3]), ScaleFormat.E8M0, dtype=torch.float32
    ... ).tolist()
    [0.25]
    """
    if global_scale is not None:
        scale = scale * global_scale
    if scale_format is ScaleFormat.E4M3:
        wide = scale.detach().clamp(_E4M3_LEAST, _E4M3_LARGEST)
        scale = _replaced(scale, wide.to(torch.float8_e4m3fn).to(scale.dtype))
    elif scale_format is ScaleFormat.E8M0:
        exponent = scale.detach().log2().round().clamp(_E8M0_LEAST, _E8M0_LARGEST)
        scale = _replaced(scale, torch.exp2(exponent))
    info = torch.finfo(dtype)
    return scale.to(dtype).clamp(min=info.smallest_normal)


def with_zero_gradients(x: Tensor, *others: Tensor) -> Tensor:
    """Return ``x``, with gradients of zero for ``others`` in its backward.

    Data parallel training needs a gradient for every parameter, even for those that are not part of
    the forward yet.
    """
    result: Tensor = _WithZeroGradients.apply(x, *others)  # type: ignore[no-untyped-call]  # torch's own
    return result


def _values(
    codes: Tensor,
    dtype: torch.dtype,
    scale: Tensor,
    zero: Tensor | None,
    through: torch.dtype | None,
) -> Tensor:
    """Dequantized values (q - z) s, in ``dtype``; ``codes`` may be overwritten."""
    values = codes.to(scale.dtype)
    if zero is not None:
        values.sub_(zero.to(scale.dtype))
    values.mul_(scale)
    return (values if through is None else values.to(through)).to(dtype)


def _inside(quotients: Tensor, grid: Grid) -> Tensor:
    """Mask of the t within the ends of the grid, with a tolerance for rounding at the ends.

    The extreme from which a scale was computed is at the end, and the two divisions may put it a
    little beyond.
    """
    slack = 1.0 + 2.0 * torch.finfo(quotients.dtype).eps
    return quotients.clamp(grid.qmin * slack, grid.qmax * slack) == quotients


def _replaced(x: Tensor, value: Tensor) -> Tensor:
    result: Tensor = _Replaced.apply(x, value)  # type: ignore[no-untyped-call]  # torch's own
    return result


class _FakeQuantize(torch.autograd.Function):
    """Fake quantization with a constant or a learned scale (LSQ, equation 3).

    With a constant one, a bool per element is all that is saved for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        grid: Grid,
        through: torch.dtype | None,
        gradient_scale: float,
    ) -> Tensor:
        quotients = grid.quotients(x, scale, zero)
        inside, slope = _inside(quotients, grid), None
        if not ctx.needs_input_grad[1]:
            codes = grid.round_(quotients.clamp_(grid.qmin, grid.qmax))
        else:
            codes = grid.round_(quotients.clamp(grid.qmin, grid.qmax))
            offset = quotients if zero is None else quotients.sub_(zero.to(quotients.dtype))
            # q - t inside, q - z outside: t - z is x / s, which counts inside only
            slope = codes - torch.where(inside, offset, 0.0)
            if zero is not None:
                slope.sub_(zero.to(slope.dtype))
        ctx.save_for_backward(inside, slope)
        ctx.scale_shape, ctx.scale_dtype = scale.shape, scale.dtype
        ctx.gradient_scale = gradient_scale
        return _values(codes, x.dtype, scale, zero, through)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inside, slope = ctx.saved_tensors
        to_x = torch.where(inside, gradient, 0.0) if ctx.needs_input_grad[0] else None
        if slope is None:
            return to_x, None, None, None, None, None
        products = (gradient * slope).sum_to_size(ctx.scale_shape)
        to_scale = (products * ctx.gradient_scale).to(ctx.scale_dtype)
        return to_x, to_scale, None, None, None, None


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


class _WithZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(torch.zeros_like(other) for other in ctx.saved_tensors)
