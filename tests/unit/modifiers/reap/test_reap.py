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
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
)

from llmcompressor import oneshot, plan, verify
from llmcompressor.core.modifier import planned_structure
from llmcompressor.core.state import State
from llmcompressor.errors import (
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.reap.layers import (
    expert_count_attributes,
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


@pytest.mark.parametrize("family", small.FAMILIES)
def test_what_is_only_outlined_is_as_it_was_again(family: str) -> None:
    def look(model: Any) -> list[Any]:
        numbers = [
            (name, key, value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if type(value) is int
        ]
        return [
            model.config.to_dict(),
            numbers,
            {key: id(value) for key, value in model.state_dict(keep_vars=True).items()},
        ]

    model = small.mixture(family)
    state, modifier = State(model=model), REAPPruningModifier(sparsity=0.5)
    modifier.initialize(state)
    before = look(model)
    with planned_structure([modifier], state):
        assert count_of(model.config) == 4
        assert {len(one.experts.down_proj) for one in small.blocks(model)} == {4}
    assert look(model) == before


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


def hunyuan() -> Any:
    """The Linear that scores experts is a part of the router."""
    torch.manual_seed(0)
    own = {"head_dim": 8, "num_experts": small.EXPERTS, "moe_topk": 2}
    return HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**small.COMMON, **own)).eval()


@pytest.mark.parametrize("make", [gemma4, hunyuan])
def test_all_that_a_router_has_for_an_expert_goes_with_it(make: Any, tmp_path: Path) -> None:
    """Whatever holds it: the part that scores, or what that is a part of."""
    original = make()
    original.save_pretrained(tmp_path / "model")
    modifier = REAPPruningModifier(sparsity=0.5)
    model = tiny.run(str(tmp_path / "model"), modifier, output_dir=tmp_path / "out")
    assert verify(tmp_path / "out").ok
    logits = tiny.logits(model, tiny.batches())
    for layer, record in zip(find_moe_layers(original), modifier.report().values(), strict=True):
        prune_experts(original, layer, record["kept"])
        counts = [vars(one)["num_experts"] for one in layer.around if "num_experts" in vars(one)]
        assert set(counts) <= {4}
    for holder, name in expert_count_attributes(original, small.EXPERTS):
        setattr(holder, name, 4)
    for layer in original.model.layers:
        router = getattr(layer, "router", None)
        if router is not None:
            assert len(router.per_expert_scale) == 4
    assert torch.equal(tiny.logits(original, tiny.batches()), logits)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(tiny.logits(read, tiny.batches()), logits)


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


def test_what_is_passed_on_makes_a_difference() -> None:
    """Else the cases above would show nothing."""
    one, other = (
        by_hand(small.mixture("mixtral"), 0.5, propagates=passed) for passed in (True, False)
    )
    assert one[0] == other[0]
    assert one[1][0] != pytest.approx(other[1][0], rel=1e-2)


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


@pytest.mark.parametrize("family", ["gemma4", "mixtral"])
def test_mixtures_in_one_stop_are_looked_at_as_they_were(family: str) -> None:
    one, other = REAPPruningModifier(sparsity=0.5), REAPPruningModifier(sparsity=0.5)
    model = MAKERS[family]()
    tiny.run(model, one, sequential_targets=[type(model.model).__name__])
    tiny.run(MAKERS[family](), other, propagate_error=False)
    assert one.report() == other.report()


def test_padding_does_not_count() -> None:
    found = []
    for data in (tiny.batches(), tiny.padded(tiny.batches(), by=9)):
        modifier = REAPPruningModifier(sparsity=0.5)
        tiny.run(small.mixture("mixtral"), modifier, data=data)
        found.append(modifier.report())
    for one, other in zip(*(report.values() for report in found), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["saliency"] == pytest.approx(other["saliency"], rel=1e-4)


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


def test_what_is_left_can_be_quantized_in_the_same_recipe() -> None:
    modifier = REAPPruningModifier(sparsity=0.25)
    quantizing = QuantizationModifier(
        targets=["re:.*self_attn.*_proj"], scheme="W8A16", ignore=["lm_head"]
    )
    model = tiny.run(planted("qwen3_moe"), modifier, quantizing)
    assert dropped(modifier) == list(USELESS)
    assert hasattr(model.model.layers[0].self_attn.q_proj, "weight_scale")


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


def test_the_share_that_is_proposed_drops_one() -> None:
    """Of three experts 0.3333 would drop none."""
    given = small.mixture("mixtral", num_local_experts=3, num_experts_per_tok=1)
    with pytest.raises(TargetError, match="drops none") as caught:
        tiny.run(given, REAPPruningModifier(sparsity=0.1))
    share = float(caught.value.remedy.removeprefix("Give at least ").removesuffix("."))
    assert share == 0.3334
    assert count_of(tiny.run(given, REAPPruningModifier(sparsity=share)).config) == 2


def test_an_ignore_entry_that_matches_nothing_is_warned_of(warned: list[str]) -> None:
    tiny.run(small.mixture("mixtral"), REAPPruningModifier(sparsity=0.5, ignore=["mixtur"]))
    assert any("'mixtur' matches no module" in one for one in warned)


def test_a_report_that_cannot_be_written_is_refused_before_the_model(tmp_path: Path) -> None:
    """Here the model is not even there; a plan needs one."""
    given: dict[str, Any] = {"sparsity": 0.5, "report_path": "/proc/report.json"}
    with pytest.raises(
        OutputError, match=r"REAPPruningModifier: report_path is /proc/report\.json"
    ):
        oneshot(model=tmp_path / "none", recipe=REAPPruningModifier(**given), dataset="none")
    small.mixture("mixtral").save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [3, 4, 5]}]
    found = plan(tmp_path / "model", REAPPruningModifier(**given), rows, measure=False)
    assert [one for one in found.problems if "report_path" in str(one.message)]


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


def test_the_mixture_is_run_from_a_folder_too(tmp_path: Path) -> None:
    """A recipe as text."""
    small.mixture("mixtral").save_pretrained(tmp_path / "model")
    text = "modifiers:\n  REAPPruningModifier:\n    sparsity: 0.5\n"
    rows: Any = [{"input_ids": row.tolist()} for b in tiny.batches() for row in b["input_ids"]]
    oneshot(model=str(tmp_path / "model"), recipe=text, dataset=rows, output_dir=tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_local_experts == 4
