# SPDX-License-Identifier: Apache-2.0
"""The tensors of a quantized module in their final form, packed by compressed-tensors.

Nothing here changes the model: each module's tensors are taken, compressed and handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.modeling import IMPL_ATTR
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.errors import (
    ArgumentError,
    LifecycleError,
    NonFiniteError,
    did_you_mean,
)
from llmcompressor.logger import logger

__all__ = [
    "QuantizedModule",
    "compress",
    "keep_dense",
    "parse_format",
    "quantized_modules",
]

_PARTS = ("scale", "zero_point", "global_scale")
_BASES = ("weight", "input", "output", "q", "k", "v")
_NO_READER = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24", "mixed-precision"}


@dataclass(frozen=True)
class QuantizedModule:
    """One module and how it is written.

    Attributes:
        name: its name in the module tree.
        module: the module.
        scheme: a copy of its scheme with ``format`` filled in.
        is_attention: its queries, keys or values are quantized, it has no weight of its own.
        has_group: it needs a config group (attention of which only the cache is quantized
            needs none: ``kv_cache_scheme`` says it).
    """

    name: str
    module: Module
    scheme: QuantizationScheme
    is_attention: bool = False
    has_group: bool = True


def parse_format(name: str | None) -> CompressionFormat | None:
    """The compression format called ``name``.

    Raises:
        ArgumentError: there is no such format, or no reader takes it any more.
    """
    if name is None:
        return None
    known = sorted(item.value for item in CompressionFormat if item.value not in _NO_READER)
    value = getattr(name, "value", name)
    if value not in known:
        raise ArgumentError(
            f"There is no format named {value!r} that readers take.", did_you_mean(value, known)
        )
    return CompressionFormat(value)


def quantized_modules(
    model: Module, *, forced_format: CompressionFormat | None = None
) -> list[QuantizedModule]:
    """All quantized modules of ``model``, in module order; shared modules once per name."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not is_module_quantized(module):
            continue
        scheme: QuantizationScheme = module.quantization_scheme
        if isinstance(module, Linear | Embedding):
            chosen = _format(scheme, forced_format, name)
            copy = scheme.model_copy(update={"format": chosen.value})
            found.append(QuantizedModule(name, module, copy))
        elif is_cached_attention_module(module):
            copy = scheme.model_copy(update={"format": CompressionFormat.dense.value})
            has_group = hasattr(module, IMPL_ATTR)
            found.append(QuantizedModule(name, module, copy, True, has_group))
        else:
            logger.warning(
                f"{name} ({type(module).__name__}) is written dense: the format holds compressed "
                "weights of Linear and Embedding modules only."
            )
    return found


def _format(
    scheme: QuantizationScheme, forced: CompressionFormat | None, name: str
) -> CompressionFormat:
    if scheme.weights is None:
        return CompressionFormat.dense
    natural = _natural_format(scheme)
    if forced is not None:
        if forced is not natural:
            logger.warning(f"{name} is written as {forced.value}; {natural.value} fits its scheme.")
        return forced
    return CompressionFormat(scheme.format) if scheme.format else natural


def _natural_format(scheme: QuantizationScheme) -> CompressionFormat:
    """The smallest format that readers take for ``scheme``.

    compressed-tensors would store integer weights below 8 bits one per byte as soon as
    activations are quantized too; packed, they are as small as their bits say and are read alike.
    """
    weights = scheme.weights
    if (
        weights.type == QuantizationType.INT.value
        and weights.num_bits < 8
        and weights.strategy != QuantizationStrategy.BLOCK.value
    ):
        return CompressionFormat.pack_quantized
    return infer_module_format(Linear, scheme)


def compress(entry: QuantizedModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's own tensors, compressed.

    Args:
        entry: the module and its scheme.
        tensors: own name → tensor (``weight`` [rows, columns] on the grid, its scales, ``bias``).

    Returns:
        Own name → tensor as the format defines them, with no parameter that a reader of this
        scheme does not expect.

    Raises:
        LifecycleError: a scale that the scheme needs is not there.
        NonFiniteError: a scale is NaN, infinite or negative.
    """
    expected = _expected_parameters(entry)
    own = {key: tensor for key, tensor in tensors.items() if key in expected or not _is_qparam(key)}
    _check_scales(entry, own, expected)
    if not entry.is_attention and entry.scheme.weights is not None:
        compressor = BaseCompressor.get_value_from_registry(entry.scheme.format)
        own = compressor.compress(own, entry.scheme)
    return {key: tensor.reshape(1) if tensor.ndim == 0 else tensor for key, tensor in own.items()}


def keep_dense(entry: QuantizedModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's own tensors, dense, with a zero point beside every scale that is stored.

    Readers of a checkpoint that is not compressed create zero points for symmetric schemes too.
    """
    own = dict(tensors)
    for base, args in _arguments(entry).items():
        scale = own.get(f"{base}_scale")
        if scale is not None and f"{base}_zero_point" not in own and base not in "kvq":
            own[f"{base}_zero_point"] = torch.zeros(scale.shape, dtype=args.zp_dtype)
    return own


def _is_qparam(key: str) -> bool:
    base, _, part = key.partition("_")
    return base in _BASES and (part in _PARTS or part in {"g_idx", "shape"})


def _arguments(entry: QuantizedModule) -> dict[str, QuantizationArgs]:
    scheme = entry.scheme
    if entry.is_attention:
        bases = ("q", "k", "v") if entry.has_group else ("k", "v")
        return dict.fromkeys(bases, scheme.input_activations)
    pairs: dict[str, Any] = {
        "weight": scheme.weights,
        "input": scheme.input_activations,
        "output": scheme.output_activations,
    }
    return {base: args for base, args in pairs.items() if args is not None}


def _expected_parameters(entry: QuantizedModule) -> set[str]:
    expected = set()
    for base, args in _arguments(entry).items():
        if args.strategy == QuantizationStrategy.TENSOR_GROUP.value and args.dynamic is not True:
            expected.add(f"{base}_global_scale")
        if args.dynamic in (True, DynamicType.LOCAL, DynamicType.LOCAL.value):
            continue
        expected.add(f"{base}_scale")
        if not args.symmetric:
            expected.add(f"{base}_zero_point")
    return expected


def _check_scales(
    entry: QuantizedModule, tensors: Mapping[str, Tensor], expected: set[str]
) -> None:
    missing = sorted(expected - set(tensors))
    if missing:
        raise LifecycleError(
            f"The module {entry.name} was never calibrated: it has no {', '.join(missing)}. "
            "Run the recipe on the model before saving it."
        )
    for key in sorted(expected):
        if not key.endswith("_scale"):
            continue
        scale = tensors[key].to(torch.float32)
        if not bool(torch.isfinite(scale).all()) or bool((scale < 0).any()):
            raise NonFiniteError(
                f"The {key} of {entry.name} is not finite or negative, so its values are lost. "
                "Check the weights and the calibration data that reach this module."
            )
