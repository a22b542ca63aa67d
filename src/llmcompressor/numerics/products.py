# SPDX-License-Identifier: Apache-2.0
"""Products of float32 matrices on the CPU, with its widest instructions, and their precision.

torch multiplies float32 by MKL, which uses only AVX2 on processors that are not Intel's. oneDNN,
which torch uses for 16-bit products, uses AVX-512 on all that have it: on a Zen 5 core 125 instead
of 56 · 10⁹ multiply-adds a second. Compiled models call it by
``torch.ops.mkldnn._linear_pointwise``; so does :func:`matmul`, where it is faster. Both sum in
float32. They differ in the order of the sums, so the choice depends on the processor and the shapes
alone.

Shapes: M and N outer, K summed over; leading batch dimensions of any floating dtype, at most one
with oneDNN. ``fewest`` is the number of multiply-adds below which MKL is used.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompressor.runtime.threads import SPAN, parallel_for, parallel_spans

_INSTRUCTIONS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}


@functools.cache
def has_multiply_instruction(dtype: torch.dtype) -> bool | None:
    """Return True if the CPU has an instruction for products of ``dtype``; ``None`` if unknown.

    Only x86 processors can be queried, and only for 16-bit dtypes.
    """
    names = _INSTRUCTIONS.get(dtype, ())
    if not names or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    known = [getattr(torch.cpu, name, None) for name in names]
    if any(has is not None and has() for has in known):
        return True
    return None if None in known else False


_FEWEST = 2**25
"""Multiply-adds from which on oneDNN is worth the memory that it takes for each shape it meets."""
OFTEN_ALIKE = 2**24
"""The same where a product of one shape is made for every block of columns."""
MANY_ALIKE = 2**22
"""The same where products of a few shapes make up most of the work."""
_NARROWEST = 16
"""Dimensions below this leave its tiles mostly empty."""


def matmul(left_MK: Tensor, right_KN: Tensor, *, fewest: int = _FEWEST) -> Tensor:
    """Compute ``L R``.

    >>> matmul(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    if not _use_onednn(left_MK, right_KN, fewest):
        return left_MK @ right_KN
    if left_MK.ndim == 2:
        return _by_onednn(left_MK, right_KN)
    pairs = zip(left_MK, right_KN, strict=True)
    return torch.stack([_by_onednn(left, right) for left, right in pairs])


def subtract_matmul_(
    target_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, fewest: int = _FEWEST
) -> None:
    """Compute ``target -= L R``."""
    if _use_onednn(left_MK, right_KN, fewest) or target_MN.ndim != 2:
        target_MN.sub_(matmul(left_MK, right_KN, fewest=fewest))
    else:
        target_MN.addmm_(left_MK, right_KN, alpha=-1)


def parallel_matmul(
    left_MK: Tensor,
    right_KN: Tensor,
    *,
    out: Tensor | None = None,
    fewest: int = _FEWEST,
    width: int = SPAN,
) -> Tensor:
    """Compute ``L R`` by parts of ``width`` columns of R, each on one thread.

    The result is the same for any number of threads, without a barrier after every step. It is
    written to ``out`` if given, which is neither of the operands.
    """
    columns = right_KN.shape[-1]
    out_MN = left_MK.new_empty(*left_MK.shape[:-1], columns) if out is None else out
    if left_MK.ndim == 2:
        left_MK = _without_gaps(left_MK)

    def multiply(span: slice) -> None:
        out_MN[..., span] = matmul(left_MK, right_KN[..., span], fewest=fewest)

    parallel_spans(multiply, columns, right_KN.device, width=width)
    return out_MN


def _use_onednn(left_MK: Tensor, right_KN: Tensor, fewest: int) -> bool:
    """Return True if oneDNN is faster for operands of this kind and size."""
    rows, inner = left_MK.shape[-2:]
    columns = right_KN.shape[-1]
    return (
        left_MK.dtype == right_KN.dtype == torch.float32
        and left_MK.device.type == right_KN.device.type == "cpu"
        and left_MK.ndim == right_KN.ndim <= 3
        and min(rows, inner, columns) >= _NARROWEST
        and rows * inner * columns >= fewest
        and not (torch.is_grad_enabled() and (left_MK.requires_grad or right_KN.requires_grad))
        and prefers_onednn()
    )


def _by_onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    product: Tensor = linear(
        _without_gaps(left_MK), _without_gaps(right_KN).T, None, "none", [], ""
    )
    return product


def _without_gaps(matrix_MK: Tensor) -> Tensor:
    """The matrix without gaps between its rows or columns, with which oneDNN is slow."""
    if matrix_MK.is_contiguous() or matrix_MK.T.is_contiguous():
        return matrix_MK
    return matrix_MK.contiguous()


@functools.cache
def prefers_onednn() -> bool:
    """Return True on processors with AVX-512 that are not Intel's, if torch provides oneDNN."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _cpu_vendor() in ("", "GenuineIntel"):
        return False
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        one_NN = torch.ones(_NARROWEST, _NARROWEST)
        return bool((_by_onednn(one_NN, one_NN) == _NARROWEST).all())
    return False


def fast_matmul_dtype(device: torch.device, multiply_adds: int) -> torch.dtype:
    """Bfloat16 if a product of so many multiply-adds takes at most half of float32's time.

    >>> fast_matmul_dtype(torch.device("cpu"), 1000)
    torch.float32
    """
    quick = multiply_adds >= MANY_ALIKE and _multiplies_bfloat16(device.type)
    return torch.bfloat16 if quick else torch.float32


@functools.cache
def _multiplies_bfloat16(device: str) -> bool:
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device == "cpu" and has_multiply_instruction(torch.bfloat16) is True


def _cpu_vendor() -> str:
    """The processor's vendor; an empty string if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""


# --------------------
# A Linear with 16-bit operands, on processors that multiply 32-bit ones faster.
#
# x86 processors without an instruction for bfloat16 multiply it at about a quarter of the rate of
# float32. Products of 16-bit operands are exact in float32 and are summed there in any case, so
# widening, multiplying, and rounding once gives the same result up to the order of the sums.

_PIECE_TOKENS = 256
_PIECE_WEIGHTS = 2**21
"""Elements of the weight that are widened at once: 8 MiB."""


def is_slow_dtype(dtype: torch.dtype) -> bool:
    """Return True if the CPU is known to have no instruction for products of ``dtype``."""
    return has_multiply_instruction(dtype) is False


def wide_linear(input_TC: Tensor, weight_RC: Tensor, bias_R: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b`` on the CPU, summed in float32 and rounded once to the dtype of x.

    The result is the same for any number of threads: the pieces depend on the shapes alone.

    Args:
        input_TC: x, ``[..., C]``, any floating dtype.
        weight_RC: W, ``[R, C]``.
        bias_R: b, ``[R]``, if there is one.

    >>> wide_linear(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(1, 3).bfloat16()).tolist()
    [[3.0], [3.0]]
    """
    rows, columns = weight_RC.shape
    flat_TC = input_TC.reshape(-1, columns)
    result_TR = flat_TC.new_empty(len(flat_TC), rows)
    spans = [slice(lo, lo + _PIECE_TOKENS) for lo in range(0, len(flat_TC), _PIECE_TOKENS)]
    step = max(_PIECE_WEIGHTS // columns, 1)
    for lo in range(0, rows, step):
        part = slice(lo, lo + step)
        wide_CR = weight_RC[part].float().T
        bias = None if bias_R is None else bias_R[part].float()

        def multiply(
            span: slice,
            part: slice = part,
            wide_CR: Tensor = wide_CR,
            bias: Tensor | None = bias,
        ) -> None:
            piece_TC = flat_TC[span].float()
            product = matmul(piece_TC, wide_CR, fewest=MANY_ALIKE)
            result_TR[span, part] = product if bias is None else product.add_(bias)

        parallel_for(multiply, spans)
    return result_TR.view(*input_TC.shape[:-1], rows)


# --------------------
# Settings of the process that a body needs; several threads may be inside at once.

_FULL, _INHERITED = "ieee", "none"
_lock = threading.Lock()
_entered: Counter[Callable[[], Callable[[], None]]] = Counter()
_restore: dict[Callable[[], Callable[[], None]], Callable[[], None]] = {}


@contextlib.contextmanager
def _setting(change: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """``change`` on the first entry of any thread; what it returns restores on the last exit."""
    with _lock:
        _entered[change] += 1
        if _entered[change] == 1:
            _restore[change] = change()
    try:
        yield
    finally:
        with _lock:
            _entered[change] -= 1
            if _entered[change] == 0:
                _restore.pop(change)()


def _forbid_reduced_precision() -> Callable[[], None]:
    coarse = None
    with contextlib.suppress(RuntimeError):  # raised where it disagrees with the newer settings
        coarse = torch.get_float32_matmul_precision()
    # not all of torch's settings objects are declared
    found: list[Any] = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    before = [one.fp32_precision for one in found]
    if coarse is not None and coarse != "highest":  # otherwise reading it inside would raise
        torch.set_float32_matmul_precision("highest")
    for one in found:
        one.fp32_precision = _FULL

    def restore() -> None:
        if coarse is not None and coarse != "highest":
            torch.set_float32_matmul_precision(coarse)
        for one, precision in zip(found, before, strict=True):
            one.fp32_precision = _INHERITED
            if one.fp32_precision != precision:
                one.fp32_precision = precision

    return restore


@contextlib.contextmanager
def full_float32_products() -> Iterator[None]:
    """Context manager: no TF32 or bfloat16 in products of float32 inside; restored afterwards.

    Training scripts allow these for the process and leave them on
    (``TrainingArguments(tf32=True)``, ``torch.set_float32_matmul_precision("high")``). With a
    mantissa of ten bits the Schur complements of an ill-conditioned matrix are no longer positive,
    and results differ between accelerators.
    """
    with _setting(_forbid_reduced_precision):
        yield


def _default_to_float32() -> Callable[[], None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    return lambda: torch.set_default_dtype(before)


@contextlib.contextmanager
def float32_by_default() -> Iterator[None]:
    """Context manager: float32 is the default dtype of new tensors; restored afterwards.

    Scripts that load a model set another default for the process
    (``torch.set_default_dtype(torch.bfloat16)``) and leave it so. Sums would be kept in it, and
    probes of a model's structure with random values would be lost in rounding. The dtype of a model
    is that of its configuration or its weights.
    """
    with _setting(_default_to_float32):
        yield
