# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose experts are stored by other names than transformers' table has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, conversion_mapping
from transformers.core_model_loading import WeightRenaming

from llmcompressor import oneshot
from llmcompressor.errors import ArgumentError
from llmcompressor.modeling import patch_moe_mappings
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.utils import load_context

NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
STACKS = [".experts.gate_up_proj", ".experts.down_proj"]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")  # fills the table
    for name in ("_checkpoint_conversion_mapping_cache", "USER_REGISTERED_MAPPINGS"):
        monkeypatch.setattr(conversion_mapping, name, getattr(conversion_mapping, name).copy())


def odd_checkpoint(folder: Path) -> MixtralForCausalLM:
    """A mixture whose file calls its experts as no table of its type does."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    for own, other in NAMES.items():
        found = {name.replace(f".{own}.", f".{other}_of."): one for name, one in found.items()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("removed", [[], STACKS], ids=["kept", "removed"])
def test_experts_of_other_names_are_stacked(removed: list[str], tmp_path: Path) -> None:
    """By the type's own table, and where that is taken away."""
    model = odd_checkpoint(tmp_path)
    own = {other: other if removed else own for own, other in NAMES.items()}
    renamings = [
        WeightRenaming(rf"\.experts\.(\d+)\.{other}_of\.", rf".experts.\1.{name}.")
        for other, name in own.items()
    ]
    patch_moe_mappings("mixtral", renamings, remove_targets=removed)
    with load_context(MixtralForCausalLM):
        read = MixtralForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)
    recipe = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    returned = oneshot(model=str(tmp_path), recipe=recipe)
    with torch.no_grad():
        assert (returned(ids).logits - model(ids).logits).abs().max() < 0.05


def test_what_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ArgumentError, match="knows no model type 'mixtrall'"):
        patch_moe_mappings("mixtrall", [])
    with pytest.raises(ArgumentError, match="Among the mappings is a tuple"):
        patch_moe_mappings("mixtral", [("w1", "gate_proj")])
