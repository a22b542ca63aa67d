# SPDX-License-Identifier: Apache-2.0
"""The preset schemes by name, and the format in which a scheme is written.

A preset is data: the arguments of the weights and of the input activations. ``W4A16`` reads
"weights in 4 bits, activations in 16", so only the weights are quantized; ``_ASYM`` gives them
a zero point. All presets are symmetric otherwise.

===================  ====================================  ===================================
preset               weights                               input activations
===================  ====================================  ===================================
``W{2…8}A16[_ASYM]`` n-bit int, groups of 128              none
``W8A8``, ``INT8``   8-bit int, channel                    8-bit int, token, dynamic
``W{2…7}A8``         n-bit int, groups of 128              8-bit int, token, dynamic
``W{2,3,4}A4``       n-bit int, groups of 128              4-bit int, token, dynamic
``W4AFP8``           4-bit int, groups of 128              8-bit float, token, dynamic
``FP8``              8-bit float, tensor                   8-bit float, tensor, static
``FP8_DYNAMIC``      8-bit float, channel                  8-bit float, token, dynamic
``FP8_BLOCK``        8-bit float, blocks of 128 x 128      8-bit float, groups of 128, dynamic
``NVFP4[A16]``       4-bit float, two-level groups of 16   the same, local scales dynamic
``MXFP4[A16]``       4-bit float, groups of 32, 2^k        the same, dynamic
``MXFP4XFP8``        4-bit float, groups of 32, 2^k        8-bit float, groups of 128, dynamic
``MXFP6A16``         6-bit float, groups of 32, 2^k        none
``MXFP6A8``          6-bit float, groups of 32, 2^k        8-bit float, groups of 32, 2^k, dynamic
``MXFP8[A16]``       8-bit float, groups of 32, 2^k        the same, dynamic
``UNQUANTIZED``      none                                  none
===================  ====================================  ===================================

MXFP4XFP8 and 6-bit floats came with compressed-tensors 0.20. With an older one those presets are
known by name, and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import compressed_tensors
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from llmcompressor.errors import InputError, did_you_mean

__all__ = [
    "PRESETS",
    "Preset",
    "can_store_6_bit_floats",
    "check_6_bit_floats",
    "format_of",
    "is_bit_packed",
    "is_preset",
    "preset_scheme",
    "with_format",
]

Arguments = Mapping[str, Any]

_PACKED = "pack-quantized"
_MXFP6 = "mxfp6-pack-quantized"
_NEEDED = "0.20"


@dataclass(frozen=True)
class Preset:
    """Keyword arguments of the two ``QuantizationArgs`` of a preset.

    Attributes:
        weights: arguments of the weights; ``None`` leaves them unquantized.
        input_activations: arguments of the inputs; ``None`` leaves them unquantized.
    """

    weights: Arguments | None = None
    input_activations: Arguments | None = None

    def scheme(self, targets: Iterable[str]) -> QuantizationScheme:
        """A new scheme of this preset for ``targets``, with an explicit format if it needs one."""
        scheme = QuantizationScheme(
            targets=list(targets),
            weights=self.weights and QuantizationArgs(**self.weights),
            input_activations=self.input_activations and QuantizationArgs(**self.input_activations),
        )
        return with_format(scheme)


def _grouped_int_arguments(bits: int, *, symmetric: bool = True) -> Arguments:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": symmetric,
    }


def _per_token_arguments(bits: int, kind: str) -> Arguments:
    return {"num_bits": bits, "type": kind, "strategy": "token", "dynamic": True}


def can_store_6_bit_floats() -> bool:
    """Return True if the installed compressed-tensors has a format for 6-bit floats."""
    return _MXFP6 in {one.value for one in CompressionFormat}


def check_6_bit_floats(what: str) -> None:
    """Refuse 6-bit floats if the installed compressed-tensors can neither store nor run them.

    Raises:
        InputError: the installed compressed-tensors is too old; ``what`` begins the sentence.
    """
    if not can_store_6_bit_floats():
        _refuse_newer(f"{what} is of 6-bit floats, which")


def _refuse_newer(what: str) -> NoReturn:
    raise InputError(
        f"{what} compressed-tensors {compressed_tensors.__version__} does not have.",
        f"Install compressed-tensors {_NEEDED} or newer, or take MXFP4, MXFP8 or W6A16.",
    )


_FP8_TENSOR: Arguments = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_FP8_BLOCK = Preset(
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
)
_NVFP4: Arguments = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}


def _mx_arguments(bits: int) -> Arguments:
    """Arguments of the OCP microscaling (MX) formats: 32 values share a power-of-two scale."""
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": torch.uint8,
        "zp_dtype": torch.uint8,
    }


def _build_presets() -> dict[str, Preset]:
    w8a8 = Preset(
        {"num_bits": 8, "type": "int", "strategy": "channel"}, _per_token_arguments(8, "int")
    )
    presets = {"UNQUANTIZED": Preset(), "W8A8": w8a8, "INT8": w8a8}
    for bits in range(2, 9):
        presets[f"W{bits}A16"] = Preset(_grouped_int_arguments(bits))
        presets[f"W{bits}A16_ASYM"] = Preset(_grouped_int_arguments(bits, symmetric=False))
    for bits in range(2, 8):
        presets[f"W{bits}A8"] = Preset(_grouped_int_arguments(bits), _per_token_arguments(8, "int"))
    for bits in range(2, 5):
        presets[f"W{bits}A4"] = Preset(_grouped_int_arguments(bits), _per_token_arguments(4, "int"))
    presets |= {
        "W4AFP8": Preset(_grouped_int_arguments(4), _per_token_arguments(8, "float")),
        "FP8": Preset(_FP8_TENSOR, {**_FP8_TENSOR, "observer": "static_minmax"}),
        "FP8_DYNAMIC": Preset(
            {**_FP8_TENSOR, "strategy": "channel"}, _per_token_arguments(8, "float")
        ),
        "FP8_BLOCK": _FP8_BLOCK,
        "NVFP4A16": Preset(_NVFP4),
        "NVFP4": Preset(_NVFP4, {**_NVFP4, "dynamic": "local", "observer": "static_minmax"}),
        "MXFP4A16": Preset(_mx_arguments(4)),
        "MXFP4": Preset(_mx_arguments(4), {**_mx_arguments(4), "dynamic": True}),
        "MXFP8A16": Preset(_mx_arguments(8)),
        "MXFP8": Preset(_mx_arguments(8), {**_mx_arguments(8), "dynamic": True}),
    }
    return presets | {name: one for name, one in _NEWER.items() if name in PRESET_SCHEMES}


_NEWER = {
    "MXFP4XFP8": Preset(_mx_arguments(4), _FP8_BLOCK.input_activations),
    "MXFP6A16": Preset(_mx_arguments(6)),
    "MXFP6A8": Preset(_mx_arguments(6), {**_mx_arguments(8), "dynamic": True}),
}
PRESETS: Mapping[str, Preset] = MappingProxyType(_build_presets())
"""Every preset that the installed compressed-tensors knows, by its name in capitals."""


def is_preset(name: str) -> bool:
    """Return True if ``name`` is a preset of any compressed-tensors release, in any case.

    >>> is_preset("w4a16"), is_preset("W4A17")
    (True, False)
    """
    return name.upper() in PRESETS or name.upper() in _NEWER


def preset_scheme(name: str, targets: str | Iterable[str] = ("Linear",)) -> QuantizationScheme:
    """A new scheme of the preset ``name``, in any case, for ``targets``.

    Raises:
        InputError: there is no such preset, and the message lists all of them; or the installed
            compressed-tensors is too old for it.

    >>> preset_scheme("w4a16", "Linear").weights.group_size
    128
    """
    preset = PRESETS.get(name.upper())
    if preset is None and name.upper() in _NEWER:
        _refuse_newer(f"{name} is a preset that")
    if preset is None:
        near = did_you_mean(name, PRESETS)
        every = f"The presets are: {', '.join(sorted(PRESETS))}."
        raise InputError(
            f"There is no preset scheme named {name!r}.",
            f"{near} {every}" if near.startswith("Did") else every,
        )
    return preset.scheme([targets] if isinstance(targets, str) else targets)


def is_bit_packed(scheme: QuantizationScheme) -> bool:
    """Return True if integer weights are written bit-packed although activations are quantized.

    compressed-tensors by default stores every integer weight with quantized activations as one byte
    per value, so W4A8 would be as large as W8A8. Packed, a weight takes ``num_bits`` per value. It
    is also what CUDA engines load: vLLM's schemes for int weights with dynamic int8 or fp8
    activations expect ``weight_packed``. (vLLM's CPU kernel for W4A8 loads ``int-quantized``: set
    it as the group's ``format``.) Packing saves nothing at eight bits. Inputs with a zero point are
    supported by that CPU kernel alone, so they are written for it.
    """
    weights = scheme.weights
    activations = scheme.input_activations or scheme.output_activations
    if not (weights and activations and weights.type == "int" and weights.num_bits < 8):
        return False
    return not _is_for_vllm_cpu_kernel(scheme)


def _is_for_vllm_cpu_kernel(scheme: QuantizationScheme) -> bool:
    """Return True if only vLLM's CPU kernel for W4A8 supports a scheme, and no packed kernel."""
    weights, inputs = scheme.weights, scheme.input_activations
    return (
        inputs is not None
        and (weights.num_bits, weights.symmetric) == (4, True)
        and weights.strategy in ("group", "channel")
        and (inputs.num_bits, inputs.type, inputs.strategy) == (8, "int", "token")
        and inputs.dynamic is True
        and not inputs.symmetric
        and scheme.output_activations is None
    )


def with_format(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme, with an explicit format where compressed-tensors would choose another."""
    if scheme.format is None and is_bit_packed(scheme):
        return scheme.model_copy(update={"format": _PACKED})
    return scheme


def format_of(scheme: QuantizationScheme) -> str:
    """The compression format in which a module of ``scheme`` is written.

    In this order: the scheme's own ``format``; bit-packed if :func:`is_bit_packed`; the first
    match in the order in which compressed-tensors tries its formats.

    >>> format_of(preset_scheme("W4A8")), format_of(preset_scheme("W8A8"))
    ('pack-quantized', 'int-quantized')
    """
    if scheme.format is not None:
        return str(CompressionFormat(scheme.format).value)
    if scheme.weights is None:
        return "dense"
    if scheme.weights.type == "float":
        return _float_format(scheme)
    if is_bit_packed(scheme):
        return _PACKED
    if scheme.input_activations is not None:
        return "int-quantized"
    return _PACKED if scheme.weights.num_bits <= 8 else "naive-quantized"


def _float_format(scheme: QuantizationScheme) -> str:
    weights = scheme.weights
    if weights.group_size == 32 and weights.num_bits == 4:
        return "mxfp4-pack-quantized"
    if weights.group_size == 32 and weights.num_bits == 6:
        return _MXFP6
    if weights.group_size == 32 and weights.scale_dtype == torch.uint8:
        return "mxfp8-quantized"
    if weights.group_size == 16 and weights.num_bits == 4:
        return "nvfp4-pack-quantized"
    return "naive-quantized" if scheme.input_activations is None else "float-quantized"
