# SPDX-License-Identifier: Apache-2.0
"""Mappings that a recipe names and that cannot be smoothed: each is told of, with its reason."""

from __future__ import annotations

import pytest
import small_architectures as small

from llmcompressor.errors import TargetError
from llmcompressor.modeling.mapped_places import Names
from llmcompressor.modeling.named_mappings import named_sets

V_TO_O: Names = ("re:.*v_proj$", ("re:.*o_proj$",))
UP_TO_DOWN: Names = ("re:.*up_proj$", ("re:.*down_proj$",))


def test_grouped_heads_alone_are_refused_with_the_reason() -> None:
    model = small.build("llama")
    attention = model.model.layers[0].self_attn
    rows, columns = attention.v_proj.out_features, attention.o_proj.in_features
    assert rows < columns
    with pytest.raises(TargetError) as caught:
        named_sets(model, [V_TO_O])
    told = str(caught.value)
    assert f"v_proj has {rows} rows" in told
    assert f"o_proj {columns} columns" in told
    assert "'re:.*v_proj$' -> ['re:.*o_proj$']" in told
    assert "heads share keys and values" in told
    assert "leave mappings out" in caught.value.remedy


def test_every_mapping_has_its_own_reason() -> None:
    with pytest.raises(TargetError) as caught:
        named_sets(small.build("llama"), [V_TO_O, UP_TO_DOWN], ignore=["re:.*mlp.*"])
    assert "share keys and values" in caught.value.problem
    assert (
        "'re:.*up_proj$' -> ['re:.*down_proj$']: all that it matches is to be ignored"
        in caught.value.problem
    )


def test_beside_others_it_is_left_out_and_told_of(said: list[str]) -> None:
    found = named_sets(small.build("llama"), [V_TO_O, UP_TO_DOWN])
    assert {one.name.rpartition(".")[2] for one in found} == {"up_proj"}
    [told] = [line for line in said if "not smoothed" in line]
    assert "v_proj has" in told
    assert "up_proj" not in told


def test_with_a_value_for_each_head_it_is_smoothed(said: list[str]) -> None:
    found = named_sets(small.build("llama_all_heads"), [V_TO_O])
    assert {one.name.rpartition(".")[2] for one in found} == {"v_proj"}
    assert not [line for line in said if "not smoothed" in line]
