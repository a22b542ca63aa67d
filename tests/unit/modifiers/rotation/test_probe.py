# SPDX-License-Identifier: Apache-2.0
"""Rotations are tried out in float32 first: what a model would not pass is refused, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.thinned import thinned
from tests.support.tiny_llama import SIZES, batches, llama, run, traces
from tests.unit.modifiers.rotation.test_rotation import lively, moved
from torch.nn import Linear, Module
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier
from llmcompressor.modifiers.rotation.probe import InvarianceProbe, probe_logits

DATA = batches(number=2)
HYBRID = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
RECURRENT = {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4}
JAMBA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 4,
    "expert_layer_offset": 3,
    "use_mamba_kernels": False,
}
MAMBA_HEADS = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small model of a family of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **changes})
    model = lively(AutoModelForCausalLM.from_config(config))
    for module in model.modules():
        if hasattr(module, "A_log"):  # states that decay, as in a trained model
            module.A_log.data.fill_(0.5)
    return model.to(dtype)


def deepseek(dtype: torch.dtype = torch.float32) -> Any:
    return tiny("deepseek_v3", dtype, **LATENT)


def falcon_h1() -> Any:
    heads = {**MAMBA_HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_expand": 1}
    return tiny("falcon_h1", head_dim=16, **heads)


def state_of(model: Module) -> Any:
    """All of a model that a refusal may not change."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    left = [(name, sorted(one.__dict__), list(one._modules)) for name, one in model.named_modules()]
    return values, left, model.config.to_dict(), traces(model)  # type: ignore[union-attr, operator]


def refused(model: Any, modifier: Modifier, *later: Modifier) -> str:
    """The error of a run, which leaves the model as it was."""
    tied = [one.data_ptr() for one in model.parameters()]
    values, *others = state_of(model)
    with pytest.raises(TargetError) as error:
        run(model, modifier, *later, data=DATA)
    after, *others_after = state_of(model)
    assert values.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in values.items())
    assert others == others_after
    assert tied == [one.data_ptr() for one in model.parameters()]
    return str(error.value)


DTYPES = (torch.float32, torch.bfloat16)

REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    "weights of values": (lambda dtype: tiny("doge", dtype), ["R2"], ["R2"]),
    "an output gate": (
        lambda dtype: tiny("qwen3_5_text", dtype, **HYBRID, **LINEAR_ATTENTION),
        ["R2", "R4"],
        ["R2"],
    ),
    "a gate of a mixture": (
        lambda dtype: tiny(
            "afmoe",
            dtype,
            head_dim=16,
            num_dense_layers=1,
            layer_types=["sliding_attention", "full_attention"],
            **EXPERTS,
        ),
        ["R3", "R2"],
        ["R2"],
    ),
    "a norm before o_proj": (lambda dtype: tiny("bitnet", dtype), ["R1", "R2"], ["R2"]),
    "a cache of latents": (deepseek, ["R3", "R4"], ["R3"]),
}


@pytest.mark.parametrize(("case", "dtype"), thinned(REFUSED, DTYPES))
def test_rotations_that_do_not_pass_are_named(case: str, dtype: torch.dtype) -> None:
    make, rotations, guilty = REFUSED[case]
    told = refused(make(dtype), SpinQuantModifier(rotations=rotations))
    assert f"with {' and '.join(guilty)} " in told
    assert told.endswith(f"Leave {' and '.join(guilty)} out of rotations.")
    rest = [name for name in rotations if name not in guilty]
    if rest and dtype is torch.float32:
        assert moved(make(dtype), SpinQuantModifier(rotations=rest)) < 1e-4


def test_what_is_not_seen_of_the_stream_is_listed() -> None:
    told = refused(falcon_h1(), SpinQuantModifier())
    assert "with R1 " in told
    assert "were not: model.layers.0.mamba.in_proj" in told
    assert told.endswith("with the fields mappings and norm_mappings.")


class Doubling(Linear):
    """A Linear that does something to its input of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not linear."""
        return super().forward(x * x.abs())


def test_quip_names_the_module_at_fault() -> None:
    model = lively(llama())
    model.model.layers[1].mlp.up_proj.__class__ = Doubling
    told = refused(model, QuIPModifier(rotations=["v"]))
    assert "with rotations of model.layers.1.mlp.up_proj (Doubling)" in told
    name = "model.layers.1.mlp.up_proj"
    assert f"ignore=['lm_head', '{name}']" in told
    assert moved(model, QuIPModifier(rotations=["v"], ignore=["lm_head", name])) < 1e-5


@pytest.mark.parametrize(("name", "fields"), [("mamba", RECURRENT), ("jamba", JAMBA)])
def test_without_those_the_returned_model_computes_what_it_did(name: str, fields: Any) -> None:
    modifier = QuIPModifier(rotations=["u", "v"], ignore=["lm_head", "re:.*dt_proj$"])
    assert moved(tiny(name, **fields), modifier) < 1e-5


