# SPDX-License-Identifier: Apache-2.0
"""Conversion of compressed-tensors' ``QuantizationArgs`` to the types of ``numerics``.

Callers handle configurations; ``numerics`` handles grids, partitions and scale formats.
"""

from __future__ import annotations

from typing import Literal

import torch
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition
from llmcompressor.numerics.scales import ScaleFormat, default_zero_dtype
from llmcompressor.schemes.checks import describe
from llmcompressor.schemes.presets import format_of

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
_MX_GROUP = 32


def grid_of(args: QuantizationArgs) -> Grid:
    """The grid that ``args`` rounds to."""
    kind: Literal["int", "float"] = "int" if args.type == QuantizationType.INT else "float"
    return Grid(kind, args.num_bits, args.symmetric)


def partition_of(args: QuantizationArgs) -> Partition:
    """The partition of a weight [R, C] into cells that share a scale.

    Raises:
        InputError: the strategy is not one for weights (``token``, ``attn_head``).
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return Partition(0, 0)
    if args.strategy == QuantizationStrategy.CHANNEL:
        return Partition(1, 0)
    if args.strategy in _GROUPED and args.group_size is not None:
        return Partition(1, args.group_size)
    if args.strategy == QuantizationStrategy.BLOCK and args.block_structure is not None:
        return Partition(*args.block_structure)
    name = QuantizationStrategy(args.strategy).value if args.strategy else "None"
    raise InputError(
        f"The strategy {name} does not apply to weights.",
        "Use tensor, channel, group, tensor_group or block.",
    )


def scale_format_of(args: QuantizationArgs) -> ScaleFormat:
    """The format in which scales of ``args`` are stored.

    Raises:
        InputError: integer scales outside the MX formats, which have no meaning.
    """
    dtype = args.scale_dtype
    if dtype is None or (dtype.is_floating_point and dtype is not torch.float8_e4m3fn):
        return ScaleFormat.PLAIN
    if dtype is torch.float8_e4m3fn:
        return ScaleFormat.E4M3
    is_mx = args.type == QuantizationType.FLOAT and args.group_size == _MX_GROUP
    if dtype is torch.uint8 and is_mx and args.symmetric:
        return ScaleFormat.E8M0
    raise InputError(
        f"Scales of {dtype} are exponents, which only symmetric floats of 4, 6 or 8 bits in "
        f"groups of {_MX_GROUP} have.",
        f"Set type float and group_size {_MX_GROUP}, or leave scale_dtype out.",
    )


def scale_dtype_of(args: QuantizationArgs) -> torch.dtype | None:
    """The floating dtype that plain scales of ``args`` are rounded to, or ``None`` if unset."""
    dtype: torch.dtype | None = args.scale_dtype
    return dtype if scale_format_of(args) is ScaleFormat.PLAIN else None


def zero_dtype_of(args: QuantizationArgs) -> torch.dtype:
    """The dtype of zero points of ``args``."""
    return args.zp_dtype or default_zero_dtype(grid_of(args))


def needs_global_scale(args: QuantizationArgs) -> bool:
    """Return True if the scales of ``args`` are relative to a global scale of the tensor."""
    return bool(args.strategy == QuantizationStrategy.TENSOR_GROUP)


def default_observer(args: QuantizationArgs, base_name: str) -> str | None:
    """The name of the observer that calibrates a tensor.

    Args:
        args: how the tensor is quantized; an observer named there takes precedence.
        base_name: ``"weight"``, or the activation: ``"input"``, ``"output"``, ``"q"``, …

    Returns:
        The observer's registry name; ``None`` for activations whose scales are all dynamic.
    """
    if args.dynamic is True:
        return None
    if args.observer is not None:
        return str(args.observer)
    if base_name == "weight":
        return "memoryless_minmax"
    return "static_minmax" if args.dynamic == DynamicType.LOCAL else "minmax"


# --------------------
# Compression formats that can hold the weights of a scheme, for formats requested by name.

PACKED_ZEROS = frozenset({"channel", "group"})
"""Strategies whose zero points pack-quantized packs as it packs codes."""
_BYTE, _WIDEST = 8, 32


def compatible_formats(scheme: QuantizationScheme) -> tuple[str, ...]:
    """The formats from which loaders decode the weights of ``scheme`` correctly, its own first.

    >>> from llmcompressor.schemes.presets import preset_scheme
    >>> compatible_formats(preset_scheme("W8A8"))
    ('int-quantized', 'naive-quantized', 'pack-quantized')
    """
    weights, own = scheme.weights, format_of(scheme.model_copy(update={"format": None}))
    fitting: tuple[str, ...] = ()
    if weights is not None and weights.type == "float":  # those of 4 and 6 bits have one each
        fitting = ("float-quantized", "naive-quantized") if weights.num_bits == _BYTE else ()
    elif weights is not None and weights.num_bits <= _WIDEST:
        packed = ("pack-quantized",) if weights.num_bits <= _BYTE else ()
        fitting = ("int-quantized", "naive-quantized", *packed)
    return (own, *(name for name in fitting if name != own))


def format_mismatch(scheme: QuantizationScheme, form: str) -> tuple[str, str] | None:
    """Why ``form`` cannot hold the weights of ``scheme``, and the remedy; ``None`` if it can.

    A loader would misinterpret the stored tensors and decode other weights.

    >>> from llmcompressor.schemes.presets import preset_scheme
    >>> format_mismatch(preset_scheme("W4A16"), "float-quantized")[0]
    'float-quantized holds no weights in int4 group 128'
    """
    fitting = compatible_formats(scheme)
    weights = scheme.weights
    if (
        form == "pack-quantized"
        and weights is not None
        and not weights.symmetric
        and weights.strategy in PACKED_ZEROS
        and weights.zp_dtype not in (None, torch.int8)
    ):
        return (
            f"{form} packs zero points of torch.int8, and zp_dtype is {weights.zp_dtype}",
            "Leave zp_dtype out.",
        )
    if form == "dense" or form in fitting:
        return None
    return (
        f"{form} holds no weights {describe(scheme)}",
        f"What holds them: {', '.join(fitting)}. Left out, it is {fitting[0]}.",
    )
