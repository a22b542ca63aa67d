# SPDX-License-Identifier: Apache-2.0
r"""Scales as trained parameters of weights whose codes are frozen.

A weight is decoded as :math:`w = (q - z) s` from codes q, zero points z and scales s. Chen et al.,
*EfficientQAT: Efficient Quantization-Aware Training for Large Language Models*, arXiv:2407.11062,
section 3.3, keep q and z and train s, so that nothing has to be passed straight through a rounding
of weights:

.. math:: \frac{\partial w}{\partial s} = q - z, \qquad
          \frac{\partial L}{\partial s} = \sum_{\text{cell}} (q - z) \frac{\partial L}{\partial w}

A scale is :math:`s = s_0 e^p` with p = 0 at first, rounded to the dtype in which it is stored, with
straight-through gradients. Steps are those of Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1).

A weight is ``[R, C]``; its scale and zero point have the shape that its partition gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition, dequantize_matrix, quantize_matrix
from llmcompressor.numerics.scales import ScaleFormat
from llmcompressor.numerics.straight_through import learned_scale, storable_scale

_DECAYS = (0.9, 0.95)
"""Of the means of gradients and of their squares: the second is short, as there are few steps."""
_SMALLEST = 1e-12


@dataclass(frozen=True)
class CodedWeight:
    """A weight whose codes are frozen.

    Attributes:
        weight: ``[R, C]`` as it is decoded, in its own dtype.
        scale: in the dtype in which it is stored.
        zero: zero points in the shape of the scale; ``None`` on symmetric grids.
        grid: the grid of the codes.
        partition: the cells that share a scale.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    grid: Grid
    partition: Partition

    def scale_at(self, log_ratio: Tensor) -> Tensor:
        """The scale s0 exp(p), rounded to its dtype, with straight-through gradients."""
        start = self.scale.detach().float()
        moved = learned_scale(log_ratio, start)
        return storable_scale(moved, ScaleFormat.PLAIN, dtype=self.scale.dtype)

    def decoded(self, log_ratio: Tensor) -> Tensor:
        """The weight with the scale at p = ``log_ratio``, in its dtype; differentiable in p.

        >>> one = CodedWeight(
        ...     torch.tensor([[2.0, -1.0]]), torch.ones(1, 1), None, Grid("int", 4), Partition(1, 0)
        ... )
        >>> one.decoded(torch.full((1, 1), 2.0).log()).round(decimals=5)
        tensor([[ 4., -2.]])
        """
        codes_RC = self.codes()
        if self.zero is not None:
            unit = torch.ones_like(self.scale, dtype=torch.float32)
            codes_RC = dequantize_matrix(codes_RC, unit, self.zero, self.grid, self.partition)
        scale = self.scale_at(log_ratio).float()
        values_RC = self.partition.apply(lambda q, s, _: q * s, codes_RC, scale)
        return values_RC.to(self.weight.dtype)

    @torch.no_grad()
    def codes(self) -> Tensor:
        """The codes ``[R, C]``, float32.

        In float32, as division in bfloat16 would find some codes of 8 bits one off.
        """
        weight_RC, scale = self.weight.detach().float(), self.scale.detach().float()
        return quantize_matrix(weight_RC, scale, self.zero, self.grid, self.partition)

    @torch.no_grad()
    def with_scale_at(self, log_ratio: Tensor) -> CodedWeight:
        """The same codes with the scale at p, as a loader decodes them.

        The codes that are computed from its weight and its scale are those of this one. A cell
        where rounding to the dtype of the weight would change one stays as it is.
        """
        codes_RC, scale = self.codes(), self.scale_at(log_ratio)
        values_RC = dequantize_matrix(codes_RC, scale, self.zero, self.grid, self.partition)
        moved = replace(self, weight=values_RC.to(self.weight.dtype), scale=scale)
        differs_RC = (moved.codes() != codes_RC).float()
        stays = self.partition.magnitudes(differs_RC) > 0
        stays_RC = self.partition.expand(stays, *codes_RC.shape)
        return replace(
            self,
            weight=torch.where(stays_RC, self.weight, moved.weight),
            scale=torch.where(stays, self.scale, scale),
        )


@dataclass
class AdamState:
    """A trained tensor with its running means, float32.

    Attributes:
        value: the tensor.
        mean: of its gradients.
        square: of their squares.
    """

    value: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, value: Tensor) -> AdamState:
        """The state before the first step."""
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, number: int) -> None:
        """Take a step of Adam in place; ``number`` is 1 for the first one."""
        first, second = _DECAYS
        self.mean.mul_(first).add_(gradient, alpha=1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = self.mean / (1 - first**number)
        size = (self.square / (1 - second**number)).sqrt_().add_(_SMALLEST)
        self.value.sub_(mean.div_(size), alpha=rate)
