# SPDX-License-Identifier: Apache-2.0
"""Tensors of a quantized module: those that its scheme requires, and its decoded weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, lcm

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.files import Files
from llmcompressor.verification.modules import PLAIN_FLOATS, Entry
from llmcompressor.verification.scheme import Args, Scheme

_INT32 = frozenset({"I32"})
_BYTE = frozenset({"U8"})
_SCALE = PLAIN_FLOATS
_ONE = ((1,), ())
_PACKED_FLOATS = {"nvfp4-pack-quantized": 4, "mxfp4-pack-quantized": 4, "mxfp6-pack-quantized": 6}
"""Format → bits of a value, where floats are packed into bytes."""


@dataclass(frozen=True)
class Expected:
    """A tensor that must be there.

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
        return packed.shape[1] * 8 // (6 if scheme.weights.small_float == "mxfp6" else 4)
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
    """True if the codes of a module lie in the file as its format has them: packed, or not."""
    return (entry.form == "coded") == (weight_dtype(scheme) is not None)


def is_decodable(scheme: Scheme) -> bool:
    """True if the format of a scheme can hold weights of its kind and bits.

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
        "nvfp4-pack-quantized": args.small_float == "nvfp4",
        "mxfp4-pack-quantized": args.small_float == "mxfp4",
        "mxfp6-pack-quantized": args.small_float == "mxfp6",
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
    """Own name → what must be there, for a Linear or Embedding; a bias may be.

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
    return {**found, "bias": Expected(PLAIN_FLOATS, ((rows,),))}


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
    """Differences: own name, ``missing`` / ``dtype`` / ``shape`` / ``extra``, and a sentence."""
    for name, wanted in expected.items():
        info = own.get(name)
        if info is None:
            if name != "bias":
                yield name, "missing", f"It has no {name}."
        elif info.dtype not in wanted.dtypes:
            words = " or ".join(sorted(wanted.dtypes))
            yield name, "dtype", f"Its {name} is stored as {info.dtype} instead of {words}."
        elif wanted.shapes and info.shape not in wanted.shapes:
            words = " or ".join(str(list(shape)) for shape in wanted.shapes)
            yield name, "shape", f"Its {name} has the shape {list(info.shape)} instead of {words}."
    for name in own:
        if name not in expected:
            yield name, "extra", f"It has a {name}, which is not read."


CHUNK = 1 << 18
"""Elements that are decoded together: few enough to stay in a core's cache."""
_RAW_CHUNK = 1 << 22
_WORD_ROWS = 32


@dataclass(frozen=True)
class Part:
    """Some rows of a module's weight, as [rows, cells, columns of a cell].

    Attributes:
        start: the first row.
        units: float32, what the codes stand for with a scale of one and no zero point.
        scale: float32, broadcasts to ``units``; the decoded weight is their product.
        zero: float32, as ``scale``; it is taken off ``units`` already. ``None`` if there is none.
    """

    start: int
    units: Tensor
    scale: Tensor
    zero: Tensor | None


def _integers(raw: Tensor, bits: int, columns: int) -> Tensor:
    """Packed codes int32 [rows, words] as int8 [rows, columns].

    >>> _integers(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 8).tolist()
    [[-8, -7, -6, -5, -4, -3, -2, -1]]
    """
    if bits not in (2, 4, 8):
        codes: Tensor = unpack_from_int32(raw, bits, torch.Size((len(raw), columns)))
        return codes
    octets = raw.view(torch.uint8)
    fields = 8 // bits
    wide = torch.empty(*octets.shape, fields, dtype=torch.uint8)
    for index in range(fields):
        torch.bitwise_right_shift(octets, index * bits, out=wide[..., index])
    signed = wide.bitwise_and_((1 << bits) - 1).view(torch.int8).sub_(1 << (bits - 1))
    return signed.reshape(len(raw), -1)[:, :columns]


def _small_floats(raw: Tensor) -> Tensor:
    """Bits of e4m3 as float32: moved to where float16 has sign, exponent and mantissa.

    >>> _small_floats(torch.tensor([0.0, 1.5, -448.0, 2.0**-9]).to(torch.float8_e4m3fn)).tolist()
    [0.0, 1.5, -448.0, 0.001953125]
    """
    half = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return half.view(torch.float16).float().mul_(2.0**8)


def _tiny_floats(raw: Tensor) -> Tensor:
    """Bits of e2m1 uint8 [rows, bytes] as float32 [rows, 2 * bytes], the low half first.

    >>> _tiny_floats(torch.tensor([[0x10, 0x7A]], dtype=torch.uint8)).tolist()
    [[0.0, 0.5, -1.0, 6.0]]
    """
    wide = raw.to(torch.int16)
    halves = torch.empty(*raw.shape, 2, dtype=torch.int16)
    for index in range(2):
        number = (wide << (9 - 4 * index)).bitwise_and_(0x0E00)
        sign = (wide << (12 - 4 * index)).bitwise_and_(~0x7FFF)
        torch.bitwise_or(number, sign, out=halves[..., index])
    return halves.view(torch.float16).float().mul_(2.0**14).reshape(len(raw), -1)


def _floats_of_six(raw: Tensor) -> Tensor:
    """Bits of e2m3 uint8 [rows, bytes] as float32 [rows, 4 * bytes / 3], the lowest bits first.

    >>> _floats_of_six(torch.tensor([[193, 15, 1]], dtype=torch.uint8)).tolist()
    [[0.125, -7.5, 2.0, 0.0]]
    """
    three = raw.reshape(len(raw), -1, 3).to(torch.int32)
    word = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
    halves = torch.empty(*word.shape, 4, dtype=torch.int16)
    for index in range(4):
        code = (word >> (6 * index)).to(torch.int16)
        number = (code << 7).bitwise_and_(0x0F80)
        torch.bitwise_or(number, (code << 10).bitwise_and_(~0x7FFF), out=halves[..., index])
    return halves.view(torch.float16).float().mul_(2.0**14).reshape(len(raw), -1)


