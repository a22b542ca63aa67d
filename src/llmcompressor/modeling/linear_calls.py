# SPDX-License-Identifier: Apache-2.0
"""Another way of multiplying in the place of ``torch.nn.functional.linear``, where it fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn import Parameter, functional

__all__ = ["linear_replaced"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@contextlib.contextmanager
def linear_replaced(fits: Callable[[Tensor, Tensor], bool], product: Product) -> Iterator[None]:
    """Have ``functional.linear`` call ``product`` inside.

    Args:
        fits: of an input and a weight, both plain tensors, whether it is to.
        product: of an input, a weight and a bias or ``None``, what ``functional.linear`` gives.
    """
    plain = functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if type(input) is Tensor and type(weight) in (Tensor, Parameter) and fits(input, weight):
            return product(input, weight, bias)
        return plain(input, weight, bias)

    setattr(functional, "linear", linear)  # noqa: B010 - torch declares it a function
    try:
        yield
    finally:
        setattr(functional, "linear", plain)  # noqa: B010
