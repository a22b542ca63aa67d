# SPDX-License-Identifier: Apache-2.0
"""AWQ on whole models: the function stays, quantization gets better, wrong recipes end."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.support import planted
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as mixtures
from tests.support.thinned import thinned
from torch import Tensor
from torch.nn import Module

from llmcompressor import plan
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY, AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model
from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import (
    get_layer_mappings_from_model as norm_mappings,
)
from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY
from llmcompressor.recipe import Recipe

WEIGHTS: dict[str, Any] = {
    "num_bits": 3,
    "strategy": "group",
    "group_size": 32,
    "symmetric": False,
}
GROUPS: dict[str, Any] = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}


def rounding(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"config_groups": GROUPS, "ignore": ["lm_head"], **fields})


def far(model: Module, reference: Tensor, data: Any) -> float:
    change = tiny.logits(model, data) - reference
    return float(change.square().mean() / reference.square().mean())


def scaled_only(model: Module, modifier: AWQModifier, **arguments: Any) -> None:
    """AWQ's part of a recipe alone: what comes behind it marks its modules and does nothing."""
    tiny.run(model, modifier, Marking(config_groups=GROUPS, ignore=["lm_head"]), **arguments)


class Marking(QuantizationModifier):
    """Says how weights are to be rounded, and leaves them."""

    def on_sequential_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def on_calibration_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""
        self.remove_hooks()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["statistics", "output"])
def test_the_model_computes_what_it_did(loss: Any, dtype: torch.dtype) -> None:
    model = tiny.llama(dtype, num_key_value_heads=4)
    reference = tiny.logits(model, tiny.batches())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    scaled_only(model, AWQModifier(loss=loss, clip=False, n_grid=6))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert len(changed) > 2 * 6
    assert far(model, reference, tiny.batches()) < (1e-10 if dtype == torch.float32 else 1e-3)
    assert tiny.traces(model) == {}


@pytest.mark.slow
def test_it_undoes_planted_outliers(pico: Path) -> None:
    data = planted.text(pico)
    calibration, held_out = data[:6], data[6:]
    reference = tiny.logits(planted.planted(pico, 1.0), held_out)
    recipe = {"scheme": "W4A16_ASYM", "targets": "Linear"}
    errors = {}
    for name, before in {
        "rounded": [],
        "scaled": [AWQModifier(clip=False, n_grid=10)],
        "scaled and clipped": [AWQModifier(n_grid=10)],
    }.items():
        model = planted.planted(pico, 60.0)
        tiny.run(model, *before, rounding(config_groups=None, **recipe), data=calibration)
        errors[name] = far(model, reference, held_out)
    assert errors["scaled"] < 0.6 * errors["rounded"]
    assert errors["scaled and clipped"] < errors["scaled"]


def test_the_published_loss_beats_rounding_too() -> None:
    errors = {}
    for name, before in {"rounded": [], "scaled": [AWQModifier(clip=False, loss="output")]}.items():
        model = tiny.llama()
        with torch.no_grad():  # outliers in two channels
            for layer in model.model.layers:
                layer.post_attention_layernorm.weight[[3, 40]] *= 30
                for reader in (layer.mlp.gate_proj, layer.mlp.up_proj):
                    reader.weight[:, [3, 40]] /= 30
        reference = tiny.logits(model, tiny.batches())
        tiny.run(model, *before, rounding())
        errors[name] = far(model, reference, tiny.batches())
    assert errors["scaled"] < 0.9 * errors["rounded"]