@dataclass(frozen=True)
class Codes:
    """The codes of one module.

    Attributes:
        files: the checkpoint.
        entry: the module.
        scheme: its scheme.
        rows: rows of the weight.
        columns: its columns.
    """

    files: Files
    entry: Entry
    scheme: Scheme
    rows: int
    columns: int

    @property
    def args(self) -> Args:
        """The arguments of the weight."""
        if self.scheme.weights is None:
            raise ValueError(self.entry.name)
        return self.scheme.weights

    @property
    def is_unpacked(self) -> bool:
        """True if the weight is stored as it is decoded, beside its scales."""
        return self.entry.form == "dense"

    @property
    def stored(self) -> str:
        """The own name of the tensor with the codes."""
        return "weight_packed" if "weight_packed" in self.entry.own else "weight"

    def own(self, name: str) -> Tensor | None:
        """A tensor of the module, whole."""
        if name not in self.entry.own:
            return None
        return self.files.read(f"{self.entry.name}.{name}")

    def raw(self, start: int, stop: int) -> Tensor:
        """Rows of the stored codes as they are."""
        return self.files.read(f"{self.entry.name}.{self.stored}", start, stop)

    def spans(self, most: int = _RAW_CHUNK) -> Iterator[tuple[int, int]]:
        """Rows to look at together, about ``most`` elements: whole blocks and words of zeros."""
        unit = (
            _WORD_ROWS if self.args.block is None else lcm(_WORD_ROWS, max(self.args.block[0], 1))
        )
        step = max(most // max(self.columns, 1) // unit, 1) * unit
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def integers(self, start: int, stop: int) -> Tensor:
        """Integer codes int8 [rows, columns], of ``pack-quantized`` or of ``weight``."""
        raw = self.raw(start, stop)
        return raw if self.stored == "weight" else _integers(raw, self.args.bits, self.columns)

    def zero_points(self) -> Tensor | None:
        """Zero points int8, in the shape of the scale."""
        zero, scale = self.own("weight_zero_point"), self.entry.own.get("weight_scale")
        if zero is None or scale is None or zero.dtype is not torch.int32:
            return zero
        shape = torch.Size(scale.shape)
        if len(zero) == 1:  # compressed-tensors turns it, and views it as bytes
            zero = zero.as_strided(zero.shape, (1, 1))
        unpacked: Tensor = unpack_from_int32(zero, self.args.bits, shape, packed_dim=0)
        return unpacked

    def parts(self) -> Iterator[Part]:
        """The whole weight, decoded, part by part."""
        scale = self.own("weight_scale")
        if scale is None:
            return
        factors = _factors(scale, self.own("weight_global_scale"))
        points = None if self.args.symmetric else self.zero_points()
        cells, size = self._cells()
        for start, stop in self.spans(CHUNK):
            units = self._units(start, stop).reshape(stop - start, cells, size)
            zero = None
            if self.is_unpacked:
                spread = self._spread(factors, start, stop)
                units = torch.where(spread == 0, 0, units / spread)
            elif points is not None:
                zero = self._spread(points, start, stop).float()
                units -= zero
            yield Part(start, units, self._spread(factors, start, stop), zero)

    def _units(self, start: int, stop: int) -> Tensor:
        """The codes as float32 [rows, columns]."""
        if self.is_unpacked:
            return self.raw(start, stop).float()
        if self.args.kind == "int":
            return self.integers(start, stop).float()
        raw = self.raw(start, stop)
        if self.stored == "weight":
            return _small_floats(raw)
        return _floats_of_six(raw) if self.args.bits == 6 else _tiny_floats(raw)

    def _cells(self) -> tuple[int, int]:
        """Into how many cells a row is cut, and their columns; one cell if they are unequal."""
        args = self.args
        size = args.block[1] if args.strategy == "block" and args.block else args.group
        is_cut = args.strategy in ("group", "tensor_group", "block")
        if not is_cut or not size or self.columns % size:
            return 1, self.columns
        return self.columns // size, size

    def _spread(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Values per cell of some rows, so that they broadcast to [rows, cells, columns]."""
        args = self.args
        if args.strategy == "tensor" or values.ndim < 2:
            return values.reshape(-1, 1, 1)
        if args.strategy == "block" and args.block:
            height = args.block[0]
            values = values[start // height : ceil(stop / height)]
            values = values.repeat_interleave(height, dim=0)[: stop - start]
        else:
            values = values[start:stop]
        if values.shape[1] in (1, self._cells()[0]):
            return values.unsqueeze(2)
        size = args.block[1] if args.block else args.group
        return values.repeat_interleave(size, dim=1)[:, None, : self.columns]


def _factors(scale: Tensor, overall: Tensor | None) -> Tensor:
    """Scales as float32 factors: exponents and two-level scales are resolved."""
    if scale.dtype is torch.uint8:
        # the exponent of a float32; its least power of two but one has no exponent
        bits = scale.to(torch.int32) << 23
        return bits.masked_fill_(scale == 0, 1 << 22).view(torch.float32)
    plain = scale.float()
    return plain if overall is None else plain / overall.float()


def codes_of(files: Files, entry: Entry, scheme: Scheme, columns: int) -> Codes | None:
    """The codes of a module, ``None`` if its tensors do not allow to decode them."""
    rows = entry.rows
    if rows is None or not is_decodable(scheme):
        return None
    return Codes(files, entry, scheme, rows, columns)
