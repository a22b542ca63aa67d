# SPDX-License-Identifier: Apache-2.0
"""Experts that the model's own code calls see all tokens, or it is said that they do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from tests.support import tiny_models as tiny
from tests.support.listed_mixtures import AsList
from tests.support.recorders import Recorder, hooks_left, plain_inputs, run_pipeline
from tests.support.thinned import thinned
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.pipelines.moe_routing import experts_report

PIPELINES = ["basic", "sequential", "layer_sequential", "independent"]
EXPERTS = 3
LIST = "model.layers.1.mlp.experts"
FEW: dict[str, Any] = {"moe_calibrate_all_experts": False, "min_tokens_per_module": 0.5}


def chosen_of(tokens: int, share: Sequence[int]) -> Tensor:
    """An expert for each token."""
    return torch.tensor(share).repeat(tokens // len(share) + 1)[:tokens]


class Listed(nn.Module):
    """A list of MLPs; of ten tokens the first gets seven, the second three, the last none."""

    share: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList([LlamaMLP(config) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = self.chosen(rows)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                output[chosen == number] = self.made(expert, rows[chosen == number])
        return output.view_as(x)

    def chosen(self, rows: Tensor) -> Tensor:
        return chosen_of(len(rows), self.share)

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        made: Tensor = expert(rows)
        return made


class ByContent(Listed):
    """What a token holds decides: about seven of ten go to the first, none to the last."""

    def chosen(self, rows: Tensor) -> Tensor:
        said = rows.float().sum(-1)
        return (said > said.mean() + 0.5 * said.std()).long()


class Scaled(ByContent):
    """What they get are no rows of the input."""

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        made: Tensor = expert(rows * 0.5)
        return made


class InChunks(Listed):
    """Some tokens after others, and a shared expert between the calls of one expert."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared = LlamaMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        parts = [super(InChunks, self).forward(one) + self.shared(one) for one in x.split(3, dim=1)]
        return torch.cat(parts, dim=1)


class OfMixtures(Listed):
    """Each of its experts holds experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts = nn.ModuleList([InRows(config) for _ in range(EXPERTS)])


class InRows(Listed):
    """As one of several experts gets tokens: in a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[None])[0]


