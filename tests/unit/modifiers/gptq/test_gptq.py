# SPDX-License-Identifier: Apache-2.0
"""GPTQ on a whole model: quality, records, fields, and what it does when things go wrong."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from tests.support import tiny_llama as tiny
from tests.support.presets import LIKE_OTHERS, USUAL
from tests.support.thinned import thinned
from torch import Tensor
from torch.nn import Linear

from llmcompressor import callbacks, create_session
from llmcompressor.checkpoint.packing import compress, quantized_modules
from llmcompressor.core.state import Calibration, State
from llmcompressor.errors import NonFiniteError, RecipeError, TargetError
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.awq.base import AWQModifier
from llmcompressor.modifiers.gptq import GPTQModifier, base
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.numerics import gptq as gptq_numerics
from llmcompressor.numerics import gram
from llmcompressor.numerics.hessian import SingularHessianError
from llmcompressor.observers import input_statistics
from llmcompressor.pipelines.watchers import reference_input
from llmcompressor.quantization import column_solver
from llmcompressor.recipe import Recipe
from llmcompressor.schemes.presets import PRESETS

WEIGHTS: dict[str, Any] = {"num_bits": 3, "strategy": "group", "group_size": 32}
GROUPS: dict[str, Any] = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def gptq(**fields: Any) -> GPTQModifier:
    """Three bits in groups of 32, everything but the head, one stream."""
    given = {"ignore": ["lm_head"], "asymmetric": False, **fields}
    if "scheme" not in given:
        given.setdefault("config_groups", GROUPS)
    return GPTQModifier(**given)


def error(model: Any, reference: Tensor) -> float:
    change = tiny.logits(model, tiny.batches()) - reference
    return float(change.square().mean() / reference.square().mean())


def test_modules_that_were_solved_are_not_rounded_once_more(warned: list[str]) -> None:
    """Where their owner is told of them again: their inputs' moments are gone by then."""
    found = []
    for times in (1, 2):
        model = tiny.llama()
        with create_session() as session, torch.no_grad():
            session.initialize(recipe=gptq(), model=model)
            callbacks.calibration_epoch_start()
            for batch in tiny.batches():
                model(**batch)
            for _ in range(times):
                callbacks.sequential_epoch_end(tiny.linears(model).values())
            callbacks.calibration_epoch_end()
            session.finalize()
        found.append(tiny.logits(model, tiny.batches()))
    assert torch.equal(*found)
    assert not any("no calibration token" in line for line in warned)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return tiny.logits(tiny.llama(), tiny.batches())


@pytest.fixture(scope="module")
def rounding_error(reference: Tensor) -> float:
    nearest = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
    return error(tiny.run(tiny.llama(), nearest), reference)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("actorder", [None, "static"])
def test_the_model_comes_closer_to_the_original_than_by_rounding(
    asymmetric: bool, actorder: str | None, reference: Tensor, rounding_error: float
) -> None:
    model = tiny.run(tiny.llama(), gptq(asymmetric=asymmetric, actorder=actorder))
    assert error(model, reference) < 0.85 * rounding_error


@pytest.mark.parametrize("scheme", [name for name in ("MXFP4A16", "MXFP6A16") if name in PRESETS])
def test_floats_come_closer_than_by_rounding_too(scheme: str, reference: Tensor) -> None:
    nearest = QuantizationModifier(scheme=scheme, targets="Linear", ignore=["lm_head"])
    rounded = error(tiny.run(tiny.llama(), nearest), reference)
    solved = error(tiny.run(tiny.llama(), gptq(scheme=scheme)), reference)
    assert solved < 0.9 * rounded


@pytest.mark.parametrize("pipeline", ["basic", "layer_sequential"])
def test_every_pipeline_gives_it_its_inputs(
    pipeline: str, reference: Tensor, rounding_error: float
) -> None:
    model = tiny.run(tiny.llama(), gptq(), pipeline=pipeline)
    assert error(model, reference) < 0.85 * rounding_error


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *thinned(USUAL, FLOATS),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in itertools.product(LIKE_OTHERS, FLOATS)
        ),
    ],
)
def test_the_file_holds_the_weights_that_are_in_memory(name: str, dtype: torch.dtype) -> None:
    model = tiny.run(tiny.llama(dtype, num_hidden_layers=1), gptq(scheme=name), data=DATA)
    entries = quantized_modules(model)
    assert len(entries) == 7
    for entry in entries:
        own = {key: tensor.data for key, tensor in entry.module.named_parameters(recurse=False)}
        reader = BaseCompressor.get_value_from_registry(entry.scheme.format)
        decoded = reader.decompress(compress(entry, own), entry.scheme)["weight"]
        assert torch.equal(decoded.to(dtype), entry.module.weight)


