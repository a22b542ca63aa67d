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

from llmcompressor import oneshot, plan, reset_session, train, verify
from llmcompressor.checkpoint.block_stream import BlockStream
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.schemes.attention import kv_source_layer

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


def two_passes() -> list[Any]:
    """The cache is calibrated in the first; blocks lie in a scratch folder until the second."""
    return [*cache(), GPTQModifier(targets=["re:.*mlp.*proj$"], scheme="W4A16")]


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
def test_a_layer_that_shares_has_the_scales_of_the_one_it_reads_from(
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


def test_the_model_in_memory_runs_as_transformers_reads_it(tmp_path: Path) -> None:
    model = compress(gemma3n(), cache(), tmp_path / "out")
    read, told = Gemma3nForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    with torch.no_grad():
        ours = model.eval()(small.probe(), use_cache=True).logits
        theirs = read.eval()(small.probe(), use_cache=True).logits
    assert torch.equal(ours, theirs)
    assert {name.split(".")[2] for name in told["unexpected_keys"]} == {"2", "3"}
    assert not told["missing_keys"]


@pytest.mark.parametrize(
    ("recipe", "block"),
    [
        (cache, "model.layers.1"),
        pytest.param(cache, "model.layers.3", marks=pytest.mark.slow),
        (two_passes, "model.layers.2"),
        pytest.param(two_passes, "model.layers.3", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_writes_the_same_bytes(
    recipe: Callable[[], Any], block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales are read from the block that an earlier run has finished."""
    folder = tmp_path / "model"
    gemma3n().save_pretrained(folder)
    compress(str(folder), recipe(), tmp_path / "whole")
    leave = BlockStream.leave

    def broken_off(self: BlockStream, name: str) -> None:
        if name == block:
            raise KeyboardInterrupt
        leave(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(BlockStream, "leave", broken_off)
        with pytest.raises(KeyboardInterrupt):
            compress(str(folder), recipe(), tmp_path / "out")
    before = (tmp_path / "out.partial" / "journal").read_text().count("model.layers.")
    assert before >= int(block[-1])
    model = compress(str(folder), recipe(), tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    model.save_pretrained(tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")


def test_the_plan_counts_these_scales(tmp_path: Path) -> None:
    gemma3n().save_pretrained(tmp_path / "model")
    found = plan(tmp_path / "model", cache(), small.token_rows(), measure=False)
    compress(str(tmp_path / "model"), cache(), tmp_path / "out")
    assert not found.problems
    assert found.sizes is not None
    assert dict(found.sizes.files) == {"model.safetensors": len(weights(tmp_path / "out"))}


def test_the_checkpoint_is_verified_and_lacks_nothing(tmp_path: Path) -> None:
    compress(gemma3n(), cache(), tmp_path / "out")
    report = verify(tmp_path / "out", serve="vllm", tp=1)
    assert [one for one in report.findings if one.severity != "note"] == []
    rules = {one.rule for one in verify(tmp_path / "out", serve="transformers").findings}
    assert "L11" not in rules


def test_training_writes_them_too(tmp_path: Path) -> None:
    train(
        model=gemma3n(),
        recipe=cache(),
        dataset=small.token_rows(),
        output_dir=tmp_path / "out",
        max_steps=2,
    )
    found = states_of(tmp_path / "out")
    assert {layer for layer, _ in found} == {0, 1, 2, 3}
    assert all(
        torch.equal(found[layer, name], found[source, name])
        for layer, source in READ_FROM.items()
        for name in ("k_scale", "v_scale")
    )


def test_dynamic_scales_are_stored_nowhere(tmp_path: Path) -> None:
    dynamic = {**FP8, "strategy": "token", "dynamic": True}
    compress(gemma3n(), cache(dynamic), tmp_path / "out")
    assert not states_of(tmp_path / "out")


def test_which_layer_is_read_from_is_asked_of_the_attention() -> None:
    for make in (gemma3n, gemma4):
        layers = make().model.layers
        found = {index: kv_source_layer(layer.self_attn) for index, layer in enumerate(layers)}
        assert found == {0: None, 1: None, **READ_FROM}
    layers[3].self_attn.kv_shared_layer_index = 0  # what it says itself goes before
    assert kv_source_layer(layers[3].self_attn) == 0
