# SPDX-License-Identifier: Apache-2.0
"""The saliency of experts against a loop, and which of them go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.numerics import reap
from llmcompressor.numerics.reap import Saliency, dropped_experts

EXPERTS, HIDDEN, TOKENS, CHOSEN = 5, 6, 40, 2


@pytest.fixture
def matrices() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN)


def mixture(matrices: Tensor, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    outputs = torch.einsum("eoh,th->teo", matrices, hidden)
    picked = outputs.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    return (picked * weight.unsqueeze(-1)).sum(1)


def batch(seed: int, *, elsewhere: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    scores = torch.randn(TOKENS, EXPERTS - 1 + elsewhere)  # the last expert is never chosen
    weight, index = scores.softmax(-1).topk(CHOSEN)
    if elsewhere:
        index = torch.where(index == EXPERTS - 1, EXPERTS, index)
    return torch.randn(TOKENS, HIDDEN), index, weight


@pytest.mark.parametrize("elsewhere", [False, True])
def test_it_is_the_textbook_mean(
    matrices: Tensor, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reap, "_CHUNK_TOKENS", 7)
    found = Saliency.of(EXPERTS)
    values: list[list[float]] = [[] for _ in range(EXPERTS)]
    for seed in (1, 2):
        hidden, index, weight = batch(seed, elsewhere=elsewhere)
        found.add(lambda *given: mixture(matrices, *given), hidden, index, weight)
        for token in range(TOKENS):
            for place in range(CHOSEN):
                expert = int(index[token, place])
                if expert < EXPERTS:
                    norm = float((matrices[expert] @ hidden[token]).norm())
                    values[expert].append(float(weight[token, place]) * norm)
    assert found.count_E.tolist() == [len(one) for one in values]
    wanted = [sum(one) / len(one) if one else 0.0 for one in values]
    torch.testing.assert_close(found.mean(), torch.tensor(wanted).double(), rtol=1e-5, atol=1e-7)
    assert float(found.mean()[-1]) == 0


def test_the_least_go_and_groups_lose_as_many() -> None:
    saliency = torch.tensor([8.0, 1, 7, 2, 3, 4, 5, 6])
    assert dropped_experts(saliency, 0.25) == [1, 3]
    assert dropped_experts(saliency, 0.25, groups=2) == [1, 4]
    assert dropped_experts(saliency, 0.5, groups=4) == [1, 3, 4, 6]
    assert dropped_experts(saliency, 0.2) == [1]
    assert dropped_experts(saliency, 0.1) == []
    assert dropped_experts(torch.zeros(10), 0.3) == [0, 1, 2]
    with pytest.raises(InputError, match="3 groups"):
        dropped_experts(saliency, 0.5, groups=3)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match=r"experts \[2\] is NaN or infinite"):
            dropped_experts(torch.tensor([3.0, 1.0, bad, 2.0]), 0.5)