DATA = tiny.batches(number=1)


def test_every_module_is_recorded() -> None:
    modifier = gptq()
    model = tiny.run(tiny.llama(), modifier)
    assert list(modifier.records) == list(tiny.linears(model))
    for record in modifier.records.values():
        assert record.tokens == 8 * 2 * 24
        assert record.dampening == 0.01
        assert record.loss is not None
        assert record.loss > 0
    assert json.loads(json.dumps(modifier.report(), allow_nan=False)) == modifier.report()


def solved(**fields: Any) -> tuple[GPTQModifier, dict[str, Tensor]]:
    modifier = gptq(**fields)
    model = tiny.run(tiny.llama(num_hidden_layers=1), modifier, data=DATA)
    return modifier, {name: module.weight.detach() for name, module in tiny.linears(model).items()}


def test_the_same_input_is_counted_once_and_solved_together() -> None:
    modifier = gptq()
    tiny.run(tiny.llama(), modifier)
    losses = {name: record.loss for name, record in modifier.records.items()}
    layer = "model.layers.0."
    q, k, o = (losses[f"{layer}self_attn.{part}_proj"] for part in "qko")
    assert q == k
    assert losses[f"{layer}mlp.gate_proj"] == losses[f"{layer}mlp.up_proj"]
    assert len({q, o, losses[f"{layer}mlp.up_proj"], losses[f"{layer}mlp.down_proj"]}) == 4


def test_padding_changes_nothing() -> None:
    data = tiny.batches()
    plain, with_padding = gptq(), gptq()
    a = tiny.run(tiny.llama(), plain, data=data)
    b = tiny.run(tiny.llama(), with_padding, data=tiny.padded(data, 16))
    for name, record in plain.records.items():
        assert with_padding.records[name].tokens == record.tokens
    for one, other in zip(tiny.linears(a).values(), tiny.linears(b).values(), strict=True):
        # attention over a longer row sums in another order: single codes may fall the other way
        moved = ~torch.isclose(one.weight, other.weight, rtol=1e-3)
        assert float(moved.float().mean()) < 0.02


@pytest.mark.parametrize("asymmetric", [True, False])
def test_scales_that_are_fitted_again_lower_the_loss(asymmetric: bool, reference: Tensor) -> None:
    chosen, fitted = (gptq(asymmetric=asymmetric, refit_scales=wanted) for wanted in (False, True))
    a = tiny.run(tiny.llama(), chosen)
    b = tiny.run(tiny.llama(), fitted)
    assert error(b, reference) < error(a, reference)
    first = next(iter(chosen.records))
    assert fitted.records[first].loss < chosen.records[first].loss


NARROW: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
"""Heads of so few rows that q, k and v together have half as many as columns."""


