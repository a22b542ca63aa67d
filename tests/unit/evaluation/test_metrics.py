# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmcompressor.evaluation import metrics
from llmcompressor.evaluation.metrics import batch_sums, predicted_positions

B, T, V = 3, 7, 11


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(B, T, V, generator=generator)
    reference = 3 * torch.randn(B, T, V, generator=generator)
    ids = torch.randint(0, V, (B, T), generator=generator)
    return logits, reference, ids, torch.ones(B, T, dtype=torch.bool)


def test_a_token_at_a_time_gives_the_same() -> None:
    logits, reference, ids, mask = batch()
    nll = kl = agreed = 0.0
    for b in range(B):
        for t in range(T - 1):
            q = torch.softmax(logits[b, t].double(), 0)
            p = torch.softmax(reference[b, t].double(), 0)
            nll -= math.log(q[ids[b, t + 1]])
            kl += float((p * (p / q).log()).sum())
            agreed += float(p.argmax() == q.argmax())
    sums = batch_sums(logits, ids, mask, reference)
    assert sums.tokens == B * (T - 1)
    assert sums.nll == pytest.approx(nll, rel=1e-5)
    assert sums.kl == pytest.approx(kl, rel=1e-5)
    assert sums.agreed == agreed


def test_padding_never_counts() -> None:
    logits, reference, ids, mask = batch()
    padded = [torch.cat((x, 50 * torch.ones_like(x[:, :4])), 1) for x in (logits, reference)]
    more_ids = torch.cat((ids, ids[:, :4]), 1)
    more_mask = torch.cat((mask, torch.zeros_like(mask[:, :4])), 1)
    plain = batch_sums(logits, ids, mask, reference)
    assert batch_sums(padded[0], more_ids, more_mask, padded[1]) == plain


def test_the_first_real_token_after_padding_is_not_predicted() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert predicted_positions(mask).tolist() == [2, 3, 5, 6]


def test_chunks_do_not_change_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, reference, ids, mask = batch()
    whole = batch_sums(logits, ids, mask, reference)
    monkeypatch.setattr(metrics, "_CHUNK_ELEMENTS", 2 * V)
    pieces = batch_sums(logits, ids, mask, reference)
    assert pieces.tokens == whole.tokens
    assert pieces.agreed == whole.agreed
    assert pieces.nll == pytest.approx(whole.nll)
    assert pieces.kl == pytest.approx(whole.kl)


def test_low_precision_is_normalized_in_float32() -> None:
    """A bf16 softmax of 4096 equal logits would not sum to one; the loss must be log 4096."""
    logits = torch.zeros(1, 3, 4096, dtype=torch.bfloat16)
    ids = torch.zeros(1, 3, dtype=torch.long)
    sums = batch_sums(logits, ids, ids == 0)
    assert sums.nll / sums.tokens == pytest.approx(math.log(4096), rel=1e-6)
