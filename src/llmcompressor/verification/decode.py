# SPDX-License-Identifier: Apache-2.0
"""Weights out of codes, some rows at a time, by compressed-tensors itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from llmcompressor.verification.files import Files
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.scheme import Args, Scheme

__all__ = ["CHUNK", "Codes", "Part", "codes_of"]

CHUNK = 1 << 21
"""Elements of a weight that are looked at together; bounds the memory of a worker."""

_WORD_ROWS = 32


@dataclass(frozen=True)
class Part:
    """Some rows of a module's weight.

    Attributes:
        start: the first row.
        decoded: float32 [rows, columns], what the codes stand for.
        scale: float32 [rows, columns] or smaller to broadcast, what a code of one stands for.
        zero: as ``scale``, the zero point; ``None`` if there is none.
    """

    start: int
    decoded: Tensor
    scale: Tensor
    zero: Tensor | None


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

    def spans(self) -> Iterator[tuple[int, int]]:
        """Rows to look at together: whole blocks, and whole words of zero points."""
        unit = (
            _WORD_ROWS if self.args.block is None else lcm(_WORD_ROWS, max(self.args.block[0], 1))
        )
        step = max(CHUNK // max(self.columns, 1) // unit, 1) * unit
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def integers(self, start: int, stop: int) -> Tensor:
        """Integer codes int8 [rows, columns], of ``pack-quantized`` or of ``weight``."""
        raw = self.raw(start, stop)
        if self.stored == "weight":
            return raw
        shape = torch.Size((stop - start, self.columns))
        codes: Tensor = unpack_from_int32(raw, self.args.bits, shape)
        return codes

    def zero_points(self) -> Tensor | None:
        """Zero points int8, in the shape of the scale."""
        zero, scale = self.own("weight_zero_point"), self.entry.own.get("weight_scale")
        if zero is None or scale is None or zero.dtype is not torch.int32:
            return zero
        shape = torch.Size(scale.shape)
        unpacked: Tensor = unpack_from_int32(zero, self.args.bits, shape, packed_dim=0)
        return unpacked

    def parts(self) -> Iterator[Part]:
        """The whole weight, decoded, part by part."""
        scale, zero = self.own("weight_scale"), self.zero_points()
        packed_zero = self.own("weight_zero_point")
        overall = self.own("weight_global_scale")
        if scale is None:
            return
        compressor = BaseCompressor.get_value_from_registry(self.scheme.format)
        scheme = self._native()
        plain = _plain_scale(scale, overall)
        for start, stop in self.spans():
            own: dict[str, Tensor] = {self.stored: self.raw(start, stop)}
            wide = scale if scale.dtype in (torch.uint8, torch.float8_e4m3fn) else scale.float()
            own["weight_scale"] = self._rows(wide, start, stop)
            if overall is not None:
                own["weight_global_scale"] = overall
            if packed_zero is not None:
                own["weight_zero_point"] = self._zero_rows(packed_zero, start, stop)
            own["weight_shape"] = torch.tensor([stop - start, self.columns])
            decoded = compressor.decompress(own, scheme)["weight"].float()
            yield Part(
                start,
                decoded,
                self._spread(self._rows(plain, start, stop), stop - start),
                None
                if zero is None
                else self._spread(self._rows(zero.float(), start, stop), stop - start),
            )

    def _native(self) -> QuantizationScheme:
        args = self.args
        fields = {
            "num_bits": args.bits,
            "type": args.kind,
            "symmetric": args.symmetric,
            "strategy": args.strategy,
            "group_size": args.group or None,
            "block_structure": list(args.block) if args.block else None,
        }
        if args.strategy == "channel":
            fields["group_size"] = None
        return QuantizationScheme(targets=[], weights=QuantizationArgs.model_validate(fields))

    def _rows(self, cells: Tensor, start: int, stop: int) -> Tensor:
        """The cells that hold for some rows."""
        args = self.args
        if args.strategy == "tensor" or cells.ndim < 2:
            return cells
        height = args.block[0] if args.strategy == "block" and args.block else 1
        return cells[start // height : ceil(stop / height)]

    def _zero_rows(self, zero: Tensor, start: int, stop: int) -> Tensor:
        if zero.dtype is not torch.int32:
            return self._rows(zero, start, stop)
        bits = self.args.bits
        return zero[start * bits // 32 : ceil(stop * bits / 32)]

    def _spread(self, cells: Tensor, rows: int) -> Tensor:
        """One value per element, or fewer that broadcast."""
        args = self.args
        if args.strategy in ("group", "tensor_group"):
            return cells.repeat_interleave(args.group, dim=1)[:, : self.columns]
        if args.strategy == "block" and args.block:
            tall = cells.repeat_interleave(args.block[0], dim=0)[:rows]
            return tall.repeat_interleave(args.block[1], dim=1)[:, : self.columns]
        return cells


def _plain_scale(scale: Tensor, overall: Tensor | None) -> Tensor:
    """Scales as float32 factors."""
    plain = decompress_mx_scale(scale) if scale.dtype is torch.uint8 else scale
    plain = plain.float()
    return plain if overall is None else plain / overall.float()


def codes_of(files: Files, entry: Entry, scheme: Scheme, columns: int) -> Codes | None:
    """The codes of a module, ``None`` if its tensors do not allow to decode them."""
    rows = entry.rows
    if scheme.weights is None or rows is None or scheme.format in (None, "dense"):
        return None
    return Codes(files, entry, scheme, rows, columns)
