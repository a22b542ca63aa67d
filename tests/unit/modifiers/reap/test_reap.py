# SPDX-License-Identifier: Apache-2.0
"""REAP on tiny mixtures: what is useless goes, what is left computes as before, counts agree."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as small
from tests.support.thinned import few, thinned
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from llmcompressor import verify
from llmcompressor.errors import (
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.modifiers.reap.layers import (
    find_moe_layers,
    prune_experts,
)

USELESS = ((1, 6), (0, 3))
"""Of the first and of the second mixture."""


class Separate(torch.nn.ModuleList):
    """Experts that were never stacked, as a model of its own code may have them."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(32, 32) for _ in range(small.EXPERTS))

    def forward(self, hidden: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden


def planted(family: str, **changes: Any) -> Any:
    """Two experts of each mixture return next to nothing."""
    model = small.mixture(family, **changes)
    with torch.no_grad():
        for block, experts in zip(small.blocks(model), USELESS, strict=True):
            block.experts.down_proj[list(experts)] *= 1e-3
    return model


def count_of(config: Any) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    [count] = {getattr(config, name) for name in names if hasattr(config, name)}
    return int(count)


def dropped(modifier: REAPPruningModifier) -> list[tuple[int, ...]]:
    return [tuple(record["dropped"]) for record in modifier.report().values()]


@pytest.mark.parametrize("family", small.FAMILIES)
def test_planted_experts_go_and_the_rest_computes_as_before(family: str) -> None:
    original, modifier = planted(family), REAPPruningModifier(sparsity=0.25)
    model = tiny.run(planted(family), modifier)
    assert dropped(modifier) == list(USELESS)
    assert count_of(model.config) == 6
    hidden = torch.randn(1, 400, 32)
    for before, after, gone in zip(
        small.blocks(original), small.blocks(model), USELESS, strict=True
    ):
        assert len(after.experts.down_proj) == len(after.gate.weight) == 6
        assert after.experts.num_experts == after.gate.num_experts == 6
        with torch.no_grad():
            chosen = before.gate(hidden.flatten(0, 1))[2]
            untouched = ~torch.isin(chosen, torch.tensor(gone)).any(-1)
            assert 50 < int(untouched.sum()) < 350
            one, other = (block(hidden)[0] for block in (before, after))
        torch.testing.assert_close(one[untouched], other[untouched], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(one[~untouched], other[~untouched], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", few(small.FAMILIES, "qwen3_moe"))
def test_from_folder_to_folder(family: str, tmp_path: Path) -> None:
    planted(family).save_pretrained(tmp_path / "model")
    modifier = REAPPruningModifier(sparsity=0.3, report_path=str(tmp_path / "new" / "experts.json"))
    model = tiny.run(str(tmp_path / "model"), modifier, output_dir=tmp_path / "out")
    assert dropped(modifier) == list(USELESS)
    assert verify(tmp_path / "out").ok
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert count_of(read.config) == 6
    assert torch.equal(tiny.logits(read, tiny.batches()), tiny.logits(model, tiny.batches()))
    record = modifier.report()
    left = json.loads((tmp_path / "new" / "experts.json").read_text())
    assert left == {name.rpartition(".")[0]: one["kept"] for name, one in record.items()}
    for one in record.values():
        assert sum(one["tokens"]) == 8 * 2 * 24 * 2
        assert sorted(one["kept"] + one["dropped"]) == list(range(8))
    written = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert next(iter(record)) in json.dumps(written)


@pytest.mark.parametrize(("family", "quantizes"), thinned(small.FAMILIES, [False, True]))
def test_block_by_block_and_in_memory_are_the_same(
    family: str, quantizes: bool, tmp_path: Path, warned: list[str]
) -> None:
    """One block is in memory at a time, and experts go with it; a pass behind has none of them."""
    planted(family).save_pretrained(tmp_path / "model")
    weights = {"num_bits": 4, "strategy": "group", "group_size": 8}
    groups = {"all": {"targets": ["re:.*self_attn.o_proj$"], "weights": weights}}
    for name in ("streamed", "whole"):
        recipe: list[Any] = [REAPPruningModifier(sparsity=0.5)]
        if quantizes:
            recipe.append(GPTQModifier(config_groups=groups))
        folder = tmp_path / "model"
        given = AutoModelForCausalLM.from_pretrained(folder) if name == "whole" else str(folder)
        tiny.run(given, *recipe, output_dir=tmp_path / name, verify=False)
    assert not [one for one in warned if "whole model is loaded" in one]
    for file in ("model.safetensors", "config.json", "compression_report.json"):
        streamed, whole = ((tmp_path / name / file).read_bytes() for name in ("streamed", "whole"))
        assert streamed == whole, file


@torch.no_grad()
def by_hand(model: Any, sparsity: float, *, propagates: bool) -> list[tuple[list[float], Any]]:
    """Mixture by mixture: S of each expert, which are left; these alone go on where it is asked."""
    found = []
    for layer in find_moe_layers(model):
        calls: list[Any] = []
        handle = layer.experts.register_forward_pre_hook(
            lambda _, args, calls=calls: calls.append(args)
        )
        tiny.logits(model, tiny.batches())
        handle.remove()
        hidden, index, weight = (torch.cat(each) for each in zip(*calls, strict=True))
        saliency = []
        for expert in range(small.EXPERTS):
            token, place = (index == expert).nonzero(as_tuple=True)
            alone = torch.full((len(token), 1), expert), torch.ones(len(token), 1)
            output = layer.experts(hidden[token], *alone)
            saliency.append(float((weight[token, place] * output.norm(dim=-1)).mean()))
        order = sorted(range(small.EXPERTS), key=saliency.__getitem__)
        kept = sorted(order[int(small.EXPERTS * sparsity) :])
        found.append((saliency, kept))
        if propagates:
            prune_experts(model, layer, kept)
    return found


def gemma4() -> Any:
    """Its blocks hold router and experts themselves, beside an MLP."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=96,
        vocab_size_per_layer_input=96,
        hidden_size=32,
        hidden_size_per_layer_input=0,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=0,
        head_dim=8,
        global_head_dim=8,
        max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=small.EXPERTS,
        top_k_experts=2,
        moe_intermediate_size=24,
        initializer_range=0.2,
        pad_token_id=0,
    )
    model: Any = Gemma4ForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.router.proj.weight, std=0.5)
        torch.nn.init.uniform_(layer.router.per_expert_scale, 0.2, 3.0)
        for stack in layer.experts.parameters():
            torch.nn.init.normal_(stack, std=0.2)
    return model


MAKERS = {
    "gemma4": gemma4,
    **{name: partial(small.mixture, name) for name in small.FAMILIES},
}


WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "sequential": ({}, True),
    "by layer": ({"pipeline": "layer_sequential"}, True),
    "independent": ({"pipeline": "independent"}, True),
    "as it was": ({"propagate_error": False}, False),
    "basic": ({"pipeline": "basic"}, False),
}


@cache
def found_by_hand(family: str, *, propagates: bool) -> list[tuple[list[float], Any]]:
    return by_hand(MAKERS[family](), 0.5, propagates=propagates)


@pytest.mark.parametrize(("family", "way"), thinned(MAKERS, WAYS))
def test_as_computed_by_hand(family: str, way: str) -> None:
    """Each mixture behind those that have lost their experts, or in the model as it was."""
    arguments, propagates = WAYS[way]
    expected = found_by_hand(family, propagates=propagates)
    modifier = REAPPruningModifier(sparsity=0.5)
    model = tiny.run(MAKERS[family](), modifier, **arguments)
    for record, (saliency, kept) in zip(modifier.report().values(), expected, strict=True):
        assert record["kept"] == kept
        assert record["saliency"] == pytest.approx(saliency, rel=1e-4)
    assert tiny.logits(model, tiny.batches()).isfinite().all()


def part(model: Any, kind: str) -> str:
    """The name of a part of the last layer."""
    names = {module: name for name, module in model.named_modules()}
    layer = find_moe_layers(model)[-1]
    attention = re.sub(r"(layers\.\d+)\..*", r"\1.self_attn", names[layer.experts])
    own = {"experts": layer.experts, "router": layer.router, "holder": layer.parent}
    return attention if kind == "attention" else names[own[kind]]


STOPS: list[tuple[list[str], str]] = [
    (["attention"], "auto"),
    (["attention", "experts"], "auto"),
    (["attention", "router"], "auto"),
    (["router"], "auto"),
    (["experts"], "auto"),
    (["holder"], "auto"),
    (["holder"], "sub_block"),
    (["attention", "experts"], "linear"),
]


@cache
def of_whole_blocks(family: str) -> tuple[Any, Any]:
    modifier = REAPPruningModifier(sparsity=0.5)
    model = tiny.run(MAKERS[family](), modifier, sequential_granularity="block")
    return model, modifier.report()


@pytest.mark.parametrize(("family", "kinds", "granularity"), thinned(MAKERS, STOPS), ids=str)
def test_stops_within_a_mixture_drop_the_same_experts(
    family: str, kinds: list[str], granularity: str
) -> None:
    """Passes that were routed before experts are gone would go on to the wrong ones."""
    whole, expected = of_whole_blocks(family)
    found = REAPPruningModifier(sparsity=0.5)
    model = MAKERS[family]()
    targets = [re.sub(r"layers\.\d+", r"layers.\\d+", part(model, kind)) for kind in kinds]
    targets = [f"re:^{one}$" for one in targets]
    tiny.run(model, found, sequential_targets=targets, sequential_granularity=granularity)
    assert found.report() == expected
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_routing_groups_lose_as_many(tmp_path: Path) -> None:
    model = small.mixture("deepseek_v3", n_group=2, topk_group=1)
    modifier = REAPPruningModifier(sparsity=0.5)
    biases = [block.gate.e_score_correction_bias.clone() for block in small.blocks(model)]
    tiny.run(model, modifier, output_dir=tmp_path / "out")
    for gone in dropped(modifier):
        assert [sum(number // 4 == group for number in gone) for group in range(2)] == [2, 2]
    pairs = zip(small.blocks(model), biases, modifier.report().values(), strict=True)
    for block, bias, record in pairs:
        assert torch.equal(block.gate.e_score_correction_bias, bias[record["kept"]])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(tiny.logits(read, tiny.batches()), tiny.logits(model, tiny.batches()))


def test_dropping_what_adds_least_costs_least() -> None:
    """Against dropping the experts that add most."""
    reference = tiny.logits(small.mixture("mixtral"), tiny.batches())
    modifier = REAPPruningModifier(sparsity=0.25)
    best = tiny.run(small.mixture("mixtral"), modifier)
    worst = small.mixture("mixtral")
    for layer in find_moe_layers(worst):
        saliency = modifier.report()[layer.name]["saliency"]
        order = sorted(range(small.EXPERTS), key=saliency.__getitem__)
        prune_experts(worst, layer, sorted(order[:6]))
    errors = [
        float((tiny.logits(model, tiny.batches()) - reference).square().mean())
        for model in (best, worst)
    ]
    assert errors[0] < 0.8 * errors[1]


def test_broken_off_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted("mixtral")
    small.blocks(model)[1].experts.down_proj.data[2] = torch.inf
    with pytest.raises(NonFiniteError):
        tiny.run(model, REAPPruningModifier(sparsity=0.25))
    model = planted("mixtral")
    monkeypatch.setattr("llmcompressor.numerics.reap.Saliency.mean", lambda self: self.sum_E / 0)
    with pytest.raises(NonFiniteError, match="experts"):
        tiny.run(model, REAPPruningModifier(sparsity=0.25))
    assert count_of(model.config) == 8
    assert len(small.blocks(model)[0].experts.down_proj) == 8
    assert tiny.traces(small.blocks(model)[0].gate) == {}


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        (("mixtral", {"num_experts_per_tok": 3}), {"sparsity": 0.8}, "only 2 would remain"),
        (("mixtral", {"num_experts_per_tok": 5}), {"sparsity": 0.5}, "only 4 would remain"),
        (("mixtral", {}), {"sparsity": 0.1}, "drops none"),
        (("mixtral", {}), {"sparsity": 0.5, "ignore": ["re:.*experts"]}, "no mixture"),
        (("mixtral", {}), {"sparsity": 0.5, "ignore": ["model.layers.0.mlp"]}, "one number"),
        (
            ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
            {"sparsity": 0.5},
            "score a group by two",
        ),
    ],
    ids=["most", "top_k", "none", "all ignored", "one ignored", "groups"],
)
def test_wrong_use_is_refused(
    model: tuple[str, dict[str, Any]], fields: dict[str, Any], told: str
) -> None:
    family, changes = model
    given = small.mixture(family, **changes)
    with pytest.raises(TargetError, match=told):
        tiny.run(given, REAPPruningModifier(**fields))
    assert count_of(given.config) == 8


def test_models_and_fields_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "folder.json").mkdir()
    for place, what in (("taken/report.json", "Not a dir"), ("folder.json", "Is a dir")):
        lost = REAPPruningModifier(sparsity=0.5, report_path=str(tmp_path / place))
        with pytest.raises(OutputError, match=what):
            tiny.run(small.mixture("mixtral"), lost)
    with pytest.raises(TargetError, match="no mixture"):
        tiny.run(tiny.llama(), REAPPruningModifier(sparsity=0.5))
    with pytest.raises(RecipeError, match=r"\.json"):
        REAPPruningModifier(sparsity=0.5, report_path="report.yaml")
    for sparsity in (0.0, 1.0, None):
        with pytest.raises(RecipeError, match="sparsity"):
            REAPPruningModifier(sparsity=sparsity)
    separate = small.mixture("qwen3_moe")
    separate.model.layers[0].mlp.experts = Separate()
    with pytest.raises(TargetError, match="modules of its own for each"):
        tiny.run(separate, REAPPruningModifier(sparsity=0.5))
