# SPDX-License-Identifier: Apache-2.0
"""Modules by name, and names that no target tells apart."""

from __future__ import annotations

import itertools
import re

import pytest
from torch.nn import Identity, Linear, Module, ModuleList, Sequential

from llmcompressor.modeling.matching import matches, matches_name
from llmcompressor.modeling.names import NameForms, TargetIndex, named_modules
from llmcompressor.schemes.assign import matching_targets

NAMES = [
    f"model.layers.{layer}.{own}"
    for layer in (0, 1, 3, 9, 10, 13, 31, 100)
    for own in ("mlp.gate", "mlp.experts.7.up_proj", "mlp.experts.12.up_proj", "attn2.q_proj")
] + ["lm_head", "model.layers.3", "h1.3", "h2-3", "h3:3"]
PATTERNS = [
    ".*",
    r".*layers\.\d+\.mlp",
    ".*layers.[0-9].mlp",
    r".*layers\..\.mlp.gate$",
    r".*layers\.\w\w\.mlp",
    r".*layers\.(?:1|3)\.",
    r".*layers\.[1-3]\.",
    r".*layers\.\[0-9]",
    r".*layers\.[^0-4]",
    r".*layers\.\d{2}\.",
    r".*layers\.(?P<one>\d)(?P=one)",
    r".*layers\.(\d)\1",
    r".*layers\.[!-1]",
    r".*layers\.[/-:]\.",
    r".*layers\.[+-5]",
    r".*layers\.\x33",
    r".*layers\.\N{DIGIT THREE}",
    r".*h[a-z0-9]",
    r"h[\d-]",
    r"(?i)MODEL.*Q_proj",
    r"(?!.*experts).*layers.*",
    "lm_head",
]


def tree() -> Module:
    shared = Linear(2, 2)
    inner = Sequential(Identity(), shared)
    return Sequential(inner, ModuleList([shared, inner, Sequential(Linear(2, 2))]), Identity())


def test_a_module_with_an_order_of_its_own_keeps_it() -> None:
    class Reversed(Sequential):
        def named_modules(self, *args: object, **kwargs: object) -> object:
            return reversed(list(super().named_modules()))

    model = Reversed(Identity(), Identity())
    assert [name for name, _ in named_modules(model)] == ["1", "0", ""]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_of_one_form_are_matched_alike(pattern: str) -> None:
    forms = NameForms([f"re:{pattern}", "model.layers.3.mlp.gate"])
    for one, other in itertools.combinations(NAMES, 2):
        if forms.of(one) == forms.of(other):
            assert (re.match(pattern, one) is None) == (re.match(pattern, other) is None)


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("re:.*experts.*gate_proj$", {"w1"}),
        ("re:.*experts.3.up_proj", {"w3"}),
        ("re:.*w2$", {"w2"}),
        ("layers.0.mlp.experts.3.down_proj", {"w2"}),
        ("re:.*experts", {"w1", "w2", "w3"}),
        ("re:.*block_sparse_moe.experts.*.w1$", {"w1"}),
        ("re:.*block_sparse_moe.experts.*", {"w1", "w2", "w3"}),
        (r"re:.*experts\.\d+\.(?!w2)w.*", {"w1", "w3"}),
        (r"re:.*experts\.\d+\.(?!gate_proj)w.*", {"w1", "w2", "w3"}),
        (r"re:.*experts\.\d+\.(?!gate).*", {"w2", "w3"}),
    ],
)
def test_linears_of_an_expert_have_other_names(entry: str, meant: set[str]) -> None:
    """However many names are asked for, and whichever was asked for first."""
    every = [f"layers.0.mlp.experts.3.{own}" for own in ("w3", "w1", "w2", "gate")]
    forms = NameForms([entry])
    assert {name for name in every if matches_name(name, entry)} == {
        f"layers.0.mlp.experts.3.{own}" for own in meant
    } | ({every[-1]} if entry == "re:.*experts" else set())
    for one, other in itertools.permutations(every, 2):
        if forms.of(one) == forms.of(other):
            assert matches_name(one, entry) == matches_name(other, entry)


@pytest.mark.parametrize(
    ("entry", "is_meant"),
    [
        ("re:visual.*", True),
        ("re:^visual", True),
        ("re:model.visual", True),
        ("visual.blocks.0.attn.qkv", True),
        ("re:vision_tower.*", False),
        (r"re:(?!model\.visual).*qkv", False),
        ("re:^(?!visual|.*lm_head).*qkv", False),
        ("re:^(?!vision_tower).*qkv", True),
        ("re:^(?!language_model).*", True),
    ],
)
def test_towers_are_meant_as_they_were_called(entry: str, is_meant: bool) -> None:
    name = "model.visual.blocks.0.attn.qkv"
    assert matches_name(name, entry) == is_meant
    assert bool(matching_targets(name, Linear(1, 1), [entry])) == is_meant
    assert not matches_name("model.layers.0.visual.blocks.0.attn.qkv", "re:visual.*")


@pytest.mark.parametrize("name", ["lm_head", "model.language_model.layers.0.mlp.experts.3.w1"])
def test_the_text_beside_a_tower_is_meant_as_it_was_called(name: str) -> None:
    """All of it: an entry that means the head alone would leave the rest out silently."""
    assert matches_name(name, "re:language_model.*")
    assert matching_targets(name, Linear(1, 1), ["re:language_model.*"])
    assert matches_name(name, "re:language_model.model.*.gate_proj$") == (name != "lm_head")
    assert not matches_name(name, "re:language_model.model.*.up_proj$")
    assert not matches_name("model.norm", "re:language_model.*")
    assert not matches_name(name, "re:^(?!language_model).*")
    assert not matching_targets(name, Linear(1, 1), ["re:^(?!language_model).*"])
    assert matching_targets(name, Linear(1, 1), ["re:^(?!visual).*", "Linear"]) == [
        "re:^(?!visual).*",
        "Linear",
    ]


def test_blocks_have_one_form_unless_a_pattern_says_which() -> None:
    names = [f"layers.{index}.mlp" for index in range(10)]
    assert len({NameForms([r"re:.*layers\.\d+.*", "re:.*mlp$"]).of(name) for name in names}) == 1
    assert len({NameForms([r"re:.*layers\.[3-5].*"]).of(name) for name in names}) == 2


class LinearBase(Module):
    """As vLLM calls the base of its Linears, which the target Linear means."""


class ColumnLinear(LinearBase):
    pass


def test_no_target_that_means_a_module_is_left_out() -> None:
    targets = [f"re:{pattern}" for pattern in PATTERNS]
    targets += ["Linear", "Identity", "LinearBase", "Module", "lm_head", *NAMES[:9:2], "lm_head"]
    targets += ["model.layers.3.mlp.experts.0.up_proj", "model.layers.3.mlp.experts.0.w3"]
    possible = TargetIndex(targets)
    names = [*NAMES, "model.layers.3.mlp.experts.0.w3", "Linear", ""]
    for name, module in itertools.product(names, [Linear(1, 1), Identity(), ColumnLinear()]):
        near = possible.of(name, module)
        means = [target for target in dict.fromkeys(targets) if matches(name, module, target)]
        assert [target for target in near if matches(name, module, target)] == means
        plain = [target for target in near if not target.startswith("re:")]
        assert plain == [target for target in means if not target.startswith("re:")]
