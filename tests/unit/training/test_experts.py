# SPDX-License-Identifier: Apache-2.0
"""Experts lie in stacks while a model is trained: nobody may believe that they were compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import tiny_training as tiny
from transformers import MixtralConfig, MixtralForCausalLM

from llmcompressor.errors import TargetError
from llmcompressor.training import Trainer

FP8 = "QuantizationModifier: {targets: Linear, ignore: [lm_head%s], scheme: FP8_DYNAMIC}"
PRUNED = (
    "MagnitudePruningModifier: {targets: %s, ignore: [lm_head%s], init_sparsity: 0.1, "
    "final_sparsity: 0.5, start: 0, end: 0.5}"
)
KEPT = "ConstantPruningModifier: {targets: Linear, ignore: [lm_head%s]}"


def trainer_of(folder: Path, modifier: str) -> Trainer:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        pad_token_id=0,
    )
    return Trainer(
        model=MixtralForCausalLM(config),
        args=tiny.arguments(folder, max_steps=1),
        train_dataset=tiny.Rows(4),
        recipe=f"modifiers: {{{modifier}}}",
    )


@pytest.mark.parametrize(
    "modifier",
    [FP8 % "", PRUNED % ("Linear", ""), PRUNED % ("__ALL_PRUNABLE__", ""), KEPT % ""],
    ids=["quantized", "pruned", "all pruned", "kept"],
)
def test_a_recipe_that_means_them_is_refused(modifier: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"mlp\.experts.* lie in stacks") as raised:
        trainer_of(tmp_path, modifier).train()
    assert r"ignore=['re:.*\.experts\..*']" in str(raised.value)


@pytest.mark.parametrize(
    "modifier",
    [FP8 % r", 're:.*\.experts\..*'", PRUNED % ("Linear", r", 're:.*\.experts\..*'")],
    ids=["quantized", "pruned"],
)
def test_the_rest_is_compressed_where_they_are_ignored(modifier: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, modifier)
    figures = trainer.train().metrics
    matrices = {
        name: weight.numel()
        for name, weight in trainer.model.named_parameters()
        if weight.dim() > 1 and not name.endswith(("embed_tokens.weight", "_scale"))
    }
    attention = sum(size for name, size in matrices.items() if "self_attn" in name)
    share = attention / sum(matrices.values())
    found = max(figures["quantized_percent"], 2 * figures["sparsity_percent"])
    assert found == pytest.approx(100 * share, rel=0.02)
