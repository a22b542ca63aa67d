# SPDX-License-Identifier: Apache-2.0
"""Padding is left out of whatever has its layout, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.observers.tokens import alike_batches, count_tokens, per_batch, real_tokens

MASK = torch.tensor([[True, True, False], [False, True, True]])


def activation() -> Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)


def test_padding_is_left_out_and_real_tokens_keep_their_order() -> None:
    tokens_TC = real_tokens(activation(), MASK)
    assert torch.equal(tokens_TC, torch.stack([activation()[b, t] for b, t in MASK.nonzero()]))


def test_an_activation_that_was_flattened_has_the_same_tokens() -> None:
    flat_TC = activation().flatten(0, 1)
    assert torch.equal(real_tokens(flat_TC, MASK), real_tokens(activation(), MASK))


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (5, 4), (1, 2, 3, 4), (4,)])
def test_without_a_mask_every_row_counts(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    assert torch.equal(real_tokens(values, None), values.reshape(-1, shape[-1]))


@pytest.mark.parametrize("shape", [(5, 4), (2, 7, 4), (3, 2, 4)])
def test_another_layout_has_no_such_positions(shape: tuple[int, ...]) -> None:
    """Tokens routed to an expert, patches of an image."""
    values = torch.randn(shape)
    assert torch.equal(real_tokens(values, MASK), values.reshape(-1, shape[-1]))


def test_one_sequence_given_as_a_matrix_loses_its_padding() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(real_tokens(values, MASK[:1]), values[:2])


def test_a_row_of_padding_alone_leaves_nothing() -> None:
    assert real_tokens(activation(), torch.zeros_like(MASK)).shape == (0, 4)


def test_batches_that_were_run_as_one_come_apart_again() -> None:
    values, mask = torch.randn(5, 3, 4), torch.rand(5, 3) > 0.5
    parts = list(per_batch(values, mask, (2, 1, 2)))
    assert [len(part) for part, _ in parts] == [2, 1, 2]
    assert torch.equal(torch.cat([part for part, _ in parts]), values)
    assert torch.equal(torch.cat([own for _, own in parts if own is not None]), mask)
    assert [own for _, own in per_batch(values, None, (2, 1, 2))] == [None, None, None]


@pytest.mark.parametrize("sizes", [None, (5,), (2, 2)])
def test_one_batch_or_another_layout_stays_whole(sizes: tuple[int, ...] | None) -> None:
    values = torch.randn(5, 3, 4)
    ((part, own),) = per_batch(values, None, sizes)
    assert part is values
    assert own is None


@pytest.mark.parametrize("mask", [MASK, None], ids=["mask", ""])
@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (5, 4), (1, 2, 3, 4), (4,)])
def test_tokens_are_counted_as_they_are_taken(shape: tuple[int, ...], mask: Tensor | None) -> None:
    values = torch.randn(shape)
    assert count_tokens(values, mask) == len(real_tokens(values, mask))


def test_batches_are_alike_if_they_have_one_size_and_no_padding() -> None:
    values = torch.randn(6, 3, 4)
    assert alike_batches(values, None, (2, 2, 2)) == 3
    assert alike_batches(values, None, (6,)) == 1
    assert alike_batches(values, None, None) == 1
    assert alike_batches(values, None, (4, 2)) == 1
    assert alike_batches(values, torch.ones(6, 3, dtype=torch.bool), (2, 2, 2)) == 1
    assert alike_batches(values[:5], None, (2, 2, 2)) == 1, "laid out otherwise"
