# SPDX-License-Identifier: Apache-2.0
"""Compression of a quantized module's tensors to their stored form, by compressed-tensors.

Nothing here changes the model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, PackedQuantizationCompressor
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.modeling import IMPL_ATTR
from compressed_tensors.offload import as_single_threaded
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.errors import ArgumentError, LifecycleError, NonFiniteError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.packing import (
    can_pack,
    needs_recoding,
    pack_e2m1,
    pack_e2m3,
    pack_integers,
    recode,
)
from llmcompressor.numerics.partition import Partition, fake_quantize_matrix
from llmcompressor.numerics.scales import effective_scale, smallest_of
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.threads import parallel_for
from llmcompressor.schemes.assign import weight_without_onloading
from llmcompressor.schemes.attention import has_kv_cache_argument, kv_source_layer
from llmcompressor.schemes.bridge import (
    PACKED_ZEROS,
    format_mismatch,
    grid_of,
    partition_of,
    scale_dtype_of,
)
from llmcompressor.schemes.checks import supports_ragged_groups
from llmcompressor.schemes.presets import format_of

_ELEMENTS = 2**19
"""Of a piece: small enough for caches, large enough that starting operations takes no time."""
_PARTS = ("scale", "zero_point", "global_scale", "g_idx", "shape")
_BASES = ("weight", "input", "output", "q", "k", "v")
_FP4_FORMATS = {
    CompressionFormat.nvfp4_pack_quantized.value,
    CompressionFormat.mxfp4_pack_quantized.value,
}
_MXFP6 = "mxfp6-pack-quantized"  # of compressed-tensors 0.20 and newer
_MX_FORMATS = {
    CompressionFormat.mxfp4_pack_quantized.value,
    _MXFP6,
    CompressionFormat.mxfp8_quantized.value,
}
_PACKED = CompressionFormat.pack_quantized.value
_PLAIN_FORMATS = {
    CompressionFormat.naive_quantized.value,
    CompressionFormat.int_quantized.value,
    CompressionFormat.float_quantized.value,
    CompressionFormat.mxfp8_quantized.value,
}
_WORD = 32
_NO_READER = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24", "mixed-precision"}


# Codes of a weight, computed in cache-sized pieces on all cores.
#
# Rounding a matrix takes half a dozen elementwise operations. Over the whole matrix each of them
# reads and writes main memory; piece by piece only the first reads and the last writes it. Each
# piece is processed by one thread: torch's own parallelism synchronizes all threads after every
# operation, which is slow when a core is busy elsewhere.


def compute_codes(
    matrix_RC: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    quotients: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    partition: Partition,
    convert: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the codes of a matrix in their stored form.

    Args:
        matrix_RC: ``[R, C]``, floating dtype.
        scale: effective scale, of the partition's shape.
        zero: zero point of that shape, or ``None``.
        quotients: from weight, scale and zero point to the value that is rounded, elementwise,
            such as :meth:`Grid.limit`.
        partition: which elements share a scale.
        convert: from the quotients of some rows, clamped to the grid, to their stored form;
            rows stay rows.
    """
    R, C = matrix_RC.shape
    if matrix_RC.device.type != "cpu" or R * C <= _ELEMENTS:
        return convert(partition.apply(quotients, matrix_RC, scale, zero))
    height = partition.rows if 0 < partition.rows < R else 1
    rows = max(_ELEMENTS // (C * height), 1) * height  # no group is split
    spans = [(first, min(first + rows, R)) for first in range(0, R, rows)]
    row = convert(torch.zeros(1, C))
    stored = row.new_empty((R, *row.shape[1:]))

    def of_rows(scales: Tensor, first: int, last: int) -> Tensor:
        if partition.rows == 0 or scales.ndim < 2 or scales.shape[0] == 1 < R:
            return scales
        return scales[first // partition.rows : -(-last // partition.rows)]

    def store(span: tuple[int, int]) -> None:
        first, last = span
        offset = None if zero is None else of_rows(zero, first, last)
        cells = (of_rows(scale, first, last), offset)
        stored[first:last] = convert(partition.apply(quotients, matrix_RC[first:last], *cells))

    parallel_for(store, spans)
    return stored


@dataclass(frozen=True)
class QuantizedModule:
    """A quantized module and the form in which it is written.

    Attributes:
        name: its name in the module tree.
        module: the module.
        scheme: a copy of its scheme with ``format`` filled in.
        is_attention: attention with quantized queries, keys or values, and no own weight.
        has_group: it needs a config group. Attention with only a quantized cache needs none, as
            ``kv_cache_scheme`` describes it.
    """

    name: str
    module: Module
    scheme: QuantizationScheme
    is_attention: bool = False
    has_group: bool = True

    @property
    def is_raw(self) -> bool:
        """True if the weight has not been rounded yet."""
        status = getattr(self.module, "quantization_status", None)
        return status is QuantizationStatus.FROZEN

    def owns_tensor(self, own: str) -> bool:
        """Return True if a tensor of the module is written with its quantization parameters.

        Attention has other tensors too (sinks), for which a checkpoint may have another name.
        """
        return not self.is_attention or _is_qparam(own)


def parse_format(name: str | None) -> CompressionFormat | None:
    """Return the compression format named so; ArgumentError if no loader supports it (any more)."""
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
    """Return all quantized modules of ``model`` in module order, shared ones once per name."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not is_module_quantized(module):
            continue
        scheme, has_group = module.quantization_scheme, hasattr(module, IMPL_ATTR)
        entry = quantized_module(
            name, module, scheme, has_group=has_group, forced_format=forced_format
        )
        if entry is not None:
            found.append(entry)
    if forced_format not in (None, CompressionFormat.dense):
        forced = str(forced_format.value)
        changed = {
            entry.name: own
            for entry in found
            if entry.scheme.format == forced
            and (own := format_of(entry.module.quantization_scheme)) != forced
        }
        if changed:
            logger.warning(
                f"quantization_format: {join_names(changed, most=1)} are written as {forced} "
                f"instead of {', '.join(sorted(set(changed.values())))}. Servers may read only "
                "the latter."
            )
    return found


def quantized_module(
    name: str,
    module: Module,
    scheme: Any,
    *,
    has_group: bool = True,
    forced_format: CompressionFormat | None = None,
) -> QuantizedModule | None:
    """Return how a module is written; ``None`` with a warning if no format supports its kind.

    ``has_group`` tells of attention that a scheme of the recipe targets it. ArgumentError if a
    forced format cannot store the module.
    """
    if isinstance(module, Linear | Embedding):
        chosen = CompressionFormat(format_of(scheme))
        if forced_format is not None and scheme.weights is not None:
            chosen = forced_format
            _check_forced_format(name, module, scheme, chosen)
        return QuantizedModule(name, module, scheme.model_copy(update={"format": chosen.value}))
    if has_kv_cache_argument(module) or kv_source_layer(module) is not None:
        copy = scheme.model_copy(update={"format": CompressionFormat.dense.value})
        return QuantizedModule(name, module, copy, True, has_group)
    logger.warning(
        f"{name} ({type(module).__name__}) is written dense: the format holds compressed "
        "weights of Linear and Embedding modules only."
    )
    return None


def _check_forced_format(
    name: str, module: Module, scheme: QuantizationScheme, chosen: CompressionFormat
) -> None:
    """Refuse a forced format that cannot store a module's scheme or its incomplete last group.

    For the default format the modifier checked this when it was initialized.
    """
    wrong = format_mismatch(scheme, chosen.value)
    if wrong is not None:
        raise ArgumentError(f"quantization_format does not fit {name}: {wrong[0]}.", wrong[1])
    weights, own = scheme.weights, format_of(scheme)
    is_grouped = weights.strategy == QuantizationStrategy.GROUP.value
    if not is_grouped or chosen.value in (own, CompressionFormat.dense.value):
        return
    weight = weight_without_onloading(module)
    columns = 0 if weight is None else weight.shape[-1]
    if columns % weights.group_size and not supports_ragged_groups(chosen.value, columns):
        raise ArgumentError(
            f"quantization_format does not fit {name}: {chosen.value} holds whole groups of "
            f"{weights.group_size}, and there are {columns} columns.",
            f"Leave it out, and it is {own}.",
        )


def compress(entry: QuantizedModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's tensors in compressed form.

    Args:
        entry: the module and its scheme.
        tensors: own name → tensor (``weight`` [rows, columns] on the grid, its scales, ``bias``);
            on the meta device the result has shapes and dtypes only.

    Returns:
        Own name → tensor as the format defines them, and as a loader of this scheme expects.

    Raises:
        LifecycleError: a scale that the scheme needs is missing.
        NonFiniteError: a scale is NaN or infinite, or one of activations negative.
    """
    expected = _expected_parameters(entry)
    own = {key: tensor for key, tensor in tensors.items() if key in expected or not _is_qparam(key)}
    missing = sorted(expected - set(own))
    if missing:
        raise LifecycleError(
            f"The module {entry.name} was never calibrated: it has no {', '.join(missing)}. "
            "Run the recipe on the model before saving it."
        )
    for key in sorted(key for key in expected if key.endswith("_scale")):
        scale = own[key]
        may_be_negative = key == "weight_scale"  # of another tool: codes times it are the weight
        if not scale.is_meta and not (
            is_finite(scale) and (may_be_negative or float(scale.float().amin()) >= 0)
        ):
            raise NonFiniteError(
                f"The {key} of {entry.name} is not finite or negative, so its values are lost. "
                "Check the weights and the calibration data that reach this module."
            )
    if not entry.is_attention and entry.scheme.weights is not None:
        own = _pack(entry, own)
        # Stored in the scheme's scale dtype if every value of the weight's dtype fits in it. The
        # value itself stays representable in the weight's dtype, in which loaders keep scales.
        scale, named = own["weight_scale"], scale_dtype_of(entry.scheme.weights)
        if named is not None and torch.promote_types(scale.dtype, named) == named:
            own["weight_scale"] = scale.to(named)
    return {key: tensor.reshape(1) if tensor.ndim == 0 else tensor for key, tensor in own.items()}


def _pack(entry: QuantizedModule, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored tensors of a module.

    compressed-tensors defines what is stored, given a weight on the meta device. The codes are
    computed here, as compressed-tensors takes several times as long.
    """
    scheme, weight = entry.scheme, own["weight"]
    if scheme.format == CompressionFormat.dense.value:
        return {**own, "weight": _rounded(entry, own) if entry.is_raw else weight}
    codes = None if weight.is_meta else _packed_codes(entry, own)
    forms = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items())
    structure = _structure_of(scheme.model_dump_json(), forms)
    packed = {
        name: own[name].to(tensor.dtype) if name in own and name != "weight" else tensor.clone()
        for name, tensor in structure.items()
    }
    if scheme.format in _MX_FORMATS:  # their scales are stored as exponents
        scale, dtype = own["weight_scale"].float(), structure["weight_scale"].dtype
        packed["weight_scale"] = compress_mx_scale(scale, dtype)
    if codes is not None:
        packed["weight_packed" if "weight_packed" in packed else "weight"] = codes
    zero = packed.get("weight_zero_point")
    if zero is not None and scheme.format == _PACKED and scheme.weights.strategy in PACKED_ZEROS:
        # compressed-tensors leaves these alone where the weight has no data
        bits = scheme.weights.num_bits
        if zero.is_meta:
            packed["weight_zero_point"] = _packed_zero_on_meta(zero, bits)
        else:
            packed["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0).contiguous()
    return packed


def _packed_zero_on_meta(zero: Tensor, bits: int) -> Tensor:
    words = -(-zero.shape[0] * bits // _WORD)
    return torch.empty((words, *zero.shape[1:]), dtype=torch.int32, device="meta")


@functools.lru_cache(maxsize=256)  # a model has few forms, and this takes milliseconds
def _structure_of(
    scheme_json: str, forms: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
) -> dict[str, Tensor]:
    """Return the stored tensors, on the meta device, for names, shapes and dtypes."""
    scheme = QuantizationScheme.model_validate_json(scheme_json)
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    own = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in forms}
    packed: dict[str, Tensor] = compressor.compress(own, scheme)
    return packed


def _rounded(entry: QuantizedModule, own: Mapping[str, Tensor]) -> Tensor:
    weights = entry.scheme.weights
    if own["weight"].is_meta:
        return own["weight"]
    scale = effective_scale(own["weight_scale"], own.get("weight_global_scale"))
    zero = None if weights.symmetric else own["weight_zero_point"]
    return fake_quantize_matrix(own["weight"], scale, zero, grid_of(weights), partition_of(weights))


def _packed_codes(entry: QuantizedModule, own: Mapping[str, Tensor]) -> Tensor:
    """Return the weight's codes as stored.

    A weight that lies on its grid was rounded to the model's dtype. Dividing it by its scale in
    that dtype loses half a unit twice: in bfloat16 some 8-bit codes come out one off. In float32
    the quotient is within half a code of the original code, or that code is searched for
    (:mod:`llmcompressor.numerics.packing`). A weight that was not rounded yet is divided in its
    own dtype, as a loader would do. Where that code could not be recovered from the rounded weight,
    the weight is rounded first, so that a model in memory gives the same file.
    """
    weights, weight = entry.scheme.weights, own["weight"]
    convert = _code_packer(entry.scheme, weight.shape[-1])
    grid = grid_of(weights)
    scale = effective_scale(own["weight_scale"], own.get("weight_global_scale"))
    zero = None if weights.symmetric else own["weight_zero_point"]
    quotients = grid.limit
    if entry.is_raw:
        # Several codes may stand for one value. A model in memory has only the values, so the code
        # that the values give is chosen.
        is_shifted_float = grid.kind == "float" and not grid.symmetric
        if grid.needs_float32 or is_shifted_float or needs_recoding(grid, weight.dtype):
            quotients = partial(_rounded_quotients, grid)
    elif needs_recoding(grid, weight.dtype):
        quotients = partial(recode, grid=grid)
    else:
        weight = weight.float()
        scale = effective_scale(own["weight_scale"].float(), own.get("weight_global_scale"))
    if weights.strategy == QuantizationStrategy.TENSOR.value:
        scale = scale.reshape(1)
        zero = None if zero is None else zero.reshape(1)
    return compute_codes(weight, scale, zero, quotients, partition_of(weights), convert)


def _rounded_quotients(grid: Grid, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    rounded = grid.fake_quantize(x, scale, zero)
    if needs_recoding(grid, x.dtype):
        return recode(rounded, scale, zero, grid)
    return grid.limit(rounded.float(), scale.float(), zero)


def _code_packer(scheme: QuantizationScheme, columns: int) -> Callable[[Tensor], Tensor]:
    weights = scheme.weights
    grid = grid_of(weights)
    if scheme.format in _FP4_FORMATS:
        return pack_e2m1
    if scheme.format == _MXFP6:
        return pack_e2m3
    if scheme.format in _PLAIN_FORMATS:
        dtype = weights.pytorch_dtype()
        if grid.kind == "float":
            return lambda quotients: quotients.to(dtype)  # rounds to nearest, ties to even
        return lambda quotients: grid.round_(quotients).to(dtype)
    assert scheme.format == _PACKED, scheme.format
    bits = weights.num_bits
    pack = pack_integers if can_pack(columns, bits) else pack_to_int32
    return lambda quotients: pack(grid.round_(quotients).to(torch.int8), bits)


def _is_qparam(key: str) -> bool:
    base, _, part = key.partition("_")
    return base in _BASES and part in _PARTS


def _expected_parameters(entry: QuantizedModule) -> set[str]:
    scheme = entry.scheme
    by_base: dict[str, Any] = {
        "weight": scheme.weights,
        "input": scheme.input_activations,
        "output": scheme.output_activations,
    }
    if entry.is_attention:
        bases = ("q", "k", "v") if entry.has_group else ("k", "v")
        by_base = dict.fromkeys(bases, scheme.input_activations)
    expected = set()
    for base, args in by_base.items():
        if args is None:
            continue
        if args.strategy == QuantizationStrategy.TENSOR_GROUP.value and args.dynamic is not True:
            expected.add(f"{base}_global_scale")
        if args.dynamic not in (True, DynamicType.LOCAL, DynamicType.LOCAL.value):
            expected |= {f"{base}_scale", *([] if args.symmetric else [f"{base}_zero_point"])}
    return expected


# Round-trip check that a quantized weight still matches its codes and scales when written.
#
# Codes are computed from the weight in memory and the scales that it was rounded with. If the
# weight was changed since, the file would silently hold another weight than the model.

_OF_A_STEP = 0.25
_OF_A_FLOAT = 2.0**-6
"""Off by more of its size, a float of eight bits or fewer was not rounded to one."""
_OF_A_VALUE = 2.0**-7
"""Codes less their zero point, and what they stand for, were rounded to the model's dtype:
bfloat16 may be off by 2^-9 of each, and a scale in it too."""
_LEAST = 2.0**-12


def is_on_grid(entry: QuantizedModule, own: Mapping[str, Tensor]) -> bool:
    """Return True if a module's weight equals its quantized and dequantized value.

    That is so for a weight that is not rounded yet or has no data.
    """
    weights, weight = entry.scheme.weights, own.get("weight")
    if entry.is_raw or entry.is_attention or weights is None or weight is None:
        return True
    if weight.is_meta or weight.ndim != 2 or "weight_scale" not in own:
        return True
    grid, wide = grid_of(weights), torch.float32
    scale = effective_scale(own["weight_scale"].to(wide), own.get("weight_global_scale"))
    zero = None if weights.symmetric else own["weight_zero_point"]
    if weights.strategy == "tensor":
        scale, zero = scale.reshape(1), None if zero is None else zero.reshape(1)

    def most_off(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The distance to the nearest code, divided by what a step of the grid allows."""
        quotients = grid.quotients(x.to(wide), scale, zero)
        return quotients.sub_(grid.round(quotients)).abs_()

    def far(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        x = x.to(wide)
        if grid.kind == "float":
            subnormal = smallest_of(weight.dtype) / 2
            allowed = _OF_A_FLOAT * x.abs() + _LEAST * scale + subnormal
        else:
            allowed = _OF_A_STEP * scale + _OF_A_VALUE * x.abs()
        return ((x - grid.fake_quantize(x, scale, zero)).abs() > allowed).to(wide)

    partition = partition_of(weights)
    largest_of_row = partial(torch.amax, dim=-1, keepdim=True)
    if grid.kind == "int":  # most weights pass this, which takes a third of the time
        off = compute_codes(weight, scale, zero, most_off, partition, largest_of_row)
        if bool((off <= _OF_A_STEP).all()):
            return True
    off = compute_codes(weight, scale, zero, far, partition, largest_of_row)
    return not bool(off.any())


def warn_off_grid(names: Iterable[str]) -> None:
    """Warn of weights that changed after they were quantized."""
    names = list(names)
    if names:
        logger.warning(
            f"Something has changed the weights of {join_names(names)} after they were quantized: "
            "they are stored as the nearest that their scales can hold, which is not what the "
            "model in memory computes with. Change weights before the modifier that quantizes them."
        )


def warn_cast(dtype: torch.dtype, before: torch.dtype | None) -> None:
    """Warn if a model was cast to ``dtype`` after it was quantized in ``before``, if known."""
    if before is not None and dtype is not before:
        names = [str(one).removeprefix("torch.") for one in (before, dtype)]
        logger.warning(
            f"The model was cast from {names[0]} to {names[1]} after it was quantized: weights and "
            "scales were rounded once more, so that readers compute something else than the model "
            f"in memory. Quantize it in {names[1]} (precision={names[1]!r})."
        )


# Loading by transformers: packed zero points, and a process group.
#
# transformers determines the shape of each tensor by compressing a model on the meta device. There
# compressed-tensors packs the codes but not the zero points, so its own files do not fit; since
# transformers 5.23 that fails the load.

_PACKED_STRATEGIES = ("group", "channel")
_lock = threading.RLock()
"""The method is one for all threads: what one puts in its place another would put back."""


@contextmanager
def loading_compressed() -> Iterator[None]:
    """Let ``from_pretrained`` load compressed checkpoints inside, in this process alone.

    Packed zero points are loaded whatever the release. In a process group compressed-tensors would
    share the modules among all processes, and wait for those that load nothing.
    """
    _lock.acquire()
    own = vars(PackedQuantizationCompressor)["compress"]

    def compress(
        cls: Any, state_dict: dict[str, Tensor], scheme: QuantizationScheme
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = own.__func__(cls, state_dict, scheme)
        zero, scale = found.get("weight_zero_point"), found.get("weight_scale")
        args = scheme.weights
        is_packed = args is not None and args.strategy in _PACKED_STRATEGIES
        if zero is None or scale is None or not is_packed or args.symmetric:
            return found
        if zero.is_meta and zero.shape == scale.shape:
            found["weight_zero_point"] = _packed_zero_on_meta(zero, args.num_bits)
        return found

    PackedQuantizationCompressor.compress = classmethod(compress)
    try:
        with as_single_threaded():
            yield
    finally:
        PackedQuantizationCompressor.compress = own
        _lock.release()
