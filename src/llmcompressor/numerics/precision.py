# SPDX-License-Identifier: Apache-2.0
"""Float32 with all of its digits, whatever a process allows for speed or takes by default."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["float32_by_default", "full_float32_products"]

_FULL, _INHERITED = "ieee", "none"


class _Settings:
    """What was set before the first of those who are within; several threads may be at once."""

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
                if self._coarse is not None:  # or who asks for it inside would get an error
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
    """What torch's older setting says of products, if that is less than all digits.

    Where it disagrees with the newer ones it cannot be asked.
    """
    try:
        said = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return said if said != "highest" else None


def _products() -> list[Any]:
    """Torch's settings for products; it does not declare them all."""
    return [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]


@contextlib.contextmanager
def full_float32_products() -> Iterator[None]:
    """Take no TF32, and no bfloat16, for products of float32 inside; as before afterwards.

    Trainings allow it for the process and leave it so (``TrainingArguments(tf32=True)``,
    ``torch.set_float32_matmul_precision("high")``). With ten bits of a mantissa the Schur
    complements of an ill-conditioned matrix are not positive any more, and what is solved on one
    accelerator is not what is solved on another.
    """
    _SETTINGS.enter()
    try:
        yield
    finally:
        _SETTINGS.leave()


class _Default:
    """The dtype that tensors had before the first of those who are within."""

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
    """Have new tensors be float32 inside, unless they are told otherwise; as before afterwards.

    Scripts that load a model set another default for the process
    (``torch.set_default_dtype(torch.bfloat16)``) and leave it so. Sums would be kept in it, and
    what is tried out on random values to see how a model is built would be lost in rounding. A
    model has the dtype that its configuration or its weights say.
    """
    _DEFAULT.enter()
    try:
        yield
    finally:
        _DEFAULT.leave()