def rounded_by_hand(weight: Tensor) -> Tensor:
    """Three bits with a zero point between the extremes of 32 columns, as readers round it."""
    groups = weight.reshape(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    scale = (high.clamp(min=0) - low) / 7
    zero = (-4 - low / scale).clamp(-4, 3).round()
    codes = (groups / scale + zero).clamp(-4, 3).round()
    return ((codes - zero) * scale).reshape(weight.shape)


@pytest.mark.parametrize("duo", [True, False])
def test_the_published_search_is_that_of_a_loop(duo: bool) -> None:
    """Every candidate's output of the common parent, and the scale of the best one applied."""
    points, model = 6, tiny.llama()
    with torch.no_grad():  # an outlier, so that something is to be scaled
        model.model.layers[0].post_attention_layernorm.weight[[3, 40]] *= 8
    layer = model.model.layers[0]
    inputs = tiny.inputs_of(model, "model.layers.0.mlp", tiny.batches())
    norm, readers = layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)
    weights = [one.weight.detach().clone() for one in readers]
    before, expected = norm.weight.detach().clone(), layer.mlp(inputs).detach()

    size = inputs.abs().mean(0)
    prominence = torch.cat(weights).abs().reshape(-1, 2, 32)
    prominence = (prominence / (prominence.amax(-1, keepdim=True) + 1e-6)).reshape(-1, 64).mean(0)
    ratios = [i / (points - 2) for i in range(points - 1)] if duo else []
    grid = [size.clone().pow(0.0)] if duo else []
    grid += [size**r / (prominence ** (1 - r) + 1e-4) for r in ratios]
    grid += [] if duo else [size ** (i / (points - 1)) for i in range(points)]
    errors = []
    for number, scale in enumerate(grid):
        floored = scale.clamp(min=1e-4)
        grid[number] = floored / (floored.max() * floored.min()).sqrt()
        for one, weight in zip(readers, weights, strict=True):
            one.weight.data = rounded_by_hand(weight * grid[number]) / grid[number]
        errors.append(float((layer.mlp(inputs).detach() - expected).square().mean()))
    for one, weight in zip(readers, weights, strict=True):
        one.weight.data = weight.clone()
    best = grid[errors.index(min(errors))]
    assert errors[0] > 1.05 * min(errors)

    mapping = AWQMapping(
        "re:.*layers.0.post_attention_layernorm$",
        ["re:.*layers.0.mlp.gate_proj$", "re:.*layers.0.mlp.up_proj$"],
    )
    fields: dict[str, Any] = {"mappings": [mapping], "loss": "output", "clip": False}
    scaled_only(model, AWQModifier(n_grid=points, duo_scaling=duo, **fields))
    torch.testing.assert_close(norm.weight * best, before, rtol=1e-4, atol=1e-6)
    for one, weight in zip(readers, weights, strict=True):
        torch.testing.assert_close(one.weight, weight * best, rtol=1e-4, atol=1e-6)


@cache
def plain_run() -> Any:
    return tiny.run(tiny.llama(), AWQModifier(n_grid=4), rounding())


@pytest.mark.parametrize("pipeline", ["independent", "sequential", "basic", "layer_sequential"])
def test_every_pipeline_gives_the_same_model(pipeline: str) -> None:
    found = tiny.run(tiny.llama(), AWQModifier(n_grid=4), rounding(), pipeline=pipeline)
    for one, other in zip(found.parameters(), plain_run().parameters(), strict=True):
        torch.testing.assert_close(one, other)


def choices(modifier: AWQModifier, loss: str) -> dict[str, Any]:
    """Per set the candidate that was taken, and its error where that is the parent's."""
    keys = ["ratio", "duo", *(["error", "error_unscaled"] if loss == "output" else [])]
    return {
        name: {key: one[key] if one[key] is None else round(one[key], 6) for key in keys}
        for name, one in modifier.report().items()
        if "ratio" in one
    }


STOPS = {
    "parts": ["LlamaAttention", "LlamaMLP"],
    "attention": ["LlamaAttention"],
    "an MLP": ["re:.*layers.1.mlp$", "re:.*layers.0$"],
    "Linears": ["Linear"],
    "some Linears": ["re:.*(k|down)_proj$"],
    "Linears and parts": ["re:.*(k|o)_proj$", "LlamaMLP"],
    "the model": ["LlamaModel"],
}


