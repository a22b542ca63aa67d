# SPDX-License-Identifier: Apache-2.0
"""Products by either library are the product, whatever the memory layout of the operands."""

from __future__ import annotations

import pytest
import torch
from tests.support.pairs import pairs
from torch import Tensor

from llmcompressor.numerics import products
from llmcompressor.numerics.products import matmul, parallel_matmul, subtract_matmul_

SHAPES = [(64, 64, 512), (130, 257, 129), (16, 4096, 40), (5, 3, 2), (0, 4, 3), (3, 0, 4)]
HAS_ONEDNN = torch.backends.mkldnn.is_available()


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two multiplies; oneDNN at any size."""
    if request.param == "onednn" and not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param == "onednn")
    return str(request.param)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The same numbers: in rows, in columns, or as a part of something wider."""
    if layout == "columns":
        return matrix.mT.contiguous().mT
    if layout == "part":
        wide = torch.cat([matrix, matrix, matrix], dim=-1)
        return wide[..., matrix.shape[-1] : 2 * matrix.shape[-1]]
    return matrix


@pairs(
    shape=SHAPES,
    left_layout=["rows", "columns", "part"],
    right_layout=["rows", "columns", "part"],
    batch=[(), (2,)],
)
@pytest.mark.usefixtures("library")
def test_it_is_the_product(
    shape: tuple[int, int, int], left_layout: str, right_layout: str, batch: tuple[int, ...]
) -> None:
    rows, inner, columns = shape
    left, right = torch.randn(*batch, rows, inner), torch.randn(*batch, inner, columns)
    exact = left.double() @ right.double()
    operands = laid_out(left, left_layout), laid_out(right, right_layout)
    within = {"atol": 1e-5 * max(inner, 1), "rtol": 1e-5}
    assert torch.allclose(matmul(*operands, fewest=0).double(), exact, **within)
    assert torch.allclose(parallel_matmul(*operands, fewest=0).double(), exact, **within)
    target = torch.ones(*batch, rows, columns)
    subtract_matmul_(target, *operands, fewest=0)
    assert torch.allclose(1 - target.double(), exact, **within)


@pytest.mark.usefixtures("library")
def test_gradients_are_kept() -> None:
    left = torch.randn(64, 64, requires_grad=True)
    matmul(left, torch.eye(64), fewest=0).sum().backward()
    assert left.grad is not None
    assert torch.equal(left.grad, torch.ones(64, 64))


@pytest.mark.skipif(not products.prefers_onednn(), reason="MKL is used here")
def test_where_onednn_is_used_it_is_no_less_exact() -> None:
    left, right = torch.randn(256, 1024), torch.randn(1024, 256)
    exact = left.double() @ right.double()
    error = (matmul(left, right, fewest=0).double() - exact).norm()
    assert error < 2 * ((left @ right).double() - exact).norm()
