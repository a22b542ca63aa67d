# SPDX-License-Identifier: Apache-2.0
"""Checks of schemes against the weights they are for."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from llmcompressor.errors import TargetError
from llmcompressor.schemes.checks import (
    check_divisible,
    check_schemes,
    check_weights_quantizable,
    indivisible_modules,
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


def test_embeddings_are_checked_by_their_width() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(10, 96)})
    schemes = schemes_of(model, config_groups={"g": preset_scheme("MXFP4A16", ["Embedding"])})
    check_divisible(model, schemes)
    model = nn.ModuleDict({"e": nn.Embedding(96, 10)})
    assert [one[:3] for one in indivisible_modules(model, schemes)] == [("e", 10, 32)]


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


def test_a_set_in_two_schemes_is_told_with_its_members(warned: list[str]) -> None:
    four, eight = preset_scheme("W4A16"), preset_scheme("W8A16")
    joined = [("x.q_proj", "x.k_proj", "x.v_proj"), ("x.gate_proj", "x.up_proj")]
    warn_mixed_fused_sets(
        {"x.q_proj": four, "x.k_proj": four, "x.v_proj": eight, "x.gate_proj": four}, joined
    )
    assert len(warned) == 1
    assert "x.q_proj, x.k_proj in int4 group 128, x.v_proj in int8 group 128" in warned[0]
    assert "x.up_proj not quantized" in warned[0]
