# SPDX-License-Identifier: Apache-2.0
"""Rounding to nearest, caches and attention, and what is left of a run that fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from tests.support import tiny_llama as tiny
from tests.support.caches import cache_of
from tests.support.presets import USUAL, WITH_WEIGHTS
from tests.support.thinned import few
from torch import Tensor

from llmcompressor.core import active_session
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import InputError, NonFiniteError, TargetError
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization.rounding import QuantizationModifier
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.recipe import Recipe

STRANGE: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "observer": "foo"}}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT8: dict[str, Any] = {"num_bits": 8, "strategy": "tensor"}
ATTENTION: dict[str, Any] = {"states": {"targets": ["LlamaAttention"], "input_activations": FP8}}


def nearest(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"ignore": ["lm_head"], **fields})


def states(given: list[tiny.Batch]) -> dict[str, list[Tensor]]:
    """Keys and values of the original model at real tokens, per layer [heads, tokens, dim]."""
    model = tiny.llama()
    found: dict[str, list[list[Tensor]]] = {"k": [[], []], "v": [[], []]}
    for batch in given:
        with torch.no_grad():
            cache = cache_of(model(**batch, use_cache=True))
        mask = batch["attention_mask"].bool()
        for layer in range(2):
            for name, kept in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
                found[name][layer].append(kept.transpose(0, 1)[:, mask])
    return {name: [torch.cat(parts, dim=1) for parts in each] for name, each in found.items()}


@pytest.mark.parametrize("name", few(WITH_WEIGHTS, *USUAL))
def test_every_weight_is_rounded_on_the_scales_of_its_observer(name: str) -> None:
    before, model = (tiny.llama(torch.bfloat16, num_hidden_layers=1) for _ in range(2))
    tiny.run(model, nearest(scheme=name))
    for module_name, module in tiny.linears(model).items():
        weight = before.get_submodule(module_name).weight.detach()
        args = module.quantization_scheme.weights
        shared = getattr(module, "weight_global_scale", None)
        expected = observe_weight(weight, args, global_scale=shared)
        assert torch.equal(module.weight, expected.round(weight))
        assert torch.equal(module.weight_scale, expected.scale.to(torch.bfloat16))
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_importance_comes_from_real_tokens(warned: list[str]) -> None:
    """Padding holds tokens too: counted, it would move the scales."""
    data = tiny.batches()
    for batch in data:
        batch["attention_mask"][:, 12:] = 0
    short = [{key: value[:, :12] for key, value in batch.items()} for batch in data]
    fields = {"scheme": "W3A16", "weight_observer": "imatrix_mse"}
    a = tiny.run(tiny.llama(), nearest(**fields), data=data)
    b = tiny.run(tiny.llama(), nearest(**fields), data=short)
    for one, other in zip(tiny.linears(a).values(), tiny.linears(b).values(), strict=True):
        assert float((one.weight_scale != other.weight_scale).float().mean()) < 0.02
    assert not warned


def test_importance_is_the_mean_square_of_the_inputs() -> None:
    data, name = tiny.padded(tiny.batches(tokens=6), 10), "model.layers.0.self_attn.k_proj"
    inputs = tiny.inputs_of(tiny.llama(), name, data)
    fields = {"scheme": "W3A16", "weight_observer": "imatrix_mse"}
    model = tiny.run(tiny.llama(), nearest(**fields), data=data)
    module = tiny.linears(model)[name]
    expected = observe_weight(
        tiny.linears(tiny.llama())[name].weight.detach(),
        module.quantization_scheme.weights,
        importance_C=inputs.square().mean(dim=0),
    )
    assert float((module.weight_scale != expected.scale).float().mean()) < 0.05


@pytest.mark.parametrize("kind", [QuantizationModifier, GPTQModifier])
def test_fields_that_are_changed_before_a_run_count(kind: type[Any]) -> None:
    scheme = preset_name_to_scheme("W8A16", ["Linear"])
    by_part = kind(config_groups={"g": scheme})
    by_part.config_groups["g"].weights.num_bits = 4
    by_part.ignore.append("lm_head")
    by_field = kind(targets="Linear", scheme="W8A16")
    by_field.scheme, by_field.ignore = "W4A16", ["lm_head"]
    for modifier in (by_part, by_field):
        model = tiny.llama()
        tiny.run(model, modifier, data=tiny.batches())
        assert model.model.layers[0].mlp.up_proj.quantization_scheme.weights.num_bits == 4
        assert not hasattr(model.lm_head, "quantization_scheme")


def test_the_quantized_model_is_close_to_the_original() -> None:
    reference = tiny.logits(tiny.llama(), tiny.batches())
    for name, bound in (("W8A16", 0.05), ("W8A8", 0.1), ("FP8", 0.2), ("NVFP4", 0.6)):
        model = tiny.run(tiny.llama(), nearest(scheme=name))
        change = tiny.logits(model, tiny.batches()) - reference
        assert 0 < float(change.norm() / reference.norm()) < bound


@pytest.mark.parametrize(
    ("others", "said"), [("W8A16", []), ("W8A8", ["int8 channel"]), (None, ["not quantized"])]
)
def test_a_served_set_whose_members_two_modifiers_quantize(
    others: str | None, said: list[str], warned: list[str]
) -> None:
    """One scheme for all of them is no mixture, whoever gives it; two are told of once."""
    modifiers: list[Any] = [nearest(scheme="W8A16", targets="re:.*[qo]_proj$")]
    if others:
        modifiers.append(nearest(scheme=others, targets="re:.*[kv]_proj$"))
    tiny.run(tiny.llama(), *modifiers)
    mixtures = [text for text in warned if "served as one" in text]
    assert len(mixtures) == len(said)
    assert all(words in text for words, text in zip(said, mixtures, strict=True))


class Scaling(Modifier):
    """An earlier modifier that changes a weight once its calibration begins."""

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        state.model.model.layers[0].self_attn.k_proj.weight.data *= 10


@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_a_global_scale_is_that_of_the_weights_when_quantized(
    modifier: Any,
) -> None:
    quantizing = modifier(scheme="NVFP4A16", ignore=["lm_head"])
    model = tiny.run(tiny.llama(), Scaling(), quantizing)
    amax = 10 * float(tiny.llama().model.layers[0].self_attn.k_proj.weight.detach().abs().max())
    for part in ("q_proj", "k_proj", "v_proj"):
        found = float(model.model.layers[0].self_attn.get_submodule(part).weight_global_scale)
        assert found == pytest.approx(448 * 6 / amax, rel=1e-6)


@pytest.mark.parametrize("pipeline", ["independent", "basic", "layer_sequential"])
@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_cache_scales_cover_the_keys_and_values_of_real_tokens(
    modifier: Any, pipeline: str
) -> None:
    data = tiny.padded(tiny.batches(tokens=6), 40)
    cache = {**FP8, "observer": "static_minmax"}
    fields: dict[str, Any] = {"scheme": "W8A16", "ignore": ["lm_head"], "kv_cache_scheme": cache}
    model = tiny.run(tiny.llama(), modifier(**fields), data=data, pipeline=pipeline)
    original = states(data)
    for layer in range(2):
        attention = model.model.layers[layer].self_attn
        for name in "kv":
            expected = float(original[name][layer].abs().max()) / 448
            found = float(getattr(attention, f"{name}_scale"))
            # GPTQ observes behind weights of eight bits, rounding behind those of the original
            exact = modifier is QuantizationModifier
            assert found == pytest.approx(expected, rel=1e-5 if exact else 0.05)
        assert not hasattr(attention, "q_scale")


def test_cache_scales_can_be_kept_per_head() -> None:
    data = tiny.batches()
    cache = {**INT8, "strategy": "attn_head", "observer": "static_minmax"}
    model = tiny.run(tiny.llama(), nearest(kv_cache_scheme=cache, ignore=[]), data=data)
    for name, layers in states(data).items():
        for layer, values in enumerate(layers):
            expected = values.abs().amax(dim=(1, 2)).reshape(2, 1, 1) / 127.5
            found = getattr(model.model.layers[layer].self_attn, f"{name}_scale")
            assert torch.allclose(found, expected, rtol=1e-5)


def unchanged(model: Any, before: Any) -> bool:
    """Whether the parameters are those of ``before``, and no run left a trace."""
    pairs = zip(model.state_dict().items(), before.state_dict().items(), strict=True)
    same = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    return same and tiny.traces(model) == {}


REFUSED: dict[str, tuple[list[Modifier], type[Exception], str]] = {
    "two modifiers on one module": (
        [nearest(scheme="W8A16"), GPTQModifier(scheme="W4A16", targets=["re:.*down_proj"])],
        TargetError,
        r"model\.layers\.0\.mlp\.down_proj is quantized already",
    ),
    "a target that matches nothing": (
        [nearest(scheme="W8A16", targets=["Linar"])],
        TargetError,
        "Linear",
    ),
    "groups that do not divide": (
        [
            nearest(
                config_groups={
                    "g": {
                        "targets": ["re:.*up_proj"],
                        "weights": {"num_bits": 4, "strategy": "group", "group_size": 48},
                    }
                }
            )
        ],
        TargetError,
        "64 columns, groups of 48",
    ),
    "inputs of an embedding": (
        [nearest(scheme="W8A8", targets=["Linear", "Embedding"])],
        TargetError,
        "row numbers",
    ),
    "attention of some layers": (
        [
            nearest(
                config_groups={
                    "g": {"targets": [r"re:.*\.0\.self_attn$"], "input_activations": FP8}
                }
            )
        ],
        TargetError,
        r"model\.layers\.1\.self_attn",
    ),
    "attention twice": (
        [
            nearest(config_groups=ATTENTION, ignore=[]),
            QuantizationModifier(kv_cache_scheme=FP8),
        ],
        TargetError,
        r"model\.layers\.0\.self_attn is quantized already",
    ),
    "a cache twice": (
        [nearest(kv_cache_scheme=FP8), nearest(kv_cache_scheme={"num_bits": 8, "type": "int"})],
        TargetError,
        r"keys and values of model\.layers\.0\.self_attn are quantized by another modifier",
    ),
    "a cache, then attention": (
        [nearest(kv_cache_scheme=FP8, ignore=[]), nearest(config_groups=ATTENTION, ignore=[])],
        TargetError,
        r"keys and values of model\.layers\.0\.self_attn are quantized by another modifier",
    ),
    "two schemes for one cache": (
        [
            nearest(
                config_groups=ATTENTION,
                kv_cache_scheme={"num_bits": 4, "type": "int", "strategy": "tensor"},
                ignore=[],
            )
        ],
        TargetError,
        r"self_attn and kv_cache_scheme quantize its keys and values differently",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_calibration_leaves_the_model(case: str) -> None:
    modifiers, error, message = REFUSED[case]
    model = tiny.llama()
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        tiny.run(model, *(each.model_copy(deep=True) for each in modifiers))
    assert unchanged(model, before)
    assert model.config._attn_implementation == before.config._attn_implementation


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_bad_weights_are_refused_by_name_before_calibration(modifier: Any, bad: float) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = bad
    session = active_session()
    session.reset()
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj"):
        session.initialize(model=model, recipe=modifier(scheme="W8A16", ignore=["lm_head"]))
    session.reset()
    assert tiny.traces(model) == {}


def test_bad_activations_are_named_and_nothing_is_left() -> None:
    model = tiny.llama()
    model.model.layers[1].input_layernorm.weight.data[3] = 3e38  # finite, but times an input
    before = copy.deepcopy(model)
    modifier = nearest(scheme="FP8", kv_cache_scheme=FP8)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.self_attn"):
        tiny.run(model, modifier)
    assert unchanged(model, before)
    assert model.config._attn_implementation == before.config._attn_implementation


@pytest.mark.parametrize("kind", ["cache", "attention"])
def test_a_run_that_breaks_off_takes_its_taps_from_attention(kind: str) -> None:
    class Breaking(QuantizationModifier):
        def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    fields = {"kv_cache_scheme": FP8} if kind == "cache" else {"config_groups": ATTENTION}
    model = tiny.llama()
    before = copy.deepcopy(model)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(model, Breaking(**fields))
    assert unchanged(model, before)
    data = tiny.batches()
    assert torch.equal(tiny.logits(model, data), tiny.logits(before, data))
    assert model.config._attn_implementation == before.config._attn_implementation
    tiny.run(model, nearest(ignore=[], **fields))
    assert float(model.model.layers[0].self_attn.k_scale) > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Nothing says how to quantize.*another modifier.*move it here"),
        ({"scheme": "W4A16", "config_groups": ATTENTION}, "both set"),
        ({"scheme": "W4A17"}, "W4A16"),
        ({"scheme": "W4A16", "observer": {"weights": "mse"}, "weight_observer": "mse"}, "observer"),
        ({"scheme": "W4A16", "schemes": "W4A16"}, "no such field"),
    ],
)
def test_contradicting_fields_are_refused_without_a_model(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        QuantizationModifier(**fields)


def test_a_named_head_is_untied_unless_it_is_to_stay_tied() -> None:
    model = tiny.llama(tie_word_embeddings=True)
    named = nearest(scheme="W8A16", targets=["lm_head"], ignore=[])
    with pytest.raises(TargetError, match="share one weight"):
        tiny.run(model, named, tie_word_embeddings=True)
    assert tiny.traces(model) == {}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for given in ({}, {"tie_word_embeddings": False}):
        untied = tiny.run(
            tiny.llama(tie_word_embeddings=True),
            nearest(scheme="W8A16", targets=["lm_head"], ignore=[]),
            **given,
        )
        assert untied.config.tie_word_embeddings is False
        assert untied.lm_head.weight_scale.shape == (96, 1)
        original = tiny.llama(tie_word_embeddings=True).model.embed_tokens.weight
        assert torch.equal(untied.model.embed_tokens.weight, original)


@pytest.mark.parametrize(
    "modifiers",
    [
        [nearest(config_groups=ATTENTION)],
        [nearest(scheme="FP8", kv_cache_scheme={**INT8, "symmetric": False})],
        [nearest(scheme="MXFP4", targets=["re:.*mlp.*"], observer={"weights": "memoryless_mse"})],
        [
            nearest(scheme="W8A16", targets=["re:.*mlp.*"]),
            nearest(scheme="W4A16", targets=["re:.*attn.*_proj"], bypass_divisibility_checks=True),
        ],
        [
            nearest(
                config_groups={
                    "FP8_DYNAMIC": ["re:.*mlp.*"],
                    "own": {
                        "targets": ["re:.*attn.*_proj"],
                        "weights": {
                            "num_bits": 8,
                            "type": "float",
                            "strategy": "block",
                            "block_structure": [32, 32],
                        },
                    },
                }
            )
        ],
    ],
)
def test_what_is_saved_of_a_recipe_loads_as_an_equal_one(
    modifiers: list[QuantizationModifier],
) -> None:
    recipe = Recipe.from_modifiers(modifiers)
    read = Recipe.create_instance(recipe.yaml())
    assert read == recipe
    for ours, theirs in zip(recipe.modifiers, read.modifiers, strict=True):
        assert isinstance(ours, QuantizationModifier)
        assert isinstance(theirs, QuantizationModifier)
        assert ours.resolve_quantization_config() == theirs.resolve_quantization_config()
