# SPDX-License-Identifier: Apache-2.0
"""Padding is left out of whatever has its layout, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from tests.support.thinned import thinned
from torch import Tensor

from llmcompressor.observers.tokens import (
    count_tokens,
    num_batch_tokens,
    real_tokens,
    token_mask,
)

MASK = torch.tensor([[True, True, False], [False, True, True]])


def activation() -> Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)


def test_padding_is_left_out_and_real_tokens_keep_their_order() -> None:
    tokens_TC = real_tokens(activation(), MASK)
    assert torch.equal(tokens_TC, torch.stack([activation()[b, t] for b, t in MASK.nonzero()]))


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (5, 4), (1, 2, 3, 4), (4,)])
def test_without_a_mask_every_row_counts(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    assert torch.equal(real_tokens(values, None), values.reshape(-1, shape[-1]))


@pytest.mark.parametrize("shape", [(5, 4), (2, 7, 4), (3, 2, 4)])
def test_another_layout_has_no_such_positions(shape: tuple[int, ...]) -> None:
    """Tokens routed to an expert, patches of an image."""
    values = torch.randn(shape)
    assert torch.equal(real_tokens(values, MASK), values.reshape(-1, shape[-1]))


@pytest.mark.parametrize("mask", [MASK, None], ids=["mask", ""])
@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (5, 4), (1, 2, 3, 4), (4,)])
def test_tokens_are_counted_as_they_are_taken(shape: tuple[int, ...], mask: Tensor | None) -> None:
    values = torch.randn(shape)
    assert count_tokens(values, mask) == len(real_tokens(values, mask))


SIDES = {
    "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
    "left": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool(),
}


def by_query(real_BT: Tensor, form: str, *, causal: bool, opened: bool) -> Tensor:
    """What each query sees; with ``opened`` those that would see nothing see everything."""
    seen_BQK = real_BT.unsqueeze(1).expand(-1, real_BT.shape[1], -1)
    if causal:
        seen_BQK = seen_BQK & torch.ones(real_BT.shape[1], real_BT.shape[1]).tril().bool()
    if opened:
        seen_BQK = seen_BQK | ~seen_BQK.any(dim=-1, keepdim=True)
    if form == "added":
        return torch.where(seen_BQK, 0.0, torch.finfo(torch.float32).min).unsqueeze(1)
    return seen_BQK.unsqueeze(1) if form == "of heads" else seen_BQK


@pytest.mark.parametrize(
    ("side", "form", "causal", "opened"),
    thinned(SIDES, ["plain", "of heads", "added"], [(True, False), (True, True), (False, False)]),
)
def test_a_mask_of_queries_tells_which_tokens_are_real(
    side: str, form: str, causal: bool, opened: bool
) -> None:
    mask = by_query(SIDES[side], form, causal=causal, opened=opened)
    found = token_mask({"input_ids": torch.ones(2, 5), "attention_mask": mask})
    assert found is not None
    assert torch.equal(found, SIDES[side])


def test_one_mask_for_all_rows_and_masks_of_other_sequences() -> None:
    mask = by_query(SIDES["right"][1:], "of heads", causal=True, opened=False)
    found = token_mask({"input_ids": torch.ones(2, 5), "attention_mask": mask})
    assert found is not None
    assert found.tolist() == [[True, True, True, False, False]] * 2
    assert token_mask({"attention_mask": mask[..., :2, :]}) is None


@pytest.mark.parametrize("form", ["flat", "of heads"])
def test_tokens_are_counted_whatever_the_mask(form: str) -> None:
    real = SIDES["left"]
    mask = real if form == "flat" else by_query(real, form, causal=True, opened=False)
    total = num_batch_tokens({"input_ids": torch.ones(2, 5), "attention_mask": mask})
    assert total is not None
    assert int(total) == 8
    assert int(num_batch_tokens({"input_ids": torch.ones(2, 5)})) == 10  # type: ignore[arg-type]
    assert num_batch_tokens({"pixel_values": torch.ones(2, 5)}) is None
