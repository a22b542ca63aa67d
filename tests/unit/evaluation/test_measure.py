# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.errors import ArgumentError, NonFiniteError
from llmcompressor.evaluation.measure import compare, measure
from llmcompressor.evaluation.metrics import Report

VOCABULARY = 40
WINDOWS = [[(7 * start + step) % VOCABULARY for step in range(12)] for start in range(5)]
RAGGED = [*WINDOWS, [1, 2, 3], [5, 6]]


def llama(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def expected_loss(model: nn.Module, windows: list[list[int]]) -> float:
    """A window at a time, by torch's own cross-entropy."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for window in windows:
        ids = torch.tensor([window])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        tokens += len(window) - 1
    return float(total / tokens)


def test_loss_is_the_mean_over_tokens_not_over_windows() -> None:
    model = llama()
    report = measure(model, RAGGED, batch_size=1)
    assert report.tokens == 5 * 11 + 2 + 1
    assert report.windows == 7
    assert report.loss == pytest.approx(expected_loss(model, RAGGED), rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(report.loss))


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_batching_and_its_padding_change_nothing(batch_size: int) -> None:
    model, reference = llama(0), llama(1)
    one = measure(model, RAGGED, reference=reference, batch_size=1)
    many = measure(model, RAGGED, reference=reference, batch_size=batch_size)
    assert many.tokens == one.tokens
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.kl_divergence == pytest.approx(one.kl_divergence, rel=1e-4)
    assert many.top1_agreement == one.top1_agreement


def test_more_noise_is_further_away() -> None:
    reference = llama()
    models = {}
    for name, scale in (("a little", 0.01), ("more", 0.1)):
        models[name] = copy.deepcopy(reference)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in models[name].parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    reports = compare(models, WINDOWS, reference=reference)
    little, more = reports["a little"], reports["more"]
    assert little.kl_divergence is not None
    assert more.kl_divergence is not None
    assert 0 < little.kl_divergence < more.kl_divergence
    assert (
        little.reference_loss
        == more.reference_loss
        == pytest.approx(measure(reference, WINDOWS).loss)
    )


class Counting(nn.Module):
    """Always the same logits; counts its calls and notes its mode."""

    def __init__(self, vocabulary: int = VOCABULARY, fill: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Dropout()
        self.vocabulary = vocabulary
        self.fill = fill
        self.calls: list[tuple[bool, bool, bool]] = []

    def forward(self, input_ids: Tensor, use_cache: bool, **more: Any) -> SimpleNamespace:
        self.calls.append((self.training, torch.is_grad_enabled(), "attention_mask" in more))
        return SimpleNamespace(logits=torch.full((*input_ids.shape, self.vocabulary), self.fill))


def test_the_reference_runs_once_for_all_models() -> None:
    reference = Counting()
    compare({"a": Counting(), "b": Counting()}, WINDOWS, reference=reference, batch_size=2)
    tried = 2  # whether it looks ahead
    assert len(reference.calls) == tried + 3


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ArgumentError, match="vocabulary of 40 tokens and its reference one of 50"):
        measure(Counting(), WINDOWS, reference=Counting(50))


def test_nan_is_an_error_not_a_figure() -> None:
    with pytest.raises(NonFiniteError, match="model"):
        measure(Counting(fill=math.nan), WINDOWS)


def test_a_report_as_json() -> None:
    report = Report(tokens=10, windows=2, loss=1.0, reference_loss=0.5)
    figures = report.as_dict()
    assert figures["loss_increase"] == 0.5
    assert figures["reference_perplexity"] == pytest.approx(math.exp(0.5))
    assert Report(1, 1, 1e6).perplexity == math.inf
    assert Report(1, 1, 1.0).loss_increase is None
