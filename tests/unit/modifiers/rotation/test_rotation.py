# SPDX-License-Identifier: Apache-2.0
"""Rotated models compute what they did; what cannot be rotated is refused before anything is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.thinned import thinned
from tests.support.tiny_llama import SIZES, batches, llama, logits, run, traces
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import NormMapping, QuIPModifier, SpinQuantModifier
from llmcompressor.modifiers.rotation.plan import (
    SpinQuantMapping,
)
from llmcompressor.pipelines import moe_selection
from llmcompressor.recipe import Recipe

DATA = batches(number=2)
ALL = ["R1", "R2", "R3", "R4"]
KINDS = ("hadamard", "random-hadamard", "random-matrix")
EACH_ALONE = [
    {"rotations": [name], "transform_type": kind}
    for name, kind in zip(ALL, (*KINDS, "random-hadamard"), strict=True)
]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What is logged, in order."""
    texts: list[str] = []
    sink = logger.add(lambda message: texts.append(str(message)), level="INFO")
    yield texts
    logger.remove(sink)


def lively(model: Any) -> Any:
    """Gains and biases as a trained model has them: far from one and zero."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            shift = 0.0 if name.endswith("bias") else float(parameter.detach().mean())
            values = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data = (shift + values).to(parameter.dtype)
    return model.eval()


def moved(model: Any, *modifiers: Modifier) -> float:
    """||change of the logits|| / ||logits||."""
    before = logits(model, DATA)
    run(model, *modifiers, data=DATA)
    return float((logits(model, DATA) - before).norm() / before.norm())


def built(config: Any, model: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return lively(model(config(**{**SIZES, **changes})))


MODELS: dict[str, Any] = {
    "llama": lambda: lively(llama()),
    "llama, tied": lambda: lively(llama(tie_word_embeddings=True)),
    "llama, biases": lambda: lively(llama(attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: built(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": lambda: built(Qwen3Config, Qwen3ForCausalLM, head_dim=32),
    "gemma": lambda: built(GemmaConfig, GemmaForCausalLM, head_dim=16),
}


@pytest.mark.parametrize(("name", "kind"), thinned(MODELS, ["hadamard", "random-matrix"]))
def test_outputs_stay(name: str, kind: Any) -> None:
    assert moved(MODELS[name](), SpinQuantModifier(rotations=ALL, transform_type=kind)) < 1e-5
    assert moved(MODELS[name](), QuIPModifier(rotations=["u", "v"], transform_type=kind)) < 1e-5


@pytest.mark.parametrize(
    "fields", [*EACH_ALONE, {"rotations": ALL, "transform_block_size": 8}], ids=str
)
def test_each_rotation_alone_and_in_blocks(fields: dict[str, Any]) -> None:
    model = lively(llama(tie_word_embeddings=True))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert moved(model, SpinQuantModifier(**fields)) < 1e-5
    after = dict(model.named_parameters())
    turned = {n.rpartition(".")[0] for n, p in before.items() if not torch.equal(p, after[n])}
    if fields["rotations"] == ["R2"]:
        assert {name.rpartition(".")[2] for name in turned} == {"v_proj", "o_proj"}
    if fields["rotations"] == ["R3"]:
        assert not turned
    if fields["rotations"] == ["R4"]:
        assert {name.rpartition(".")[2] for name in turned} == {"down_proj"}


def test_quip_leaves_routers_alone_unless_they_are_named() -> None:
    """Engines build them without a configuration, and so without the rotation of their input."""

    def routed() -> Any:
        own = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        return built(Qwen2MoeConfig, Qwen2MoeForCausalLM, **own)

    def gate(model: Any) -> torch.Tensor:
        return model.model.layers[0].mlp.shared_expert_gate.weight

    before = gate(routed()).clone()
    model = routed()
    assert moved(model, QuIPModifier(ignore=["lm_head", "re:.*experts.*"])) < 1e-5
    assert torch.equal(gate(model), before)
    assert not torch.equal(
        model.model.layers[0].self_attn.q_proj.weight,
        routed().model.layers[0].self_attn.q_proj.weight,
    )
    named = routed()
    run(named, QuIPModifier(targets=["re:.*shared_expert_gate$"], ignore=[]), data=DATA)
    assert not torch.equal(gate(named), before)


def norms_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters of all norms of the stream."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0].endswith("norm")
    }


@pytest.fixture
def outlying() -> Any:
    """A model whose norms return some channels large and some small, as their readers expect."""
    model = lively(llama())
    sizes = torch.ones(64)
    sizes[3], sizes[40] = 64.0, 0.125
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in READERS.items():
                layer.get_submodule(norm).weight *= sizes
                for reader in readers:
                    layer.get_submodule(reader).weight /= sizes
    return model


READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def test_quip_takes_large_channels_out_of_norms(outlying: Any) -> None:
    """Into the weights that it rotates, by powers of two; the norm of the head stays."""
    layer, before = outlying.model.layers[0], norms_of(outlying)
    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    assert moved(outlying, QuIPModifier()) < 1e-5
    for norm, readers in READERS.items():
        old, new = before[f"model.layers.0.{norm}.weight"], layer.get_submodule(norm).weight
        taken = old / new
        assert torch.equal(taken.log2(), taken.log2().round())
        assert taken[3] >= 16
        assert taken[40] <= 0.5
        for reader in readers:
            scaled = weights[f"{reader}.weight"] * taken.double()
            rotated = layer.get_submodule(reader).weight.double()
            # products of rows are what a rotation of the columns keeps
            torch.testing.assert_close(rotated @ rotated.T, scaled @ scaled.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(outlying.model.norm.weight, before["model.norm.weight"])


@pytest.mark.parametrize("shared", ["norm", "weight of norms", "weight of Linears"])
def test_what_blocks_share_is_changed_once(shared: str, outlying: Any, warned: list[str]) -> None:
    first, second = outlying.model.layers
    if shared == "norm":
        second.input_layernorm = first.input_layernorm
    elif shared == "weight of norms":
        second.input_layernorm.weight = first.input_layernorm.weight
    else:
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert moved(outlying, QuIPModifier()) < 1e-5
    assert sum("left as it is" in line for line in warned) == 2


def test_one_matrix_for_each_module() -> None:
    model = lively(llama())
    assert moved(model, QuIPModifier(randomize=True)) < 1e-5
    layer = model.model.layers[0]
    attention = layer.self_attn
    # servers join q, k and v, which have to take one input
    assert torch.equal(attention.q_proj.v_0_input.weight, attention.k_proj.v_0_input.weight)
    own = [one for name, one in model.named_modules() if name.endswith("_input")]
    assert len({one.weight.numpy().tobytes() for one in own}) == 8
    other = lively(llama())
    assert moved(other, SpinQuantModifier(rotations=["R2", "R4"], randomize=True)) < 1e-5
    first, second = (layer.mlp.down_proj for layer in other.model.layers)
    assert not torch.equal(first.R4_0_input.weight, second.R4_1_input.weight)


def test_seeds_decide() -> None:
    def rotated(seed: int) -> torch.Tensor:
        model = lively(llama())
        run(model, SpinQuantModifier(transform_type="random-hadamard", seed=seed))
        return model.model.layers[0].mlp.up_proj.weight

    assert torch.equal(rotated(1), rotated(1))
    assert not torch.equal(rotated(1), rotated(2))


def test_gains_are_folded_and_embeddings_untied() -> None:
    model = lively(llama(tie_word_embeddings=True))
    run(model, SpinQuantModifier())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    for layer in model.model.layers:
        assert bool((layer.input_layernorm.weight == 1).all())
    gemma = MODELS["gemma"]()
    run(gemma, SpinQuantModifier())
    assert bool((gemma.model.norm.weight == 0).all())  # one is added to it
    untouched = lively(llama(tie_word_embeddings=True))
    run(untouched, SpinQuantModifier(rotations=["R2"]))
    assert untouched.lm_head.weight is untouched.model.embed_tokens.weight


@pytest.mark.parametrize("experts", [0, 4])
def test_experts_and_the_mlp_beside_them_rotate_too(experts: int) -> None:
    layers = {"layer_types": ["attention"] * 2, "mamba_n_heads": 4}
    own = {"shared_intermediate_size": 48, "num_local_experts": experts}
    model = built(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, **layers, **own)
    assert moved(model, SpinQuantModifier(rotations=["R1", "R2", "R3"])) < 1e-5


def test_experts_that_cannot_be_taken_apart_do_not_rotate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_selection, "has_reordered_experts", lambda *_: True)
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4)
    model = lively(MixtralForCausalLM(config))
    assert moved(model, SpinQuantModifier(rotations=["R2", "R3"])) < 1e-5
    with pytest.raises(TargetError, match=r"not taken apart\. Leave R1 out"):
        run(model, SpinQuantModifier(rotations=["R1"]))


def test_mappings_say_what_parts_are() -> None:
    mapping = SpinQuantMapping(
        embedding="re:.*embed_tokens$",
        attn="re:.*self_attn$",
        attn_q="re:.*q_proj$",
        attn_k="re:.*k_proj$",
        attn_v="re:.*v_proj$",
        attn_o="re:.*o_proj$",
        mlp_in=["re:.*gate_proj$", "re:.*up_proj$"],
        mlp_out="re:.*down_proj$",  # type: ignore[arg-type]  # read as a list
        lm_head="lm_head",
    )
    norms = [
        NormMapping(norm="re:.*input_layernorm$", linears=["re:.*self_attn.[qkv]_proj$"]),
        NormMapping(norm="re:.*post_attention_layernorm$", linears=mapping.mlp_in),
        NormMapping(norm="model.norm", linears=["lm_head"]),
    ]
    said, found = lively(llama()), lively(llama())
    run(said, SpinQuantModifier(rotations=ALL, mappings=mapping, norm_mappings=norms))
    run(found, SpinQuantModifier(rotations=ALL))
    for one, other in zip(said.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_config_of_transforms_is_applied() -> None:
    config = {
        "config_groups": {
            "mine": {
                "type": "random-hadamard",
                "apply": [
                    {"targets": ["re:.*down_proj$"], "location": "input"},
                    {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True},
                ],
            }
        }
    }
    model = lively(llama())
    fields: Any = {"transform_config": config}
    assert moved(model, SpinQuantModifier(**fields)) < 1e-5
    assert hasattr(model.model.layers[0].mlp.down_proj, "mine_input")


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no Hadamard matrix": (
        lambda: llama(intermediate_size=90),
        {"rotations": ["R4"]},
        r"There is no Hadamard matrix of order 90, .*transform_block_size to 2,",
    ),
    "no construction": (
        lambda: llama(intermediate_size=2060),
        {"rotations": ["R4"]},
        r"No construction is known here of a Hadamard matrix of order 2060, .*to 20, 4, 2",
    ),
    "blocks without a Hadamard matrix": (
        lambda: llama(hidden_size=72, num_attention_heads=4, num_key_value_heads=4),
        {"transform_block_size": 3},
        r"of order 3, the transform_block_size for .*another divisor of the width,",
    ),
    "blocks that do not divide": (llama, {"transform_block_size": 48}, "48 does not divide 64"),
    "norms of outputs": (
        lambda: built(Gemma2Config, Gemma2ForCausalLM, head_dim=16),
        {},
        "post_attention_layernorm acts on what",
    ),
    "norms with means": (
        lambda: built(PhiConfig, PhiForCausalLM, num_key_value_heads=4),
        {},
        "layernorm has a bias",
    ),
    "a size that readers cannot build": (
        lambda: llama(intermediate_size=90),
        {"rotations": ["R4"], "transform_type": "random-matrix"},
        "Readers cannot build a rotation of 90 channels",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_rotated_is_refused_before_anything_is(case: str) -> None:
    make, fields, message = WRONG[case]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TargetError, match=message):
        run(model, SpinQuantModifier(**fields), QuantizationModifier(scheme="W8A8"), data=DATA)
    after = model.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not traces(model)


INT8: Any = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
STATES: Any = {
    "config_groups": {
        "group_0": {
            "targets": ["LlamaAttention"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    }
}


def test_rotations_come_first() -> None:
    quantize = {"QuantizationModifier": {"targets": "Linear", "scheme": "W8A8"}}
    for name in ("SpinQuantModifier", "QuIPModifier"):
        with pytest.raises(RecipeError, match=f"{name} stands after"):
            Recipe.create_instance(str({"modifiers": [quantize, {name: {}}]}))
    model = llama()
    run(model, QuantizationModifier(targets="Linear", scheme="W8A8"))
    with pytest.raises(TargetError, match="is quantized already"):
        run(model, SpinQuantModifier(rotations=["R1"]))


def test_fields_are_checked() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rotations": ["R1", "r1"]}, "at most once"),
        ({"rotations": None}, r"rotations are \[\]"),
        ({"rotations": 1}, r"'rotations': .*list \(given: 1\)"),
        ({"rotations": ["R5"]}, "R1"),
        ({"transform_type": "hadamar"}, "hadamard"),
        ({"precision": "float46"}, "no precision 'float46'"),
        ({"rotation": ["R1"]}, "no such field"),
        ({"rotations": ["R4"], "learnable": True}, "learns R1 and R2"),
        ({"learning_rate": float("inf")}, "'learning_rate'.*finite"),
        ({"learning_rate": float("nan")}, "'learning_rate'.*nan"),
        ({"transform_config": {"config_groups": {}}}, "'transform_config': it has no scheme"),
        (
            {"transform_config": {"config_groups": {"own": {"type": "hadamard", "apply": []}}}},
            "'transform_config': it has no scheme",
        ),
    ]
    for fields, message in wrong:
        with pytest.raises(RecipeError, match=message):
            SpinQuantModifier(**fields)


def test_a_pattern_of_quip_means_the_linears_that_it_matches() -> None:
    """And not what holds them; by its name, or alone, that is an error."""
    model = MODELS["llama"]()
    linears = QuIPModifier(targets=["re:.*self_attn.*_proj$"], ignore=[])
    all_inside = QuIPModifier(targets=["re:.*self_attn.*"], ignore=[])
    plan = all_inside.make_plan(model)
    assert [one.module_name for one in plan.online] == [
        one.module_name for one in linears.make_plan(model).online
    ]
    assert moved(model, all_inside) < 1e-5
    for target in ("re:.*self_attn$", "model.layers.0.self_attn"):
        wrong = QuIPModifier(targets=[target, "re:.*up_proj$"][: 1 + (target[0] == "m")])
        with pytest.raises(TargetError, match="QuIP rotates Linears"):
            wrong.make_plan(model)


def test_fields_survive_a_recipe() -> None:
    modifier = SpinQuantModifier(rotations=["r1", "R4"], precision="torch.float32", seed=4)
    read = Recipe.create_instance(Recipe.from_modifiers(modifier).yaml()).modifiers[0]
    assert isinstance(read, SpinQuantModifier)
    assert read.model_dump(exclude={"group"}) == modifier.model_dump(exclude={"group"})
    assert (read.rotations, read.precision) == (["R1", "R4"], "float32")
