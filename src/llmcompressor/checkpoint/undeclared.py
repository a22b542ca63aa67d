# SPDX-License-Identifier: Apache-2.0
"""Detection of quantized weights that ``config.json`` does not declare, from headers alone.

Codes that are loaded as weights give meaningless numbers, and no error. Codes are

- integers under a name that only packed weights have (``qweight``, …);
- a matrix of values of one byte or less, stored with its scales;
- such a matrix named ``weight``, unless its module is named like a table or a draft head: an
  embedding may be stored in float8 without scales, and no class loads a draft head.

Other tensors of one byte (masks and tables in buffers) are not codes, nor is a dense weight that is
stored with scales: it has its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompressor.errors import CheckpointError

if TYPE_CHECKING:
    from llmcompressor.checkpoint.source import TensorHeader

__all__ = ["SIDE_FILES", "check_dense", "codes_in", "undeclared_error", "with_scales"]

SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""What exporters write beside ``config.json``, of the weights that they have quantized."""

_PACKED = frozenset({"weight_packed", "qweight", "W_q"})
_INTEGER = re.compile(r"[IU]\d+")
_NARROW = re.compile(r"[IU][48]|F[468](?:_.*)?")
_TABLE = re.compile(r"(?!.*proj).*emb|wte|wpe")
_DRAFT = re.compile(r"(?:.*\.)?(?:mtp|nextn|draft|eagle|medusa)")
_MATRIX = 2


def codes_in(tensors: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Return the names of the tensors that hold codes.

    Args:
        tensors: name → header.
    """
    return (name for name, header in tensors.items() if _holds_codes(name, header, tensors))


def with_scales(names: Iterable[str]) -> set[str]:
    """Return the names of code tensors and the possible names of their scales.

    >>> sorted(with_scales(["up.weight"]))[:3]
    ['up.SCB', 'up.scale', 'up.scales']
    """
    found = set(names)
    for name in list(found):
        path, _, own = name.rpartition(".")
        found |= {f"{path}.{scale}" if path else scale for scale in _scales_of(own)}
    return found


def _holds_codes(name: str, header: TensorHeader, tensors: Mapping[str, TensorHeader]) -> bool:
    path, _, own = name.rpartition(".")
    if own in _PACKED:
        return _INTEGER.fullmatch(header.dtype) is not None
    if len(header.shape) < _MATRIX or not _NARROW.fullmatch(header.dtype):
        return False
    beside = f"{path}." if path else ""
    if any(f"{beside}{scale}" in tensors for scale in _scales_of(own)):
        return True
    is_weight = own == "weight" and len(header.shape) == _MATRIX
    return is_weight and not _is_table(path) and not _DRAFT.match(path)


def _is_table(path: str) -> bool:
    """Return True if a module has the name of an embedding table.

    >>> [_is_table(path) for path in ("model.embed_tokens", "wte", "embed_proj", "up_proj")]
    [True, True, False, False]
    """
    return _TABLE.match(path.rpartition(".")[2]) is not None


def _scales_of(own: str) -> tuple[str, ...]:
    """Return the possible names of the scales of a tensor."""
    names = (f"{own}_scale", f"{own}_scale_inv", f"{own}_scales")
    if own == "weight":
        return (*names, "scale", "scales", "SCB")
    return (*names, f"{own.removesuffix('_blocks')}_scales") if own.endswith("_blocks") else names


def check_dense(tensors: Mapping[str, TensorHeader]) -> None:
    """Refuse tensors if one of them holds codes.

    Args:
        tensors: the tensors of a checkpoint that declares no quantization.

    Raises:
        CheckpointError: a tensor holds codes.
    """
    name = next(codes_in(tensors), None)
    if name is not None:
        raise undeclared_error(name, tensors[name])


def undeclared_error(name: str, header: TensorHeader) -> CheckpointError:
    """Return the error for a tensor of codes that ``config.json`` does not declare."""
    return CheckpointError(
        f"The tensor {name} of {header.file} ({header.dtype}) is quantized already, though "
        f"config.json does not say so{_told_by(header.file.parent)}.",
        "Compress the original, unquantized model.",
    )


def _told_by(folder: Path) -> str:
    found = next((name for name in SIDE_FILES if (folder / name).is_file()), None)
    return "" if found is None else f" ({found} beside it does)"
