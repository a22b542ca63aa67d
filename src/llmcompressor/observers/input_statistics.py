# SPDX-License-Identifier: Apache-2.0
"""What the inputs of a Linear look like: one object for every solver.

It adds up: the statistics of two halves of the data, or of two ranks, sum to those of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.errors import NonFiniteError
from llmcompressor.numerics.gram import (
    TokenBuffer,
    add_cross_product,
    add_upper_product,
    mirror_upper_,
)

__all__ = ["InputStatistics"]


class InputStatistics:
    """Second moments of the inputs of a Linear, accumulated batch by batch.

    Args:
        columns: C, the number of input features.
        device: where the sums live and the products run.
        twin: also accumulate the cross product with the inputs of the original model.
        name: of the module, for errors.

    Attributes:
        tokens: how many tokens were counted.
        gram: ``YᵀY``, float32 ``[C, C]``, exactly symmetric.
        cross: ``Yᵀ(X − Y)``, float32 ``[C, C]``, or ``None`` without twin streams.
    """

    def __init__(
        self, columns: int, device: torch.device | str, *, twin: bool = False, name: str = ""
    ) -> None:
        self.tokens = 0
        self.name = name
        self._gram_CC = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._cross_CC = torch.zeros_like(self._gram_CC) if twin else None
        self._buffer = TokenBuffer(2 if twin else 1)
        self._symmetric = True

    def update(self, input_TC: Tensor, reference_TC: Tensor | None = None) -> None:
        """Count the tokens of one batch.

        Args:
            input_TC: what the Linear gets, ``[T, C]``, padding already left out.
            reference_TC: what it gets in the original model, token by token, ``[T, C]``.
        """
        self.tokens += len(input_TC)
        if self._cross_CC is None:
            chunk = self._buffer.add(input_TC)
        else:
            chunk = self._buffer.add(input_TC, input_TC if reference_TC is None else reference_TC)
        self._multiply(chunk)

    @property
    def gram(self) -> Tensor:
        """``YᵀY``."""
        self._settle()
        return self._gram_CC

    @property
    def cross(self) -> Tensor | None:
        """``Yᵀ(X − Y)``."""
        self._settle()
        return self._cross_CC

    def merge(self, other: InputStatistics) -> None:
        """Add what ``other`` has counted."""
        self._gram_CC += other.gram.to(self._gram_CC.device)
        if self._cross_CC is not None and other.cross is not None:
            self._cross_CC += other.cross.to(self._cross_CC.device)
        self.tokens += other.tokens

    def _settle(self) -> None:
        self._multiply(self._buffer.drain())
        if not self._symmetric:
            mirror_upper_(self._gram_CC)
            self._symmetric = True

    def _multiply(self, chunk: list[Tensor] | None) -> None:
        if chunk is None:
            return
        device = self._gram_CC.device
        input_TC = chunk[0].to(device)
        add_upper_product(self._gram_CC, input_TC)
        if self._cross_CC is not None:
            add_cross_product(self._cross_CC, input_TC, chunk[1].to(device) - input_TC)
        self._symmetric = False
        if not bool(torch.isfinite(self._gram_CC.diagonal().sum())):
            raise NonFiniteError(
                f"The activations that go into {self.name or 'a module'} hold NaN or infinity. "
                "Look for a bad weight upstream, or load the model with precision='float32'."
            )
