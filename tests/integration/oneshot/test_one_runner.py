# SPDX-License-Identifier: Apache-2.0
"""A model in memory gives the same files as its folder, for pairs of techniques and models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.reap import REAPPruningModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier


def mixtral(*, tied: bool) -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=small.VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense, untied": small.llama,
    "dense, tied": lambda: small.llama(tie_word_embeddings=True),
    "MoE, untied": lambda: mixtral(tied=False),
    "MoE, tied": lambda: mixtral(tied=True),
}
GIVEN: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head", "re:.*gate$"]}


def rounding(scheme: str = "FP8_DYNAMIC", **changes: Any) -> QuantizationModifier:
    return QuantizationModifier(scheme=scheme, **{**GIVEN, **changes})


def solving(scheme: str = "W4A16", **changes: Any) -> GPTQModifier:
    return GPTQModifier(scheme=scheme, **{**GIVEN, **changes})


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "rounding": lambda: [rounding()],
    "static inputs": lambda: [rounding("FP8")],
    "GPTQ": lambda: [solving()],
    "GPTQ, then rounding": lambda: [
        solving(targets=["re:.*mlp.*"]),
        rounding(targets=["re:.*self_attn.*_proj"]),
    ],
    "rounding, then GPTQ": lambda: [
        rounding(targets=["re:.*self_attn.*_proj"]),
        solving(targets=["re:.*mlp.*"]),
    ],
    "AWQ": lambda: [AWQModifier(scheme="W4A16", **GIVEN)],
    "AWQ, then GPTQ": lambda: [AWQModifier(scheme="W4A16", **GIVEN), solving()],
    "SmoothQuant, then GPTQ": lambda: [SmoothQuantModifier(), solving("W8A8")],
    "SmoothQuant, then rounding": lambda: [SmoothQuantModifier(), rounding("W8A8")],
    "SparseGPT, then GPTQ": lambda: [SparseGPTModifier(sparsity=0.5), solving()],
    "Wanda": lambda: [WandaPruningModifier(sparsity=0.5)],
    "Wanda, then rounding": lambda: [WandaPruningModifier(sparsity=0.5), rounding()],
    "SpinQuant, then GPTQ": lambda: [SpinQuantModifier(rotations=["R1", "R2"]), solving()],
    "QuIP, then rounding": lambda: [QuIPModifier(targets="Linear"), rounding("W4A16")],
    "REAP, then rounding": lambda: [REAPPruningModifier(sparsity=0.5), rounding()],
    "AutoRound": lambda: [AutoRoundModifier(scheme="W4A16", iters=2, **GIVEN)],
    "cache": lambda: [
        QuantizationModifier(
            kv_cache_scheme={
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
            }
        )
    ],
}
PAIRS = [
    ("rounding", "MoE, tied"),
    ("static inputs", "dense, tied"),
    ("GPTQ", "dense, tied"),
    ("GPTQ", "MoE, untied"),
    ("GPTQ, then rounding", "dense, untied"),
    ("rounding, then GPTQ", "dense, tied"),
    ("AWQ", "MoE, tied"),
    ("AWQ, then GPTQ", "dense, untied"),
    ("SmoothQuant, then GPTQ", "dense, tied"),
    ("SmoothQuant, then rounding", "dense, untied"),
    ("SparseGPT, then GPTQ", "MoE, untied"),
    ("Wanda", "MoE, untied"),
    ("Wanda, then rounding", "dense, untied"),
    ("SpinQuant, then GPTQ", "dense, tied"),
    ("SpinQuant, then GPTQ", "MoE, untied"),
    ("QuIP, then rounding", "dense, untied"),
    ("REAP, then rounding", "MoE, untied"),
    ("AutoRound", "dense, untied"),
    ("cache", "MoE, tied"),
]


@pytest.mark.parametrize(("recipe", "name"), PAIRS, ids=[", ".join(pair) for pair in PAIRS])
def test_a_model_in_memory_gives_the_files_of_its_folder(
    recipe: str, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    MODELS[name]().to(torch.bfloat16).save_pretrained(tmp_path / "original")
    given = {"dataset": small.token_rows(), "max_seq_length": 16}
    oneshot(tmp_path / "original", RECIPES[recipe](), output_dir=tmp_path / "streamed", **given)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype="auto")
    made = oneshot(model, RECIPES[recipe](), output_dir=tmp_path / "written", **given)
    made.save_pretrained(tmp_path / "saved")
    streamed = small.tree(tmp_path / "streamed")
    for other in ("written", "saved"):
        assert small.tree(tmp_path / other) == streamed
