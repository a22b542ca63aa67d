# SPDX-License-Identifier: Apache-2.0
"""The trial of rotations without weights: refused is what the run refuses, whatever the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.pairs import each
from tests.support.thinned import few
from tests.support.tiny_llama import SIZES, llama
from tests.unit.modifiers.rotation.test_probe import (
    HYBRID,
    JAMBA,
    LATENT,
    LINEAR_ATTENTION,
    RECURRENT,
    refused,
    tiny,
)
from tests.unit.modifiers.rotation.test_rotation import moved
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier
from llmcompressor.planning.proxy_model import NoProxyModel, ProxyTrials, proxy_model_builder

LARGE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LARGE_LATENT = {
    **LATENT,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 32,
    "num_key_value_heads": 16,
    "n_group": 4,
    "topk_group": 2,
}


def large(name: str, **changes: Any) -> Any:
    """A model without weights, of sizes that are not run in a test."""
    with torch.device("meta"):
        config = AutoConfig.for_model(name, **{**SIZES, **LARGE, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def spin(*names: str, **fields: Any) -> SpinQuantModifier:
    return SpinQuantModifier(rotations=list(names), **fields)


def rehearsed(model: Any, modifier: Modifier) -> str:
    """What a plan of the model finds out."""
    with torch.device("meta"):
        hollow = model if next(model.parameters()).is_meta else type(model)(model.config)
    rehearsal = ProxyTrials(hollow.eval(), [modifier])
    modifier.initialize(State(model=hollow))
    return rehearsal(modifier)


PASSING: dict[str, Any] = {
    "llama": (lambda: large("llama"), lambda: spin("R1", "R2", "R3", "R4")),
    "blocks of channels": (
        lambda: large("llama", tie_word_embeddings=True),
        lambda: spin("R1", "R2", "R4", transform_block_size=128),
    ),
    "any matrix": (
        lambda: large("llama"),
        lambda: spin("R2", transform_type="random-matrix"),
    ),
    "heads wider than the stream": (
        lambda: large("qwen3", head_dim=128),
        lambda: spin("R1", "R2", "R3"),
    ),
    "embeddings of their own width": (
        lambda: large("opt", ffn_dim=2816, word_embed_proj_dim=1024),
        lambda: spin("R2"),
    ),
    "a mixture": (lambda: large("mixtral"), lambda: QuIPModifier(rotations=["u", "v"])),
    "latent keys": (lambda: large("deepseek_v3", **LARGE_LATENT), lambda: spin("R4")),
    "one kind of block after another": (
        lambda: large("jamba", **JAMBA),
        lambda: QuIPModifier(ignore=["lm_head", "re:.*dt_proj$"]),
    ),
}


SLOW = {"one kind of block after another"}


@pytest.mark.parametrize("case", few(PASSING, *(PASSING.keys() - SLOW)))
def test_what_passes_is_not_refused(case: str) -> None:
    make, modifier = PASSING[case]
    assert rehearsed(make(), modifier()) == ""


REFUSED: dict[str, Any] = {
    "an output gate": (
        lambda: large(
            "qwen3_5_text",
            **{**HYBRID, "layer_types": ["linear_attention", *["full_attention"] * 7]},
            **LINEAR_ATTENTION,
        ),
        lambda: spin("R2"),
        r"with R2 Qwen3_5ForCausalLM computes something else \(its outputs move by",
    ),
    "a cache of latents": (
        lambda: large("deepseek_v3", **LARGE_LATENT),
        lambda: spin("R3", "R4"),
        "with R3 DeepseekV3ForCausalLM computes something else",
    ),
    "weights that are read uncalled": (
        lambda: large("jamba", **JAMBA),
        lambda: QuIPModifier(rotations=["v"]),
        "multiplies by the weight of model.layers.0.mamba.dt_proj without calling it",
    ),
    "a router that returns two things": (
        lambda: large("phimoe", num_local_experts=16, num_experts_per_tok=2),
        lambda: QuIPModifier(rotations=["u"], targets=["Linear", "re:.*router$"]),
        r"layers\.0\.mlp\.router \(PhimoeTopKRouter\) returns a tuple",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_weights_would_let_pass_is_refused(case: str) -> None:
    make, modifier, message = REFUSED[case]
    with pytest.raises(TargetError, match=message) as error:
        rehearsed(make(), modifier())
    assert "seen on a small model of its class, with random weights" in error.value.problem


TINY: dict[str, Any] = {
    "llama": (lambda: tiny("llama"), ["R1", "R2", "R3", "R4"]),
    "gemma": (lambda: tiny("gemma", head_dim=16), ["R1", "R2"]),
    "afmoe": (
        lambda: tiny(
            "afmoe",
            head_dim=16,
            num_dense_layers=1,
            layer_types=["sliding_attention", "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        ["R2", "R3"],
    ),
    "doge": (lambda: tiny("doge"), ["R2"]),
    "bitnet": (lambda: tiny("bitnet"), ["R1", "R2"]),
    "deepseek": (lambda: tiny("deepseek_v3", **LATENT), ["R3", "R4"]),
    "mamba": (lambda: tiny("mamba", **RECURRENT), ["R1"]),
}


@each(rotation=["R1", "R2", "R3", "R4"], case=TINY)
def test_nothing_is_refused_that_the_run_does(case: str, rotation: str) -> None:
    make, rotations = TINY[case]
    if rotation not in rotations:
        return
    try:
        rehearsed(make(), spin(rotation))
    except TargetError:
        refused(make(), spin(rotation))


def test_what_the_weights_decide_is_told_and_not_refused() -> None:
    model = tiny("bitnet")  # its norm before o_proj has gains that differ
    assert "with R2 BitNetForCausalLM" in refused(model, spin("R2"))
    assert "not with others. SpinQuantModifier: with R2" in rehearsed(model, spin("R2"))
    for name, parameter in model.named_parameters():
        if "attn_sub_norm" in name:
            parameter.data.fill_(1.0)
    assert moved(model, spin("R2")) < 1e-4


def test_a_model_that_was_changed_is_not_judged_by_its_class() -> None:
    model = llama()
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(NoProxyModel, match="a forward that its class has not"):
        proxy_model_builder(model)

    class Doubled(Linear):
        pass

    other = large("llama")
    other.model.layers[7].mlp.up_proj.__class__ = Doubled
    with pytest.raises(NoProxyModel, match="other modules"):
        proxy_model_builder(other)


def test_the_same_seed_gives_the_same_and_touches_nothing() -> None:
    model = large("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build = proxy_model_builder(model)
    one, other = build(0).state_dict(), build(0).state_dict()
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert model.config.num_hidden_layers == 8
    assert all(parameter.is_meta for parameter in model.parameters())
