# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine trains as the trainer's own loop does, on two processes without a device."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.train.test_distributed import assert_alike, losses
from tests.support import engine_run, sharded_run
from tests.support import tiny_training as tiny
from torch import multiprocessing, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmcompressor.core import Event, EventType, State
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.pruning import ConstantPruningModifier, MagnitudePruningModifier
from llmcompressor.recipe import Recipe
from llmcompressor.training import Trainer
from llmcompressor.training.checks import check_trainer

pytestmark = pytest.mark.usefixtures("session", "nothing_seen")

installed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is an optional companion"
)
RECIPE = {"stage_modifiers": {**sharded_run.RECIPE["stage_modifiers"], "Witness": {}}}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder with the tiny model."""
    tiny.tiny_model().save_pretrained(tmp_path / "dense")
    return tmp_path


def by_engine(folder: Path, name: str, stage: int, recipe: Any = RECIPE, **settings: Any) -> None:
    """Train on two processes to a checkpoint."""
    given = {"output_dir": str(folder / name), "stage": stage, "recipe": recipe, **settings}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(
        engine_run.as_rank,
        args=(2, port, str(folder), given),
        nprocs=2,
        start_method="forkserver",
    )


@installed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_as_one_process_does(dense: Path, stage: int) -> None:
    """Pruned, quantized and taught; the optimizer's step lies between its events."""
    sharded_run.main(dense, 1, {"output_dir": str(dense / "alone"), "use_cpu": True})
    by_engine(dense, "engine", stage)
    assert_alike(dense / "alone", dense / "engine")