@cache
def of_whole_blocks(loss: Any) -> tuple[dict[str, Any], Any]:
    awq = AWQModifier(loss=loss, n_grid=4)
    model = tiny.llama(num_key_value_heads=4)
    tiny.run(model, awq, rounding(), sequential_granularity="block")
    assert any(record.get("ratio") for record in awq.report().values())
    return choices(awq, loss), model


@pytest.mark.parametrize(
    ("stops", "loss", "pipeline"),
    thinned(STOPS, itertools.product(["statistics", "output"], ["independent", "sequential"])),
)
def test_stops_within_blocks_give_the_scales_of_whole_blocks(
    stops: str, loss: Any, pipeline: str
) -> None:
    """What GPTQ makes of them behind it is another matter: it goes by the stops."""
    expected, whole = of_whole_blocks(loss)
    model, awq = tiny.llama(num_key_value_heads=4), AWQModifier(loss=loss, n_grid=4)
    tiny.run(model, awq, rounding(), pipeline=pipeline, sequential_targets=STOPS[stops])
    assert choices(awq, loss) == expected
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_padding_does_not_count() -> None:
    plain, padded = tiny.llama(), tiny.llama()
    scaled_only(plain, AWQModifier(n_grid=4, clip=False))
    scaled_only(padded, AWQModifier(n_grid=4, clip=False), data=tiny.padded(tiny.batches(), by=9))
    for one, other in zip(plain.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_search_rounds_as_the_scheme_does() -> None:
    """On a grid that holds every weight exactly nothing is to be gained, and nothing is done."""
    model = tiny.llama()
    for linear in tiny.linears(model).values():
        linear.weight.data.copy_(torch.where(linear.weight > 0, 7 / 16, 0.0))
    norm = model.model.layers[0].input_layernorm.weight.clone()
    tiny.run(model, AWQModifier(duo_scaling=False, n_grid=6), rounding())
    assert torch.equal(model.model.layers[0].input_layernorm.weight, norm)


def test_what_was_done_is_reported() -> None:
    model, modifier = tiny.llama(), AWQModifier(n_grid=4)
    tiny.run(model, modifier, rounding())
    record = modifier.report()["model.layers.0.mlp.up_proj"]
    assert record["readers"] == ["model.layers.0.mlp.down_proj"]
    assert record["tokens"] == 8 * 2 * 24
    assert 0 < record["error"] <= record["error_unscaled"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("ignore: [lm_head]", "ignore is a field of the form in which it quantizes too"),
        ("targets: Linear, ignore: [lm_head]", "targets and ignore are fields of the form"),
        ("ignore: [lm_head], scheme: null", "ignore and scheme are fields of the form"),
    ],
)
def test_quantizing_fields_that_say_nothing_are_refused(fields: str, said: str) -> None:
    """The recipe has no QuantizationModifier, so that no error is to be of one."""
    behind = "HQQModifier: {scheme: W4A16, ignore: [lm_head]}"
    with pytest.raises(RecipeError, match=f"AWQModifier: {said}") as caught:
        Recipe.create_instance(f"modifiers: {{AWQModifier: {{{fields}}}, {behind}}}")
    assert "QuantizationModifier" not in str(caught.value)
    assert "behind it" in caught.value.remedy


def test_mappings_read_back() -> None:
    mapping = AWQMapping("re:.*up_proj$", ["re:.*down_proj$"])
    recipe = Recipe.create_instance([AWQModifier(mappings=[mapping]), rounding()])
    assert Recipe.create_instance(recipe.yaml()) == recipe


