# SPDX-License-Identifier: Apache-2.0
"""Context managers for full float32 precision, whatever the process has set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["float32_by_default", "full_float32_products"]

_FULL, _INHERITED = "ieee", "none"


class _Settings:
    """The process's settings before the first entry; several threads may be inside at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._before: list[tuple[Any, str]] = []
        self._coarse: str | None = None

    def enter(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                self._coarse = _coarse()
                self._before = [(one, one.fp32_precision) for one in _products()]
                if self._coarse is not None:  # otherwise reading it inside would raise
                    torch.set_float32_matmul_precision("highest")
                for one, _ in self._before:
                    one.fp32_precision = _FULL

    def leave(self) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                if self._coarse is not None:
                    torch.set_float32_matmul_precision(self._coarse)
                for one, before in self._before:
                    one.fp32_precision = _INHERITED
                    if one.fp32_precision != before:
                        one.fp32_precision = before


_SETTINGS = _Settings()


def _coarse() -> str | None:
    """The value of torch's older matmul precision setting if it allows reduced precision.

    Torch refuses to read it if it disagrees with the newer settings.
    """
    try:
        said = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return said if said != "highest" else None


def _products() -> list[Any]:
    """Torch's matmul settings objects, some of them undeclared."""
    return [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]


@contextlib.contextmanager
def full_float32_products() -> Iterator[None]:
    """Context manager: no TF32 or bfloat16 in products of float32 inside; restored afterwards.

    Training scripts allow these for the process and leave them on
    (``TrainingArguments(tf32=True)``, ``torch.set_float32_matmul_precision("high")``). With a
    mantissa of ten bits the Schur complements of an ill-conditioned matrix are no longer positive,
    and results differ between accelerators.
    """
    _SETTINGS.enter()
    try:
        yield
    finally:
        _SETTINGS.leave()


class _Default:
    """The default dtype before the first entry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._before = torch.float32

    def enter(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)

    def leave(self) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                torch.set_default_dtype(self._before)


_DEFAULT = _Default()


@contextlib.contextmanager
def float32_by_default() -> Iterator[None]:
    """Context manager: float32 is the default dtype of new tensors; restored afterwards.

    Scripts that load a model set another default for the process
    (``torch.set_default_dtype(torch.bfloat16)``) and leave it so. Sums would be kept in it, and
    probes of a model's structure with random values would be lost in rounding. The dtype of a model
    is that of its configuration or its weights.
    """
    _DEFAULT.enter()
    try:
        yield
    finally:
        _DEFAULT.leave()
