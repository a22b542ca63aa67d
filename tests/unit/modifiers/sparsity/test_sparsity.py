# SPDX-License-Identifier: Apache-2.0
"""One-shot pruning on a whole model: what is left, how good it is, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Linear, Module
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.pytorch_utils import Conv1D

from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.sparsity.solve import Options, Problem, solve
from llmcompressor.modifiers.sparsity.targets import find_pruning_layers, matrix_inputs, matrix_of
from llmcompressor.numerics.masks import NofM, Share, Sparsity
from llmcompressor.numerics.wanda import owl_sparsities
from llmcompressor.recipe import Recipe

PAIRS: dict[str, Any] = {"sparsity": 0.5, "mask_structure": "2:4", "ignore": ["lm_head"]}
HALF: dict[str, Any] = {"sparsity": 0.5, "ignore": ["lm_head"]}
MODIFIERS = [SparseGPTModifier, WandaPruningModifier]
WEIGHTS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}


def error(model: Any, reference: Tensor) -> float:
    change = tiny.logits(model, tiny.batches()) - reference
    return float(change.square().mean() / reference.square().mean())


def zeros(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return tiny.logits(tiny.llama(), tiny.batches())


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_all_but_one_kind_may_be_ignored(modifier: type) -> None:
    """No name of a weight ends in that of its module."""
    model = tiny.run(tiny.llama(), modifier(sparsity=0.5, ignore=["re:(?!.*q_proj$).*"]))
    for name, module in tiny.linears(model).items():
        assert (zeros(module.weight) > 0.4) == name.endswith("q_proj"), name


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("targets", ["Linear", ["re:.*proj.weight"]])
def test_ignore_may_name_weights_as_targets_do(
    modifier: type, targets: Any, warned: list[str]
) -> None:
    given = modifier(sparsity=0.5, targets=targets, ignore=["lm_head", "re:.*mlp.*weight"])
    model = tiny.run(tiny.llama(), given)
    for name, module in tiny.linears(model).items():
        assert (zeros(module.weight) > 0.4) == ("mlp" not in name), name
    assert not any("matches no module" in line for line in warned)


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_each_four_have_two_zeros(modifier: type) -> None:
    model = tiny.run(tiny.llama(), modifier(**PAIRS))
    for module in tiny.linears(model).values():
        fours = module.weight.view(-1, 4)
        assert bool(((fours == 0).sum(dim=1) == 2).all())
    assert zeros(model.lm_head.weight) == 0


@pytest.mark.parametrize("refinements", [0, 8])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 1.0])
def test_the_number_of_zeros_is_exact(sparsity: float, refinements: int) -> None:
    modifier = SparseGPTModifier(sparsity=sparsity, ignore="lm_head", refinements=refinements)
    before = {name: one.weight.clone() for name, one in tiny.linears(tiny.llama()).items()}
    model = tiny.run(tiny.llama(), modifier)
    for name, module in tiny.linears(model).items():
        weights = module.weight.numel()
        assert int((module.weight == 0).sum()) == round(sparsity * weights)
        if sparsity == 0:
            assert torch.equal(module.weight, before[name])


def test_the_published_order_of_quality(reference: Tensor) -> None:
    """Magnitude, Wanda, the sweep of the paper, and what it is refined to; 2:4 and half."""
    for fields in (PAIRS, HALF):
        found = [
            error(tiny.run(tiny.llama(), modifier), reference)
            for modifier in (
                WandaPruningModifier(**fields),
                SparseGPTModifier(**fields, refinements=0, asymmetric=False),
                SparseGPTModifier(**fields, asymmetric=False),
            )
        ]
        found.insert(0, error(by_magnitude(fields), reference))
        ratios = [late / early for early, late in pairwise(found)]
        assert ratios[0] < 0.97
        assert max(ratios[1:]) < 0.85


def by_magnitude(fields: dict[str, Any]) -> Any:
    """The model with the least magnitudes of each row, or of each four, at zero."""
    model = tiny.llama()
    for module in tiny.linears(model).values():
        weight = module.weight.data
        parts = weight.view(-1, 4) if "mask_structure" in fields else weight
        least = parts.abs().topk(parts.shape[1] // 2, dim=1, largest=False).indices
        parts.scatter_(1, least, 0)
    return model


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("pipeline", ["basic", "layer_sequential", "sequential"])
def test_every_pipeline_gives_it_its_inputs(
    pipeline: str, modifier: type, reference: Tensor
) -> None:
    model = tiny.run(tiny.llama(), modifier(**PAIRS), pipeline=pipeline)
    assert error(model, reference) < 0.97 * error(by_magnitude(PAIRS), reference)


@pytest.mark.parametrize("pruner", MODIFIERS)
@pytest.mark.parametrize("quantizer", [QuantizationModifier, GPTQModifier])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pipeline", ["independent", "sequential"])
def test_what_quantizes_afterwards_keeps_the_zeros(
    pruner: type, quantizer: type, symmetric: bool, pipeline: str
) -> None:
    groups = {"all": {"targets": ["Linear"], "weights": {**WEIGHTS, "symmetric": symmetric}}}
    model = tiny.run(
        tiny.llama(num_hidden_layers=1),
        pruner(**PAIRS),
        quantizer(config_groups=groups, ignore=["lm_head"]),
        pipeline=pipeline,
    )
    for module in tiny.linears(model).values():
        fours = module.weight.view(-1, 4)
        assert int((fours == 0).sum(dim=1).min()) >= 2
        assert module.quantization_scheme is not None


def test_gptq_makes_up_for_its_rounding_on_what_is_left(reference: Tensor) -> None:
    groups = {"all": {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 3}}}
    errors = [
        error(
            tiny.run(
                tiny.llama(),
                SparseGPTModifier(**PAIRS),
                quantizer(config_groups=groups, ignore=["lm_head"]),
            ),
            reference,
        )
        for quantizer in (QuantizationModifier, GPTQModifier)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_existing_zeros_stay() -> None:
    model = tiny.llama()
    gone = {}
    for name, module in tiny.linears(model).items():
        torch.manual_seed(len(name))
        gone[name] = torch.rand_like(module.weight) < 0.3
        module.weight.data[gone[name]] = 0
    for refinements in (0, 8):
        fields = {**HALF, "refinements": refinements, "preserve_sparsity_mask": True}
        pruned = tiny.run(_copy(model), SparseGPTModifier(**fields))
        for name, module in tiny.linears(pruned).items():
            assert bool((module.weight[gone[name]] == 0).all())
            assert zeros(module.weight) == 0.5


def _copy(model: Any) -> Any:
    other = tiny.llama()
    other.load_state_dict(model.state_dict())
    return other


def test_a_recipe_names_them() -> None:
    text = """
    modifiers:
      WandaPruningModifier: {sparsity: 0.5, targets: Linear}
      SparseGPTModifier: {sparsity: [0.5, 0.6], targets: [Linear, Conv2d], block_size: 64}
    """
    first, second = Recipe.create_instance(text).modifiers
    assert isinstance(first, WandaPruningModifier)
    assert isinstance(second, SparseGPTModifier)


def test_a_target_given_as_a_string_is_pruned() -> None:
    model = tiny.run(tiny.llama(), WandaPruningModifier(**{**HALF, "targets": "Linear"}))
    assert {zeros(one.weight) for one in tiny.linears(model).values()} == {0.5}


def test_a_list_gives_each_target_its_sparsity() -> None:
    modifier = WandaPruningModifier(
        sparsity=[0.25, 0.75], targets=["re:.*down_proj", "re:.*q_proj.weight"]
    )
    model = tiny.run(tiny.llama(), modifier)
    expected = {"down_proj": 0.25, "q_proj": 0.75}
    for name, module in tiny.linears(model).items():
        assert zeros(module.weight) == expected.get(name.rpartition(".")[2], 0)


@pytest.mark.parametrize("second", ["re:.*q_proj.weight", "__ALL_PRUNABLE__"])
def test_a_target_that_means_only_what_one_before_it_does_is_no_error(second: str) -> None:
    model = tiny.run(tiny.llama(), WandaPruningModifier(**{**HALF, "targets": ["Linear", second]}))
    assert {zeros(one.weight) for one in tiny.linears(model).values()} == {0.5}


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_what_two_targets_mean_belongs_to_the_first(modifier: type[Any]) -> None:
    """Also where the second one means what holds it."""
    cases = {
        (r"re:.*layers\.0\..*", r"re:.*layers\..*"): lambda name: ".0." in name,
        ("re:.*down_proj$", "LlamaDecoderLayer"): lambda name: "down_proj" in name,
        ("re:.*down_proj$", "re:.*layers.*"): lambda name: "down_proj" in name,
    }
    for targets, is_first in cases.items():
        model = tiny.run(tiny.llama(), modifier(sparsity=[0.25, 0.75], targets=list(targets)))
        for name, module in tiny.linears(model).items():
            assert zeros(module.weight) == (0.25 if is_first(name) else 0.75), (targets, name)


def test_a_list_gives_each_layer_its_sparsity() -> None:
    modifier = SparseGPTModifier(sparsity=[0.25, 0.5], targets="LlamaDecoderLayer")
    model = tiny.run(tiny.llama(), modifier)
    for name, module in tiny.linears(model).items():
        assert zeros(module.weight) == (0.25 if ".layers.0." in name else 0.5)
    assert zeros(model.lm_head.weight) == 0


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_profile_keeps_the_mean(modifier: type) -> None:
    """Outliers are planted in the second layer, which therefore keeps more."""
    model = tiny.llama()
    for name, module in tiny.linears(model).items():
        if ".layers.1." in name:
            module.weight.data[:, ::16] *= 8
    pruner = modifier(
        sparsity=0.5,
        sparsity_profile="owl",
        owl_m=3,
        owl_lmbda=0.1,
        targets="LlamaDecoderLayer",
    )
    tiny.run(model, pruner)
    shares: dict[str, list[float]] = {"0": [], "1": []}
    weights = dict.fromkeys(shares, 0)
    for name, module in tiny.linears(model).items():
        shares[name.split(".")[2]].append(float((module.weight == 0).sum()))
        weights[name.split(".")[2]] += module.weight.numel()
    found = {layer: sum(each) / weights[layer] for layer, each in shares.items()}
    assert found["0"] == pytest.approx(0.6, abs=0.01)
    assert found["1"] == pytest.approx(0.4, abs=0.01)
    assert len(pruner.records) == 14


def test_a_profile_is_that_of_the_scores_of_each_layer() -> None:
    """Five layers, each with its own number of outliers, against sums over whole score matrices."""
    model, data = tiny.llama(num_hidden_layers=5), tiny.batches(number=2)
    for layer, every in enumerate((64, 16, 32, 8, 48)):
        for name, module in tiny.linears(model).items():
            if f".layers.{layer}." in name:
                module.weight.data[:, ::every] *= 6
    scores: dict[str, list[Tensor]] = {}
    for name, module in tiny.linears(model).items():
        reach = tiny.inputs_of(model, name, data).float().norm(dim=0)
        score_RC = module.weight.detach().abs() * reach
        scores.setdefault(name.split(".")[2], []).append(score_RC.flatten())
    joined = {layer: torch.cat(parts) for layer, parts in scores.items()}
    ratios = {
        layer: float((all_ > 3 * all_.mean()).double().mean()) for layer, all_ in joined.items()
    }
    shares = owl_sparsities(list(ratios.values()), [1] * 5, 0.5, 0.05)  # all layers are of one size
    expected = dict(zip(ratios, shares, strict=True))

    tiny.run(
        model,
        WandaPruningModifier(
            sparsity=0.5,
            sparsity_profile="owl",
            owl_m=3,
            owl_lmbda=0.05,
            targets="LlamaDecoderLayer",
        ),
        data=data,
    )
    gone: dict[str, list[Tensor]] = {}
    for name, module in tiny.linears(model).items():
        gone.setdefault(name.split(".")[2], []).append((module.weight == 0).flatten().double())
    found = {layer: float(torch.cat(parts).mean()) for layer, parts in gone.items()}
    assert len(set(expected.values())) == 5
    assert found == pytest.approx(expected, abs=8e-3)  # half a weight of 64


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_every_module_is_recorded(modifier: type) -> None:
    pruner = modifier(**PAIRS)
    model = tiny.run(tiny.llama(), pruner)
    assert list(pruner.records) == list(tiny.linears(model))
    for record in pruner.records.values():
        assert record.sparsity == 0.5
        assert record.structure == "2:4"
        assert record.tokens == 8 * 2 * 24
        assert record.loss is not None
        assert record.loss > 0
        assert "no reader" in record.stored
    assert json.loads(json.dumps(pruner.report(), allow_nan=False)) == pruner.report()


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_padding_does_not_count(modifier: type) -> None:
    given = tiny.batches()
    plain = tiny.run(tiny.llama(), modifier(**PAIRS), data=given)
    padded = tiny.run(tiny.llama(), modifier(**PAIRS), data=tiny.padded(given, 8))
    same = [
        float(((one.weight == 0) == (other.weight == 0)).float().mean())
        for one, other in zip(
            tiny.linears(plain).values(), tiny.linears(padded).values(), strict=True
        )
    ]
    assert min(same) > 0.999


def test_nothing_is_left_on_the_model() -> None:
    model = tiny.run(tiny.llama(), SparseGPTModifier(**PAIRS))
    assert tiny.traces(model) == {}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "sparsity"),
        ({"sparsity": 1.5}, "between 0 and 1"),
        ({"sparsity": 0.5, "mask_structure": "1:4"}, "1:4 has 0.25"),
        ({"sparsity": 0.5, "mask_structure": "4:2"}, "field 'mask_structure': .*'4:2'"),
        ({"sparsity": 0.5, "mask_structure": "channel"}, "'mask_structure': .*training"),
        ({"sparsity": 0.5, "owl_m": 5}, "belong together"),
        ({"sparsity": 0.5, "sparsity_profile": "atlas"}, "owl"),
        (
            {"sparsity": [0.5], "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.1},
            "a list",
        ),
        (
            {
                "sparsity": 0.5,
                "sparsity_profile": "owl",
                "owl_m": 5,
                "owl_lmbda": 0.1,
                "mask_structure": "2:4",
            },
            "2:4",
        ),
    ],
)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_fields_that_contradict_each_other(
    modifier: type, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        modifier(**fields)


@pytest.mark.parametrize("sparsity", [True, [0.5, False]])
def test_a_sparsity_is_no_switch(sparsity: Any) -> None:
    with pytest.raises(RecipeError, match="not true or false"):
        WandaPruningModifier(sparsity=sparsity)


@pytest.mark.parametrize("word", ["__ALL__", "__ALL_PRUNABLE__", "__ALL_QUANTIZABLE__"])
def test_words_for_everything_that_can_be_pruned(word: str) -> None:
    model = tiny.run(tiny.llama(), WandaPruningModifier(sparsity=0.5, targets=word))
    assert all(zeros(module.weight) == 0.5 for module in tiny.linears(model).values())


def test_no_dampening_given_is_the_default() -> None:
    assert SparseGPTModifier(dampening_frac=None, sparsity=0.5).dampening_frac == 0.01
    with pytest.raises(RecipeError, match="dampening_frac"):
        SparseGPTModifier(dampening_frac=-1.0, sparsity=0.5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targets": "Linaer"}, "Linear"),
        ({"targets": "LlamaRMSNorm"}, "holds no Linear"),
        ({"sparsity": [0.1, 0.2, 0.3]}, "3 values"),
        ({"targets": []}, "targets is empty"),
        (
            {"sparsity": [0.1, 0.2], "targets": ["LlamaDecoderLayer", "re:.*down_proj"]},
            "sparsity of 're:.*down_proj' decides about nothing",
        ),
        ({"mask_structure": "3:6", "targets": "re:.*q_proj"}, "no multiple of 6"),
    ],
)
def test_targets_that_cannot_be_pruned(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        tiny.run(tiny.llama(), WandaPruningModifier(**{**HALF, **fields}))


@pytest.mark.parametrize(
    "quantizer", [QuantizationModifier, GPTQModifier, HQQModifier, AutoRoundModifier]
)
def test_it_may_not_stand_behind_what_quantizes(quantizer: Any) -> None:
    with pytest.raises(RecipeError, match="SparseGPTModifier stands after"):
        tiny.run(tiny.llama(), quantizer(scheme="W4A16"), SparseGPTModifier(**PAIRS))


def test_both_in_one_calibration_are_as_good_as_one_after_the_other(reference: Tensor) -> None:
    """What was fitted to the original model is not corrected a second time."""
    groups = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    errors = [
        error(
            tiny.run(
                tiny.llama(),
                SparseGPTModifier(**PAIRS),
                GPTQModifier(config_groups=groups, ignore=["lm_head"]),
                pipeline=pipeline,
            ),
            reference,
        )
        for pipeline in ("independent", "sequential")
    ]
    assert errors[1] < 1.1 * errors[0]


class Mixed(Module):
    """A convolution, a transposed Linear and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Conv2d(3, 16, 3, padding=1, stride=2)
        self.second = Conv2d(16, 8, 1)
        self.third = Conv1D(24, 8 * 16)
        self.last = Linear(24, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.second(self.first(pixels).relu()).relu()
        return self.last(self.third(hidden.flatten(1)).relu())


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_convolutions_and_transposed_weights(modifier: type) -> None:
    torch.manual_seed(1)
    mixing = torch.randn(192, 192) * torch.logspace(0, -1.5, 192)
    pixels = (torch.randn(256, 192) @ mixing).view(-1, 3, 8, 8)
    data: Any = [{"pixels": part} for part in pixels.split(16)]
    dense = Mixed()
    expected = dense(pixels).detach()

    def loss_of(model: Module) -> float:
        return float((model(pixels).detach() - expected).square().mean())

    targets = ["Conv2d", "Conv1D", "Linear"]
    pruner = modifier(sparsity=0.5, targets=targets)
    pruned = tiny.run(Mixed(), pruner, data=data, pipeline="basic")
    shapes = {"first": (16, 27), "second": (8, 16), "third": (24, 128), "last": (8, 24)}
    for name, (rows, columns) in shapes.items():
        weight = pruned.get_submodule(name).weight
        gone = int((weight == 0).sum())
        each = round(0.5 * columns) * rows if modifier is WandaPruningModifier else None
        assert gone == (each or round(0.5 * rows * columns))
    by_size = Mixed()
    for name in shapes:
        weight = by_size.get_submodule(name).weight.data
        matrix = weight.T if name == "third" else weight.flatten(1)
        least = matrix.abs().topk(matrix.shape[1] // 2, dim=1, largest=False).indices
        matrix.scatter_(1, least, 0)
    assert loss_of(pruned) < 0.9 * loss_of(by_size)


def test_the_patches_are_what_a_convolution_multiplies() -> None:
    torch.manual_seed(0)
    pixels, sound = torch.randn(2, 3, 9, 11), torch.randn(2, 3, 13)
    for module, tensor in (
        (Conv2d(3, 4, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), bias=False), pixels),
        (Conv2d(3, 4, 3, padding="same", padding_mode="circular", bias=False), pixels),
        (Conv1d(3, 4, 5, stride=2, padding=2, bias=False), sound),
    ):
        tokens_TC = matrix_inputs(module, tensor, None)
        found = tokens_TC @ matrix_of(module).T
        expected = module(tensor).flatten(2).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_the_embedding_is_left_alone() -> None:
    model = tiny.run(tiny.llama(tie_word_embeddings=True), WandaPruningModifier(sparsity=0.5))
    assert zeros(model.lm_head.weight) < 0.1
    named = WandaPruningModifier(sparsity=0.5, targets=["Linear", "lm_head"])
    model = tiny.run(tiny.llama(tie_word_embeddings=True), named)
    assert zeros(model.lm_head.weight) >= 0.5


@pytest.mark.parametrize(
    ("targets", "ignore", "is_told"),
    [
        ("Linear", (), True),
        ("__ALL_PRUNABLE__", "re:.*mlp.*", True),
        ("Linear", "lm_head", False),
        (["re:.*layers.*", "re:lm_head"], (), False),
        ("LlamaDecoderLayer", (), False),
    ],
)
def test_a_head_that_only_its_class_means_is_told(
    targets: Any, ignore: Any, is_told: bool, warned: list[str]
) -> None:
    find_pruning_layers(tiny.llama(), targets, ignore, 0.5, None)
    told = [line for line in warned if line.startswith("lm_head, which gives the logits")]
    assert len(told) == is_told


@pytest.mark.parametrize("modifier", [SparseGPTModifier, WandaPruningModifier])
def test_a_router_is_left_alone_unless_it_is_named(modifier: type[Any]) -> None:
    def routed() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, vocab_size=96, num_hidden_layers=1))

    def router(model: Any) -> torch.Tensor:
        return model.model.layers[0].mlp.router.weight

    before = router(routed()).clone()
    for targets in ("Linear", "PhimoeDecoderLayer"):
        model = tiny.run(routed(), modifier(sparsity=0.5, targets=targets))
        assert zeros(model.model.layers[0].self_attn.q_proj.weight) >= 0.5
        assert torch.equal(router(model), before)
    named = modifier(sparsity=0.5, targets=["Linear", "re:.*router$"])
    assert zeros(router(tiny.run(routed(), named))) >= 0.5


