# SPDX-License-Identifier: Apache-2.0
"""Compression formats that can hold the weights of a scheme, for formats requested by name."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from llmcompressor.schemes.checks import describe
from llmcompressor.schemes.presets import format_of

__all__ = ["PACKED_ZEROS", "fitting_formats", "misfit"]

PACKED_ZEROS = frozenset({"channel", "group"})
"""Strategies whose zero points pack-quantized packs as it packs codes."""
_BYTE, _WIDEST = 8, 32


def fitting_formats(scheme: QuantizationScheme) -> tuple[str, ...]:
    """The formats from which loaders decode the weights of ``scheme`` correctly, its own first.

    >>> from llmcompressor.schemes.presets import preset_scheme
    >>> fitting_formats(preset_scheme("W8A8"))
    ('int-quantized', 'naive-quantized', 'pack-quantized')
    """
    own = format_of(scheme.model_copy(update={"format": None}))
    if scheme.weights is None:
        return (own,)
    return (own, *(name for name in _known(scheme.weights) if name != own))


def _known(weights: QuantizationArgs) -> tuple[str, ...]:
    if weights.type == "float":  # those of 4 and 6 bits have one format each
        return ("float-quantized", "naive-quantized") if weights.num_bits == _BYTE else ()
    plain = ("int-quantized", "naive-quantized") if weights.num_bits <= _WIDEST else ()
    return (*plain, "pack-quantized") if weights.num_bits <= _BYTE else plain


def _has_unpackable_zeros(weights: QuantizationArgs | None) -> bool:
    if weights is None or weights.symmetric or weights.strategy not in PACKED_ZEROS:
        return False
    return weights.zp_dtype not in (None, torch.int8)


def misfit(scheme: QuantizationScheme, form: str) -> tuple[str, str] | None:
    """Why ``form`` cannot hold the weights of ``scheme``, and the remedy; ``None`` if it can.

    A loader would misinterpret the stored tensors and decode other weights.

    >>> from llmcompressor.schemes.presets import preset_scheme
    >>> misfit(preset_scheme("W4A16"), "float-quantized")[0]
    'float-quantized holds no weights in int4 group 128'
    """
    fitting = fitting_formats(scheme)
    if form == "pack-quantized" and _has_unpackable_zeros(scheme.weights):
        return (
            f"{form} packs zero points of torch.int8, and zp_dtype is {scheme.weights.zp_dtype}",
            "Leave zp_dtype out.",
        )
    if form == "dense" or form in fitting:
        return None
    return (
        f"{form} holds no weights {describe(scheme)}",
        f"What holds them: {', '.join(fitting)}. Left out, it is {fitting[0]}.",
    )
