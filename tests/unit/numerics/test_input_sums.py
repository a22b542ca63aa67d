# SPDX-License-Identifier: Apache-2.0
"""Sums of inputs: packed without loss, and divided as the inputs are."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics.gram import packed_upper, triangle_bytes, unpacked_upper
from llmcompressor.numerics.input_sums import InputSums


def sums_of(input_TC: torch.Tensor) -> InputSums:
    """Plain sums, in float64."""
    wide_TC = input_TC.double()
    least_C, greatest_C = wide_TC.aminmax(dim=0)
    squares_C, sizes_C = wide_TC.square().sum(dim=0), wide_TC.abs().sum(dim=0)
    return InputSums(len(input_TC), wide_TC.T @ wide_TC, squares_C, sizes_C, least_C, greatest_C)


@pytest.mark.parametrize("columns", [1, 2, 130, 300])
def test_half_of_a_symmetric_matrix_is_stored(columns: int) -> None:
    input_TC = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    gram_CC = input_TC.T @ input_TC
    gram_CC = gram_CC.triu() + gram_CC.triu(1).T
    packed = packed_upper(gram_CC)
    assert packed.nbytes == triangle_bytes(columns)
    assert torch.equal(unpacked_upper(packed, columns), gram_CC)


def test_sums_of_divided_inputs_are_divided_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    input_TC = torch.randn(50, 9, generator=generator).double()
    scale_C = torch.rand(9, generator=generator).double() * 10 + 0.1
    found, wanted = sums_of(input_TC).divided_by(scale_C), sums_of(input_TC / scale_C)
    assert found.tokens == 50
    assert found.columns == 9
    for name in ("gram_CC", "squares_C", "sizes_C", "least_C", "greatest_C"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=name)
    assert torch.equal(found.gram_CC, found.gram_CC.mT)
