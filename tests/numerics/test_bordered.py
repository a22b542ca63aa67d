# SPDX-License-Identifier: Apache-2.0
"""The border makes a Hadamard matrix of an array that is none."""

from __future__ import annotations

import pytest
import torch
from tests.thinned import few

from llmcompressor.numerics.hadamard import bordered, has_bordered

ORDERS = [n for n in range(2001) if has_bordered(n)]


def test_orders() -> None:
    assert ORDERS == [668, 716, 1388, 1436, 1676, 1772, 1916]


@pytest.mark.parametrize("order", few(ORDERS, 668, 716, 1388))
def test_bordered(order: int) -> None:
    matrix = bordered(order)
    assert matrix.shape == (order, order)
    assert matrix.dtype == torch.float64
    assert set(matrix.unique().tolist()) == {-1, 1}
    signs = matrix.float()  # whose product is exact
    assert torch.equal(signs @ signs.T, order * torch.eye(order))