@pytest.mark.parametrize(
    "named",
    [
        {"weight_observer": "memoryless_minmax"},
        {"observer": {"weights": "memoryless_minmax"}},
        {
            "config_groups": {
                "all": {"targets": ["Linear"], "weights": WEIGHTS | {"observer": "mse"}}
            }
        },
    ],
)
def test_scales_are_searched_unless_an_observer_is_named(
    named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[bool] = []
    plain = base.solve

    def recording(problems: Any, options: Any) -> Any:
        searched.extend(one.searches for one in problems)
        return plain(problems, options)

    monkeypatch.setattr(base, "solve", recording)
    tiny.run(tiny.llama(), gptq())
    assert searched
    assert all(searched)
    searched.clear()
    tiny.run(tiny.llama(), gptq(**named))
    assert searched
    assert not any(searched)


def test_a_search_for_scales_brings_the_model_closer(reference: Tensor) -> None:
    found = {}
    for observer in (None, "memoryless_minmax"):
        model = tiny.run(tiny.llama(), gptq(weight_observer=observer))
        found[observer] = error(model, reference)
    assert found[None] < found["memoryless_minmax"]


@pytest.mark.parametrize("offload", [False, True])
def test_what_outputs_lack_corrects_as_the_cross_product_does(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the Linears with one input are solved apart, each for its own rows."""
    four = {**WEIGHTS, "num_bits": 4}
    groups = {
        "three": {"targets": ["re:.*(q|v|o|gate|up|down)_proj"], "weights": WEIGHTS},
        "four": {"targets": ["re:.*k_proj"], "weights": four},
    }
    counted: list[int] = []
    add = gram.add_residual_product

    def add_and_count(missing_RC: Tensor, *tensors: Tensor) -> None:
        counted.append(len(missing_RC))
        add(missing_RC, *tensors)

    def run(*, missing: bool) -> dict[str, Linear]:
        if not missing:
            monkeypatch.setattr(input_statistics, "prefers_output_residual", lambda *_: False)
        modifier = gptq(asymmetric=True, config_groups=groups, offload_hessians=offload)
        return tiny.linears(tiny.run(tiny.llama(**NARROW), modifier))

    monkeypatch.setattr(input_statistics, "add_residual_product", add_and_count)
    found = run(missing=True)
    assert set(counted) == {32, 64}, "of q, k and v together, and of down_proj"
    for name, module in run(missing=False).items():
        close = module.weight.isclose(found[name].weight, rtol=1e-4)
        assert float(close.float().mean()) > 0.99, name


@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_number_of_threads_never_changes_a_result(asymmetric: bool) -> None:
    """Matrices large enough to be split: where LAPACK would round otherwise, too."""
    states, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            model = tiny.llama(hidden_size=256, intermediate_size=640, num_hidden_layers=1)
            tiny.run(model, gptq(asymmetric=asymmetric))
            assert torch.get_num_threads() == number
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    finally:
        torch.set_num_threads(threads)
    first, second = states
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def with_dead_channels() -> Any:
    """A model with 32 of 64 channels that are zero before the Linears of its second layer."""
    model = tiny.llama()
    model.model.layers[1].input_layernorm.weight.data[8:40] = 0
    return model


def test_columns_without_inputs_are_kept_and_told(warned: list[str]) -> None:
    model, modifier = with_dead_channels(), gptq()
    before = model.model.layers[1].self_attn.q_proj.weight[:, 8:40].detach().clone()
    tiny.run(model, modifier)
    after = model.model.layers[1].self_attn.q_proj.weight[:, 8:40].detach()
    assert float((after - before).norm() / before.norm()) < 0.3
    found = modifier.report()
    names = [name for name, record in found.items() if record["dead_columns"]]
    assert names == [f"model.layers.1.self_attn.{one}_proj" for one in "qkv"]
    assert {found[name]["dead_columns"] for name in names} == {32}
    for name in names:
        assert sum(f"{name}: the inputs of 32 of its 64 columns" in line for line in warned) == 1


def test_dampening_is_raised_for_fewer_tokens_than_columns(warned: list[str]) -> None:
    modifier = gptq(dampening_frac=0.0)
    tiny.run(tiny.llama(), modifier, data=tiny.batches(tokens=4, number=1))
    raised = {name for name, record in modifier.records.items() if record.dampening}
    assert raised
    for name in raised:
        assert any(name in line and "dampening" in line for line in warned)


def test_what_cannot_be_factorized_is_rounded_and_recorded(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise SingularHessianError("no")

    for solver in (gptq_numerics, column_solver):
        monkeypatch.setattr(solver, "factorize_with_rising_dampening", refuse)
    modifier = gptq()
    model = tiny.run(tiny.llama(), modifier)
    nearest = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
    rounded = tiny.run(tiny.llama(), nearest)
    for name, module in tiny.linears(model).items():
        assert modifier.records[name].dampening is None
        assert any(name in line and "rounded to nearest" in line for line in warned)
        assert torch.equal(module.weight, rounded.get_submodule(name).weight)


@pytest.mark.parametrize(
    ("kind", "fields", "instead"),
    [
        (GPTQModifier, {"sequential": True}, 'pipeline="basic"'),
        (GPTQModifier, {"num_calibration_steps": 8}, "num_calibration_samples"),
        (GPTQModifier, {"sequential_targets": None}, None),
        (GPTQModifier, {}, None),
        (QuantizationModifier, {"sequential_update": False}, 'pipeline="basic"'),
        (QuantizationModifier, {"dampening_frac": 0.1}, "GPTQModifier"),
        (AWQModifier, {"sequential_targets": ["LlamaDecoderLayer"]}, "--sequential-targets"),
    ],
)
def test_a_field_that_does_nothing_says_what_does(
    kind: type[Modifier], fields: dict[str, Any], instead: str | None, warned: list[str]
) -> None:
    made = kind.from_fields(config_groups=GROUPS, ignore=["lm_head"], **fields)
    tiny.run(tiny.llama(), *made)
    said = [line for line in warned if "has no effect" in line]
    assert len(said) == (instead is not None)
    if instead is not None:
        assert next(iter(fields)) in said[0]
        assert instead in said[0]


@pytest.mark.parametrize(
    ("shape", "other", "used"),
    [
        ((2, 5, 4), (2, 5, 4), True),
        ((10, 4), (10, 4), True),
        ((7, 4), (6, 4), False),
        ((7, 4), (7, 4), False),
    ],
    ids=["batch", "flattened batch", "other number of tokens", "as many tokens, but routed"],
)
def test_two_streams_meet_only_where_tokens_are_the_same(
    shape: tuple[int, ...], other: tuple[int, ...], used: bool
) -> None:
    module, reference = Linear(4, 4), torch.zeros(other)
    state = State(
        calibration=Calibration(reference_inputs={module: reference}),
        batch_data={"input_ids": torch.zeros(2, 5, dtype=torch.int64)},
    )
    found = reference_input(module, torch.zeros(shape), state)
    assert (found is reference) == used


def with_spare(**changes: Any) -> Any:
    """A model with a Linear that no forward ever calls."""
    model = tiny.llama(**changes)
    torch.manual_seed(3)
    model.model.layers[1].mlp.spare = Linear(64, 32)
    return model


def static(bits: int = 8, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "strategy": "channel"}
    inputs = {"num_bits": bits, "strategy": "tensor", "observer": "static_minmax", **fields}
    return {"all": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


def test_fused_parts_share_one_global_scale() -> None:
    model = tiny.run(tiny.llama(), gptq(scheme="NVFP4"))
    before: Any = tiny.llama()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for parts in (
            [f"{prefix}self_attn.{one}_proj" for one in "qkv"],
            [f"{prefix}self_attn.o_proj"],
            [f"{prefix}mlp.{one}_proj" for one in ("gate", "up")],
            [f"{prefix}mlp.down_proj"],
        ):
            amax = max(before.get_submodule(name).weight.detach().abs().max() for name in parts)
            inputs = {float(model.get_submodule(name).input_global_scale) for name in parts}
            assert len(inputs) == 1
            for name in parts:
                own = float(model.get_submodule(name).weight_global_scale)
                assert own == pytest.approx(448 * 6 / float(amax), rel=1e-6)


def test_an_embedding_is_rounded_to_nearest() -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {**GROUPS, "rows": {"targets": ["Embedding"], "weights": weights}}
    modifier = gptq(config_groups=groups)
    model = tiny.run(tiny.llama(), modifier)
    rounded = tiny.run(tiny.llama(), QuantizationModifier(config_groups={"rows": groups["rows"]}))
    weight = model.model.embed_tokens.weight
    assert torch.equal(weight, rounded.model.embed_tokens.weight)
    assert not torch.equal(weight, tiny.llama().model.embed_tokens.weight)
    assert "model.embed_tokens" not in modifier.records


def orders(modifier: GPTQModifier) -> dict[str, Any]:
    groups = modifier.resolve_quantization_config().groups
    return {
        name: getattr(scheme.weights.actorder, "value", scheme.weights.actorder)
        for name, scheme in groups.items()
        if scheme.weights is not None
    }


@pytest.mark.parametrize(
    ("scheme", "streams"), [("W4A16", 2), ("FP8_DYNAMIC", 2), ("W8A8", 1), ("W8A16", 1)]
)
def test_the_original_stream_runs_where_it_measures_better(scheme: str, streams: int) -> None:
    def runs(**fields: Any) -> int:
        modifier = GPTQModifier(scheme=scheme, targets=["Linear"], **fields)
        return 1 + modifier.traits.twin

    assert runs() == streams
    assert runs(asymmetric=True) == 2
    assert runs(asymmetric=False) == 1


def grouped(**orders_by_group: str | None) -> dict[str, Any]:
    return {
        name: {"targets": [f"re:{name}"], "weights": {**WEIGHTS, "actorder": order}}
        for name, order in orders_by_group.items()
    }


def test_columns_are_ordered_by_activation_by_default() -> None:
    assert orders(gptq()) == {"all": "static"}
    assert orders(gptq(actorder=None)) == {"all": None}
    assert orders(gptq(actorder=False)) == {"all": None}


@pytest.mark.parametrize("value", ["group", "dynamic", True])
def test_orders_that_no_reader_knows_are_refused_with_the_reason(value: Any) -> None:
    with pytest.raises(RecipeError, match="compressed-tensors"):
        gptq(actorder=value)
    with pytest.raises(RecipeError, match="compressed-tensors"):
        gptq(config_groups=grouped(a=value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("dampening_frac", -0.1),
        ("asymmetric_ridge", 0.0),
        ("refinements", -1),
        ("batched_quantization", "always"),
        ("batched_quantization", 0),
        ("batched_quantization", -1),
        ("batched_quantization", 2.5),
        ("actorder", "backwards"),
    ],
)
def test_fields_out_of_bounds_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=field):
        gptq(**{field: value})


def test_a_misspelt_field_gets_a_suggestion() -> None:
    with pytest.raises(RecipeError, match="dampening_frac"):
        gptq(dampening_fraction=0.1)


def test_the_dampening_may_have_its_earlier_name() -> None:
    assert gptq(percdamp=0.1) == gptq(dampening_frac=0.1)
    text = "modifiers: {SparseGPTModifier: {sparsity: 0.5, percdamp: 0.1}}"
    recipe = Recipe.create_instance(text)
    assert "dampening_frac: 0.1" in recipe.yaml()
    with pytest.raises(RecipeError, match="percdamp is the earlier name of dampening_frac"):
        gptq(percdamp=0.1, dampening_frac=0.1)
    with pytest.raises(RecipeError, match="'percdamp'"):
        QuantizationModifier(scheme="W4A16", percdamp=0.1)


@pytest.mark.parametrize(
    "modifier",
    [
        gptq(config_groups=static()),
        gptq(scheme="NVFP4", targets=["Linear"], actorder=None, dampening_frac=0.05),
        gptq(scheme={"W4A16": ["re:.*mlp.*"], "W8A8": ["re:.*attn.*"]}, block_size=64),
        gptq(scheme="W4A16", kv_cache_scheme={"num_bits": 8, "type": "float"}),
        gptq(batched_quantization=8, dampening_frac=None),
        gptq(batched_quantization=None),
    ],
)
def test_what_is_saved_of_a_recipe_loads_as_an_equal_one(modifier: GPTQModifier) -> None:
    recipe = Recipe.from_modifiers(modifier)
    read = Recipe.create_instance(recipe.yaml())
    assert read == recipe
    (again,) = read.modifiers
    assert isinstance(again, GPTQModifier)
    ours, theirs = (one.resolve_quantization_config() for one in (modifier, again))
    assert {name: one.model_dump() for name, one in ours.groups.items()} == {
        name: one.model_dump() for name, one in theirs.groups.items()
    }


def test_bad_activations_are_named_and_nothing_is_left() -> None:
    model = tiny.llama()
    model.model.layers[1].input_layernorm.weight.data[3] = 3e38  # finite, but times an input
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        tiny.run(model, gptq())
    assert not tiny.traces(model)


def test_an_unreached_module_is_an_error_in_sequential() -> None:
    model = with_spare()
    with pytest.raises(TargetError, match=r"model\.layers\.1\.mlp\.spare"):
        tiny.run(model, gptq())
    assert not tiny.traces(model)
