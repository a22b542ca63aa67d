# SPDX-License-Identifier: Apache-2.0
"""Second moments from integers: exact ones of rounded inputs, near those of the inputs."""

from __future__ import annotations

import pytest
import torch
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.numerics import int8_products
from llmcompressor.numerics.gram import (
    add_cross_product,
    add_residual_product,
    add_upper_product,
    fast_operand,
    mirror_upper_,
)
from llmcompressor.numerics.int8_products import int8_columns, prefers_int8
from llmcompressor.observers.input_statistics import InputStatistics

T, C = 700, 300


def inputs(tokens: int = T, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Correlated, of columns of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    mixed_TC = torch.randn(tokens, C, generator=draw) @ torch.randn(C, C, generator=draw) / 17
    return (mixed_TC * torch.linspace(0.01, 30, C)).to(dtype)


def rounded(x_TC: Tensor) -> Tensor:
    """The inputs as integers represent them, number by number."""
    largest_C = x_TC.float().abs().amax(0)
    return torch.round(x_TC.float() * (127 / largest_C)).double() * (largest_C / 127).double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@each(dtype=[torch.bfloat16, torch.float16], tokens=[1, 129, 2048])
def test_products_are_exact_for_rounded_inputs(tokens: int, dtype: torch.dtype) -> None:
    x_TC, other_TC = inputs(tokens, dtype), inputs(tokens, dtype, seed=1)
    gram_CC, cross_CC = torch.zeros(C, C), torch.zeros(C, C)
    operand = int8_columns(x_TC)
    add_upper_product(gram_CC, operand)
    add_cross_product(cross_CC, operand, other_TC)
    assert relative(mirror_upper_(gram_CC), rounded(x_TC).T @ rounded(x_TC)) < 1e-6
    assert relative(cross_CC, rounded(x_TC).T @ rounded(other_TC)) < 1e-6


def test_they_are_near_those_of_the_inputs() -> None:
    x_TC, other_TC = inputs(2048), inputs(2048, seed=1) / 10
    weight_RC = torch.randn(40, C).bfloat16()
    gram_CC, cross_CC, missing_RC = torch.zeros(C, C), torch.zeros(C, C), torch.zeros(40, C)
    operand = int8_columns(x_TC)
    add_upper_product(gram_CC, operand)
    add_cross_product(cross_CC, operand, other_TC)
    add_residual_product(missing_RC, weight_RC, operand, other_TC)
    exact_CC = x_TC.double().T @ x_TC.double()
    exact_cross_CC = x_TC.double().T @ other_TC.double()
    size_C = exact_CC.diagonal().sqrt()
    apart_CC = (mirror_upper_(gram_CC) - exact_CC) / size_C / size_C.unsqueeze(-1)
    assert float(apart_CC.abs().max()) < 4e-3
    assert relative(cross_CC, exact_cross_CC) < 0.02
    assert relative(missing_RC, weight_RC.double() @ exact_cross_CC.T) < 0.02


def test_a_column_of_one_token_is_that_of_float32() -> None:
    """The worst case of the others: what is added to the diagonal is bounded by its own share."""
    x_TC = torch.zeros(2048, 2).bfloat16()
    x_TC[77, 0] = 3000.0
    x_TC[:, 1], x_TC[5, 1] = 23.0 / 2, 3000.0
    gram_CC = torch.zeros(2, 2)
    add_upper_product(gram_CC, int8_columns(x_TC))
    exact_C = x_TC.double().square().sum(0)
    assert float(gram_CC[0, 0]) == pytest.approx(float(exact_C[0]), rel=1e-6)
    assert float(gram_CC[1, 1]) == pytest.approx(float(exact_C[1]), rel=3 * 2048 / 193548)


def test_dead_columns_stay_zero_and_bad_ones_show() -> None:
    x_TC = inputs()
    x_TC[:, 3] = 0
    x_TC[9, 5], x_TC[9, 6] = float("nan"), float("-inf")
    x_TC[:, 7] = 1e-38
    gram_CC = torch.zeros(C, C)
    add_upper_product(gram_CC, int8_columns(x_TC))
    assert float(mirror_upper_(gram_CC)[3].nan_to_num().abs().max()) == 0
    assert not torch.isfinite(gram_CC[5, 5]), "NaN"
    assert not torch.isfinite(gram_CC[6, 6]), "infinity"
    assert float(gram_CC[7, 7]) == 0, "squares below float32"
    assert bool(torch.isfinite(gram_CC.diagonal()[8:]).all())


def test_they_are_positive_semidefinite() -> None:
    x_TC = inputs(128)  # of rank 128 at most
    gram_CC = torch.zeros(C, C)
    add_upper_product(gram_CC, int8_columns(x_TC))
    values_C = torch.linalg.eigvalsh(mirror_upper_(gram_CC).double())
    assert float(values_C[0]) > -1e-6 * float(values_C[-1])


def test_the_shape_and_dtype_alone_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: True)
    assert prefers_int8(inputs(2048), torch.float32)
    assert not prefers_int8(inputs(2048), torch.float64)
    assert not prefers_int8(inputs(2048, torch.float32), torch.float32)
    assert not prefers_int8(inputs(2048)[:, :200], torch.float32)
    assert not prefers_int8(inputs(2047), torch.float32), "the last tokens of all"
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: False)
    assert fast_operand(x_TC := inputs(2048), torch.float32) is x_TC


def test_batches_and_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: True)
    x_TC, original_TC = inputs(5000), inputs(5000, seed=1)
    found, before = [], torch.get_num_threads()
    try:
        for threads, size in ((1, 5000), (2, 5000), (1, 700), (2, 4096)):
            torch.set_num_threads(threads)
            one = InputStatistics(C, "cpu", twin=True)
            for part in zip(x_TC.split(size), original_TC.split(size), strict=True):
                one.update(*part)
            found.append(one)
    finally:
        torch.set_num_threads(before)
    first = found[0]
    assert first.cross is not None
    for one in found[1:]:
        assert one.cross is not None
        assert torch.equal(one.gram, first.gram)
        assert torch.equal(one.cross, first.cross)
