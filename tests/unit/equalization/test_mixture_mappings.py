# SPDX-License-Identifier: Apache-2.0
"""Smoothing into mixtures: the router and all experts together, whatever of them is named."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
import torch
from tests.support import small_architectures as small
from torch import Tensor, nn

from llmcompressor.equalization.mappings import find_smooth_sets, resolve_mappings
from llmcompressor.equalization.probe import Names, SmoothSet
from llmcompressor.equalization.rescale import divide_outputs, multiply_inputs
from llmcompressor.errors import TargetError
from llmcompressor.modeling.fused import parse_expert_name

NORM = "re:.*post_attention_layernorm$"
UP_TO_DOWN: Names = ("re:.*up_proj$", ("re:.*down_proj$",))
PUBLISHED: dict[str, Names] = {
    "qwen3_moe": (
        NORM,
        ("re:.*mlp.gate$", "re:.*mlp.experts.*.gate_proj$", "re:.*mlp.experts.*.up_proj$"),
    ),
    # the first layer is dense and has no router
    "deepseek": (NORM, ("re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$")),
    "llama4": (
        NORM,
        (
            "re:.*feed_forward.router$",
            "re:.*feed_forward.*.gate_proj$",
            "re:.*feed_forward.*.up_proj$",
        ),
    ),
    "mixtral": (NORM, ("re:.*mlp.gate$", "re:.*experts.*.w1$", "re:.*experts.*.w3$")),
    "gpt_oss": (NORM, ("re:.*mlp.router$", "re:.*experts.*.(gate|up)_proj$")),
    "qwen2_moe": (
        NORM,
        (
            "re:.*mlp.gate$",
            "re:.*experts.*.(gate|up)_proj$",
            "re:.*shared_expert.(gate|up)_proj$",
            "re:.*shared_expert_gate$",
        ),
    ),
}
"""What llm-compressor lists for a family, or would."""


def moved_by_scales(model: nn.Module, sets: Iterable[SmoothSet]) -> float:
    """How far outputs move, as a share of their size, when sets get random scales."""
    model.double()
    ids = torch.arange(3, 51).reshape(2, 24)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for one in sets:
            random = torch.Generator().manual_seed(3)
            scale = torch.rand(one.columns, generator=random, dtype=torch.float64) * 4 + 0.25
            for module in one.balance.values():
                multiply_inputs(module, scale)
            divide_outputs(one.smooth, scale, one.offset)
        after = model(input_ids=ids).logits
    return float((after - before).abs().max() / before.abs().max())


def into_experts(sets: Iterable[SmoothSet]) -> list[SmoothSet]:
    return [
        one
        for one in sets
        if parse_expert_name(one.name) is None and any(map(parse_expert_name, one.balance))
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mappings_change_no_output(name: str) -> None:
    model = small.with_experts(name)
    sets = resolve_mappings(model, [PUBLISHED[name]])
    assert len(sets) == 2
    routed = into_experts(sets)
    assert routed
    assert all(any(name.endswith((".gate", ".router")) for name in one.balance) for one in routed)
    assert moved_by_scales(model, sets) < 1e-6


@pytest.mark.parametrize("name", PUBLISHED)
def test_without_anyone_naming_them_they_are_found(name: str) -> None:
    model = small.with_experts(name)
    named = resolve_mappings(small.with_experts(name), [PUBLISHED[name]])
    sets = find_smooth_sets(model)
    found = {one.name: set(one.balance) for one in sets}
    for one in named:
        assert found[one.name] == set(one.balance)
    assert moved_by_scales(model, sets) < 1e-6
    assert not into_experts(find_smooth_sets(model, mixtures=False))


def test_what_a_mixture_is_called_does_not_matter() -> None:
    model = small.with_experts("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp._modules["many"] = layer.mlp._modules.pop("experts")
        type(layer.mlp).experts = property(lambda self: self._modules["many"])
    try:
        sets = find_smooth_sets(model)
        [one, _] = [one for one in sets if one.name.endswith("post_attention_layernorm")]
        assert len(one.balance) == 1 + 2 * 8
        assert len(sets) == 2 * (2 + 8)
        some: Names = (NORM, ("re:.*mlp.gate$", "re:.*many.[01].(gate|up)_proj$"))
        assert set(resolve_mappings(model, [some])[0].balance) == set(one.balance)
    finally:
        del type(model.model.layers[0].mlp).experts


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek", "llama4"])
def test_a_router_that_is_not_named_takes_scales_too(name: str, said: list[str]) -> None:
    """With 32 experts a few tokens do not reach them all: nothing is taken at its word."""
    counts = {"num_experts": 32, "num_local_experts": 32, "n_routed_experts": 32}
    model = small.with_experts(name, **counts)
    smooth, readers = PUBLISHED[name]
    sets = resolve_mappings(model, [(smooth, readers[1:])])
    whole = resolve_mappings(small.with_experts(name, **counts), [(smooth, readers)])
    assert [set(one.balance) for one in sets] == [set(one.balance) for one in whole]
    assert moved_by_scales(model, sets) < 1e-6
    [told] = [line for line in said if "does not name all" in line]
    assert re.search(r"(mlp\.gate|router)\.", told)


@pytest.mark.parametrize("some", ["[01]", "[0-6]", "7"])
def test_experts_that_are_not_named_take_scales_too(some: str) -> None:
    """Also those that the trial looks at: an expert that is left out reads the norm, too."""
    model = small.with_experts("qwen3_moe")
    readers = ("re:.*mlp.gate$", f"re:.*experts.{some}.gate_proj$", f"re:.*experts.{some}.up_proj$")
    sets = resolve_mappings(model, [(NORM, readers)])
    assert {len(one.balance) for one in sets} == {1 + 2 * 8}
    assert moved_by_scales(model, sets) < 1e-6


def test_each_expert_alone_holds_whether_tokens_reach_it_or_not() -> None:
    model = small.with_experts("qwen3_moe", num_experts=32)
    sets = resolve_mappings(model, [UP_TO_DOWN])
    assert len(sets) == 2 * 32
    assert moved_by_scales(model, sets) < 1e-6
    wrong: Names = ("re:.*gate_proj$", ("re:.*down_proj$",))  # its SiLU lets no factor pass
    with pytest.raises(TargetError, match="would change"):
        resolve_mappings(model, [wrong])


class ListOfExperts(nn.Module):
    """A mixture as models with code of their own have it; each token goes to one expert."""

    def __init__(self, widths: Iterable[int], *, biased: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, len(list(widths)), bias=biased)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, width), "down": nn.Linear(width, 8)})
            for width in widths
        )

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        weight, chosen = self.router(normed).softmax(-1).max(-1)
        result = torch.zeros_like(states)
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, nn.ModuleDict)
            if (chosen == number).any():
                own = expert["down"](expert["up"](normed[chosen == number]).relu())
                result[chosen == number] = own * weight[chosen == number, None]
        return states + result


BATCH = [{"states": torch.zeros(1, 4, 8)}]
WHOLE: Names = ("re:.*norm$", ("re:.*router$", "re:.*up$"))


def test_experts_of_a_list_stand_for_those_like_them() -> None:
    model = small.OneBlock(ListOfExperts([16] * 12))
    [one] = resolve_mappings(model, [WHOLE], batches=BATCH)
    assert len(one.balance) == 13
    each = resolve_mappings(model, [("re:.*up$", ("re:.*down$",))], batches=BATCH)
    assert len(each) == 12
    with pytest.raises(TargetError, match=r"would change.*layers\.0\.router"):
        resolve_mappings(model, [("re:.*norm$", ("re:.*up$",))], batches=BATCH)
