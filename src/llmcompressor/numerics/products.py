# SPDX-License-Identifier: Apache-2.0
r"""Products of float32 matrices on the CPU, with its widest instructions.

torch multiplies float32 by MKL, which uses only AVX2 on processors that are not Intel's. oneDNN,
which torch uses for 16-bit products, uses AVX-512 on all that have it: on a Zen 5 core 125 instead
of 56 · 10⁹ multiply-adds a second. Compiled models call it by
``torch.ops.mkldnn._linear_pointwise``; so does :func:`matmul`, where it is faster.

Both sum in float32. They differ in the order of the sums, so the choice depends on the processor
and the shapes alone.

Shapes: M and N outer, K summed over.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import torch
from torch import Tensor

from llmcompressor.numerics.instructions import multiplies
from llmcompressor.threads import SPAN, each_span

__all__ = [
    "MANY_ALIKE",
    "OFTEN_ALIKE",
    "matmul",
    "prefers_onednn",
    "quick_dtype",
    "spread_matmul",
    "subtract_matmul_",
]

_FEWEST = 2**25
"""Multiply-adds from which on oneDNN is worth the memory that it takes for each shape it meets."""
OFTEN_ALIKE = 2**24
"""The same where a product of one shape is made for every block of columns."""
MANY_ALIKE = 2**22
"""The same where products of a few shapes make up most of the work."""
_NARROWEST = 16
"""Dimensions below this leave its tiles mostly empty."""


def matmul(left_MK: Tensor, right_KN: Tensor, *, fewest: int = _FEWEST) -> Tensor:
    """Compute ``L R``, for operands with at most one leading batch dimension.

    Args:
        left_MK: any floating dtype ``[..., M, K]``.
        right_KN: of the same dtype ``[..., K, N]``.
        fewest: number of multiply-adds below which MKL is used.

    >>> matmul(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    if not (_gains(left_MK, right_KN, fewest) and prefers_onednn()):
        return left_MK @ right_KN
    if left_MK.ndim == 2:
        return _by_onednn(left_MK, right_KN)
    pairs = zip(left_MK, right_KN, strict=True)
    return torch.stack([_by_onednn(left, right) for left, right in pairs])


def subtract_matmul_(
    target_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, fewest: int = _FEWEST
) -> None:
    """Compute ``target -= L R``, for operands with at most one leading batch dimension."""
    if _gains(left_MK, right_KN, fewest) and prefers_onednn():
        target_MN.sub_(matmul(left_MK, right_KN, fewest=fewest))
    elif target_MN.ndim == 2:
        target_MN.addmm_(left_MK, right_KN, alpha=-1)
    else:
        target_MN.sub_(left_MK @ right_KN)


def spread_matmul(
    left_MK: Tensor,
    right_KN: Tensor,
    *,
    out: Tensor | None = None,
    fewest: int = _FEWEST,
    width: int = SPAN,
) -> Tensor:
    """Compute ``L R`` by parts of the columns of R, each on one thread.

    The result is the same for any number of threads, without a barrier after every step.

    Args:
        left_MK: any floating dtype ``[..., M, K]``.
        right_KN: of the same dtype ``[..., K, N]``.
        out: memory for the result, ``[..., M, N]``; neither of the operands.
        fewest: for each part; see :func:`matmul`.
        width: columns of a part.
    """
    columns = right_KN.shape[-1]
    out_MN = left_MK.new_empty(*left_MK.shape[:-1], columns) if out is None else out
    if left_MK.ndim == 2:
        left_MK = _dense(left_MK)

    def multiply(span: slice) -> None:
        out_MN[..., span] = matmul(left_MK, right_KN[..., span], fewest=fewest)

    each_span(multiply, columns, right_KN.device, width=width)
    return out_MN


def _gains(left_MK: Tensor, right_KN: Tensor, fewest: int) -> bool:
    """Return True if oneDNN may be faster for operands of this kind and size."""
    rows, inner = left_MK.shape[-2:]
    columns = right_KN.shape[-1]
    return (
        left_MK.dtype == right_KN.dtype == torch.float32
        and left_MK.device.type == right_KN.device.type == "cpu"
        and left_MK.ndim == right_KN.ndim <= 3
        and min(rows, inner, columns) >= _NARROWEST
        and rows * inner * columns >= fewest
        and not (torch.is_grad_enabled() and (left_MK.requires_grad or right_KN.requires_grad))
    )


def _by_onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    product: Tensor = linear(_dense(left_MK), _dense(right_KN).T, None, "none", [], "")
    return product


def _dense(matrix_MK: Tensor) -> Tensor:
    """The matrix without gaps between its rows or columns, with which oneDNN is slow."""
    if matrix_MK.is_contiguous() or matrix_MK.T.is_contiguous():
        return matrix_MK
    return matrix_MK.contiguous()


@functools.cache
def prefers_onednn() -> bool:
    """Return True if oneDNN multiplies float32 faster than MKL here, and torch provides it.

    This is the case on processors with AVX-512 that are not Intel's.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _maker() in ("", "GenuineIntel"):
        return False
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        one_NN = torch.ones(_NARROWEST, _NARROWEST)
        return bool((_by_onednn(one_NN, one_NN) == _NARROWEST).all())
    return False


def quick_dtype(device: torch.device, multiply_adds: int) -> torch.dtype:
    """Bfloat16 if its products take at most half of the time of float32's; else float32.

    Only on x86 processors and accelerators with an instruction for it.

    Args:
        device: device of the products.
        multiply_adds: of one product; small ones are not worth the conversion.

    >>> quick_dtype(torch.device("cpu"), 1000)
    torch.float32
    """
    quick = multiply_adds >= MANY_ALIKE and _multiplies_bfloat16(device.type)
    return torch.bfloat16 if quick else torch.float32


@functools.cache
def _multiplies_bfloat16(device: str) -> bool:
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device == "cpu" and multiplies(torch.bfloat16) is True


def _maker() -> str:
    """The processor's vendor; an empty string if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""
