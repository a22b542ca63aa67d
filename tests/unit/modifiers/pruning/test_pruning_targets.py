# SPDX-License-Identifier: Apache-2.0
"""What targets of pruning mean, and what is refused before the first step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from llmcompressor.core import Event, EventType, State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.pruning import ConstantPruningModifier, MagnitudePruningModifier
from llmcompressor.modifiers.pruning.masked_weights import MaskedWeights
from llmcompressor.modifiers.pruning.targets import find_parameters
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.masks import parse_structure
from llmcompressor.numerics.scales import scales_from_range
from llmcompressor.recipe import Recipe


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv2d(4, 8, 3)
        self.turned = Conv1D(4, 8)
        self.experts = nn.Parameter(torch.randn(2, 4, 8))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


LINEARS = [f"layers.{i}.{name}_proj.weight" for i in range(2) for name in "qk"]


def names(targets: Any, ignore: Any = (), model: Any = None) -> list[str]:
    return [place.name for place in find_parameters(model or Model(), targets, ignore)]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("Linear", LINEARS),
        (["re:.*q_proj"], LINEARS[::2]),
        ("re:.*q_proj.weight", LINEARS[::2]),
        (r"re:.*q_proj\.weight$", LINEARS[::2]),
        (r"re:.*q_proj\.(weight|bias)", ["layers.0.q_proj.weight", "layers.0.q_proj.bias",
                                         "layers.1.q_proj.weight", "layers.1.q_proj.bias"]),
        ("layers.0.k_proj", LINEARS[1:2]),
        ("layers.0.k_proj.weight", LINEARS[1:2]),
        (["Linear", "layers.0.k_proj", "re:.*k_proj.weight"], LINEARS),
        ("re:layers", LINEARS),
        ("__ALL_PRUNABLE__", [*LINEARS, "conv.weight", "turned.weight"]),
        ("__ALL__", ["experts", "embed.weight", *LINEARS, "conv.weight", "turned.weight"]),
        ("experts", ["experts"]),
        ("head", ["head.weight"]),
        ("re:.*head.weight", ["head.weight"]),
        ("Conv2d", ["conv.weight"]),
    ],
)  # fmt: skip
def test_targets(targets, expected):
    assert names(targets) == expected


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        ("re:.*q_proj", LINEARS[1::2]),
        (["re:.*q_proj.weight"], LINEARS[1::2]),
        ("layers.0.k_proj.weight", [LINEARS[0], *LINEARS[2:]]),
        ("Conv2d", LINEARS),
    ],
)
def test_ignore_wins(ignore, expected):
    assert names("Linear", ignore) == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("Linaer", r"'Linaer' matches no module and no parameter of Model\. Did you mean 'Linear'"),
        ("re:.*qproj.weight", r"'re:\.\*qproj\.weight' matches no .*q_proj"),
        ("re:.*q_prj", r"'re:\.\*q_prj' matches no .*q_proj"),
        ("q_proj", r"'q_proj' matches no .*'re:\.\*q_proj\$'"),
        (["Linear", "nothing"], r"'nothing' matches no"),
        ("Block", r"matches modules of Model \(layers\.0, layers\.1\).*'layers\.0\.q_proj'"),
        ("LayerNorm", r"matches modules of Model .*Name its parameter in full"),
        ("re:(", "not a valid regular expression"),
    ],
)
def test_targets_without_parameters(targets, message):
    for modifier in (gradual(targets=targets), ConstantPruningModifier(targets=targets)):
        with pytest.raises(TargetError, match=message):
            modifier.initialize(State(model=Model()))


@pytest.mark.parametrize("everything", ["__ALL__", "__ALL_PRUNABLE__", "Linear"])
def test_routers_are_pruned_by_their_names_alone(everything: str) -> None:
    model = Model()
    for block in model.layers:
        block.mlp = nn.Module()
        block.mlp.gate, block.mlp.gate_proj = nn.Linear(8, 4), nn.Linear(8, 4)
    found = names(everything, model=model)
    assert {f"layers.{i}.mlp.gate_proj.weight" for i in range(2)} <= set(found)
    assert not [name for name in found if name.endswith("mlp.gate.weight")]
    for target in ("layers.1.mlp.gate", r"re:layers\.1\.mlp\.gate\.weight"):
        more = names([everything, target], model=model)
        assert sorted(more) == sorted([*found, "layers.1.mlp.gate.weight"])
    only = nn.ModuleDict({"gate": nn.Linear(8, 4)})
    with pytest.raises(TargetError, match="what matches is ignored, a router, or"):
        names(everything, model=nn.ModuleDict({"mlp": only}))


def gradual(**changes: Any) -> MagnitudePruningModifier:
    fields: dict[str, Any] = {
        "targets": "Linear", "init_sparsity": 0.0, "final_sparsity": 0.5, "end": 4,
    }  # fmt: skip
    return MagnitudePruningModifier(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 3, "end": 2}, r"end \(2\) lies before start \(3\)\. Give an end that does not"),
        ({"end": float("inf")}, r"it has no end"),
        ({"end": None}, "it has no end.*Give end, in epochs"),
        ({"update": 0}, "update is 0: .* above 0.*Leave it out"),
        ({"init_sparsity": -0.1}, "'init_sparsity'.*greater than or equal to 0"),
        ({"final_sparsity": 60}, "'final_sparsity'.*less than or equal to 1"),
        ({"init_sparsity": 0.6}, r"final_sparsity \(0\.5\) is below init_sparsity \(0\.6\)"),
        ({"targets": []}, "'targets': there is no target"),
        (
            {"mask_structure": "4:2"},
            "'mask_structure': .*no mask structure '4:2'.*Choose unstructured",
        ),
        ({"mask_structure": "1:4"}, r"final_sparsity is 0\.5, and 1:4 has 0\.25\."),
        ({"update_scheduler": "qubic"}, "no schedule named 'qubic'.*Did you mean cubic"),
        ({"scheduler_args": {"power": 2}}, "'cubic' has no argument 'power'.*It takes: none"),
        (
            {"update_scheduler": "polynomial", "scheduler_args": {"exponent": 0}},
            "exponent is 0.*above 0",
        ),
        (
            {"update_scheduler": "multi_step", "scheduler_args": {"steps": [[9, 0.5]]}},
            r"The step at 9 lies outside of start \(0\) to end \(4\)",
        ),
        (
            {"update_scheduler": "multi_step", "scheduler_args": {"steps": [[1, 0.4], [2, 0.2]]}},
            r"falls from 0\.4 to 0\.2 at index 2",
        ),
        (
            {"update_scheduler": "multi_step", "scheduler_args": {"steps": [[1, 0.7]]}},
            r"ends at 0\.7, and final_sparsity is 0\.5",
        ),
        ({"update_scheduler": "calc(index)"}, r"gives a sparsity of 1\.\d+ at index"),
        ({"update_scheduler": "calc(0.5 - index / 10)"}, "falls from 0.5 to"),
        ({"update_scheduler": "calc(index / 16)"}, r"ends at 0\.25, and final_sparsity is 0\.5"),
        ({"update_scheduler": "calc(open('x'))"}, "'open' is not allowed"),
        ({"update_scheduler": "calc('x')"}, "gives 'x' at index 0"),
        ({"update_scheduler": "calc(update)"}, "no argument named 'update'"),
        ({"update_scheduler": "calc(1 / index)"}, "division by zero"),
    ],
)
def test_fields_that_cannot_be(changes, message):
    with pytest.raises(RecipeError, match=rf"(?s)^MagnitudePruningModifier: .*{message}"):
        gradual(**changes)


def test_a_recipe_survives_being_saved():
    modifier = gradual(
        targets=["re:.*q_proj.weight"], mask_structure="2:4", start=1, update=0.5,
        update_scheduler="calc(final_sparsity * ((index - start) / (end - start)) ** power)",
        scheduler_args={"power": 2}, ignore="lm_head", group="default",
    )  # fmt: skip
    constant = ConstantPruningModifier(targets="Linear", start=4, group="default")
    recipe = Recipe.from_modifiers([modifier, constant])
    again, _ = found = Recipe.create_instance(recipe.yaml()).modifiers
    assert found == recipe.modifiers
    assert isinstance(again, MagnitudePruningModifier)
    assert again.sparsity_at(2.5) == pytest.approx(0.5 * 0.25)


def test_conv1d_has_its_rows_in_columns():
    """Transformers' Conv1D stores [inputs, outputs]: 2:4 counts along the inputs."""
    model = Model()
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.weight.copy_(model.turned.weight.t())
    for structure in ("2:4", "filter", "channel", "block_2,4"):
        for module in (model.turned, linear):
            weights = MaskedWeights(find_parameters(module, "re:weight"))
            weights.grow(parse_structure(structure), 0.5, together=False)
            weights.drop()
        assert torch.equal(model.turned.weight.t(), linear.weight), structure


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zero_when_they_are_rounded(symmetric):
    """So a mask of the raw weight is one of what fake quantization makes of it."""
    weights = MaskedWeights(find_parameters(layer := nn.Linear(16, 8), "re:weight"))
    weights.grow(parse_structure("2:4"), 0.5, together=False)
    grid, weight_RC = Grid("int", 4, symmetric=symmetric), layer.weight.detach() + 0.0
    weight_RC[0] = weight_RC[0].abs()  # a range with zero at its end
    lowest, highest = weight_RC.amin(1, keepdim=True), weight_RC.amax(1, keepdim=True)
    scale, zero = scales_from_range(lowest, highest, grid)
    rounded_RC = grid.fake_quantize(weight_RC, scale, zero)
    assert bool((rounded_RC[weight_RC == 0] == 0).all())
    assert bool((rounded_RC[weight_RC != 0] != 0).any())


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    """A device mesh of this process alone."""
    dist = torch.distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(os.name != "posix", reason="gloo on one machine")