class Again(Listed):
    """Its layer is called twice in one forward, and its experts were calibrated in the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = Listed(config)
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Halved(ByContent):
    """Its experts return less than they get."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for expert in self.experts:
            expert.down_proj = nn.Linear(config.intermediate_size, config.hidden_size // 2)
        self.back = nn.Linear(config.hidden_size // 2, config.hidden_size)

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        made: Tensor = self.back(expert(rows))
        return made


class Numbered(LlamaMLP):
    """Takes what it is called with under its own number alone."""

    def forward(self, rows: Tensor, number: int = -1) -> Tensor:
        if number != self.number:
            raise ValueError(f"Not {number}.")
        made: Tensor = super().forward(rows)
        return made


class Own(Listed):
    """None of its experts can be called with what another gets."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts = nn.ModuleList([Numbered(config) for _ in range(EXPERTS)])
        for number, expert in enumerate(self.experts):
            expert.number = number

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        made: Tensor = expert(rows, number=expert.number)
        return made


class Doubling(LlamaMLP):
    """Writes to what it gets, and returns nothing else."""

    def forward(self, rows: Tensor, *, weight: Tensor | None = None) -> Tensor:
        return rows.add_(
            super().forward(rows) if weight is None else super().forward(rows * weight)
        )


class Overwritten(ByContent):
    """What experts get are no tokens any more when they have returned; some get a weight."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts = nn.ModuleList([Doubling(config) for _ in range(EXPERTS)])

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        made: Tensor = expert(rows, weight=torch.full_like(rows[:, :1], 0.5))
        return made


class Patient(Recorder):
    """Can do without tokens, as those that quantize weights can."""

    def accepts_unreached(self, name: str) -> bool:
        return True


def build(kind: type[Listed], layer: int = 1) -> Any:
    model: Any = tiny.build("llama")
    model.model.layers[layer].mlp = kind(model.config)
    return model.eval()


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def observed(
    kind: type[Listed], layer: int = 1
) -> tuple[Any, list[Any], dict[nn.Module, str], dict[str, list[Tensor]]]:
    """A model, its batches, its Linears, and what these get in an ordinary forward."""
    model, batches = build(kind, layer), tiny.text_batches()
    names = {module: name for name, module in model.named_modules() if is_linear(name, module)}
    return model, batches, names, plain_inputs(model, batches, names)


def told(warned: list[str]) -> list[str]:
    return [one for one in warned if "model's own code calls" in one]


@pytest.mark.parametrize(("pipeline", "twin"), thinned(PIPELINES, [True, False]))
def test_each_sees_every_token_once_and_outputs_stay(
    pipeline: str, twin: bool, warned: list[str]
) -> None:
    model, batches, _, plain = observed(Listed, layer=0)
    recorder = Patient(twin=twin)
    run_pipeline(model, batches, recorder, pipeline)
    before = "model.layers.0.mlp.experts"
    (report,) = experts_report(model).values()
    shares = [chosen_of(batch["input_ids"].numel(), Listed.share) for batch in batches]
    assert report == {"tokens": torch.cat(shares).bincount(minlength=EXPERTS).tolist()}
    for name, seen in recorder._inputs.items():
        if name.startswith(before) and not name.endswith("down_proj"):
            assert len(seen) == len(batches)
            for one, other in zip(seen, recorder._inputs[f"{before}.0.gate_proj"], strict=True):
                assert torch.equal(one, other)
        elif name.startswith(before):
            sizes = [batch["input_ids"].numel() for batch in batches]
            assert [len(one) for one in seen] == sizes
        else:  # those behind it too
            for one, other in zip(seen, plain[name], strict=True):
                assert torch.equal(one, other)
        if twin and pipeline != "basic":
            pairs = zip(recorder._references[name], seen, strict=True)
            assert all(torch.equal(reference, one) for reference, one in pairs)
    assert any(name.startswith("model.layers.1") for name in recorder._inputs)
    assert not told(warned)
    assert not hooks_left(model)
    assert not [one for one in model.modules() if "forward" in vars(one)]


@pytest.mark.parametrize(
    ("pipeline", "kind"),
    thinned(["sequential", "layer_sequential"], [Listed, InChunks, OfMixtures]),
)
def test_references_are_those_of_the_original_model(pipeline: str, kind: type[Listed]) -> None:
    """Behind compressed experts too, to which other tokens may go, and as often as they like."""
    batches = tiny.text_batches()
    original = Patient()
    run_pipeline(build(kind, layer=0), batches, original, pipeline)
    recorder = Patient(twin=True, round_to=1)
    run_pipeline(build(kind, layer=0), batches, recorder, pipeline)
    for name, references in recorder._references.items():
        if ".shared." in name:  # called several times
            continue
        for one, other in zip(references, original._inputs[name], strict=True):
            assert one is not None
            torch.testing.assert_close(one, other)
    last = "model.layers.1.mlp.down_proj"
    assert not torch.equal(recorder._inputs[last][0], recorder._references[last][0])


@pytest.mark.parametrize("every", [True, False])
def test_a_folder_is_read_block_by_block_with_them(every: bool, tmp_path: Path) -> None:
    """Switch Transformers keep experts by name; what weights would route is not known at first."""
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )
    folder = tmp_path / "model"
    SwitchTransformersForConditionalGeneration(config).save_pretrained(folder)
    ids = torch.randint(2, 96, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": one, "decoder_input_ids": one[:12]} for one in ids]
    outputs = []
    for model in (str(folder), SwitchTransformersForConditionalGeneration.from_pretrained(folder)):
        weights = {"num_bits": 8, "strategy": "channel"}
        recipe = GPTQModifier(
            config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
            ignore=["lm_head", "re:.*classifier$"],
        )
        outputs.append(tmp_path / f"out-{len(outputs)}")
        oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            output_dir=str(outputs[-1]),
            moe_calibrate_all_experts=every,
        )
    for name in ("model.safetensors", "config.json"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    reports = [json.loads((one / "compression_report.json").read_text()) for one in outputs]
    assert reports[0]["experts"] == reports[1]["experts"]
    assert len(reports[0]["experts"]) == 2
    none = [
        (layer, str(place))
        for layer, one in reports[0]["experts"].items()
        for place, count in enumerate(one["tokens"])
        if count == 0
    ]
    assert none
    found = [
        (layer, n) for layer, one in reports[0]["experts"].items() for n in one.get("starved", ())
    ]
    assert found == ([] if every else none)
    records = reports[0]["modifiers"]["GPTQModifier"]
    tokens = [record["tokens"] for name, record in records.items() if ".experts." in name]
    if every:
        assert sorted(tokens) == [4 * 12] * 8 + [4 * 24] * 8  # of the decoder, of the encoder


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_they_may_be_left_to_what_is_routed_to_them(pipeline: str, warned: list[str]) -> None:
    model, batches, _, plain = observed(Listed)
    recorder = Patient()
    arguments = {"moe_calibrate_all_experts": False, "starved_experts": "rtn"}
    run_pipeline(model, batches, recorder, pipeline, **arguments)
    for name in (f"{LIST}.0.gate_proj", f"{LIST}.1.down_proj"):
        assert [len(one) for one in recorder._inputs[name]] == [len(one) for one in plain[name]]
    assert f"{LIST}.2.gate_proj" not in recorder._inputs


STARVED = {**FEW, "sequential_granularity": "block"}


@pytest.mark.parametrize("arguments", [{}, STARVED], ids=["all", "starved"])
def test_they_are_quantized_as_experts_in_stacks_are(arguments: dict[str, Any]) -> None:
    """The same weights, the same routes: GPTQ makes the same of both."""
    stacked: Any = tiny.build("mixtral")
    listed_one = copy.deepcopy(stacked)
    for layer in listed_one.model.layers:
        layer.mlp = AsList(layer.mlp)
    batches = tiny.text_batches()
    if arguments:  # what is routed to experts in lists is padding too
        batches = [{"input_ids": batch["input_ids"]} for batch in batches]
    for model in (stacked, listed_one):
        weights = {"num_bits": 4, "strategy": "group", "group_size": 16}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        asymmetric = None if not arguments else False  # in stacks they have no such correction then
        recipe = GPTQModifier(
            config_groups=groups, ignore=["lm_head", "re:.*gate$"], asymmetric=asymmetric
        )
        data = DataLoader(batches, batch_size=None)
        oneshot(model=model, dataset=data, recipe=recipe, **arguments)
    called = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    pairs = [
        (stack, listed_layer.mlp.experts[int(number)].get_submodule(called[own]))
        for layer, listed_layer in zip(stacked.model.layers, listed_one.model.layers, strict=True)
        for number, expert in layer.mlp.experts.named_children()
        if number.isdigit()
        for own, stack in expert.named_children()
    ]
    assert len(pairs) == len(stacked.model.layers) * stacked.config.num_local_experts * 3
    counted = [experts_report(model) for model in (stacked, listed_one)]
    assert counted[0].keys() == counted[1].keys()
    assert [one.get("starved") for one in counted[0].values()] == [
        one.get("starved") for one in counted[1].values()
    ]
    assert all("starved" in one for one in counted[0].values()) == bool(arguments)
    for name, own in counted[0].items():  # in lists padding counts too
        assert all(a <= b for a, b in zip(own["tokens"], counted[1][name]["tokens"], strict=True))
    for stack, single in pairs:
        assert stack.weight_scale.shape == single.weight_scale.shape
        torch.testing.assert_close(stack.weight_scale, single.weight_scale)
        assert (stack.weight != single.weight).float().mean() < 0.01  # ties of rounding


@pytest.mark.parametrize(
    ("pipeline", "twin", "kind"),
    thinned(PIPELINES, [False, True], [Own, Scaled, Halved, Overwritten]),
)
def test_others_get_their_own_tokens_with_one_warning(
    pipeline: str, twin: bool, kind: type[Listed], warned: list[str]
) -> None:
    model, batches, names, plain = observed(kind)
    sizes = [sum(map(len, plain.get(f"{LIST}.{n}.gate_proj", ()))) for n in range(EXPERTS)]
    recorder = Patient(twin=twin)
    run_pipeline(model, batches, recorder, pipeline)
    for name in (one for one in names.values() if f"{LIST}." in one):
        for one, other in zip(recorder._inputs.get(name, ()), plain.get(name, ()), strict=True):
            assert torch.equal(one, other)
    most = max(sizes)
    assert sizes[2] == 0
    (said,) = told(warned)
    assert LIST in said
    assert f"(0 to {most})" in said
    assert "moe_calibrate_all_experts=True has no effect" in said
    assert f"1 of {EXPERTS} experts: {LIST}.2 (0)." in said
    assert not hooks_left(model)


class Grouped(Patient):
    """Remembers which Linears get one input, as the small forward showed it."""

    _groups: list[set[str]] = PrivateAttr(default_factory=list)

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        super().on_calibration_start(state, event, **kwargs)
        self._groups = [
            {self._names[one] for one in group} for group in state.calibration.call_order.groups
        ]


PAUSED = ["sequential", "layer_sequential", "independent"]
POLICIES = ["all_tokens", "rtn", "neighbours"]


@pytest.mark.parametrize(("policy", "pipeline", "twin"), thinned(POLICIES, PAUSED, [False, True]))
def test_starved_ones_are_shown_what_the_policy_says(
    policy: str, pipeline: str, twin: bool, warned: list[str]
) -> None:
    """Three tenths of the tokens are too few here, and none anyway; the first has enough."""
    model, batches, names, plain = observed(Listed, layer=0)
    shares = [chosen_of(one["input_ids"].numel(), Listed.share) for one in batches]
    recorder = Patient(twin=twin, targets=list(names.values()))
    run_pipeline(model, batches, recorder, pipeline, **FEW, starved_experts=policy)
    first = "model.layers.0.mlp.experts"
    sizes = [len(one) for one in shares]
    routed = [[int((one == number).sum()) for one in shares] for number in range(EXPERTS)]
    wanted = {
        "all_tokens": {1: sizes, 2: sizes},
        "neighbours": {
            1: routed[0],
            2: [n for both in zip(*routed[:2], strict=True) for n in both],
        },
        "rtn": {},
    }[policy]
    for number, lengths in {0: routed[0], 1: [], 2: [], **wanted}.items():
        for own in ("gate_proj", "up_proj", "down_proj"):
            seen = recorder._inputs.get(f"{first}.{number}.{own}", [])
            assert [len(one) for one in seen] == lengths
    for one, other in zip(
        recorder._inputs[f"{first}.0.gate_proj"], plain[f"{first}.0.gate_proj"], strict=True
    ):
        assert torch.equal(one, other)
    for name in names.values():  # outputs are those of the routed tokens
        if name.startswith("model.layers.1"):
            for one, other in zip(recorder._inputs[name], plain[name], strict=True):
                assert torch.equal(one, other)
    totals = [sum(one) for one in routed]
    starved = {1: policy, 2: policy}
    assert experts_report(model) == {first: {"tokens": totals, "starved": starved}}
    (said,) = [one for one in warned if "reached 2 of 3 experts" in one]
    assert f"{first}.1 ({totals[1]}), {first}.2 (0)" in said
    assert not told(warned)
    assert not hooks_left(model)


@pytest.mark.parametrize(
    ("policy", "kind"), thinned(["all_tokens", "neighbours"], [InChunks, OfMixtures])
)
def test_starved_ones_change_no_output(policy: str, kind: type[Listed]) -> None:
    model, batches, names, plain = observed(kind, layer=0)
    recorder = Patient()
    arguments = {"moe_calibrate_all_experts": False, "starved_experts": policy}
    run_pipeline(model, batches, recorder, **arguments)
    for name in names.values():
        if name.startswith("model.layers.1"):
            for one, other in zip(recorder._inputs[name], plain[name], strict=True):
                assert torch.equal(one, other)
    assert any(name.startswith("model.layers.0.mlp.experts.2.") for name in recorder._inputs)
