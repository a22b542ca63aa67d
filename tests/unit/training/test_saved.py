# SPDX-License-Identifier: Apache-2.0
"""Compiled, wrapped and scaled trainings end as others do, and save what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_training as tiny
from tests.unit.training.test_events import expected
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from llmcompressor import verify
from llmcompressor.core import CompressionSession, callbacks, create_session
from llmcompressor.modifiers import Modifier
from llmcompressor.training import Trainer
from llmcompressor.training.driver import remove_checkpoint_wrappers

QUANTIZED = "modifiers: {QuantizationModifier: {targets: Linear, ignore: [lm_head], scheme: W4A4}}"


def trainer_of(folder: Path, recipe: str | None, **changed: Any) -> Trainer:
    return Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(folder / "run", max_steps=2, **changed),
        train_dataset=tiny.Rows(8),
        recipe=recipe,
    )


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tiny.row(0)["input_ids"][None]).logits
    return found


@pytest.mark.parametrize(
    "save",
    [
        lambda trainer, folder: trainer.save_model(folder),
        lambda trainer, folder: trainer.model.save_pretrained(folder),
    ],
    ids=["save_model", "save_pretrained"],
)
def test_it_is_the_compressed_checkpoint(
    save: Callable[[Trainer, str], None], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, QUANTIZED)
    trainer.train()
    save(trainer, str(tmp_path / "out"))
    assert verify(tmp_path / "out").ok
    assert (tmp_path / "out" / "recipe.yaml").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.quantization_config is not None
    assert torch.allclose(logits(again), logits(trainer.model), atol=1e-6)


def test_checkpoints_of_the_training_hold_what_is_trained(tmp_path: Path) -> None:
    trainer_of(tmp_path, QUANTIZED, save_strategy="steps", save_steps=2).train()
    [config] = (tmp_path / "run").glob("checkpoint-2/config.json")
    assert "quantization_config" not in config.read_text()


def test_without_a_recipe_it_is_what_any_trainer_saves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, None)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "recipe.yaml").exists()


QUANTIZE = """
modifiers:
  QuantizationModifier:
    start: START
    config_groups:
      g:
        targets: [Linear]
        weights: {num_bits: 3, type: int, strategy: channel}
        input_activations: {num_bits: 4, type: int, strategy: tensor, dynamic: DYNAMIC}
"""


DISTILL = "modifiers: {OutputDistillationModifier: {targets: ['re:.*layers.0$'], start: 1, end: 2}}"


class Doubling(Modifier):
    """Doubles what a Linear gives, within its schedule."""

    def on_initialize(self, state, **kwargs):
        return True

    def on_start(self, state, event, **kwargs):
        linear = state.model.model.layers[-1].mlp.down_proj
        self.register_hook(linear, lambda module, args, output: 2 * output, "forward")

    def on_end(self, state, event, **kwargs):
        self.remove_hooks()


def losses(folder, recipe, *, compiled: bool) -> list[float]:
    """Of three epochs of two steps, in which nothing is learned."""
    changed = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    with create_session():
        trainer = Trainer(
            model=tiny.tiny_model(),
            args=tiny.arguments(folder, learning_rate=0.0, num_train_epochs=3, **changed),
            train_dataset=tiny.Rows(4),
            recipe=recipe,
            teacher=tiny.tiny_model(seed=1),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what is traced warns of being traced
@pytest.mark.parametrize(
    "recipe",
    [
        QUANTIZE.replace("START", "1").replace("DYNAMIC", "true"),
        QUANTIZE.replace("START", "0").replace("DYNAMIC", "false"),
        DISTILL,
        [Doubling(start=1, end=2)],
    ],
    ids=["quantized later", "observed first", "distilled later", "a hook of one's own"],
)
def test_a_schedule_acts_on_a_compiled_model(tmp_path, recipe):
    plain = losses(tmp_path / "plain", recipe, compiled=False)
    again = [type(one)(start=1, end=2) for one in recipe] if isinstance(recipe, list) else recipe
    assert losses(tmp_path / "ours", again, compiled=True) == pytest.approx(plain, rel=1e-4)
    assert len({round(loss, 3) for loss in plain}) > 2, "it does something"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_fake_quantization_stays_compiled(tmp_path, dynamic):
    """torch gives up what it has compiled too often; the books of fake quantization are no reason.

    A compiled forward ends before a hook and goes on behind it, as often as there are shapes.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        recipe = QUANTIZE.replace("START", "0").replace("DYNAMIC", dynamic)
        assert len(losses(tmp_path, recipe, compiled=True)) == 6


