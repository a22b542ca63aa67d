# SPDX-License-Identifier: Apache-2.0
"""What feeds what, found by running blocks with stand-in weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import small_architectures as small
from torch import Tensor, nn

from llmcompressor.equalization.mappings import find_smooth_sets, resolve_mappings
from llmcompressor.equalization.probe import SmoothSet, block_probes
from llmcompressor.equalization.rescale import divide_outputs, multiply_inputs
from llmcompressor.errors import TargetError

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.up_proj", ("mlp.down_proj",))
V_TO_O = ("self_attn.v_proj", ("self_attn.o_proj",))

LINKS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "llama": [("input_layernorm", QKV), ("post_attention_layernorm", GATE_UP), DOWN],
    "llama_all_heads": [
        ("input_layernorm", QKV),
        V_TO_O,
        ("post_attention_layernorm", GATE_UP),
        DOWN,
    ],
    "qwen3": [("input_layernorm", QKV), ("post_attention_layernorm", GATE_UP), DOWN],
    "gemma3": [("input_layernorm", QKV), V_TO_O, ("pre_feedforward_layernorm", GATE_UP), DOWN],
    "phi3": [
        ("input_layernorm", ("self_attn.qkv_proj",)),
        ("self_attn.qkv_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_up_proj",)),
        ("mlp.gate_up_proj", ("mlp.down_proj",)),
    ],
    # the second norm of a mixture feeds the router too, which is no Linear
    "mixtral": [("input_layernorm", QKV)],
    "opt": [
        ("self_attn_layer_norm", QKV),
        ("self_attn.v_proj", ("self_attn.out_proj",)),
        ("final_layer_norm", ("fc1",)),
        ("fc1", ("fc2",)),  # a ReLU lets factors pass
    ],
    # GELU does not, and q, k and v are interleaved
    "gpt_neox": [
        ("input_layernorm", ("attention.query_key_value",)),
        ("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ],
    "cohere": [("input_layernorm", (*QKV, *GATE_UP)), DOWN],  # one norm for both branches
    "olmo2": [DOWN],  # its norms come behind attention and MLP
    "gpt2": [],  # Conv1D is no Linear
}


def links_of(model: nn.Module) -> list[list[tuple[str, tuple[str, ...]]]]:
    probes = {id(probe): probe for probe in block_probes(model).values()}
    return [[(link.smooth, link.balance) for link in p.find()] for p in probes.values()]


def test_a_text_model_within_another_is_seen_as_by_itself() -> None:
    """Its cache is turned on by its own configuration alone, and each run would add to one."""
    model = small.build("llava")
    assert links_of(model) == [LINKS["llama_all_heads"]]
    own = tuple(f"re:.*language_model.*{name}$" for name in QKV)
    names = [("re:.*input_layernorm$", own)]
    assert len(resolve_mappings(model, names)) == 2
    assert model.config.text_config.use_cache


def test_blocks_that_differ_are_looked_at_one_by_one() -> None:
    dense, sparse = links_of(small.build("deepseek"))
    assert ("post_attention_layernorm", GATE_UP) in dense
    assert ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)) in sparse
    assert not [link for link in sparse if link[0] == "post_attention_layernorm"]


def test_the_model_is_as_before() -> None:
    model = small.build("gemma3").train()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    links_of(model)
    assert model.training
    for name, parameter in model.named_parameters():
        identity, value = before[name]
        assert id(parameter) == identity
        assert torch.equal(parameter, value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_blocks_that_share_a_cache_are_run_again() -> None:
    """XLM always makes a cache; later blocks of Gemma 3n read what earlier ones put in a dict."""
    assert [("v_lin", ("out_lin",))] in links_of(small.build("xlm"))
    first, sharing = links_of(small.build("gemma3n").bfloat16())
    assert first == sharing
    assert first[1:] == [("pre_feedforward_layernorm", GATE_UP), DOWN]


@pytest.mark.parametrize("name", [*LINKS, "deepseek", "xlm", "gemma3n"])
def test_links_are_found_and_scaling_them_is_exact(name: str) -> None:
    model = small.build(name)
    assert name not in LINKS or links_of(model) == [LINKS[name]]
    ids = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for one in find_smooth_sets(model):
            scale = torch.rand(one.columns, generator=torch.Generator().manual_seed(3)) * 4 + 0.25
            for module in one.balance.values():
                multiply_inputs(module, scale)
            divide_outputs(one.smooth, scale, one.offset)
        after = model(input_ids=ids).logits
    assert float((after - before).abs().max()) <= 2e-5 * float(before.abs().max())


class TwiceRead(nn.Module):
    """A norm whose output goes into a Linear and past it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        return self.first(normed) + normed


def test_a_norm_that_is_read_elsewhere_too_is_not_taken() -> None:
    model = small.OneBlock(TwiceRead())
    probes = block_probes(model, [{"states": torch.zeros(1, 4, 8)}])
    assert probes["layers.0"].find() == []


class HalfOnly(nn.Module):
    """What runs in 16 bits only, as with a kernel that knows no other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        if states.dtype is not torch.bfloat16:
            raise TypeError("a kernel for 16 bits")
        return self.first(self.norm(states))


def test_a_block_that_does_not_run_on_stand_ins_is_not_seen(warned: list[str]) -> None:
    """That ends no run: the forward with its own weights may work all the same."""
    model = small.OneBlock(HalfOnly()).bfloat16()
    inputs = [{"states": torch.zeros(1, 4, 8, dtype=torch.bfloat16)}]
    assert find_smooth_sets(model, inputs) == []
    assert "HalfOnly" in warned[0]
    assert "a kernel for 16 bits" in warned[0]
    with pytest.raises(TargetError, match=r"layers\.0 could not be run"):
        resolve_mappings(model, [("re:.*norm$", ("re:.*first$",))], batches=inputs)
    assert torch.isfinite(model(**inputs[0])).all()


def sets(*found: SmoothSet) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.name, tuple(one.balance)) for one in found]


def test_listed_names_and_structure_agree() -> None:
    for name in ("llama_all_heads", "qwen3", "gemma3", "phi3", "cohere"):
        model: Any = small.build(name)
        listed = sorted(sets(*find_smooth_sets(model)))
        other = type(model).__name__
        type(model).__name__ = "SomethingNew"
        try:
            assert sorted(sets(*find_smooth_sets(model))) == listed
        finally:
            type(model).__name__ = other


ERRORS = {
    "in one of them": [
        ("re:.*input_layernorm$", ("re:.*q_proj$",)),
        ("re:.*input_layernorm$", ("re:.*v_proj$",)),
    ],
    "matches nothing": [("re:.*input_norm$", ("re:.*q_proj$",))],
    "would change": [("re:.*input_layernorm$", ("re:.*gate_proj$", "re:.*up_proj$"))],
    "two mappings": [
        ("re:.*input_layernorm$", ("re:.*[qkv]_proj$",)),
        ("re:.*post_attention_layernorm$", ("re:.*gate_proj$", "re:.*up_proj$", "re:.*q_proj$")),
    ],
    "more than one module to smooth": [("re:.*layernorm$", ("re:.*[qkv]_proj$",))],
    "only Linears": [("re:.*input_layernorm$", ("re:.*post_attention_layernorm$",))],
}


def test_wrong_mappings_are_refused() -> None:
    model = small.build("llama")
    for problem, mappings in ERRORS.items():
        with pytest.raises(ValueError, match=problem):
            resolve_mappings(model, mappings)