def test_what_cannot_be_factorized_is_chosen_by_score(warned: list[str]) -> None:
    weight_RC, gram_CC = torch.randn(8, 16), torch.eye(16) - 2 * torch.ones(16, 16)
    sparsity = Sparsity((Share(8, 0.5),), NofM(2, 4))
    options = Options(128, 0.01, 0.05, refinements=8, preserve=False)
    for one in (options, replace(options, refinements=0)):
        (found,) = solve([Problem([weight_RC], sparsity, gram_CC, None, 1)], one)
        assert found.dampening is None
        kept_RC = found.weights[0] != 0
        assert torch.equal(found.weights[0], weight_RC * kept_RC)
        assert int(kept_RC.sum()) == 64
    rank_one_CC = torch.ones(16, 16)
    (found,) = solve([Problem([weight_RC], sparsity, rank_one_CC, None, 1)], options)
    assert found.dampening == 0.01


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_module_that_gets_zeros_alone_is_pruned_by_magnitude(
    modifier: type, warned: list[str]
) -> None:
    model, name = tiny.llama(), "model.layers.1.mlp.down_proj"
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    before = model.get_submodule(name).weight.detach().clone()
    tiny.run(model, modifier(**PAIRS))
    rank = before.abs().unflatten(1, (-1, 4)).argsort(dim=-1).argsort(dim=-1).flatten(1)
    assert torch.equal(model.get_submodule(name).weight, before * (rank >= 2))
    assert [line for line in warned if name in line and "by magnitude" in line]


def test_equal_shapes_are_solved_in_one_batch_as_if_alone() -> None:
    torch.manual_seed(0)
    sparsity = Sparsity((Share(8, 0.5), Share(4, 0.25)))
    options = Options(128, 0.01, 0.05, refinements=8, preserve=False)
    problems = []
    for _ in range(3):
        inputs, others = torch.randn(64, 16), torch.randn(64, 16)
        weights = [torch.randn(8, 16), torch.randn(4, 16)]
        cross = inputs.T @ (0.1 * others)
        problems.append(Problem(weights, sparsity, inputs.T @ inputs, cross, len(inputs)))
    together = solve(problems, options)
    for problem, found in zip(problems, together, strict=True):
        (alone,) = solve([problem], options)
        assert found.losses == pytest.approx(alone.losses, rel=1e-3)
        for one, other in zip(found.weights, alone.weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