def test_modules_have_their_own_names_again() -> None:
    model = tiny.tiny_model()
    names = [name for name, _ in model.named_modules()]
    batch = {key: value[None] for key, value in tiny.row(0).items()}
    expected = model(**batch).loss
    for number, layer in enumerate(model.model.layers):
        wrapped = checkpoint_wrapper(layer)
        model.model.layers[number] = offload_wrapper(wrapped) if number else wrapped
    assert [name for name, _ in model.named_modules()] != names
    remove_checkpoint_wrappers(model)
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(model(**batch).loss, expected)


RECIPE = """
modifiers:
  tests.support.tiny_training.Recorder: {}
  MagnitudePruningModifier:
    {targets: [Linear], ignore: [lm_head], init_sparsity: 0.1, final_sparsity: 0.5, end: 2}
  QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8, start: 1}
"""


class ScaledTrainer(Trainer):
    """Trains in float16 with a scale that is too large at first, and again where it grows."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)


class Watch(TrainerCallback):
    """Notes of each step whether it moved what is not pruned, and how much is zero."""

    def __init__(self, model: Any) -> None:
        self.model, self.norm = model, model.model.norm.weight.detach().clone()
        self.moved: list[bool] = []
        self.zeros: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        norm, weight = self.model.model.norm.weight, self.model.model.layers[0].mlp.down_proj.weight
        assert bool(weight.isfinite().all())
        self.moved.append(not torch.equal(self.norm, norm))
        self.zeros.append(float((weight == 0).float().mean()))
        self.norm = norm.detach().clone()


def trained(cls: type[Trainer], folder: Path, **changed: Any) -> tuple[Watch, list[float]]:
    """What was seen, and the sparsities that were logged."""
    args = tiny.arguments(folder, num_train_epochs=3, gradient_accumulation_steps=2, **changed)
    made = cls(model=tiny.tiny_model(), args=args, train_dataset=tiny.Rows(16), recipe=RECIPE)
    made.add_callback(watch := Watch(made.model))
    made.train()
    return watch, [each["sparsity"] for each in made.state.log_history if "sparsity" in each]


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watch, list[float]]:
    return trained(Trainer, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_skipped_steps_change_nothing_else(
    tmp_path: Path, optim: str, unscaled: tuple[Watch, list[float]]
) -> None:
    plain, formula = unscaled
    tiny.Recorder.seen.clear()
    scaled, logged = trained(ScaledTrainer, tmp_path / "scaled", optim=optim)
    assert all(plain.moved)
    assert len(scaled.moved) == len(plain.moved) == 12
    assert 3 <= scaled.moved.count(False) <= 9, "some are skipped, some are taken"
    assert logged == formula, "the schedule is that of steps which are counted"
    assert all(zeros >= share - 0.01 for zeros, share in zip(scaled.zeros, logged, strict=True))
    assert scaled.zeros[-1] == pytest.approx(0.5, abs=0.01)
    assert tiny.Recorder.seen == expected([2] * 12)


def test_a_loop_of_ones_own_with_a_scaler(session: CompressionSession) -> None:
    """What the mask holds is zero after every step, and an infinite gradient skips the step."""
    model = tiny.tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recipe = RECIPE.replace("  tests.support.tiny_training.Recorder: {}\n", "")
    session.initialize(recipe=recipe, model=model, optimizer=optimizer, steps_per_epoch=2)
    weight = model.model.layers[0].mlp.down_proj.weight
    for step in range(8):
        skipped, before = step % 3 == 1, weight.detach().clone()
        batch = {key: value[None] for key, value in tiny.row(step).items()}
        callbacks.batch_start(batch_data=batch)
        begun = weight.detach().clone()
        loss = callbacks.loss_calculated(loss=model(**batch).loss).loss
        scaler.scale(loss * float("inf") if skipped else loss).backward()
        scaler.unscale_(optimizer)
        callbacks.optim_pre_step()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(weight, begun)
        callbacks.optim_post_step()
        optimizer.zero_grad()
        callbacks.batch_end()
        assert moved is not skipped
        assert bool((weight[before == 0] == 0).all())
        assert bool(weight.isfinite().all())
    assert session.lifecycle.global_step == 8
    assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    session.finalize()
