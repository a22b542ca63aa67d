# SPDX-License-Identifier: Apache-2.0
"""The factor of a Hessian, damping, and what happens when there is no factor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.hessian import (
    SingularHessianError,
    damp,
    dead_columns,
    factorize_with_rising_dampening,
    upper_factor,
)

C = 24


def hessian(seed: int = 0, dtype: torch.dtype = torch.float64, tokens: int = 200) -> Tensor:
    torch.manual_seed(seed)
    x_TC = torch.randn(tokens, C, dtype=dtype) @ torch.randn(C, C, dtype=dtype)
    return x_TC.T @ x_TC


def indefinite(eigenvalue: float) -> Tensor:
    """A matrix with a positive diagonal of mean 1 and one given eigenvalue below zero."""
    direction_C = torch.ones(C, dtype=torch.float64) / C**0.5
    outer_CC = torch.outer(direction_C, direction_C)
    matrix_CC = torch.eye(C, dtype=torch.float64) + (eigenvalue - 1) * outer_CC
    return matrix_CC / matrix_CC.diagonal().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_is_upper_and_squares_to_the_matrix(dtype: torch.dtype) -> None:
    H_CC = damp(hessian(dtype=dtype), 0.01)
    R_CC = upper_factor(H_CC)
    assert R_CC.dtype is dtype
    assert torch.equal(R_CC, R_CC.triu())
    assert bool((R_CC.diagonal() > 0).all())
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    assert torch.allclose(R_CC @ R_CC.T, H_CC, atol=tolerance * float(H_CC.diagonal().max()))


def test_damping_adds_a_fraction_of_the_mean_diagonal() -> None:
    H_CC = hessian()
    before_CC = H_CC.clone()
    added_CC = damp(H_CC, 0.25) - H_CC
    assert torch.equal(H_CC, before_CC)
    expected_CC = 0.25 * H_CC.diagonal().mean() * torch.eye(C, dtype=torch.float64)
    assert torch.allclose(added_CC, expected_CC, atol=1e-9)


def test_dead_columns_are_found_and_become_independent() -> None:
    H_CC = hessian()
    H_CC[3], H_CC[:, 3] = 0, 0
    assert dead_columns(H_CC).nonzero().flatten().tolist() == [3]
    R_CC = upper_factor(damp(H_CC, 0.01))
    off_C = torch.cat([R_CC[3, 4:], R_CC[:3, 3]])
    assert not off_C.any()
    rest = [c for c in range(C) if c != 3]
    alone_CC = upper_factor(damp(H_CC, 0.01)[rest][:, rest])
    assert torch.allclose(R_CC[rest][:, rest], alone_CC, rtol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_no_factor_is_an_error_of_its_own(bad: float) -> None:
    H_CC = hessian()
    H_CC[5, 5] = bad
    with pytest.raises(SingularHessianError, match="positive definite"):
        upper_factor(H_CC)


@pytest.mark.parametrize(
    ("eigenvalue", "first", "settled"),
    [
        (-0.05, 0.01, 0.1),
        (-0.5, 0.01, 1.0),
        (-5.0, 0.01, 10.0),
        (-0.005, 0.0, 0.01),
        (-0.0005, 0.0, 0.001),
    ],
)
def test_dampening_is_raised_tenfold_until_it_suffices(
    eigenvalue: float, first: float, settled: float
) -> None:
    H_CC = indefinite(eigenvalue)
    before_CC = H_CC.clone()
    found = factorize_with_rising_dampening(H_CC, first)
    assert found.dampening == pytest.approx(settled)
    R_CC = found.factor_CC
    assert torch.allclose(R_CC @ R_CC.T, damp(H_CC, settled), atol=1e-9)
    assert torch.equal(H_CC, before_CC)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_an_order_gives_the_factor_of_the_permuted_matrix(batched: bool, dead: bool) -> None:
    H_BCC = torch.stack([hessian(seed) for seed in range(2)])
    if dead:
        H_BCC[:, 5], H_BCC[:, :, 5] = 0, 0
    order_BC = H_BCC.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True)
    moved = [
        factorize_with_rising_dampening(H_CC[order_C][:, order_C], 0.01).factor_CC
        for H_CC, order_C in zip(H_BCC, order_BC, strict=True)
    ]
    before_BCC = H_BCC.clone()
    if batched:
        found = list(factorize_with_rising_dampening(H_BCC, 0.01, order_C=order_BC).factor_CC)
    else:
        pairs = zip(H_BCC, order_BC, strict=True)
        found = [
            factorize_with_rising_dampening(H_CC, 0.01, order_C=o_C).factor_CC
            for H_CC, o_C in pairs
        ]
    for R_CC, expected_CC in zip(found, moved, strict=True):
        assert torch.allclose(R_CC, expected_CC, rtol=1e-9, atol=1e-12)
    assert torch.equal(H_BCC, before_BCC)
