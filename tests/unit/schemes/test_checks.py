# SPDX-License-Identifier: Apache-2.0
"""Checks of schemes against the weights they are for."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from llmcompressor.errors import TargetError
from llmcompressor.schemes.checks import (
    check_divisible,
    check_schemes,
    check_tied,
    check_weights_quantizable,
    describe,
    indivisible_modules,
    tied_weights,
    warn_mixed_fused_sets,
)
from llmcompressor.schemes.presets import preset_scheme
from llmcompressor.schemes.resolve import resolve_schemes


def linears(**columns: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(size, 32, bias=False) for name, size in columns.items()})


def schemes_of(model: nn.Module, **fields: Any) -> dict[str, QuantizationScheme]:
    return resolve_schemes(**fields).schemes_by_module(model)


def test_every_misfit_is_in_one_error() -> None:
    model = linears(a=192, b=256, c=320, d=64)
    schemes = schemes_of(model, scheme="W4A16")
    assert [one[:3] for one in indivisible_modules(model, schemes)] == [
        ("a", 192, 128),
        ("c", 320, 128),
    ]
    with pytest.raises(TargetError, match="bypass_divisibility_checks") as caught:
        check_schemes(model, schemes)
    assert "a: 192 columns, groups of 128" in str(caught.value)
    assert "c: 320 columns, groups of 128" in str(caught.value)
    check_schemes(model, schemes, bypass_divisibility=True)


@pytest.mark.parametrize(
    ("scheme", "columns", "is_bound"),
    [
        ("W4A16", 200, False),
        ("W4A8", 200, False),
        ("W4A16", 201, False),
        ("W3A16", 200, False),
        ("NVFP4A16", 200, False),
        ("NVFP4A16", 201, True),  # two codes fill a byte
        ("MXFP4A16", 200, False),
        ("MXFP4A16", 201, True),
        ("MXFP8A16", 200, True),  # no ragged codes in this format
        ("FP8_BLOCK", 200, True),  # no forward cuts inputs into ragged groups
        ("NVFP4", 200, True),
        ("MXFP4", 200, True),
    ],
)
def test_a_bypass_is_for_what_can_be_run_and_written(
    scheme: str, columns: int, is_bound: bool
) -> None:
    model = linears(a=columns)
    schemes = schemes_of(model, scheme=scheme)
    with pytest.raises(TargetError, match=f"a: {columns} columns") as plain:
        check_schemes(model, schemes)
    assert ("bypass" in plain.value.remedy) is not is_bound
    if is_bound:
        with pytest.raises(
            TargetError, match=rf"bypass_divisibility_checks cannot help.*\n  a: {columns}"
        ):
            check_schemes(model, schemes, bypass_divisibility=True)
    else:
        check_schemes(model, schemes, bypass_divisibility=True)


@pytest.mark.parametrize(
    ("scheme", "columns", "fits"),
    [
        ("W4A16", 64, True),  # narrower than the group: one group
        ("W4A16", 127, True),
        ("W4A16", 129, False),
        ("W8A8", 77, True),  # channels have no groups
        ("FP8_BLOCK", 128, True),
        ("FP8_BLOCK", 192, False),  # blocks pad, the inputs' groups of 128 do not
        ("NVFP4A16", 48, True),
        ("NVFP4A16", 40, False),
        ("NVFP4A16", 8, False),  # the group is part of the format
        ("MXFP4", 48, False),
        ("MXFP8A16", 16, False),
    ],
)
def test_which_columns_fit(scheme: str, columns: int, fits: bool) -> None:
    model = linears(a=columns)
    assert (not indivisible_modules(model, schemes_of(model, scheme=scheme))) is fits


def test_blocks_of_weights_alone_may_be_ragged() -> None:
    block = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    scheme = QuantizationScheme(targets=["Linear"], weights=block)
    check_divisible(linears(a=200), {"a": scheme})


def test_embeddings_are_checked_by_their_width() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(10, 96)})
    schemes = schemes_of(model, config_groups={"g": preset_scheme("MXFP4A16", ["Embedding"])})
    check_divisible(model, schemes)
    model = nn.ModuleDict({"e": nn.Embedding(96, 10)})
    assert [one[:3] for one in indivisible_modules(model, schemes)] == [("e", 10, 32)]


def test_weights_without_float_values_are_refused() -> None:
    model = linears(a=32, b=32)
    model["a"].weight = nn.Parameter(torch.ones(2, 2, 2))
    model["b"].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    scheme = preset_scheme("W8A8")
    with pytest.raises(TargetError) as caught:
        check_weights_quantizable(model, dict.fromkeys("ab", scheme))
    message = str(caught.value)
    assert "a (Linear: the weight has 3 dimensions)" in message
    assert "b (Linear: the weight is int8)" in message
    with pytest.raises(TargetError, match="LayerNorm"):
        check_weights_quantizable(nn.ModuleDict({"n": nn.LayerNorm(4)}), {"n": scheme})


def test_weights_that_are_computed_anew_are_refused() -> None:
    model = linears(a=32, b=32, c=32)
    for name in "ab":
        register_parametrization(model[name], "weight", nn.Identity())
    register_parametrization(model["c"], "weight", nn.Identity())
    remove_parametrizations(model["c"], "weight")
    scheme = preset_scheme("W8A8")
    with pytest.raises(TargetError, match=r"of a, b are parametrized.*remove_parametrizations"):
        check_weights_quantizable(model, dict.fromkeys("abc", scheme))
    check_weights_quantizable(model, {"c": scheme})


def test_tied_weights_are_found_if_one_of_them_is_quantized() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 32), "head": nn.Linear(32, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    for name in ("embed", "head"):
        schemes = {name: preset_scheme("W8A8")}
        assert tied_weights(model, schemes) == [("embed", "head")]
        with pytest.raises(TargetError, match=f"share one weight, and {name} is to be"):
            check_tied(model, schemes)
    assert tied_weights(model, {}) == []
    model["head"].weight = nn.Parameter(model["embed"].weight.detach().clone())
    check_tied(model, {"head": preset_scheme("W8A8")})


class Reused(nn.Module):
    """A head that is the embedding, and two Linears that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.head = nn.Linear(32, 8, bias=False)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head.weight = self.embed.weight
        self.second.weight = self.first.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Repeated(nn.Module):
    """Two layers that are one module, as its class says, besides a head that is the embedding."""

    all_tied_weights_keys: ClassVar = {
        "head.weight": "embed.weight",
        "layers.1.weight": "layers.0.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.head = nn.Linear(32, 8, bias=False)
        layer = nn.Linear(32, 32)
        self.layers = nn.ModuleList([layer, layer])

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_one_module_in_two_places_is_refused() -> None:
    """A reader would look for the scales of each."""
    with pytest.raises(TargetError, match=r"layers\.0 and layers\.1 share one weight") as caught:
        check_tied(Repeated(), {"layers.0": preset_scheme("W8A8")})
    assert "add all of them to ignore (layers.0)" in caught.value.remedy


@pytest.mark.parametrize("names", [["head"], ["first"], ["first", "second", "head"]])
def test_the_way_out_of_a_shared_weight_is_one(names: list[str]) -> None:
    """Whoever does what the error says does not get it again."""
    model = Reused()
    schemes = dict.fromkeys(names, preset_scheme("W8A8"))
    with pytest.raises(TargetError) as caught:
        check_tied(model, schemes)
    if "tie_word_embeddings=False" in caught.value.remedy:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    else:
        ignored = caught.value.remedy.partition("(")[2].rstrip(").").split(", ")
        schemes = {name: one for name, one in schemes.items() if name not in ignored}
    check_tied(model, schemes)
    assert ("tie_word_embeddings" in caught.value.remedy) == (names == ["head"])


def test_a_set_in_two_schemes_is_told_with_its_members(warned: list[str]) -> None:
    four, eight = preset_scheme("W4A16"), preset_scheme("W8A16")
    joined = [("x.q_proj", "x.k_proj", "x.v_proj"), ("x.gate_proj", "x.up_proj")]
    warn_mixed_fused_sets(
        {"x.q_proj": four, "x.k_proj": four, "x.v_proj": eight, "x.gate_proj": four}, joined
    )
    assert len(warned) == 1
    assert "x.q_proj, x.k_proj in int4 group 128, x.v_proj in int8 group 128" in warned[0]
    assert "x.up_proj not quantized" in warned[0]


def test_alike_is_what_a_reader_sees_alike(warned: list[str]) -> None:
    written = {"targets": ["a"], "weights": {"num_bits": 4, "group_size": 128, "type": "int"}}
    schemes = {
        **{"a": resolve_schemes(config_groups={"g": written}).groups["g"]},
        **{"b": resolve_schemes(scheme="W4A16", weight_observer="mse").groups["group_0"]},
    }
    warn_mixed_fused_sets(schemes, [("a", "b"), ("c", "d")])
    assert not warned


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("W4A16_ASYM", "in int4 group 128 asymmetric"),
        ("FP8_BLOCK", "in float8 block [128, 128] with float8 group 128 inputs"),
        ("UNQUANTIZED", "in full"),
    ],
)
def test_schemes_in_words(name: str, words: str) -> None:
    assert describe(preset_scheme(name)) == words
