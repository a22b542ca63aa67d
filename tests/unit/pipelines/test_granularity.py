# SPDX-License-Identifier: Apache-2.0
"""Where a forward is paused, why there, and what is told to modifiers at each stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, hooks_left, plain_inputs, run_pipeline, stubs_left
from torch import nn
from torch.nn import Module

from llmcompressor.core.contract import Granularity
from llmcompressor.errors import TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import trace_calls
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.pipelines import activations
from llmcompressor.pipelines.granularity import StopPlan, estimate_bytes, plan_stops

LINEAR, SUB_BLOCK, BLOCK = Granularity
LAYER = [
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
]


def _plan(model: Module, **changes: Any) -> StopPlan:
    names = tiny.leaves(model, "Linear", ["lm_head"])
    blocks = find_blocks(model)
    region = {inner: name for block, name in blocks.items() for inner in block.modules()}
    by_name = {name: module for module, name in names.items()}
    order = trace_calls(
        lambda: model(torch.ones(1, 4, dtype=torch.long)),
        names,
        region=lambda name: region[by_name[name]],
        also_count=region,
    )
    settings: dict[str, Any] = {
        "finest": LINEAR,
        "forced": None,
        "tokens": 1000,
        "streams": 1,
        "budget": 10**9,
    }
    return plan_stops(names, order, blocks, **{**settings, **changes})


def _shape(plan: StopPlan, model: Module) -> list[tuple[str, tuple[str, ...]]]:
    names = {module: name for name, module in model.named_modules()}
    return [
        (unit.name, tuple(names[module].rpartition(".")[2] for module in unit.modules))
        for unit in plan.units
    ]


def test_linear_level_stops_at_the_first_of_a_shared_input() -> None:
    model = tiny.build("llama")
    plan = _plan(model)
    assert plan.level is LINEAR
    expected = [group for _ in range(tiny.LAYERS) for group in LAYER]
    assert [members for _, members in _shape(plan, model)] == expected
    assert [unit.name.rpartition(".")[2] for unit in plan.units[:4]] == [one[0] for one in LAYER]
    assert not any(unit.runs_twice for unit in plan.units)
    assert [len(unit.others) for unit in plan.units[:4]] == [2, 0, 1, 0]


def test_sub_block_level_stops_at_attention_and_mlp() -> None:
    model = tiny.build("llama")
    plan = _plan(model, forced=SUB_BLOCK)
    assert _shape(plan, model)[:2] == [
        ("model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")),
    ]
    assert all(unit.runs_twice and not unit.others for unit in plan.units)


def test_block_level_stops_at_decoder_layers() -> None:
    model = tiny.build("llama")
    plan = _plan(model, forced=BLOCK)
    assert [name for name, _ in _shape(plan, model)] == ["model.layers.0", "model.layers.1"]
    assert all(len(unit.modules) == 7 for unit in plan.units)


def test_cross_attention_shares_its_input_within_a_layer_only() -> None:
    model = tiny.build("t5")
    names = tiny.leaves(model, "Linear", ["lm_head"])
    blocks = find_blocks(model)
    region = {
        names[m]: name for block, name in blocks.items() for m in block.modules() if m in names
    }
    batch = tiny.translation_batches()[0]
    order = trace_calls(lambda: model(**batch), names, region=region.__getitem__)
    shared = [
        tuple(names[module].removeprefix("decoder.block.") for module in group)
        for group in order.groups
        if "EncDecAttention.k" in names[group[0]]
    ]
    assert shared == [
        (f"{i}.layer.1.EncDecAttention.k", f"{i}.layer.1.EncDecAttention.v") for i in range(2)
    ]


def test_the_finest_level_is_the_coarsest_a_modifier_declares() -> None:
    model = tiny.build("llama")
    assert _plan(model, finest=SUB_BLOCK).level is SUB_BLOCK
    plan = _plan(model, finest=SUB_BLOCK, forced=LINEAR)
    assert plan.level is SUB_BLOCK
    assert "the finest that the recipe allows is sub_block" in plan.reason
    assert _plan(model, finest=LINEAR, every_block=True).level is BLOCK


def test_the_level_follows_the_budget() -> None:
    model = tiny.build("llama")
    linears = list(tiny.leaves(model, "Linear", ["lm_head"]))
    sizes = {level: estimate_bytes(level, linears, 1000, 1) for level in Granularity}
    assert sizes == {LINEAR: 4000 * (64 + 128), SUB_BLOCK: 4000 * 64, BLOCK: 4000 * 32}
    for level in Granularity:
        plan = _plan(model, budget=sizes[level])
        assert (plan.level, plan.bytes) == (level, sizes[level])
        assert "fit" in plan.reason
    assert _plan(model, budget=sizes[LINEAR] - 1).level is SUB_BLOCK
    assert _plan(model, budget=sizes[LINEAR], streams=2).level is SUB_BLOCK
    nothing_fits = _plan(model, budget=1)
    assert nothing_fits.level is BLOCK
    assert "files" in nothing_fits.reason


def _told(model: Module, granularity: Granularity = LINEAR, **arguments: Any) -> list[Any]:
    pipeline = arguments.pop("pipeline", "sequential")
    recorder = Recorder(granularity=granularity)
    run_pipeline(model, tiny.text_batches(), recorder, pipeline, **arguments)
    return recorder._events[1:-1]


def _blocks_of(events: list[Any]) -> list[set[str]]:
    return [{name.rpartition(".")[2] for name in names} for names in events]


ALL = {name for group in LAYER for name in group}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["LlamaDecoderLayer"], [ALL, ALL]),
        (["re:.*layers.\\d+$"], [ALL, ALL]),
        (["model.layers.0", "model.layers.1"], [ALL, ALL]),
        (["LlamaMLP"], [set(LAYER[0]), set(LAYER[1]), {*LAYER[2], *LAYER[3]}] * 2),
        (["Linear"], [set(group) for _ in range(2) for group in LAYER]),
    ],
    ids=["class", "pattern", "names", "parts", "linears"],
)
def test_the_user_may_say_where(targets: list[str], expected: list[set[str]]) -> None:
    model = tiny.build("llama")
    assert _blocks_of(_told(model, sequential_targets=targets)) == expected


class Everywhere(Modifier):
    """Wants data, and names no modules."""

    _told: list[tuple[Module, ...]] = PrivateAttr(default_factory=list)

    @property
    def requires_calibration_data(self) -> bool:
        return True

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        return True

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
        self._told.append(tuple(modules))


@pytest.mark.parametrize("target", ["LlamaDecoderLayer", "LlamaMLP", "Linear"])
def test_who_names_no_modules_is_told_of_all_once(target: str) -> None:
    model, modifier = tiny.build("llama"), Everywhere()
    run_pipeline(model, tiny.text_batches(), modifier, sequential_targets=[target])
    *stops, rest = modifier._told
    assert all(type(modules[0]).__name__ == target for modules in stops)
    told = [module for modules in (*stops, rest) for module in modules]
    assert len(told) == len(set(told))
    assert set(told) == set(model.modules())


def test_nested_targets_of_the_user_are_an_error_that_names_both() -> None:
    with pytest.raises(TargetError, match=r"'model.layers.0' and 'model.layers.0.mlp' are nested"):
        _told(tiny.build("llama"), sequential_targets=["LlamaDecoderLayer", "LlamaMLP"])


def test_targets_that_match_nothing_are_an_error() -> None:
    with pytest.raises(TargetError, match="LlamaDecoder'"):
        _told(tiny.build("llama"), sequential_targets=["LlamaDecoder"])


class Routed(nn.Module):
    """Layers of experts of which each batch takes one; a batch's number is its route."""

    def __init__(self, experts: int = 3, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.enter = nn.Linear(4, 4)
            layer.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))
            self.layers.append(layer)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer.experts[route](torch.tanh(layer.enter(x)))
        return x


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_routes_are_joined_so_each_module_sees_all_batches(first: int, twin: bool) -> None:
    """Whichever of them the watched batch takes."""
    routes = [first, *(route for route in (0, 1, 2, 2, 0) if route != first)]
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(1, 5, 4, generator=generator), "route": r} for r in routes]
    model, original = Routed(), Routed()
    recorder = Recorder(round_to=1, twin=twin)
    run_pipeline(model, batches, recorder)
    names = tiny.leaves(model, "Linear", [])
    expected = plain_inputs(model, batches, names)
    references = plain_inputs(original, batches, tiny.leaves(original, "Linear", []))
    for name, inputs in expected.items():
        assert recorder._seen_when_told[name] == len(inputs), name
        arrived = [id(batch) for batch in recorder._batches[name]]
        seen = [arrived.index(id(batch)) for batch in batches if id(batch) in arrived]
        pairs = zip(seen, inputs, strict=True)
        assert all(torch.equal(recorder._inputs[name][i], x) for i, x in pairs), name
        if twin:
            pairs = zip(seen, references[name], strict=True)
            assert all(torch.equal(recorder._references[name][i], x) for i, x in pairs), name


