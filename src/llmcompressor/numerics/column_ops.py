# SPDX-License-Identifier: Apache-2.0
"""Column operations of a column sweep, in torch or, on the CPU, in numpy.

For columns of a few thousand elements torch's call overhead exceeds the work itself. numpy has a
third of that overhead and works on the same memory: its arrays are views of the tensors.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["Column", "ColumnOps", "column_ops"]

Column: TypeAlias = Any
"""A tensor or an array, ``[..., R]``."""
_SHORT = 2**14
"""Elements of a column from which on the work itself takes longer than beginning it."""


class ColumnOps(NamedTuple):
    """Operations on columns. Each writes to existing memory, given as ``out``."""

    view: Callable[[Tensor], Any]
    """A tensor as these operations take it: the same memory."""
    columns: Callable[[Tensor], Sequence[Column]]
    """The columns of a tensor ``[..., K, R]``: K views."""
    scratch: Callable[[Tensor], Any]
    """Memory of the shape of a tensor for intermediate results."""
    number: Callable[[float], Any]
    """A number as these operations take it."""
    multiply: Callable[..., Any]
    """``multiply(a, b, out=c)``."""
    add: Callable[..., Any]
    subtract: Callable[..., Any]
    round: Callable[..., Any]
    """To integers, ties to even: ``round(a, out=c)``."""
    clamp: Callable[..., Any]
    """``clamp(a, least, greatest, out=c)``; the ends from ``number``."""
    subtract_outer: Callable[[Any, Any, Column, Any], None]
    """``target -= factor errorᵀ``: ``[..., K, R]``, ``[..., K]``, ``[..., R]``, and scratch."""


def column_ops(work_CR: Tensor, *, by_torch: bool = False) -> ColumnOps:
    """The faster operations for columns of ``work_CR``.

    Args:
        work_CR: float32 ``[..., C, R]``.
        by_torch: always use torch.
    """
    length = work_CR[..., 0, :].numel()
    short = work_CR.device.type == "cpu" and work_CR.dtype == torch.float32 and length < _SHORT
    return _NUMPY if short and not by_torch else _TORCH


def _outer_by_torch(target_KR: Tensor, factor_K: Tensor, error_R: Tensor, _: Tensor) -> None:
    if target_KR.ndim == 2:
        target_KR.addr_(factor_K, error_R, alpha=-1)
    else:
        target_KR.sub_(factor_K.unsqueeze(-1) * error_R.unsqueeze(-2))


def _outer_by_numpy(target_KR: Any, factor_K: Any, error_R: Any, scratch_SR: Any) -> None:
    product_KR = scratch_SR[..., : factor_K.shape[-1], :]
    np.multiply(factor_K[..., None], error_R[..., None, :], out=product_KR)
    np.subtract(target_KR, product_KR, out=target_KR)


def _clip() -> Callable[..., Any]:
    """Return numpy's low-level ``clip`` without its Python wrapper, which is six times as slow."""
    with contextlib.suppress(ImportError, AttributeError):
        found: Callable[..., Any] = importlib.import_module("numpy._core.umath").clip
        return found
    return np.clip


def _columns_by_numpy(tensor_KR: Tensor) -> list[Any]:
    array_KR = tensor_KR.numpy()
    return [array_KR[..., k, :] for k in range(array_KR.shape[-2])]


_TORCH = ColumnOps(
    view=lambda tensor: tensor,
    columns=lambda tensor_KR: tensor_KR.unbind(-2),
    scratch=torch.empty_like,
    number=float,
    multiply=torch.mul,
    add=torch.add,
    subtract=torch.sub,
    round=torch.round,
    clamp=torch.clamp,
    subtract_outer=_outer_by_torch,
)
_NUMPY = ColumnOps(
    view=lambda tensor: tensor.numpy(),
    columns=_columns_by_numpy,
    scratch=lambda tensor: np.empty(tensor.shape, np.float32),
    number=lambda value: np.array(value, np.float32),
    multiply=np.multiply,
    add=np.add,
    subtract=np.subtract,
    round=np.rint,
    clamp=_clip(),
    subtract_outer=_outer_by_numpy,
)
