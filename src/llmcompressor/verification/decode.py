# SPDX-License-Identifier: Apache-2.0
"""Weights out of codes, some rows at a time.

The usual widths are decoded here, by the bits that the formats define; the rest by
compressed-tensors itself, and tests hold the two to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from llmcompressor.verification.expected import is_decodable
from llmcompressor.verification.files import Files
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.scheme import Args, Scheme

__all__ = ["CHUNK", "Codes", "Part", "codes_of"]

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
    def stored(self) -> str:
        """The own name of the tensor with the codes."""
        return "weight_packed" if "weight_packed" in self.entry.own else "weight"

    def own(self, name: str) -> Tensor | None:
        """One of the module's own tensors, whole."""
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
            if points is not None:
                zero = self._spread(points, start, stop).float()
                units -= zero
            yield Part(start, units, self._spread(factors, start, stop), zero)

    def _units(self, start: int, stop: int) -> Tensor:
        """The codes as float32 [rows, columns]."""
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
        """One value per cell of some rows, so that it broadcasts to [rows, cells, columns]."""
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