def test_a_target_that_no_batch_reaches_is_named_in_an_error(warned: list[str]) -> None:
    model = Routed(experts=2, layers=2)
    batches = [{"x": torch.randn(1, 5, 4), "route": 1}]
    with pytest.raises(TargetError, match=r"reached layers\.0\.experts\.0, layers\.1\.experts\.0"):
        run_pipeline(model, batches, Recorder())
    with pytest.raises(TargetError, match=r"reached layers\.0\.experts\.0, layers\.1\.experts\.0"):
        run_pipeline(model, batches, Recorder(twin=True))
    assert not stubs_left(model)
    assert not hooks_left(model)
    # at the beginning of each run, before any batch
    first, second = (line for line in warned if "did not call" in line)
    assert first == second
    assert "did not call layers.0.experts.0, layers.1.experts.0. If no batch does" in first
    assert "re:" not in first


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("level", list(Granularity))
def test_the_head_is_not_computed(level: Granularity, twin: bool) -> None:
    """But for a few tokens, when it is watched what shares an input with what."""
    model, tokens = tiny.build("llama"), []
    model.lm_head.register_forward_pre_hook(
        lambda _, args: tokens.append(args[0].shape[:2].numel())
    )
    run_pipeline(model, tiny.text_batches(), Recorder(granularity=level, twin=twin))
    assert sum(tokens) <= 8


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        ("auto", [set(group) for group in LAYER]),
        ("linear", [set(group) for group in LAYER]),
        ("sub_block", [{*LAYER[0], *LAYER[1]}, {*LAYER[2], *LAYER[3]}]),
        ("block", [ALL]),
    ],
)
def test_the_user_may_say_how_fine(granularity: str, expected: list[set[str]]) -> None:
    told = _told(tiny.build("llama"), sequential_granularity=granularity)
    assert _blocks_of(told) == expected * tiny.LAYERS


