# SPDX-License-Identifier: Apache-2.0
"""Mappings that a recipe names and that cannot be smoothed: each is told of, with its reason."""

from __future__ import annotations

import pytest
from tests.support import small_architectures as small
from tests.support.thinned import thinned

from llmcompressor.equalization.mappings import resolve_mappings
from llmcompressor.equalization.probe import Names, SmoothSet
from llmcompressor.errors import TargetError

V_TO_O: Names = ("re:.*v_proj$", ("re:.*o_proj$",))
UP_TO_DOWN: Names = ("re:.*up_proj$", ("re:.*down_proj$",))


def test_grouped_heads_alone_are_refused_with_the_reason() -> None:
    model = small.build("llama")
    attention = model.model.layers[0].self_attn
    rows, columns = attention.v_proj.out_features, attention.o_proj.in_features
    assert rows < columns
    with pytest.raises(TargetError) as caught:
        resolve_mappings(model, [V_TO_O])
    told = str(caught.value)
    assert f"v_proj has {rows} rows" in told
    assert f"o_proj {columns} columns" in told
    assert "'re:.*v_proj$' -> ['re:.*o_proj$']" in told
    assert "heads share keys and values" in told
    assert "leave mappings out" in caught.value.remedy


def test_every_mapping_has_its_own_reason() -> None:
    with pytest.raises(TargetError) as caught:
        resolve_mappings(small.build("llama"), [V_TO_O, UP_TO_DOWN], ignore=["re:.*mlp.*"])
    assert "share keys and values" in caught.value.problem
    assert (
        "'re:.*up_proj$' -> ['re:.*down_proj$']: all that it matches is to be ignored"
        in caught.value.problem
    )


def test_a_fused_linear_with_grouped_heads_is_left_out(said: list[str]) -> None:
    model = small.build("phi3", num_key_value_heads=2)
    fused: Names = ("re:.*qkv_proj$", ("re:.*o_proj$",))
    gate_up: Names = ("re:.*gate_up_proj$", ("re:.*down_proj$",))
    found = resolve_mappings(model, [fused, gate_up])
    assert {one.name.rpartition(".")[2] for one in found} == {"gate_up_proj"}
    [told] = [line for line in said if "not smoothed" in line]
    assert "qkv_proj has 32 rows of values" in told
    with pytest.raises(TargetError, match="share keys and values"):
        resolve_mappings(model, [fused])
    assert len(resolve_mappings(small.build("phi3"), [fused])) == 2
    wrong: Names = ("re:.*gate_up_proj$", ("re:.*o_proj$",))
    with pytest.raises(TargetError, match="would change"):
        resolve_mappings(model, [wrong])


QKV = ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$")


def layers_of(found: list[SmoothSet]) -> list[set[str]]:
    """The layers that each set has modules in."""
    return [{name.split(".")[2] for name in (one.name, *one.balance)} for one in found]


@pytest.mark.parametrize("layers", ["[02]", "0", "2"])
def test_a_mapping_may_mean_some_layers(layers: str) -> None:
    """Readers of the layers between are not joined with the norm before them."""
    model = small.build("llama", num_hidden_layers=3)
    numbers = [number for number in "012" if number in layers]
    by_norm = resolve_mappings(model, [(f"re:.*layers.{layers}.input_layernorm$", QKV)])
    assert layers_of(by_norm) == [{number} for number in numbers]
    some = tuple(f"re:.*layers.{layers}.self_attn.{name}_proj$" for name in "qkv")
    by_readers = resolve_mappings(model, [("re:.*input_layernorm$", some)])
    assert layers_of(by_readers) == layers_of(by_norm)


@pytest.mark.parametrize(
    ("own", "layer"),
    thinned(["input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "*"], [0, 1, 2]),
)
def test_what_holds_an_ignored_module_is_left_out_whole(own: str, layer: int) -> None:
    model = small.build("llama", num_hidden_layers=3)
    mapping: Names = ("re:.*input_layernorm$", QKV)
    ignore = [f"re:.*layers.{layer}.{own}"]
    found = resolve_mappings(model, [mapping], ignore=ignore)
    assert layers_of(found) == [{str(number)} for number in range(3) if number != layer]


def test_what_spans_blocks_is_refused() -> None:
    names: Names = ("re:.*layers.0.mlp.up_proj$", ("re:.*layers.1.*[qkv]_proj$",))
    with pytest.raises(
        TargetError, match=r"joins nothing: no block .*layers\.0.*layers\.1"
    ) as told:
        resolve_mappings(small.build("llama"), [names])
    assert "leave mappings out" in told.value.remedy


UNSEEN: dict[str, tuple[str, Names]] = {
    "lies in no block": ("llama", ("model.norm", ("lm_head",))),
    "could not be run": (
        "llava",
        ("re:.*layer_norm1$", tuple(f"re:.*vision.*{name}_proj$" for name in "qkv")),
    ),
}


@pytest.mark.parametrize("why", UNSEEN)
def test_what_cannot_be_tried_is_not_taken_at_its_word(why: str, said: list[str]) -> None:
    name, mapping = UNSEEN[why]
    model = small.build(name)
    with pytest.raises(TargetError, match=f"None of the mappings .*cannot be tried: .*{why}"):
        resolve_mappings(model, [mapping])
    text: Names = ("re:.*(language_)?model.layers.*up_proj$", ("re:.*down_proj$",))
    assert len(resolve_mappings(model, [mapping, text])) == 2
    [told] = [line for line in said if "not smoothed" in line]
    assert why in told
