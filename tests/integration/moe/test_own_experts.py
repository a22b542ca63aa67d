# SPDX-License-Identifier: Apache-2.0
"""Experts of a model with code of its own, which calls each with more than tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_models import VOCABULARY, token_rows, tree
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier

EXPERTS, ROUTED, BLOCKS, TOKENS = 5, 2, 1, 8 * 16
CODE = f"""
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class WeighedConfig(LlamaConfig):
    model_type = "weighed"


class Expert(LlamaMLP):
    def forward(self, x, weights=None):
        return super().forward(x) * weights


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, {EXPERTS}, bias=False)
        self.latent = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range({EXPERTS})])

    def forward(self, hidden_states):
        rows = hidden_states.flatten(0, -2)
        weights, chosen = self.gate(rows).float().softmax(-1).topk({ROUTED})
        weights, latent, made = weights.to(rows.dtype), self.latent(rows), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                weight = weights[row, place, None]
                made.index_add_(0, row, expert(latent[row], weights=weight))
        return made.view_as(hidden_states)


class WeighedForCausalLM(LlamaForCausalLM):
    config_class = WeighedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixture(config)
        self.post_init()
"""
CONFIG = {
    "model_type": "weighed",
    "architectures": ["WeighedForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_weighed.WeighedConfig",
        "AutoModelForCausalLM": "modeling_weighed.WeighedForCausalLM",
    },
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weighed") / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "modeling_weighed.py").write_text(CODE)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(made, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    model.save_pretrained(made)
    (made / "modeling_weighed.py").write_text(CODE)
    return made


@pytest.mark.parametrize("policy", [None, "all_tokens"])
def test_they_are_calibrated_with_their_own_tokens(
    policy: str | None, folder: Path, tmp_path: Path
) -> None:
    """Their code calls them with more than rows; a folder and the model in memory give one file."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    starved: dict[str, Any] = {}
    if policy is not None:
        starved = {"moe_calibrate_all_experts": False, "starved_experts": policy}
        starved["min_tokens_per_module"] = ROUTED / EXPERTS
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for name, model in {"streamed": str(folder), "memory": loaded}.items():
        oneshot(
            model=model,
            recipe=GPTQModifier(config_groups=groups, ignore=["lm_head", "re:.*mlp.gate$"]),
            dataset=token_rows(),
            output_dir=tmp_path / name,
            trust_remote_code_model=True,
            **starved,
        )
    files = [tree(tmp_path / name) for name in ("streamed", "memory")]
    assert files[0]["model.safetensors"] == files[1]["model.safetensors"]
    report = json.loads((tmp_path / "memory" / "compression_report.json").read_text())
    records = report["modifiers"]["GPTQModifier"]
    own = [one["tokens"] for name, one in records.items() if name.endswith(".down_proj")]
    assert sum(own) == BLOCKS * ROUTED * TOKENS
