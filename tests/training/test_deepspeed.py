# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine trains as the trainer's own loop does, on two processes without a device.

What runs it is skipped where DeepSpeed is not installed.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_run
import pytest
import sharded_run
import tiny_training as tiny
import torch
from safetensors.torch import load_file
from test_distributed import assert_alike, losses
from torch import multiprocessing, nn

from llmcompressor.core import Event, EventType, State
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.pruning import ConstantPruningModifier, MagnitudePruningModifier
from llmcompressor.recipe import Recipe
from llmcompressor.training import Trainer
from llmcompressor.training.checks import check_trainer
from llmcompressor.training.engine import ToldSteps

installed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is an optional companion"
)
RECIPE = {"stage_modifiers": {**sharded_run.RECIPE["stage_modifiers"], "Witness": {}}}
LET_GO = {
    "stage_modifiers": {
        "MagnitudePruningModifier": {
            **sharded_run.LINEARS,
            **sharded_run.PRUNING,
            "leave_enabled": False,
        },
        "OutputDistillationModifier": sharded_run.RECIPE["stage_modifiers"][
            "OutputDistillationModifier"
        ],
        "Witness": {},
        "Quitter": {},
    }
}


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
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_trains_as_one_process_does(dense: Path, stage: int) -> None:
    """Pruned, quantized and taught; the optimizer's step lies between its events."""
    sharded_run.main(dense, 1, {"output_dir": str(dense / "alone"), "use_cpu": True})
    by_engine(dense, "engine", stage)
    assert_alike(dense / "alone", dense / "engine")


@installed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_let_go_grows_from_zero(dense: Path, stage: int) -> None:
    """The optimizer's own copy of the weights, in parts on the processes, is masked too."""
    alone = {"output_dir": str(dense / "alone"), "use_cpu": True, "max_grad_norm": 0.0}
    sharded_run.main(dense, 1, {**alone, "recipe": LET_GO})
    by_engine(dense, "engine", stage, LET_GO, max_grad_norm=0.0)
    ours, theirs = (load_file(dense / one / "model.safetensors") for one in ("engine", "alone"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4, msg=name)
    assert losses(dense / "engine") == pytest.approx(losses(dense / "alone"), rel=1e-4)


@installed
@pytest.mark.slow
def test_an_engine_goes_on_where_it_was_killed(dense: Path) -> None:
    by_engine(dense, "whole", 2)
    with pytest.raises(multiprocessing.ProcessExitedException):
        by_engine(dense, "killed", 2, quit_after=5)
    by_engine(dense, "killed", 2)
    whole, killed = (load_file(dense / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(killed[name], one) for name, one in whole.items())


@installed
@pytest.mark.slow
def test_flat_pieces_are_refused_by_train(dense: Path) -> None:
    with pytest.raises(multiprocessing.ProcessRaisedException, match=r"ZeRO stage 3.*ZeRO stage 2"):
        by_engine(dense, "engine", 3)
    assert not list(dense.glob("engine*"))


@pytest.mark.parametrize(
    ("recipe", "refused"),
    [
        ("ConstantPruningModifier: {targets: Linear}", "ConstantPruningModifier"),
        ("QuantizationModifier: {targets: Linear, scheme: W8A8}", "QuantizationModifier"),
        ("OutputDistillationModifier: {}", None),
    ],
)
def test_flat_pieces_are_refused_to_what_changes_weights(
    tmp_path: Path, recipe: str, refused: str | None
) -> None:
    """A teacher looks at outputs, which are whole."""
    trainer = Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.Rows(4),
        recipe=f"modifiers: {{{recipe}}}",
        teacher=tiny.tiny_model(seed=1),
    )
    trainer.is_deepspeed_enabled = True
    trainer.accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    )
    modifiers = Recipe.create_instance(trainer.recipe).modifiers
    if refused is None:
        check_trainer(trainer, modifiers)
    else:
        with pytest.raises(ArgumentError, match=rf"ZeRO stage 3.*{refused}.*FSDP version 2"):
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


class Engine:
    """Steps by itself at every second micro-batch."""

    def __init__(self) -> None:
        self.micro_batches, self.seen = 0, []

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_batches % 2 == 0

    def backward(self) -> None:
        self.micro_batches += 1
        self.step()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.seen.append("step")


def test_it_is_told_before_the_engine_steps() -> None:
    engine = Engine()
    told = ToldSteps(engine, lambda: engine.seen.append("told"))
    for _ in range(4):
        engine.backward()
    told.leave()
    engine.backward()
    engine.backward()
    assert engine.seen == ["told", "step", "told", "step", "step"]


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
