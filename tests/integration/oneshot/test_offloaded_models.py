# SPDX-License-Identifier: Apache-2.0
"""Models whose weights accelerate keeps elsewhere are compressed there, a block at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tests.support.small_models import llama, logits, probe, token_rows
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.checkpoint.spread_weights import SpreadWeights
from llmcompressor.errors import ArgumentError, NonFiniteError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

LINEARS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
DEPTH = 4


@pytest.fixture
def folder(tmp_path):
    llama(num_hidden_layers=DEPTH).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def on_disk(folder: Path, offload: Path, **given: Any) -> Any:
    """All blocks on the disk, all else in main memory."""
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb"], "cpu")
    places |= {f"model.layers.{one}": "disk" for one in range(DEPTH)} | {"lm_head": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=str(offload), dtype="auto", **given
    )


@torch.no_grad()
def written_logits(output: Path) -> torch.Tensor:
    found: torch.Tensor = AutoModelForCausalLM.from_pretrained(output)(probe()).logits
    return found


@pytest.mark.parametrize("scheme", ["FP8", "W4A16"])
def test_what_has_changed_goes_back_to_the_disk(folder, tmp_path, scheme):
    """Static scales of inputs, too: the quantized forward runs when the weights are loaded."""
    kind = GPTQModifier if scheme == "W4A16" else QuantizationModifier
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model = on_disk(folder, tmp_path / "offload")
    dense = logits(model)
    given = {"dataset": token_rows(8, 32), "report": False}
    oneshot(model, kind(**LINEARS, scheme=scheme), output_dir=tmp_path / "out", **given)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    oneshot(whole, kind(**LINEARS, scheme=scheme), output_dir=tmp_path / "whole", **given)
    assert not torch.equal(logits(model), dense)
    assert torch.equal(logits(model), written_logits(tmp_path / "out"))
    assert all(one.is_meta for one in model.model.layers.parameters())
    files = list((tmp_path / "offload").glob("model.layers.*.self_attn.q_proj.weight.dat"))
    assert len(files) == DEPTH
    weights = [tmp_path / one / "model.safetensors" for one in ("out", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == weights[0].read_bytes()


def test_two_blocks_are_in_memory_at_most(folder, tmp_path, monkeypatch):
    model = on_disk(folder, tmp_path / "offload")
    held = []
    load = SpreadWeights.load

    def loading(self: SpreadWeights, block: str) -> None:
        load(self, block)
        names = {name for name, one in model.model.layers.named_parameters() if not one.is_meta}
        held.append(len({name.partition(".")[0] for name in names if name.endswith("weight")}))

    monkeypatch.setattr(SpreadWeights, "load", loading)
    oneshot(
        model,
        GPTQModifier(**LINEARS, scheme="W4A16"),
        dataset=token_rows(8, 32),
        output_dir=tmp_path / "out",
    )
    assert 1 <= max(held) <= 2 < DEPTH


def test_a_run_that_fails_leaves_the_model_as_it_was(folder, tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("in the middle")

    model = on_disk(folder, tmp_path / "offload")
    before, hooks = logits(model), [getattr(one, "_hf_hook", None) for one in model.modules()]
    recipe = GPTQModifier(**LINEARS, scheme="W4A16")
    monkeypatch.setattr(GPTQModifier, "on_sequential_epoch_end", fail)
    with pytest.raises(ValueError, match="in the middle"):
        oneshot(model, recipe, dataset=token_rows(8, 32))
    assert all(one.is_meta for one in model.model.layers.parameters())
    assert [getattr(one, "_hf_hook", None) for one in model.modules()] == hooks
    assert torch.equal(logits(model), before)


def test_weights_that_are_not_finite(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        oneshot(model, GPTQModifier(**LINEARS, scheme="W4A16"), dataset=token_rows(4, 32))


def test_gates(folder, tmp_path):
    recipe, output = QuantizationModifier(**LINEARS, scheme="FP8_DYNAMIC"), tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"is spread.*gate_reference"):
        oneshot(on_disk(folder, tmp_path / "offload"), recipe, output_dir=output, gates={"kl": 1})
    assert not output.exists()
    recipe = QuantizationModifier(**LINEARS, scheme="FP8_DYNAMIC")
    model = on_disk(folder, tmp_path / "again")
    oneshot(model, recipe, output_dir=output, gates={"size": "5GB"})
    assert (output / "model.safetensors").is_file()


def test_tied_embeddings_stay_tied(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    cpu_offload(model, torch.device("cpu"))
    recipe = QuantizationModifier(**LINEARS, scheme="FP8_DYNAMIC")
    oneshot(model, recipe, output_dir=tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(probe()).logits, written_logits(tmp_path / "out"))
