# SPDX-License-Identifier: Apache-2.0
"""The factorization in panels is the factorization, with the same bits for any thread count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from tests.support.pairs import pairs
from tests.support.thinned import thinned
from torch import Tensor

from llmcompressor.numerics.cholesky import (
    FactoredSolver,
    InverseSolver,
    cholesky,
    invert_lower_,
)

C = 40


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def positive(
    columns: int = C, seed: int = 0, batch: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Well conditioned, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, columns, 2 * columns) if batch else (columns, 2 * columns)
    x_CT = torch.randn(shape, generator=generator)
    matrix_CC = x_CT @ x_CT.mT / columns + 0.1 * torch.eye(columns)
    return ((matrix_CC + matrix_CC.mT) / 2).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "within", "panel", "batch"),
    thinned([(torch.float32, 1e-5), (torch.float64, 1e-13)], [1, 7, 16, 39, C, 512], [0, 0, 3]),
)
def test_any_panel_gives_the_factor(
    dtype: torch.dtype, within: float, panel: int, batch: int
) -> None:
    matrix_CC = positive(batch=batch, dtype=dtype)
    lower_CC = cholesky(matrix_CC, panel=panel)
    assert lower_CC is not None
    assert lower_CC.dtype is dtype
    assert torch.equal(lower_CC, lower_CC.tril())
    assert torch.allclose(lower_CC @ lower_CC.mT, matrix_CC, atol=within)
    expected_CC = torch.linalg.cholesky(matrix_CC.double())
    assert torch.allclose(lower_CC.double(), expected_CC, atol=within)


def test_batches_are_factorized_as_if_alone() -> None:
    stacked_BCC = positive(batch=3, dtype=torch.float64)
    together_BCC = cholesky(stacked_BCC, panel=16)
    assert together_BCC is not None
    for matrix_CC, lower_CC in zip(stacked_BCC, together_BCC, strict=True):
        alone_CC = cholesky(matrix_CC, panel=16)
        assert alone_CC is not None
        assert torch.allclose(alone_CC, lower_CC, atol=1e-13)


@pairs(
    column=[0, 15, 16, C - 1], batched=[False, True], value=[-1.0, 0.0, float("nan"), float("inf")]
)
def test_there_is_none_for_what_is_not_positive_definite(
    column: int, batched: bool, value: float
) -> None:
    """Wherever the panel in which that shows: also where only one matrix of a batch is."""
    matrix_CC = positive(batch=2) if batched else positive()
    matrix_CC[..., column, column] = torch.tensor([1e3, value]) if batched else value
    assert cholesky(matrix_CC, panel=16) is None


def test_the_matrix_is_kept_unless_it_may_be_overwritten() -> None:
    matrix_CC = positive()
    before_CC = matrix_CC.clone()
    lower_CC = cholesky(matrix_CC, panel=16)
    assert lower_CC is not None
    assert torch.equal(matrix_CC, before_CC)
    overwritten_CC = cholesky(matrix_CC, panel=16, overwrite=True)
    assert overwritten_CC is not None
    assert overwritten_CC.data_ptr() == matrix_CC.data_ptr()
    assert torch.equal(overwritten_CC, lower_CC)


@pytest.mark.usefixtures("_threads_restored")
@pytest.mark.parametrize("columns", [600, 1100])
def test_the_number_of_threads_does_not_show(columns: int) -> None:
    matrix_CC = positive(columns)
    factors = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        factors.append(cholesky(matrix_CC))
        assert torch.get_num_threads() == threads
    one_CC, *others = factors
    assert one_CC is not None
    assert all(other is not None and torch.equal(one_CC, other) for other in others)


@pytest.mark.parametrize(
    ("dtype", "within", "smallest", "batch"),
    thinned([(torch.float32, 1e-4), (torch.float64, 1e-12)], [1, 7, 16, C, 512], [0, 0, 3]),
)
def test_the_inverse_of_a_factor_takes_its_place(
    dtype: torch.dtype, within: float, smallest: int, batch: int
) -> None:
    lower_CC = cholesky(positive(batch=batch, dtype=dtype))
    assert lower_CC is not None
    before_CC = lower_CC.clone()
    inverse_CC = invert_lower_(lower_CC, smallest=smallest)
    assert inverse_CC.data_ptr() == lower_CC.data_ptr()
    assert torch.equal(inverse_CC, inverse_CC.tril())
    eye_CC = torch.eye(C, dtype=dtype).expand(inverse_CC.shape)
    assert torch.allclose(inverse_CC @ before_CC, eye_CC, atol=within)


@pytest.mark.parametrize(
    ("dtype", "within", "rows", "block", "batch"),
    thinned(
        [(torch.float32, 1e-3), (torch.float64, 1e-11)],
        [1, 5, 300],
        [1, 7, 16, C, 512],
        [0, 0, 3, 3],
    ),
)
def test_it_solves_as_lapack_does(
    dtype: torch.dtype, within: float, block: int, batch: int, rows: int
) -> None:
    matrix_CC = positive(batch=batch, dtype=dtype)
    lower_CC = cholesky(matrix_CC)
    assert lower_CC is not None
    right_CR = torch.randn(*matrix_CC.shape[:-1], rows, dtype=dtype)
    expected_CR = torch.cholesky_solve(right_CR, lower_CC)
    found_CR = FactoredSolver(lower_CC, block=block).solve_(right_CR.clone())
    assert torch.allclose(found_CR, expected_CR, atol=within)


@cache
def widely_spread(greatest: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factor of a matrix with no eigenvalue below 1, a right side and the solution."""
    generator = torch.Generator().manual_seed(0)
    columns = 600
    turned_CC = torch.linalg.qr(torch.randn(columns, columns, generator=generator).double())[0]
    values_C = torch.logspace(0, math.log10(greatest), columns, dtype=torch.float64)
    matrix_CC = (turned_CC * values_C) @ turned_CC.T
    right_CR = torch.randn(columns, 700, generator=generator)
    expected_CR = torch.linalg.solve(matrix_CC, right_CR.double()).float()
    return torch.linalg.cholesky(matrix_CC).float(), right_CR, expected_CR


@pytest.mark.usefixtures("_threads_restored")
@pytest.mark.parametrize(
    ("greatest", "solver"), thinned([1e1, 1e4, 1e8], [FactoredSolver, InverseSolver])
)
def test_products_of_16_bits_are_exact_for_any_eigenvalue(solver: type, greatest: float) -> None:
    """Of a matrix with no eigenvalue below 1; and the number of threads does not show."""
    lower_CC, right_CR, expected_CR = widely_spread(greatest)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        solved_CR = solver(lower_CC.clone(), dtype=torch.bfloat16).solve_(right_CR.clone())
        found.append(solved_CR)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert float((found[0] - expected_CR).norm() / right_CR.norm()) < 0.004
