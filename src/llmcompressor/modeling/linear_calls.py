# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of ``torch.nn.functional.linear`` where inputs and weights fit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn import Parameter, functional

__all__ = ["linear_replaced"]

Fits = Callable[[Tensor, Tensor], bool]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Here(threading.local):
    """The active replacements of ``functional.linear`` in this thread, innermost last."""

    def __init__(self) -> None:
        self.products: tuple[tuple[Fits, Product], ...] = ()


_here = _Here()
_lock = threading.Lock()
_plain = functional.linear
_users = 0


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if type(input) is Tensor and type(weight) in (Tensor, Parameter):
        for fits, product in reversed(_here.products):
            if fits(input, weight):
                return product(input, weight, bias)
    return _plain(input, weight, bias)


@contextlib.contextmanager
def linear_replaced(fits: Fits, product: Product) -> Iterator[None]:
    """Make ``functional.linear`` call ``product`` in the body, in this thread, where ``fits``.

    Args:
        fits: returns True for an input and a weight, both plain tensors, that it is to handle.
        product: computes the result from an input, a weight, and a bias or ``None``.
    """
    before = _here.products
    _count(1)
    _here.products = (*before, (fits, product))
    try:
        yield
    finally:
        _here.products = before
        _count(-1)


def _count(change: int) -> None:
    """Patch the function for its first user, and restore it after the last one."""
    global _plain, _users  # noqa: PLW0603 - the function is one for the whole process
    with _lock:
        if not _users:
            _plain = functional.linear
        _users += change
        setattr(functional, "linear", _linear if _users else _plain)  # noqa: B010 - torch declares it a function
