# SPDX-License-Identifier: Apache-2.0
"""Layers that read the keys and values of an earlier layer are written with that one's scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.modifiers.quantization import QuantizationModifier

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "attn_head"}
READ_FROM = {2: 0, 3: 1}
"""Layer → the last one of its type before those that share."""

SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "vocab_size_per_layer_input": small.VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma3n() -> PreTrainedModel:
    """Its attention says which layer it reads from."""
    torch.manual_seed(0)
    sparsity = {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES, **sparsity))


def gemma4() -> PreTrainedModel:
    """Its attention says that it shares."""
    torch.manual_seed(0)
    return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, global_head_dim=16))


def cache(scheme: dict[str, Any] = FP8) -> list[Any]:
    return [QuantizationModifier(kv_cache_scheme=scheme)]


def states_of(folder: Path) -> dict[tuple[int, str], Tensor]:
    """Layer and own name → what is stored for its keys and values."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".self_attn." in name and name.rpartition(".")[2].partition("_")[2] in (
            "scale",
            "zero_point",
        ):
            found[int(name.split(".layers.")[1].split(".")[0]), name.rpartition(".")[2]] = tensor
    return found


def compress(model: Any, recipe: Any, output: Path) -> Any:
    reset_session()
    return oneshot(
        model=model, recipe=recipe, dataset=small.token_rows(), output_dir=output, verify=False
    )


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("make", [gemma3n, gemma4])
@pytest.mark.parametrize("scheme", [FP8, INT8], ids=["tensor", "heads"])
def test_a_sharing_layer_has_the_scales_of_its_source(
    make: Callable[[], PreTrainedModel], scheme: dict[str, Any], tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path / "model")
    compress(str(tmp_path / "model"), cache(scheme), tmp_path / "out")
    found = states_of(tmp_path / "out")
    names = {"k_scale", "v_scale"} | ({"k_zero_point", "v_zero_point"} if scheme is INT8 else set())
    assert set(found) == {(layer, name) for layer in range(4) for name in names}
    for layer, source in READ_FROM.items():
        assert all(torch.equal(found[layer, name], found[source, name]) for name in names)
    assert not torch.equal(found[2, "k_scale"], found[3, "k_scale"])


@pytest.mark.parametrize("make", [gemma3n, gemma4])
def test_streamed_in_memory_and_saved_again_are_one_file(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make().save_pretrained(folder)
    from_folder = compress(str(folder), cache(), tmp_path / "streamed")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    in_memory = compress(loaded, cache(), tmp_path / "in memory")
    from_folder.save_pretrained(tmp_path / "streamed, again")
    in_memory.save_pretrained(tmp_path / "in memory, again")
    files = {weights(one) for one in tmp_path.iterdir() if one != folder}
    assert len(files) == 1


def test_the_checkpoint_is_verified_and_lacks_nothing(tmp_path: Path) -> None:
    compress(gemma3n(), cache(), tmp_path / "out")
    report = verify(tmp_path / "out", serve="vllm", tp=1)
    assert [one for one in report.findings if one.severity != "note"] == []
    rules = {one.rule for one in verify(tmp_path / "out", serve="transformers").findings}
    assert "L11" not in rules
