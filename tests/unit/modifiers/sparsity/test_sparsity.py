# SPDX-License-Identifier: Apache-2.0
"""One-shot pruning on a whole model: what is left, how good it is, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from tests.support.pairs import pairs
from torch import Tensor
from torch.nn import Conv2d, Linear, Module
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.pytorch_utils import Conv1D

from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier, WandaPruningModifier
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


@pytest.mark.parametrize("fields", [{"refinements": 0}, {"refinements": 3}, PAIRS])
def test_columns_without_inputs_make_no_further_zeros(fields: dict[str, Any]) -> None:
    """Nor does a group of them lose its largest weights."""
    model = tiny.llama()
    layer = model.model.layers[1]
    layer.input_layernorm.weight.data[8:56] = 0
    before = layer.self_attn.q_proj.weight[:, 8:56].detach().clone()
    tiny.run(model, SparseGPTModifier(**{**HALF, **fields}))
    assert zeros(layer.self_attn.q_proj.weight) == 0.5
    after = layer.self_attn.q_proj.weight[:, 8:56].detach()
    kept = after != 0
    assert torch.allclose(after[kept], before[kept], atol=1e-5)
    assert float(before[kept].abs().mean()) > 2 * float(before[~kept].abs().mean())


@pytest.mark.parametrize("fields", [HALF, PAIRS])
@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize(("dead", "is_told"), [(32, True), (3, False)])
def test_columns_without_inputs_are_told(
    modifier: type, fields: dict[str, Any], dead: int, is_told: bool, warned: list[str]
) -> None:
    model = tiny.llama()
    model.model.layers[1].input_layernorm.weight.data[8 : 8 + dead] = 0
    tiny.run(model, modifier(**fields))
    told = [line for line in warned if f"the inputs of {dead} of its 64 columns were zero" in line]
    names = [f"model.layers.1.self_attn.{one}_proj" for one in "qkv"]
    assert [line.partition(":")[0] for line in told] == names * is_told


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


@pairs(
    pruner=MODIFIERS,
    quantizer=[QuantizationModifier, GPTQModifier],
    symmetric=[True, False],
    pipeline=["independent", "sequential"],
)
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


def test_a_list_gives_each_target_its_sparsity() -> None:
    modifier = WandaPruningModifier(
        sparsity=[0.25, 0.75], targets=["re:.*down_proj", "re:.*q_proj.weight"]
    )
    model = tiny.run(tiny.llama(), modifier)
    expected = {"down_proj": 0.25, "q_proj": 0.75}
    for name, module in tiny.linears(model).items():
        assert zeros(module.weight) == expected.get(name.rpartition(".")[2], 0)


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


def test_both_in_one_calibration_are_as_good_as_in_two(reference: Tensor) -> None:
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