@installed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_goes_on_where_it_was_killed(dense: Path, stage: int) -> None:
    by_engine(dense, "whole", stage)
    with pytest.raises(multiprocessing.ProcessExitedException):
        by_engine(dense, "killed", stage, quit_after=5)
    by_engine(dense, "killed", stage)
    whole, killed = (load_file(dense / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(killed[name], one) for name, one in whole.items())


@installed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed .quantization_config")
@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_pieces_together(dense: Path, scheme: str) -> None:
    """Stage 3 as stage 2: a mask of 2:4 that is kept, learned scales, logits and a hidden state."""
    recipe = {
        "stage_modifiers": {
            "MagnitudePruningModifier": {
                **sharded_run.LINEARS,
                **{"mask_structure": "2:4", "init_sparsity": 0.5, "final_sparsity": 0.5},
                "end": 0.25,
            },
            "ConstantPruningModifier": {**sharded_run.LINEARS, "start": 0.25},
            "QuantizationModifier": {
                **{"targets": "Linear", "ignore": ["lm_head", "re:.*down_proj"]},
                **{"scheme": scheme, "start": 0.5, "learned_scales": True},
            },
            "OutputDistillationModifier": {
                "targets": ["lm_head", sharded_run.LAYER],
                "comparison": "l2_distance",
            },
        }
    }
    for stage in (2, 3):
        by_engine(dense, f"stage {stage}", stage, recipe)
    two, three = (load_file(dense / f"stage {stage}" / "model.safetensors") for stage in (2, 3))
    assert two.keys() == three.keys()
    assert losses(dense / "stage 3") == pytest.approx(losses(dense / "stage 2"), rel=1e-3)
    report = json.loads((dense / "stage 3" / "compression_report.json").read_text())
    assert report["verification"]["ok"]
    params = [
        json.loads((dense / f"stage {stage}" / "train_results.json").read_text())["total_params"]
        for stage in (2, 3)
    ]
    assert params[0] == params[1]
    model = AutoModelForCausalLM.from_pretrained(
        dense / "stage 3", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for name, weight in model.named_parameters():
        if name.endswith("proj.weight"):
            assert int((weight.view(-1, 4) != 0).sum(1).max()) <= 2, name


CHANGING = "ConstantPruningModifier: {targets: Linear}"


@pytest.mark.parametrize(
    ("recipe", "zero", "refused"),
    [
        (CHANGING, {"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights"),
        (CHANGING, {"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
        (CHANGING, {"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param to nvme"),
        (CHANGING, {"stage": 3, "zero_hpz_partition_size": 1, "offload_param": None}, None),
        (CHANGING, {"stage": 2, "zero_quantized_weights": True}, None),
        ("OutputDistillationModifier: {}", {"stage": 3, "mics_shard_size": 2}, None),
    ],
)
def test_pieces_that_are_not_the_weight_are_refused(
    tmp_path: Path, recipe: str, zero: dict[str, Any], refused: str | None
) -> None:
    """Only to what changes weights: a teacher looks at outputs."""
    trainer = Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.Rows(4),
        recipe=f"modifiers: {{{recipe}}}",
        teacher=tiny.tiny_model(seed=1),
    )
    trainer.is_deepspeed_enabled = True
    config = {"zero_optimization": zero}
    plugin = SimpleNamespace(deepspeed_config=config, zero_stage=zero["stage"])
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    modifiers = Recipe.create_instance(trainer.recipe).modifiers
    if refused is None:
        check_trainer(trainer, modifiers)
    else:
        with pytest.raises(ArgumentError, match=rf"{refused}.*ConstantPruning.*Leave {refused}"):
            check_trainer(trainer, modifiers)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_a_configuration_that_is_left_out_is_told(
    tmp_path: Path, warned: list[str], name: str
) -> None:
    """On the CPU accelerate trains without a word as if it were not there."""
    recipe = "modifiers: {ConstantPruningModifier: {targets: Linear}}"
    trainer = Trainer(model=tiny.tiny_model(), args=tiny.arguments(tmp_path), recipe=recipe)
    modifiers = Recipe.create_instance(trainer.recipe).modifiers
    check_trainer(trainer, modifiers)
    assert not warned
    setattr(trainer.args, name, {"any": "thing"})
    check_trainer(trainer, modifiers)
    [line] = warned
    assert line.startswith(f"{name} has no effect")


def event(kind: EventType, step: int = 0) -> Event:
    return Event(type_=kind, global_step=step)


def begun(modifier: Any) -> tuple[Any, State]:
    """A model of one layer in a training by an engine, before the first batch."""
    torch.manual_seed(0)
    model = nn.Linear(8, 6)
    state = State(model=model)
    state.hardware.distributed_strategy = "deepspeed"
    modifier.initialize(state)
    return model, state


def copy_of(weight: torch.Tensor, start: int, number: int) -> Any:
    """What DeepSpeed puts on a parameter: this process's part of the float32 copy."""
    copy = weight.detach().flatten()[start : start + number].clone()
    address = SimpleNamespace(start=start, numel=number)
    return SimpleNamespace(lp_fragment_address=address, hp_fragment=copy)


@pytest.mark.parametrize(("start", "number"), [(0, 48), (5, 20), (41, 7)])
def test_the_optimizers_own_copy_is_masked(start: int, number: int) -> None:
    pruning = MagnitudePruningModifier(
        targets="re:weight", init_sparsity=0.5, final_sparsity=0.5, end=2
    )
    model, state = begun(pruning)
    model.weight._hp_mapping = copy_of(model.weight, start, number)
    pruning.update_event(state, event(EventType.BATCH_START))
    part = model.weight.detach().flatten()[start : start + number]
    assert torch.equal(model.weight._hp_mapping.hp_fragment, part)
    assert 0 < int((part == 0).sum()) < number
    model.weight._hp_mapping.hp_fragment.add_(1.0)
    saved = pruning.state_dict()
    pruning.load_state_dict(state, saved)  # as after a checkpoint of DeepSpeed's was loaded
    assert torch.equal(model.weight._hp_mapping.hp_fragment == 0, part == 0)


def test_gradients_are_masked_where_they_arise() -> None:
    """Before they are collected, and whoever collects them."""
    model, state = begun(pruning := ConstantPruningModifier(targets="re:weight"))
    with torch.no_grad():
        model.weight[:, ::2] = 0
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))

    def gradient() -> torch.Tensor:
        model(torch.randn(4, 8)).square().sum().backward()
        return seen.pop()

    assert bool((gradient() != 0).all()), "no mask yet"
    pruning.update_event(state, event(EventType.BATCH_START))
    masked = gradient()
    assert bool((masked[:, ::2] == 0).all())
    assert bool((masked[:, 1::2] != 0).all())
    pruning.finalize(state)
    assert bool((gradient() != 0).all()), "no hook stays"