SHORT: dict[str, Any] = {
    "lfm2": lambda dtype: tiny(
        "lfm2", dtype, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    "qwen3.5": lambda dtype: tiny("qwen3_5_text", dtype, **HYBRID, **LINEAR_ATTENTION),
    "bamba": lambda dtype: tiny(
        "bamba", dtype, **MAMBA_HEADS, mamba_n_heads=8, attn_layer_indices=[1]
    ),
    "recurrent gemma": lambda dtype: tiny(
        "recurrent_gemma",
        dtype,
        lru_width=64,
        block_types=["recurrent", "attention"],
        attention_window_size=32,
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_convolutions_are_no_obstacle(name: str) -> None:
    assert moved(SHORT[name](torch.float32), SpinQuantModifier(rotations=["R1"])) < 1e-5
    assert moved(SHORT[name](torch.bfloat16), SpinQuantModifier(rotations=["R1"])) < 0.1


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    thinned(["mamba", "falcon_mamba"], [(torch.float32, 1e-5), (torch.bfloat16, 0.1)]),
)
def test_models_without_attention_have_a_stream_too(
    name: str, dtype: torch.dtype, most: float
) -> None:
    assert moved(tiny(name, dtype, **RECURRENT), SpinQuantModifier(rotations=["R1"])) < most


def closed(model: Any) -> Any:
    """One whose attention cannot be replaced."""

    class Closed(type(model)):  # type: ignore[misc]
        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    model.__class__ = Closed
    return model


UNFIT: dict[str, tuple[Any, Any, str]] = {
    "eager attention": (
        lambda: tiny("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        SpinQuantModifier(rotations=["R3"]),
        r"GptOssForCausalLM runs with the attention 'eager'.*Leave R3 out of rotations\.$",
    ),
    "attention that could be another": (
        lambda: tiny("llama", attn_implementation="eager"),
        SpinQuantModifier(rotations=["R3"]),
        r'Leave R3 out of rotations, or load it with attn_implementation="sdpa"\.$',
    ),
    "attention of its own": (
        lambda: closed(tiny("llama")),
        SpinQuantModifier(rotations=["R3"]),
        r"Closed does not let .*Leave R3 out of rotations\.$",
    ),
    "attention that may cross": (
        lambda: tiny("xglm", d_model=64, ffn_dim=128, attention_heads=4, num_layers=2),
        SpinQuantModifier(rotations=["R3"]),
        r"this model has no attention module of the form.*Leave R3 out of rotations\.$",
    ),
    "heads of several widths": (
        lambda: tiny(
            "gemma4_text",
            head_dim=16,
            global_head_dim=32,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
        ),
        SpinQuantModifier(rotations=["R3"]),
        r"Gemma4TextConfig does not tell for all layers\. Leave R3 out",
    ),
    "a router that returns two things": (
        lambda: tiny("phimoe", num_local_experts=4, num_experts_per_tok=2),
        QuIPModifier(rotations=["u"], targets=["Linear", "re:.*router$"]),
        r"layers\.0\.mlp\.router \(PhimoeTopKRouter\) returns a tuple.*on the ignore list\.$",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_got_at_is_one_clear_error(case: str) -> None:
    make, modifier, message = UNFIT[case]
    model = make()
    before = traces(model)  # of the stacks of experts alone
    with pytest.raises(TargetError, match=message):
        modifier.initialize(State(model=model))
    assert traces(model) == before


def test_rounding_does_not_count() -> None:
    model = lively(llama(torch.bfloat16, tie_word_embeddings=True))
    modifier = SpinQuantModifier(rotations=["R1", "R2", "R3", "R4"])
    plan = modifier.make_plan(model)
    before = copy.deepcopy(model.state_dict())
    assert 0 < InvarianceProbe(model).moved(plan) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not traces(model)


def test_a_model_that_needs_its_dtype_is_compared_in_it() -> None:
    model = lively(llama(torch.bfloat16))
    mask = torch.ones(SIZES["hidden_size"], dtype=torch.bfloat16)
    for layer in model.model.layers:

        def narrow(module: Module, args: Any) -> Any:
            assert args[0].dtype is torch.bfloat16, "made for bfloat16"
            return (args[0] * mask,)

        layer.mlp.register_forward_pre_hook(narrow)
    probe = InvarianceProbe(model)
    assert 1e-3 < probe.moved(SpinQuantModifier(rotations=["R2"]).make_plan(model)) < 0.1
    assert probe.tolerance == 0.2


def test_a_broken_forward_leaves_nothing_behind() -> None:
    model = lively(llama(torch.bfloat16))
    wanted = probe_logits(model)
    last = model.model.layers[1].mlp.down_proj
    told: list[str] = []

    def fails(module: Module, args: Any) -> None:
        told.append("called")
        if len(told) > 2:  # as it is, in float32; then rotated
            raise RuntimeError("out of order")

    handle = last.register_forward_pre_hook(fails)
    with pytest.raises(TargetError, match=r"its forward fails \(RuntimeError: out of order\)"):
        SpinQuantModifier(rotations=["R2"]).initialize(State(model=model))
    handle.remove()
    assert torch.equal(probe_logits(model), wanted)
    assert not traces(model)
