# SPDX-License-Identifier: Apache-2.0
"""Samples longer than what a model takes: cut, warned of or refused before it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from llmcompressor import oneshot, plan
from llmcompressor.entrypoints.arguments import PositionLimit, position_limit

LIMIT = 32
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
OWN = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LIMIT, **IDS}
BERT = {**SIZES, **IDS, "intermediate_size": 32, "max_position_embeddings": LIMIT}
RECIPE = "modifiers: {GPTQModifier: {targets: Linear, scheme: W8A16, ignore: [lm_head]}}"
LONG = [{"input_ids": [5 + at % 50 for at in range(80)]}] * 2


def opt() -> PreTrainedModel:
    own = {"ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": LIMIT}
    torch.manual_seed(0)
    return OPTForCausalLM(OPTConfig(**SIZES, **IDS, **own))


def llama() -> PreTrainedModel:
    own = {"intermediate_size": 32, "max_position_embeddings": LIMIT}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **IDS, **own))


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (opt, PositionLimit(LIMIT, in_table=True)),
        (lambda: GPT2LMHeadModel(GPT2Config(**OWN)), PositionLimit(LIMIT, in_table=True)),
        (
            lambda: GPTJForCausalLM(GPTJConfig(**OWN, rotary_dim=4)),
            PositionLimit(LIMIT, in_table=True),
        ),
        (lambda: BertForMaskedLM(BertConfig(**BERT)), PositionLimit(LIMIT, in_table=True)),
        (
            lambda: RobertaForMaskedLM(RobertaConfig(**BERT)),
            PositionLimit(LIMIT - 2, in_table=True),
        ),
        (llama, PositionLimit(LIMIT)),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
            ),
            PositionLimit(),
        ),
        (lambda: nn.Linear(2, 2), PositionLimit()),
    ],
)
def test_the_limit_is_where_the_model_fails(build: Callable[[], Any], found: PositionLimit) -> None:
    model = build().eval()
    assert position_limit(model) == found
    if found.limit is None:
        return

    def run(length: int) -> None:
        with torch.no_grad():
            model(input_ids=torch.full((1, length), 5))

    run(found.limit)
    if found.in_table:
        with pytest.raises((IndexError, RuntimeError)):
            run(found.limit + 1)
    else:
        run(found.limit + 1)


@pytest.mark.parametrize("more", [{}, {"max_seq_length": 60}, {"data_collator": "padding"}])
def test_tokenized_rows_are_cut_to_the_table(more: dict[str, Any], warned: list[str]) -> None:
    oneshot(opt(), recipe=RECIPE, dataset=LONG, **more)
    length = more.get("max_seq_length", 80)
    assert any(
        f"2 samples that came tokenized have up to {length} tokens, and the model takes 32: they "
        "are cut to 32." in line
        for line in warned
    )


@pytest.mark.parametrize(("build", "kept"), [(opt, 32), (llama, 80)])
def test_the_plan_says_the_same(
    build: Callable[[], PreTrainedModel], kept: int, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    found = plan(tmp_path, RECIPE, LONG, measure=False)
    assert found.ok, found.problems
    assert found.tokens is not None
    assert found.tokens.longest == kept
    assert any("have up to 80 tokens, and the model takes 32" in note for note in found.notes)
