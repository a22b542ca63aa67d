# SPDX-License-Identifier: Apache-2.0
"""Every claimed order has a Hadamard matrix; the fast product is the product."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics.hadamard import (
    fast_hadamard,
    hadamard,
    has_hadamard,
    random_hadamard,
    random_orthogonal,
    split_order,
    usable_block_sizes,
)

ORDERS = [1, 2, *range(4, 2001, 4)]


def is_hadamard(matrix: torch.Tensor, order: int) -> bool:
    """The product of float32 signs is exact."""
    signs = matrix.float()
    product = signs @ signs.T
    return torch.equal(matrix.abs(), torch.ones(order, order, dtype=torch.float64)) and torch.equal(
        product, order * torch.eye(order)
    )


@pytest.mark.parametrize("order", [n for n in ORDERS if n <= 668])
def test_rows_are_orthogonal_signs(order: int) -> None:
    assert is_hadamard(hadamard(order), order)


# 724 and 1460: Paley II over 19^2 and 3^6; 732: Williamson sequences of 61; 836, 852, 996:
# T-sequences of 209, 71, 83; 876, 1340: T-matrices of 73, 67; 764, 892: circulants; 772, 1444:
# Miyamoto's four times 193 and 19^2; 1336, 1432: eight times 167 and 179; 716: a border
@pytest.mark.parametrize(
    "order",
    [684, 716, 724, 732, 756, 764, 772, 836, 852, 876, 892, 996, 1336, 1340, 1432, 1444, 1460],
)
def test_large_orders(order: int) -> None:
    assert is_hadamard(hadamard(order), order)


@pytest.mark.slow
def test_every_order_up_to_2000() -> None:
    assert [n for n in ORDERS if n > 668 and not is_hadamard(hadamard(n), n)] == []


@pytest.mark.parametrize("order", [n for n in range(3, 258) if n % 4 and n != 2])
def test_no_other_order_is_claimed(order: int) -> None:
    assert not has_hadamard(order)
    with pytest.raises(ValueError, match=f"order {order} "):
        hadamard(order)


def test_no_multiple_of_4_is_missing_up_to_2000() -> None:
    assert [n for n in range(1, 2001) if has_hadamard(n)] == ORDERS


def test_an_order_that_is_not_made() -> None:
    assert not has_hadamard(2060)
    with pytest.raises(ValueError, match="no Hadamard matrix of order 2060 is known here"):
        hadamard(2060)


# hidden and intermediate sizes of published models; 29568 has a product of two in it
@pytest.mark.parametrize(
    ("order", "parts"),
    [
        (11008, (64, 172)),
        (13824, (128, 108)),
        (14336, (512, 28)),
        (13696, (32, 428)),
        (27392, (64, 428)),
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


def test_powers_of_two_are_sylvesters() -> None:
    grown = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        grown = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), grown)
    assert torch.equal(hadamard(32), grown)


def test_seeds_decide() -> None:
    def made(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return random_hadamard(24, generator), random_orthogonal(24, generator)

    for one, other in zip(made(3), made(3), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(made(3), made(4), strict=True):
        assert not torch.equal(one, other)
    eye = torch.eye(24, dtype=torch.float64)
    signs, matrix = made(3)
    assert torch.equal(signs @ signs.T, 24 * eye)
    assert torch.allclose(matrix @ matrix.T, eye, atol=1e-12)


def test_orthogonal_matrices_favour_no_direction() -> None:
    """Of the uniform distribution, entries have mean 0 and variance 1 / N, traces variance 1."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([random_orthogonal(4, generator) for _ in range(4000)])
    assert float(drawn.mean(0).abs().max()) < 0.03
    assert float((drawn.square().mean(0) - 0.25).abs().max()) < 0.02
    traces = drawn.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(float(traces.var()) - 1) < 0.1


def test_usable_sizes_divide() -> None:
    assert usable_block_sizes(90) == [2]
    assert usable_block_sizes(260) == [260, 52, 20, 4]
    assert usable_block_sizes(268) == [268, 4, 2]
    assert usable_block_sizes(2060) == [412, 20, 4, 2]
    assert all(260 % size == 0 and has_hadamard(size) for size in usable_block_sizes(260))
