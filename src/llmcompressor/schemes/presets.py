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
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import compressed_tensors
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from llmcompressor.errors import InputError, did_you_mean

_PACKED = "pack-quantized"
_MXFP6 = "mxfp6-pack-quantized"
_NEEDED = "0.20"
_NEWER = frozenset({"MXFP4XFP8", "MXFP6A16", "MXFP6A8"})
_OTHERS = """
UNQUANTIZED W8A8 INT8 W4AFP8 FP8 FP8_DYNAMIC FP8_BLOCK NVFP4A16 NVFP4 MXFP4A16 MXFP4 MXFP8A16 MXFP8
"""


@dataclass(frozen=True)
class Preset:
    """The two ``QuantizationArgs`` of a preset, or their arguments.

    Attributes:
        weights: of the weights; ``None`` leaves them unquantized.
        input_activations: of the inputs; ``None`` leaves them unquantized.
    """

    weights: Any = None
    input_activations: Any = None

    def scheme(self, targets: Iterable[str]) -> QuantizationScheme:
        """A new scheme of this preset for ``targets``, with an explicit format if it needs one."""
        given = {"weights": self.weights, "input_activations": self.input_activations}
        made = {
            name: QuantizationArgs.model_validate(deepcopy(one))
            for name, one in given.items()
            if one is not None
        }
        return with_format(QuantizationScheme(targets=list(targets), **made))


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


def _integer_preset(bits: int, inputs: int, *, symmetric: bool = True) -> Preset:
    """A preset of groups of 128; inputs of 16 bits are not quantized."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
    tokens = {"num_bits": inputs, "type": "int", "strategy": "token", "dynamic": True}
    return Preset({**weights, "symmetric": symmetric}, None if inputs == 16 else tokens)


def _build_presets() -> dict[str, Preset]:
    # W8A8 has scales of rows, not of groups; compressed-tensors before 0.20 has few of the others
    widths = [(bits, inputs) for inputs in (16, 8, 4) for bits in range(2, 9)]
    presets = {
        f"W{bits}A{inputs}": _integer_preset(bits, inputs)
        for bits, inputs in widths
        if inputs == 16 or bits < inputs or bits == inputs == 4
    }
    asymmetric = {
        f"W{bits}A16_ASYM": _integer_preset(bits, 16, symmetric=False) for bits in range(2, 9)
    }
    named = {name: Preset(**PRESET_SCHEMES[name]) for name in _OTHERS.split()}
    newer = {
        name: Preset(**PRESET_SCHEMES[name]) for name in sorted(_NEWER) if name in PRESET_SCHEMES
    }
    return {**presets, **asymmetric, **named, **newer}


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
