# SPDX-License-Identifier: Apache-2.0
"""What is written is found under the names that vLLM looks modules up by, and transformers too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.utils import match_named_modules
from transformers import PreTrainedModel

from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.packing import QuantizedModule, quantized_module
from llmcompressor.checkpoint.quantization_config import build_quantization_config
from llmcompressor.schemes.resolve import resolve_schemes
from llmcompressor.verification import TensorInfo
from llmcompressor.verification.rules.view import View

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "StableLm": {},
    "GPTNeoX": {},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "head_dim": 16},
    "GraniteMoeHybrid": {
        **MAMBA,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
}
EMBEDDING = "re:.*embed_(tokens|in)$"
FIRST_OF_MAMBA = r"re:.*layers\.0\.mamba\.in_proj$"
"""One layer alone: where vLLM counts layers otherwise, a pattern for numbers means another."""


def built(kind: str) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind]})
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


def planned(model: PreTrainedModel, targets: list[str], ignore: list[str]) -> list[QuantizedModule]:
    resolved = resolve_schemes(scheme="W8A16", targets=targets, ignore=ignore)
    schemes = resolved.schemes_by_module(model)
    every = (
        quantized_module(name, model.get_submodule(name), one) for name, one in schemes.items()
    )
    return [one for one in every if one is not None]


@pytest.mark.parametrize(
    ("kind", "targets", "ignore"),
    [
        ("Llama", ["Linear"], []),
        ("Llama", [EMBEDDING], []),
        ("Llama", ["model.embed_tokens", "Linear"], ["lm_head"]),
        ("GPTNeoX", [EMBEDDING, "Linear"], []),
        ("GPTNeoX", [r"re:gpt_neox\.layers\.0\."], []),
        ("StableLm", ["re:.*[qkv]_proj$"], []),
        ("StableLm", ["Linear"], ["lm_head", r"re:.*layers\.0.*[qkv]_proj$"]),
        ("GraniteMoeHybrid", ["re:.*mamba.*_proj"], []),
        ("GraniteMoeHybrid", ["Linear"], ["re:.*mamba.*"]),
        ("FalconH1", [FIRST_OF_MAMBA], []),
        ("FalconH1", ["Linear"], ["lm_head", FIRST_OF_MAMBA]),
        ("FalconH1", ["re:.*self_attn.*"], []),
    ],
)
def test_targets_and_ignored_hold_in_both(kind: str, targets: list[str], ignore: list[str]) -> None:
    model = built(kind)
    entries = planned(model, targets, ignore)
    config = build_quantization_config(model, entries, status=QuantizationStatus.COMPRESSED)
    wanted = {entry.name for entry in entries}
    assert wanted
    parsed = QuantizationConfig.model_validate(config)
    every = [target for one in parsed.config_groups.values() for target in one.targets]
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    found = match_named_modules(model, every, parsed.ignore)
    assert {name for name, one in found if isinstance(one, kinds)} == wanted

    matrices = [name for name, one in model.named_modules() if isinstance(one, kinds)]
    stored = NameMap(model).stored(matrices)
    headers = {f"{stored[one]}.weight": TensorInfo("BF16", (32, 32)) for one in matrices}
    whole = {**model.config.to_dict(), "quantization_config": config}
    view = View(whole, headers)
    chosen = {name for name in matrices if view.choice(view.entries[stored[name]]).group}
    assert chosen == wanted