def test_the_level_follows_the_budget_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what exceeds it goes to files, which nobody notices."""
    monkeypatch.setattr(activations, "_SMALLEST", 1024)
    spilled = []
    close = activations.ActivationStore.close

    def watched_close(store: activations.ActivationStore) -> None:
        spilled.append(store.spilled)
        close(store)

    monkeypatch.setattr(activations.ActivationStore, "close", watched_close)
    assert len(_told(tiny.build("llama"), activation_budget="1GiB")) == len(LAYER) * tiny.LAYERS
    assert _blocks_of(_told(tiny.build("llama"), activation_budget=1)) == [ALL, ALL]
    tokens = sum(batch["input_ids"].numel() for batch in tiny.text_batches())
    just_enough = 4 * tokens * 64  # two hidden states of 32 in float32
    parts = _told(tiny.build("llama"), activation_budget=just_enough)
    assert len(parts) == 2 * tiny.LAYERS
    finest = _told(tiny.build("llama"), activation_budget=1, sequential_granularity="linear")
    assert len(finest) == len(LAYER) * tiny.LAYERS
    assert [bool(one) for one in spilled] == [False, True, False, True]


class Outputs(Modifier):
    """Records the outputs of modules as an observer would, and changes their weights when told."""

    targets: list[str]
    granularity: Granularity = LINEAR

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        self._modules = [m for m in state.model.modules() if type(m).__name__ in self.targets]
        self._outputs: dict[Module, list[torch.Tensor]] = {m: [] for m in self._modules}
        self._when_told: dict[Module, int] = {}
        return True

    _modules: Any = None
    _outputs: Any = None
    _when_told: Any = None

    @property
    def requires_calibration_data(self) -> bool:
        return True

    @property
    def finest_granularity(self) -> Granularity:
        return self.granularity

    def calibrated_modules(self, state: Any) -> list[Module]:
        return self._modules

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        def record(module: Module, args: Any, output: Any) -> None:
            self._outputs[module].append(output.clone())

        for module in self._modules:
            self.register_hook(module, record, "forward")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
        for module in modules:
            if module in self._outputs:
                self._when_told[module] = len(self._outputs[module])
                for parameter in module.parameters():
                    parameter.data = parameter.data.round(decimals=1)


@pytest.mark.parametrize("target", ["LlamaMLP", "LlamaDecoderLayer"])
def test_a_block_shows_its_output_once_before_compression(target: str) -> None:
    model, original, batches = tiny.build("llama"), tiny.build("llama"), tiny.text_batches()
    modifier = Outputs(targets=[target], granularity=BLOCK)
    run_pipeline(model, batches, modifier, sequential_targets=[target])
    first = modifier._modules[0]
    assert set(modifier._when_told.values()) == {len(batches)}
    assert [len(outputs) for outputs in modifier._outputs.values()] == [len(batches)] * 2
    name = next(name for name, module in model.named_modules() if module is first)
    plain: list[torch.Tensor] = []
    original.get_submodule(name).register_forward_hook(
        lambda _, args, output: plain.append(output.clone())
    )
    with torch.no_grad():
        for batch in batches:
            original(**batch)
    assert all(map(torch.equal, modifier._outputs[first], plain))


STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
STATIC_INPUTS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": STATIC,
}


@pytest.mark.parametrize(
    "recipe",
    [
        {"config_groups": {"a": STATIC_INPUTS}},
        {"config_groups": {"a": {**STATIC_INPUTS, "output_activations": STATIC}}},
        {"config_groups": {"a": STATIC_INPUTS}, "ignore": ["lm_head", "re:.*down_proj"]},
        {"scheme": "W4A16", "weight_observer": "imatrix_mse"},
        {"scheme": "NVFP4", "ignore": ["lm_head", "re:.*down_proj"]},
    ],
    ids=["inputs", "outputs", "last stop is a group", "imatrix", "NVFP4"],
)
def test_rounding_is_the_same_in_every_pipeline(recipe: dict[str, Any]) -> None:
    """Nothing propagates from rounding, which is done at the end; so statistics are the same."""
    found = {}
    for pipeline in ("basic", "sequential", "layer_sequential"):
        torch.manual_seed(0)
        model = tiny.llama(hidden_size=128, intermediate_size=128)
        modifier = QuantizationModifier(**{"targets": "Linear", "ignore": ["lm_head"], **recipe})
        run_pipeline(model, tiny.text_batches(), modifier, pipeline)
        found[pipeline] = dict(model.state_dict())
    for pipeline in ("sequential", "layer_sequential"):
        assert found[pipeline].keys() == found["basic"].keys()
        for name, tensor in found["basic"].items():
            assert torch.equal(found[pipeline][name], tensor), (pipeline, name)


class Watcher(Modifier):
    """A third party's modifier that declares no modules: it is told of all."""

    _seen: Any = None
    _told: Any = None

    @property
    def requires_calibration_data(self) -> bool:
        return True

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        self._seen, self._told = {}, []
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        for module in state.model.modules():
            self.register_hook(module, self._count, "forward")

    def _count(self, module: Module, args: Any, output: Any) -> None:
        self._seen[module] = self._seen.get(module, 0) + 1

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
        self._told.append({module: self._seen.get(module, 0) for module in modules})


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_undeclared_modifier_is_told_of_each_module_once(name: str) -> None:
    model, batches = tiny.build(name), tiny.ARCHITECTURES[name].batches()
    watcher = Watcher()
    run_pipeline(model, batches, watcher)
    blocks = list(find_blocks(model))
    assert len(watcher._told) == len(blocks) + 1
    told = [module for event in watcher._told for module in event]
    assert len(told) == len(set(told))
    assert set(told) == set(model.modules())
    for block, event in zip(blocks, watcher._told, strict=False):
        assert set(event) == set(block.modules())
        called = {module: count for module, count in event.items() if count}
        assert set(called.values()) == {len(batches)}
    assert watcher._seen[model] == len(batches)
    assert watcher._seen[model.lm_head] == len(batches)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("level", [LINEAR, BLOCK])
def test_an_error_of_a_modifier_leaves_nothing_behind(
    level: Granularity, twin: bool, error: type[BaseException]
) -> None:
    class Failing(Recorder):
        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
            super().on_sequential_epoch_end(state, event, modules, **kw)
            if len(self._told) > 7:
                raise error

    model, config = tiny.build("llama"), tiny.build("llama").config.to_dict()
    model.model.layers[0].train()
    with pytest.raises(error):
        run_pipeline(model, tiny.text_batches(), Failing(granularity=level, twin=twin))
    assert not stubs_left(model)
    assert not hooks_left(model)
    assert torch.is_grad_enabled()
    assert model.config.to_dict() == config
    assert [module.training for module in model.model.layers] == [True, False]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("level", [LINEAR, BLOCK])
def test_an_error_in_the_model_leaves_nothing_behind(
    level: Granularity, error: type[BaseException]
) -> None:
    model, calls = tiny.build("llama"), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error

    handle = model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(fail)
    with pytest.raises(error):
        run_pipeline(model, tiny.text_batches(), Recorder(granularity=level, twin=True))
    handle.remove()
    assert not stubs_left(model)
    assert not hooks_left(model)
    assert torch.is_grad_enabled()
