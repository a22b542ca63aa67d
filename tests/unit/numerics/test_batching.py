# SPDX-License-Identifier: Apache-2.0
"""Batches hold what is alike, each problem once, and no more than fits."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics.batching import batch_by_kind, stack_float32_rows


@pytest.mark.parametrize(("limit", "most"), [(1, None), (64, None), (300, None), (300, 2)])
def test_each_problem_is_in_one_batch_of_its_kind(limit: int, most: int | None) -> None:
    kinds = ["abc"[number % 3] for number in range(20)]
    columns = [{"a": 4, "b": 8, "c": 40}[kind] for kind in kinds]
    batches = list(batch_by_kind(kinds, columns, limit, most=most))
    assert sorted(number for batch in batches for number in batch) == list(range(20))
    for batch in batches:
        assert len({kinds[number] for number in batch}) == 1
        assert batch == sorted(batch)
        elements = len(batch) * columns[batch[0]] ** 2
        assert len(batch) <= most if most else len(batch) == 1 or elements <= limit


def test_rows_are_stacked_in_float32() -> None:
    weights = [
        torch.randn(rows, 7).to(dtype)
        for rows, dtype in ((3, torch.bfloat16), (1, torch.float16), (2, torch.float64))
    ]
    assert torch.equal(stack_float32_rows(weights), torch.cat([one.float() for one in weights]))
    assert stack_float32_rows(weights[:1]).data_ptr() != weights[0].data_ptr()
