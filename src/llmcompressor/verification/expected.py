# SPDX-License-Identifier: Apache-2.0
"""The tensors that a module must have, by its scheme and format: names, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.layout import PLAIN_FLOATS, Entry
from llmcompressor.verification.scheme import Args, Scheme

__all__ = [
    "Expected",
    "columns_of",
    "expected_tensors",
    "is_decodable",
    "is_stored_so",
    "misfits",
    "scale_shape",
    "weight_dtype",
]

_INT32 = frozenset({"I32"})
_BYTE = frozenset({"U8"})
_SCALE = PLAIN_FLOATS
_ONE = ((1,), ())
_PACKED_FLOATS = {"nvfp4-pack-quantized": 4, "mxfp4-pack-quantized": 4, "mxfp6-pack-quantized": 6}
"""Format → bits of a value, where floats are packed into bytes."""


@dataclass(frozen=True)
class Expected:
    """One tensor that must be there.

    Attributes:
        dtypes: the dtypes it may have.
        shapes: the shapes it may have; empty if the header cannot tell.
    """

    dtypes: frozenset[str]
    shapes: tuple[tuple[int, ...], ...] = ()


def weight_dtype(scheme: Scheme) -> str | None:
    """The dtype of codes that are stored under the name ``weight``; ``None`` if they are packed."""
    name = scheme.format or ""
    if scheme.weights is None or "pack-quantized" in name or name == "dense":
        return None
    return "F8_E4M3" if scheme.weights.kind == "float" else "I8"


def columns_of(
    entry: Entry, scheme: Scheme, stored_shape: tuple[int, ...] | None = None
) -> int | None:
    """Columns of the weight that a module holds the codes of.

    Args:
        entry: the module.
        scheme: its scheme.
        stored_shape: the content of ``weight_shape``, where it was read.

    Returns:
        ``None`` if the header cannot tell. Packed integers are taken to fill their words.
    """
    weight = entry.own.get("weight")
    if weight is not None:
        return weight.shape[1] if len(weight.shape) == 2 else None
    packed = entry.own.get("weight_packed")
    if packed is None or len(packed.shape) != 2 or scheme.weights is None:
        return None
    if packed.dtype == "U8":
        return packed.shape[1] * 8 // (6 if scheme.weights.is_mxfp6 else 4)
    bits = max(scheme.weights.bits, 1)
    guesses = [stored_shape[1]] if stored_shape is not None and len(stored_shape) == 2 else []
    scale = entry.own.get("weight_scale")
    if scheme.weights.group and scale is not None and len(scale.shape) == 2:
        guesses.append(scale.shape[1] * scheme.weights.group)
    for columns in guesses:
        # what cannot be the width of the words, dense or of whole values, is wrong itself
        if packed.shape[1] in (ceil(columns * bits / 32), ceil(columns / (32 // min(bits, 32)))):
            return columns
    return packed.shape[1] * 32 // bits


def is_stored_so(entry: Entry, scheme: Scheme) -> bool:
    """Whether the codes of a module lie in the file as its format has them: packed, or not."""
    return (entry.form == "coded") == (weight_dtype(scheme) is not None)


def is_decodable(scheme: Scheme) -> bool:
    """Whether the format of a scheme can hold weights of its kind and bits.

    >>> is_decodable(Scheme(Args(4, "float", True, "group", 32), format="pack-quantized"))
    False
    """
    args, form = scheme.weights, scheme.format
    if args is None or not scale_shape(args, 1, 1):
        return False
    is_integer = args.kind == "int" and 1 <= args.bits <= 8
    is_small_float = (args.kind, args.bits) == ("float", 8)
    return {
        "pack-quantized": is_integer,
        "int-quantized": is_integer,
        "float-quantized": is_small_float,
        "naive-quantized": is_integer or is_small_float,
        "nvfp4-pack-quantized": args.is_nvfp4,
        "mxfp4-pack-quantized": args.is_mxfp4,
        "mxfp6-pack-quantized": args.is_mxfp6,
        "mxfp8-quantized": is_small_float and args.symmetric and args.group == 32,
    }.get(form or "", False)


def scale_shape(args: Args, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scale of a weight may have.

    >>> scale_shape(Args(4, "int", True, "group", 128), 8, 256)
    ((8, 2),)
    """
    if args.strategy == "tensor":
        return _ONE
    if args.strategy == "channel":
        return ((rows, 1),)
    if args.strategy in ("group", "tensor_group") and args.group:
        return ((rows, ceil(columns / args.group)),)
    if args.strategy == "block" and args.block and min(args.block) > 0:
        return ((ceil(rows / args.block[0]), ceil(columns / args.block[1])),)
    return ()


