# SPDX-License-Identifier: Apache-2.0
"""Embeddings without a mean, and norms whose gain is in what reads them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Embedding, LayerNorm, Linear, Module
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmcompressor.errors import InputError
from llmcompressor.modeling import center_embeddings, fuse_norm_linears


def test_a_centred_embedding_has_no_mean_but_its_differences() -> None:
    embedding = Embedding(5, 8)
    before = embedding.weight.detach().clone()
    center_embeddings(embedding)
    assert torch.allclose(embedding.weight.mean(dim=-1), torch.zeros(5), atol=1e-6)
    moved = before - embedding.weight
    assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-6)


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm, LayerNorm, torch.nn.RMSNorm])
def test_a_norm_without_its_gain_gives_the_same_to_what_reads_it(make: type[Module]) -> None:
    torch.manual_seed(0)
    norm, linears = make(8), [Linear(8, 3), Linear(8, 4, bias=False)]
    for parameter in norm.parameters():
        parameter.data.normal_()
    x = torch.randn(6, 8)
    before = [linear(norm(x)) for linear in linears]
    fuse_norm_linears(norm, linears)
    gain = norm.weight + (1 if make is GemmaRMSNorm else 0)
    assert torch.equal(gain, torch.ones(8))
    for linear, expected in zip(linears, before, strict=True):
        assert torch.allclose(linear(norm(x)), expected, atol=1e-5)


def test_a_bias_that_no_gain_can_hold_is_refused() -> None:
    norm, linear = LayerNorm(4), Linear(4, 4)
    norm.weight.data[1], norm.bias.data[1] = 0.0, 1.0
    with pytest.raises(InputError, match="gain of LayerNorm is zero"):
        fuse_norm_linears(norm, [linear])
