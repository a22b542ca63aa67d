# SPDX-License-Identifier: Apache-2.0
"""The canonical form of an observed tensor: a matrix and its partition into cells.

=====================  ==================  ===================  =============  ===============
tensor                 strategy            matrix               partition      scale
=====================  ==================  ===================  =============  ===============
weight [R, C]          of weights          [R, C]               see there      see there
activation [..., C]    tensor              [tokens, C]          (0, 0)         [1]
activation [..., C]    group, tensor_group [tokens, C]          (0, g)         [C / g]
states [B, H, T, D]    tensor              [H, B * T * D]       (0, 0)         [1]
states [B, H, T, D]    attn_head           [H, B * T * D]       (1, 0)         [H, 1, 1]
=====================  ==================  ===================  =============  ===============

Tensors are converted here once, so observers need no case for each kind of tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from llmcompressor.errors import InputError, did_you_mean
from llmcompressor.numerics.partition import Partition
from llmcompressor.numerics.scales import parameter_dtype
from llmcompressor.schemes.bridge import partition_of

ACTIVATIONS = frozenset({"input", "output"})
ATTENTION_STATES = frozenset({"q", "k", "v"})
_FOR_ACTIVATIONS = "tensor, group or tensor_group"
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


class Range(NamedTuple):
    """Minimum and maximum per scale, two tensors of the scale's shape."""

    minimum: Tensor
    maximum: Tensor


@dataclass(frozen=True)
class CanonicalTensor:
    """An observed tensor in canonical form.

    Attributes:
        matrix: [R, C], not empty.
        partition: its cells, each with one scale.
        scale_shape: the shape in which the scales are stored.
        symmetric: whether its scales depend on absolute values only.
    """

    matrix: Tensor
    partition: Partition
    scale_shape: tuple[int, ...]
    symmetric: bool = False

    @cached_property
    def extremes(self) -> Range:
        """Minimum and maximum of each cell."""
        minimum, maximum = self.partition.extremes(self.matrix)
        return Range(minimum.reshape(self.scale_shape), maximum.reshape(self.scale_shape))

    def extremes_of_each(self, parts: int) -> Range:
        """:attr:`extremes` of ``parts`` activations stacked by rows: two ``[parts, *scale]``."""
        alike = Partition(len(self.matrix) // parts, self.partition.columns)
        minimum, maximum = alike.extremes(self.matrix)
        shape = (parts, *self.scale_shape)
        return Range(minimum.reshape(shape), maximum.reshape(shape))

    @property
    def range_for_scales(self) -> Range:
        """A range with the same scales as :attr:`extremes`, faster on symmetric grids."""
        if not self.symmetric:
            return self.extremes
        maximum = self.partition.magnitudes(self.matrix).reshape(self.scale_shape)
        return Range(-maximum, maximum)

    @cached_property
    def values(self) -> Tensor:
        """The elements of each cell [scales, elements]; incomplete cells are padded with zeros."""
        return self.partition.cells(self.matrix).flatten(0, 1)

    @property
    def padding(self) -> Tensor:
        """Number of padding zeros in each row of :attr:`values`, int64 [scales]."""
        ones = self.matrix.new_ones(1, 1).expand(self.matrix.shape)
        return (self.partition.cells(ones) == 0).sum(-1).flatten()


Canonical = CanonicalTensor
"""The name that observers written for earlier releases import."""


def to_canonical(x: Tensor, base_name: str, args: QuantizationArgs) -> CanonicalTensor:
    """Convert a tensor to its canonical form.

    Args:
        x: weight [R, C], or with more dimensions, which are joined to C, or [C]; activation
            [..., C]; or attention states [batch, heads, tokens, head_dim].
        base_name: ``"weight"``, ``"input"``, ``"output"``, ``"q"``, ``"k"`` or ``"v"``.
        args: how it will be quantized.

    Raises:
        InputError: the strategy does not apply to such a tensor.
    """
    x = x.to(parameter_dtype(x.dtype) if x.is_floating_point() else torch.float32)
    if base_name == "weight":
        return _weight(x, args)
    if base_name in ACTIVATIONS:
        return _activation(x.reshape(-1, x.shape[-1] if x.ndim else 1), base_name, args)
    if base_name in ATTENTION_STATES:
        if x.ndim < 2:
            raise InputError(
                f"States of attention have several dimensions, but those of {base_name} {x.ndim}.",
                "Give them as [batch, heads, tokens, head_dim].",
            )
        return _activation(x.transpose(0, 1).flatten(1), base_name, args)
    known = {"weight", *ACTIVATIONS, *ATTENTION_STATES}
    raise InputError(f"There is no tensor named {base_name!r}.", did_you_mean(base_name, known))


def flatten_for_calibration(value: Tensor, base_name: str, args: QuantizationArgs) -> Tensor:
    """A tensor as ``[observations, *scale, elements]``: the elements of each scale in one row.

    Arguments and errors are those of :func:`to_canonical`.
    """
    return to_observations(to_canonical(value, base_name, args), base_name)


def to_observations(observed: CanonicalTensor, base_name: str) -> Tensor:
    """``[observations, *scale, elements]``: one observation per token of an activation."""
    if base_name in ACTIVATIONS:
        return observed.matrix.reshape(len(observed.matrix), observed.scale_shape[-1], -1)
    return observed.values.reshape(1, *observed.scale_shape, -1)


def _weight(x: Tensor, args: QuantizationArgs) -> CanonicalTensor:
    partition = partition_of(args)
    if x.ndim > 1:
        matrix = x.flatten(1)
        return CanonicalTensor(
            matrix, partition, partition.shape(*matrix.shape), bool(args.symmetric)
        )
    if args.strategy == QuantizationStrategy.BLOCK:
        raise InputError(
            "A weight of one dimension cannot be cut into blocks.", "Use tensor, channel or group."
        )
    row = x.reshape(1, -1)
    # one row: its scales have no dimension for rows
    shape = partition.shape(*row.shape)
    return CanonicalTensor(row, partition, shape[1:] or shape, bool(args.symmetric))


def _activation(matrix: Tensor, base_name: str, args: QuantizationArgs) -> CanonicalTensor:
    R, C = matrix.shape
    choices = "tensor or attn_head" if base_name in ATTENTION_STATES else _FOR_ACTIVATIONS
    if args.strategy == QuantizationStrategy.TENSOR:
        return CanonicalTensor(matrix, Partition(0, 0), (1,))
    if args.strategy == QuantizationStrategy.ATTN_HEAD and base_name in ATTENTION_STATES:
        return CanonicalTensor(matrix, Partition(1, 0), (R, 1, 1))
    if args.strategy in _GROUPED and args.group_size is not None and base_name in ACTIVATIONS:
        partition = Partition(0, args.group_size)
        if not partition.divides(R, C):
            raise InputError(
                f"{C} features of the {base_name} cannot be cut into groups of {args.group_size}.",
                f"Choose a group_size that divides {C}, or ignore the module.",
            )
        return CanonicalTensor(matrix, partition, (max(1, C // args.group_size),))
    name = QuantizationStrategy(args.strategy).value if args.strategy else "None"
    raise InputError(
        f"The strategy {name} has no static scales for the {base_name}.",
        f"Use {choices}, or dynamic scales.",
    )