@pytest.mark.parametrize("structure", ["unstructured", "2:4", "filter"])
def test_spread_parameters_get_the_same_masks(mesh, structure):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def trained(spread: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        modifier = gradual(init_sparsity=0.25, mask_structure=structure, end=2)
        state = State(model=model)
        modifier.initialize(state)
        if spread:  # after the modifier has seen it, as accelerate does
            fully_shard(model, mesh=mesh)
            assert isinstance(model[0].weight, DTensor)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            modifier.update_event(state, Event(type_=EventType.BATCH_START, global_step=step))
            model(torch.ones(2, 8)).square().mean().backward()
            modifier.update_event(state, Event(type_=EventType.OPTIM_PRE_STEP, global_step=step))
            optimizer.step()
            optimizer.zero_grad()
            done = {"global_step": step + 1}
            modifier.update_event(state, Event(type_=EventType.OPTIM_POST_STEP, **done))
            modifier.update_event(state, Event(type_=EventType.BATCH_END, **done))
        saved = modifier.state_dict()
        modifier.load_state_dict(state, saved)
        modifier.weights.apply()
        modifier.finalize(state)
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
        return whole, (saved, modifier.report())

    (plain, told), (spread, told_of_spread) = trained(False), trained(True)
    assert all(torch.equal(*pair) for pair in zip(plain, spread, strict=True))
    assert (plain[0] == 0).float().mean() == 0.5
    assert told[1] == told_of_spread[1]
    for name, mask in told[0]["masks"].items():
        assert torch.equal(told_of_spread[0]["masks"][name]["bits"], mask["bits"])