def test_without_a_modifier_that_quantizes_it_is_refused() -> None:
    for recipe in ([AWQModifier()], "modifiers:\n  AWQModifier: {n_grid: 8}\n"):
        with pytest.raises(ValueError, match="no modifier that quantizes stands after"):
            Recipe.create_instance(recipe)
    with pytest.raises(ValueError, match="no modifier that quantizes stands after AWQModifier"):
        Recipe.create_instance([rounding(), AWQModifier()])


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (rounding(ignore=["re:.*layers.*"]), "nothing to work for"),
        (
            QuantizationModifier(scheme="FP8", targets="Linear", ignore=["lm_head"]),
            "duo_scaling compares the weights of a group",
        ),
    ],
    ids=["other modules", "one scale"],
)
def test_what_stands_behind_it_is_looked_at_before_any_pass(
    behind: QuantizationModifier, said: str, tmp_path: Path
) -> None:
    model, batches = tiny.llama(), tiny.batches()
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    first = SparseGPTModifier(sparsity=0.5, targets=["Linear"], ignore=["lm_head"])
    with pytest.raises(ValueError, match=said):
        tiny.run(model, first, AWQModifier(), behind.model_copy(deep=True))
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    model.save_pretrained(tmp_path / "model")
    rows = [{"input_ids": row.tolist()} for batch in batches for row in batch["input_ids"]]
    found = plan(
        tmp_path / "model",
        [AWQModifier(), behind.model_copy(deep=True)],
        Dataset.from_list(rows),
        measure=False,
    )
    assert [problem.where for problem in found.problems] == ["AWQModifier"]
    assert said in found.problems[0].message


def test_registered_mappings_are_those_of_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = AWQMapping("re:.*v_proj$", ["re:.*o_proj$"])
    monkeypatch.setitem(AWQ_MAPPING_REGISTRY, "LlamaForCausalLM", [mapping])
    with pytest.raises(TargetError, match=r"None of the mappings.*v_proj has .* rows and .*o_proj"):
        tiny.run(tiny.llama(), AWQModifier(), rounding())
    monkeypatch.setitem(AWQ_MAPPING_REGISTRY, "OtherForCausalLM", [mapping])
    monkeypatch.delitem(AWQ_MAPPING_REGISTRY, "LlamaForCausalLM")
    tiny.run(tiny.llama(), AWQModifier(), rounding())


def test_mappings_of_a_model_are_its_class_s_or_are_found_in_it() -> None:
    model = tiny.llama().to("meta")
    known = AWQ_MAPPING_REGISTRY["LlamaForCausalLM"]
    assert get_layer_mappings_from_model(model) == known
    assert norm_mappings(model) == MAPPINGS_REGISTRY["LlamaForCausalLM"]
    model.__class__ = type("OfOnesOwn", (type(model),), {})
    found = get_layer_mappings_from_model(model)
    assert len(found) == len(model.model.layers) * (len(known) - 1)  # heads share values
    by_norm = [one for one in found if one.smooth_layer.endswith("norm")]
    assert [vars(one) for one in norm_mappings(model)] == [
        {"smooth_layer": one.smooth_layer, "balance_layers": one.balance_layers} for one in by_norm
    ]


@pytest.mark.parametrize(("loss", "every"), thinned(["statistics", "output"], [True, False]))
def test_what_a_mixture_reads_is_scaled(loss: Any, every: bool) -> None:
    """Large channels before router and experts: their weights are rounded better than without."""
    data, errors = tiny.batches(), {}
    for name in ("rounded", "scaled"):
        model = mixtures.mixture("qwen3_moe", num_experts=4)
        layers = [layer.post_attention_layernorm for layer in model.model.layers]
        with torch.no_grad():
            for norm in layers:
                norm.weight[:3] *= 30
            for block in mixtures.blocks(model):  # the large channels do not decide it all
                block.experts.gate_up_proj[:, :, :3] /= 10
        before = [norm.weight.clone() for norm in layers]
        reference = tiny.logits(model, data)
        awq = [AWQModifier(loss=loss, n_grid=8, clip=False)] if name == "scaled" else []
        rounded = rounding(ignore=["lm_head", "re:.*gate$", "re:.*self_attn.*"])
        tiny.run(model, *awq, rounded, data=data, moe_calibrate_all_experts=every)
        errors[name] = far(model, reference, data)
        scaled = [
            not torch.equal(*pair) for pair in zip(before, (n.weight for n in layers), strict=True)
        ]
        assert all(scaled) if awq else not any(scaled)
    assert errors["scaled"] < 0.5 * errors["rounded"]
