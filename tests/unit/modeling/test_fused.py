# SPDX-License-Identifier: Apache-2.0
"""Which Linears are joined when served."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.modeling.fused import (
    FUSED_SUFFIXES,
    expert_sets,
    fused_partners,
    fused_sets,
)


def tree(*names: str) -> nn.Module:
    """A model that has a Linear under each of ``names``."""
    root = nn.Module()
    for name in names:
        at = root
        *parents, last = name.split(".")
        for part in parents:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(last, nn.Linear(2, 2))
    return root


def test_llama_joins_qkv_and_gate_up_of_each_block() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )
    sets = fused_sets(model)
    assert len(sets) == 4
    assert sets[0] == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert sets[3] == ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")


def test_each_kind_of_set_is_found_in_its_order() -> None:
    for suffixes in FUSED_SUFFIXES:
        names = [f"a.b.{suffix}" for suffix in suffixes]
        assert fused_sets(tree(*reversed(names))) == [tuple(names)]


def test_members_below_different_parents_or_alone_are_no_set() -> None:
    assert fused_sets(tree("a.gate_proj", "b.up_proj", "a.q_proj")) == []
    assert fused_sets(tree("a.q_proj", "a.k_proj")) == [("a.q_proj", "a.k_proj")]


def test_partners_are_the_rest_of_the_sets() -> None:
    for suffixes in FUSED_SUFFIXES:
        for suffix in suffixes:
            rest = fused_partners(f"x.{suffix}")
            assert {f"x.{suffix}", *rest} >= {f"x.{each}" for each in suffixes}
            assert f"x.{suffix}" not in rest
    assert fused_partners("q_proj") == ("k_proj", "v_proj")


@pytest.mark.parametrize("gate", ["f_a_proj", "forget_gate.f_a_proj"])
def test_a_forget_gate_is_served_with_what_has_its_input(gate: str) -> None:
    names = [f"a.{one}_proj" for one in "qkvb"]
    without = [*names, "a.g_a_proj", "a.o_proj"]
    assert fused_sets(tree(*without)) == [tuple(names[:3])]
    joined = (*names, f"a.{gate}", "a.g_a_proj")
    all_of_them = (*without, f"a.{gate}", "a.f_b_proj", "a.forget_gate.f_b_proj", "a.g_b_proj")
    assert fused_sets(tree(*all_of_them)) == [joined]
    assert set(fused_partners(joined[4], all_of_them)) & set(all_of_them) == {*joined} - {joined[4]}


def test_experts_of_one_mixture_are_one_set() -> None:
    names = [f"layers.{i}.mlp.experts.{e}.{w}" for i in (0, 1) for e in (0, 1) for w in "ab"]
    assert expert_sets(tree(*names, "layers.0.mlp.shared_expert.a")) == [
        tuple(names[:4]),
        tuple(names[4:]),
    ]
