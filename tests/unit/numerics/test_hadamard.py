# SPDX-License-Identifier: Apache-2.0
"""Every claimed order has a Hadamard matrix; the fast product is the product."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics import hadamard as numbers
from llmcompressor.numerics.hadamard import (
    fast_hadamard,
    hadamard,
    random_orthogonal,
    split_order,
)

ORDERS = [1, 2, *range(4, 257, 4)]


def is_hadamard(matrix: torch.Tensor, order: int) -> bool:
    """The product of float32 signs is exact."""
    signs = matrix.float()
    product = signs @ signs.T
    return torch.equal(matrix.abs(), torch.ones(order, order, dtype=torch.float64)) and torch.equal(
        product, order * torch.eye(order)
    )


# 344: 172 of the table; 684 and 1020: Paley I over primes; 724: Paley II over 19^2; 924: a product
@pytest.mark.parametrize("orders", [ORDERS, [344, 684, 724, 924, 1020]])
def test_rows_are_orthogonal_signs(orders: list[int]) -> None:
    assert [order for order in orders if not is_hadamard(hadamard(order), order)] == []


def test_the_table_is_read_where_paley_makes_none() -> None:
    """28, 52 and 100, the bases of many models, are Paley's over 3^3, 5^2 and 7^2 elements."""
    odd_bases = range(4, 257, 8)
    read = [n for n in odd_bases if numbers._paley_field(n) is None]
    assert read == [92, 116, 156, 172, 188, 236]
    assert numbers._table_orders().issuperset(read)


@pytest.mark.parametrize("field", [(3, 1), (7, 1), (2, 3), (3, 2), (5, 2), (3, 3), (3, 6)])
def test_powers_are_all_elements_but_zero(field: tuple[int, int]) -> None:
    p, k = field
    assert sorted(numbers._powers(p, k)) == list(range(1, p**k))


# hidden and intermediate sizes of published models; 29568 has a product of two in it
@pytest.mark.parametrize(
    ("order", "parts"),
    [
        (11008, (64, 172)),
        (13824, (128, 108)),
        (14336, (512, 28)),
        (3712, (32, 116)),
        (4544, (16, 284)),
        (18944, (128, 148)),
        (8960, (64, 140)),
        (9984, (64, 156)),
        (29568, (32, 924)),
        (5120, (256, 20)),
        (4096, (4096, 1)),
    ],
)
def test_widths_of_models(order: int, parts: tuple[int, int]) -> None:
    assert split_order(order) == parts
    x = torch.randn(2, order, dtype=torch.float64)
    back = fast_hadamard(x)  # rows keep their length and their angle
    assert torch.allclose(back @ back.T, order * x @ x.T)


@pytest.mark.parametrize("order", [1, 2, 8, 12, 24, 40, 92, 344, 924])
def test_fast_is_dense(order: int) -> None:
    x = torch.randn(3, 2, order, dtype=torch.float64)
    assert torch.allclose(fast_hadamard(x), x @ hadamard(order))


def test_seeds_decide() -> None:
    def made(seed: int) -> torch.Tensor:
        return random_orthogonal(24, torch.Generator().manual_seed(seed))

    assert torch.equal(made(3), made(3))
    assert not torch.equal(made(3), made(4))
    eye = torch.eye(24, dtype=torch.float64)
    assert torch.allclose(made(3) @ made(3).T, eye, atol=1e-12)