def expected_tensors(scheme: Scheme, rows: int, columns: int) -> dict[str, Expected]:
    """Own name → what must be there, for a Linear or Embedding (bias left out).

    Args:
        scheme: its scheme, with the format that counts.
        rows: outputs.
        columns: inputs.
    """
    weights = scheme.weights
    if weights is None or scheme.format == "dense":
        found = {"weight": Expected(PLAIN_FLOATS, ((rows, columns),))}
    else:
        found = dict(_of_weight(scheme, weights, rows, columns))
    for base, args in (("input", scheme.inputs), ("output", scheme.outputs)):
        if args is not None:
            found.update(_of_activations(base, args))
    return found


def _of_weight(
    scheme: Scheme, args: Args, rows: int, columns: int
) -> Iterator[tuple[str, Expected]]:
    scales = scale_shape(args, rows, columns)
    if scheme.format in _PACKED_FLOATS:
        bits = _PACKED_FLOATS[scheme.format]
        yield "weight_packed", Expected(_BYTE, ((rows, columns * bits // 8),))
        is_nv = scheme.format.startswith("nv")
        yield "weight_scale", Expected(frozenset({"F8_E4M3"}) if is_nv else _BYTE, scales)
        if is_nv:
            yield "weight_global_scale", Expected(frozenset({"F32"}), _ONE)
        return
    is_packed = scheme.format == "pack-quantized"
    if is_packed:
        yield "weight_packed", Expected(_INT32, ((rows, ceil(columns * args.bits / 32)),))
        yield "weight_shape", Expected(frozenset({"I64"}), ((2,),))
    else:
        dtype = weight_dtype(scheme) or "I8"
        yield "weight", Expected(frozenset({dtype}), ((rows, columns),))
    dtypes = _BYTE if scheme.format == "mxfp8-quantized" else _SCALE
    yield "weight_scale", Expected(dtypes, scales)
    if not args.symmetric:
        yield "weight_zero_point", _zero_point(args, scales, is_packed)


def _zero_point(args: Args, scales: tuple[tuple[int, ...], ...], is_packed: bool) -> Expected:
    if is_packed and args.strategy in ("group", "channel"):
        packed = tuple((ceil(shape[0] * args.bits / 32), *shape[1:]) for shape in scales)
        return Expected(_INT32, packed)
    return Expected(frozenset({"F8_E4M3" if args.kind == "float" else "I8"}), scales)


def _of_activations(base: str, args: Args) -> Iterator[tuple[str, Expected]]:
    if args.strategy == "tensor_group" and args.dynamic is not True:
        yield f"{base}_global_scale", Expected(frozenset({"F32"}), _ONE)
    if not args.is_static:
        return
    if args.strategy == "tensor_group":
        return
    yield f"{base}_scale", Expected(_SCALE, _ONE if args.strategy == "tensor" else ())
    if not args.symmetric:
        shapes = _ONE if args.strategy == "tensor" else ()
        yield f"{base}_zero_point", _zero_point(args, shapes, is_packed=False)


def misfits(
    own: Mapping[str, TensorInfo], expected: Mapping[str, Expected]
) -> Iterator[tuple[str, str, str]]:
    """What differs: own name, ``missing`` / ``dtype`` / ``shape``, and a sentence."""
    for name, wanted in expected.items():
        info = own.get(name)
        if info is None:
            yield name, "missing", f"It has no {name}."
        elif info.dtype not in wanted.dtypes:
            words = " or ".join(sorted(wanted.dtypes))
            yield name, "dtype", f"Its {name} is stored as {info.dtype} instead of {words}."
        elif wanted.shapes and info.shape not in wanted.shapes:
            words = " or ".join(str(list(shape)) for shape in wanted.shapes)
            yield name, "shape", f"Its {name} has the shape {list(info.shape)} instead of {words}."
