# SPDX-License-Identifier: Apache-2.0
"""Gram matrices add up, are exact where it counts, and know nothing of how tokens arrive."""

from __future__ import annotations

import pytest
import torch
from tests.support.pairs import each, pairs
from torch import Tensor

from llmcompressor.numerics.gram import (
    TokenBuffer,
    add_cross_product,
    add_residual_product,
    add_symmetric_product,
    add_upper_product,
    mirror_upper_,
)

T, C = 600, 48


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(T, C) @ torch.randn(C, C) / 4).to(dtype)


def gram(x_TC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    total_CC = torch.zeros(C, C, dtype=dtype)
    add_symmetric_product(total_CC, x_TC)
    return total_CC


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@each(columns=[1, C, 129, 300, 600], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_lose_only_their_own_rounding(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    x_TC = torch.randn(T, columns).to(dtype)
    exact_CC = x_TC.double().T @ x_TC.double()
    total_CC = torch.zeros(columns, columns)
    add_symmetric_product(total_CC, x_TC)
    # float32 accumulation over T terms: some units of 2^-24 each, far from bfloat16's 2^-9
    assert relative(total_CC, exact_CC) < 4e-6
    add_symmetric_product(total_CC, x_TC)
    assert relative(total_CC, 2 * exact_CC) < 4e-6


@each(dtype=[torch.bfloat16, torch.float16, torch.float32], tokens=[1, 1024, 1025, 2500])
def test_the_cross_product_is_summed_in_float32(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y_TC, change_TC = torch.randn(tokens, 300).to(dtype), torch.randn(tokens, 300).to(dtype)
    cross_CC = torch.zeros(300, 300)
    add_cross_product(cross_CC, y_TC, change_TC)
    assert relative(cross_CC, y_TC.double().T @ change_TC.double()) < 4e-6


@pairs(dtype=[torch.bfloat16, torch.float32], tokens=[1, 1024, 1025, 2500], rows=[1, 150])
def test_what_an_output_lacks_is_the_cross_product_seen_from_it(
    tokens: int, rows: int, dtype: torch.dtype
) -> None:
    """Of a token it has the dtype of an output; over many tokens its rounding is averaged."""
    torch.manual_seed(0)
    y_TC, change_TC = torch.randn(tokens, 300).to(dtype), torch.randn(tokens, 300).to(dtype)
    weight_RC = torch.randn(rows, 300).to(dtype)
    missing_RC = torch.zeros(rows, 300)
    add_residual_product(missing_RC, weight_RC, y_TC, change_TC)
    exact_RC = weight_RC.double() @ change_TC.double().T @ y_TC.double()
    assert relative(missing_RC, exact_RC) < (4e-6 if dtype is torch.float32 else 2.0**-8)
    before_RC = missing_RC.clone()
    add_residual_product(missing_RC, weight_RC, y_TC, change_TC)
    assert relative(missing_RC, 2 * before_RC) < 1e-5, "it is added"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_tokens_are_widened_by_parts(dtype: torch.dtype) -> None:
    x_TC = torch.randn(2500, 300).to(dtype)
    total_CC = torch.zeros(300, 300)
    add_symmetric_product(total_CC, x_TC)
    assert relative(total_CC, x_TC.double().T @ x_TC.double()) < 4e-6


@each(
    sizes=[[T], [1] * 20 + [T - 20], [7, 90, T - 97], [64] * 9 + [T - 576]], chunk=[1, 64, 100_000]
)
def test_every_token_leaves_a_buffer_once_and_in_order(sizes: list[int], chunk: int) -> None:
    x_TC, buffer = inputs(), TokenBuffer(2, chunk)
    out: list[list[Tensor]] = []
    for part_TC in torch.split(x_TC, sizes):
        if (full := buffer.add(part_TC, -part_TC)) is not None:
            assert len(full[0]) > 0
            assert len(full[0]) % chunk == 0
            out.append(full)
    if (rest := buffer.drain()) is not None:
        assert len(rest[0]) < chunk
        out.append(rest)
    assert buffer.drain() is None
    assert torch.equal(torch.cat([one[0] for one in out]), x_TC)
    assert torch.equal(torch.cat([one[1] for one in out]), -x_TC)


@pytest.mark.parametrize("columns", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_upper_triangle_is_that_of_the_whole_product(columns: int, dtype: torch.dtype) -> None:
    """Many of them before it is made whole, which is how they are counted."""
    torch.manual_seed(0)
    parts = [torch.randn(tokens, columns).to(dtype) for tokens in (1, 70, 1500)]
    upper_CC = torch.zeros(columns, columns)
    for part_TC in parts:
        add_upper_product(upper_CC, part_TC)
    exact_CC = sum(part_TC.double().T @ part_TC.double() for part_TC in parts)
    assert isinstance(exact_CC, Tensor)
    assert relative(upper_CC.triu(), exact_CC.triu()) < 4e-6
    assert relative(mirror_upper_(upper_CC), exact_CC) < 4e-6
