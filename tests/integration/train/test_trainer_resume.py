# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed ends with the same bits; nothing else is resumed from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr
from tests.support import tiny_training as tiny

from llmcompressor.core import EventType, active_session, create_session
from llmcompressor.errors import CheckpointError, LifecycleError, RecipeError
from llmcompressor.modifiers import Modifier
from llmcompressor.training import Trainer
from llmcompressor.training.checkpoints import SESSION_FILE

pytestmark = pytest.mark.usefixtures("session", "nothing_seen")


class GrowingMask(tiny.ScaledMask):
    """The helper's, under a name that recipes find once."""


def recipe(start: float = 0, end: float = 1.5) -> str:
    return f"""
args: {{growth: 0.02}}
modifiers:
  GrowingMask: {{start: {start}, end: {end}, growth: eval(growth)}}
"""


def trainer_of(folder: Path, **changed) -> Trainer:
    given = changed.pop("recipe", recipe())
    rows, stream = changed.pop("rows", 14), changed.pop("stream", None)
    given_too = ("recipe_args", "eval_dataset")
    extra = {name: changed.pop(name) for name in given_too if name in changed}
    settings = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "weight_decay": 0.1,
        "logging_steps": 2,
        **changed,
    }
    return Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(folder, **settings),
        train_dataset=tiny.Stream(stream) if stream else tiny.Rows(rows, uneven=True),
        recipe=given,
        **extra,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}


class KilledError(Exception):
    """Stands for a signal."""


def killed_at(trainer: Trainer, step: int) -> None:
    """Train until the step has begun, after the checkpoint of the step before."""
    original = trainer.training_step

    def training_step(*args, **kwargs):
        if trainer.state.global_step == step:
            raise KilledError
        return original(*args, **kwargs)

    trainer.training_step = training_step
    with pytest.raises(KilledError):
        trainer.train()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Trainer:
    """A run of eight steps (seven batches of two in an epoch, two per step, the last alone)."""
    with create_session():
        trainer = trainer_of(tmp_path_factory.mktemp("whole"))
        trainer.train()
    assert trainer.state.global_step == 8
    return trainer


# Within the first epoch, at its end, within the second, after the mask has ended (step 6).
@pytest.mark.parametrize("step", [1, 3, 4, 5, 7])
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, whole, step):
    killed_at(trainer_of(tmp_path), step)
    torch.manual_seed(step)  # what the new process happens to have drawn
    with create_session() as session:
        resumed = trainer_of(tmp_path)
        resumed.train(resume_from_checkpoint=True)
        assert session.lifecycle.global_step == 8
        [modifier] = session.lifecycle.recipe.modifiers
    expected = weights(whole)
    assert any(name.endswith("extra_scale") for name in expected)
    for name, found in weights(resumed).items():
        assert torch.equal(found, expected[name]), name
    assert modifier._updates == 6
    assert modifier._starts == 0, "on_start belongs to the run that was killed"


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path, whole, said):
    killed_at(trainer_of(tmp_path), 4)
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    weights_of_3 = tmp_path / "checkpoint-3" / "model.safetensors"
    content = bytearray(weights_of_3.read_bytes())
    content[-9] ^= 0x10
    weights_of_3.write_bytes(content)
    for number, file in ((4, "optimizer.pt is missing"), (3, "model.safetensors is not as it was")):
        with pytest.raises(CheckpointError, match=file), create_session():
            trainer_of(tmp_path).train(
                resume_from_checkpoint=str(tmp_path / f"checkpoint-{number}")
            )
    with create_session():
        resumed = trainer_of(tmp_path)
        resumed.train(resume_from_checkpoint=True)
    assert any("checkpoint-2, not from checkpoint-4: it is damaged" in line for line in said)
    for name, found in weights(resumed).items():
        assert torch.equal(found, weights(whole)[name]), name


def test_events_go_on_where_they_were(tmp_path):
    class Counting(tiny.Recorder):
        pass

    uninterrupted = trainer_of(tmp_path / "whole", recipe=Counting())
    uninterrupted.train()
    expected = list(Counting.seen)
    Counting.seen.clear()
    killed_at(trainer_of(tmp_path / "killed", recipe=Counting()), 5)
    before = len(Counting.seen)
    assert before
    trainer_of(tmp_path / "killed", recipe=Counting()).train(resume_from_checkpoint=True)
    assert Counting.seen == expected


def test_a_checkpoint_holds_progress_recipe_and_modifier_state(tmp_path):
    trainer_of(tmp_path, recipe_args={"growth": 0.05}, max_steps=3).train()
    saved = torch.load(tmp_path / "checkpoint-3" / SESSION_FILE, weights_only=True)
    assert (saved["global_step"], saved["global_batch"], saved["steps_per_epoch"]) == (3, 5, 4)
    assert saved["versions"]["torch"] == torch.__version__
    assert "GrowingMask" in saved["recipe"]
    assert saved["recipe_args"] == {"growth": 0.05}
    [record] = saved["modifiers"]
    assert record["class"] == "GrowingMask"
    assert record["fields"]["growth"] == 0.05
    assert record["phases"] == ["created", "initialized", "started"]
    assert record["state"]["updates"] == 3
    assert set(record["state"]["masks"]) == {f"model.layers.{n}.mlp.down_proj" for n in (0, 1)}


class Odd(Modifier):
    """Its state is what a test puts there."""

    _state: dict = PrivateAttr(default_factory=dict)

    def on_initialize(self, state, **kwargs):
        return True

    def state_dict(self):
        return self._state


@pytest.mark.parametrize("value", [np.float64(1), np.zeros(1), {1, 2}, EventType.BATCH_END])
def test_an_unreadable_state_is_refused_when_written(value):
    modifier = Odd()
    modifier._state = {"seen": [0, {"deep": value}]}
    with create_session() as session:
        session.initialize(recipe=modifier)
        with pytest.raises(LifecycleError, match=r"Odd.state_dict\(\) holds a .*'seen'.*'deep'"):
            session.lifecycle.state_dict()


@pytest.fixture
def half(tmp_path) -> Path:
    """The folder of a run of which four steps are done."""
    killed_at(trainer_of(tmp_path), 4)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"recipe_args": {"growth": 0.03}}, r"growth: 0\.02 then, 0\.03 now"),
        ({"recipe": recipe(end=2)}, r"end: 1\.5 then, 2.* now"),
        ({"recipe": "modifiers: {GrowingMask: {start: 0}}"}, r"end: 1\.5 then, nothing now"),
        ({"recipe": None}, "modifiers: GrowingMask then, none now"),
        ({"recipe": [Odd(), GrowingMask()]}, "GrowingMask then, Odd, GrowingMask now"),
    ],
)
def test_another_recipe_is_refused_before_the_first_step(half, other, told):
    trainer = trainer_of(half, **other)
    before = weights(trainer)
    with pytest.raises(RecipeError, match=told):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(each, before[name]) for name, each in weights(trainer).items())
    assert trainer.optimizer is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "trainer_state.json").unlink(),
        lambda folder: cut(folder / "trainer_state.json"),
        lambda folder: (folder / "checkpoint-is-incomplete.txt").touch(),
        lambda folder: [each.unlink() for each in folder.iterdir()],
    ],
)
def test_what_was_not_finished_is_passed_over_by_name(half, whole, warned, damage):
    damage(half / "checkpoint-4")
    with pytest.raises(CheckpointError, match="was not finished"):
        trainer_of(half).train(resume_from_checkpoint=half / "checkpoint-4")
    resumed = trainer_of(half)
    resumed.train(resume_from_checkpoint=True)
    assert any("checkpoint-3, not from checkpoint-4" in each for each in warned)
    expected = weights(whole)
    assert all(torch.equal(each, expected[name]) for name, each in weights(resumed).items())


@pytest.mark.parametrize("file", [None, "model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_killed_while_a_checkpoint_is_written_over_another(tmp_path, whole, monkeypatch, file):
    """What was complete there before must not make the mixture look complete."""
    killed_at(trainer_of(tmp_path), 4)
    writes = {
        None: ("llmcompressor.training.mixin.write_session", None),
        "model.safetensors": ("transformers.Trainer.save_model", None),
        "optimizer.pt": ("transformers.Trainer._save_optimizer_and_scheduler", None),
        "trainer_state.json": ("transformers.trainer_callback.TrainerState.save_to_json", None),
    }

    def dies(*args, **kwargs):
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(writes[file][0], dies)
        with pytest.raises(KilledError):
            trainer_of(tmp_path, seed=99).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    assert state.exists() == (file is None), "nothing was written over: it is still complete"
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    expected = weights(whole)
    assert all(torch.equal(each, expected[name]) for name, each in weights(resumed).items())


@pytest.mark.parametrize("asked", [True, "nowhere"])
def test_nothing_to_resume_from_is_one_clear_error(tmp_path, asked):
    told = "no complete checkpoint" if asked is True else "there is no such folder"
    with pytest.raises(CheckpointError, match=told):
        trainer_of(tmp_path).train(resume_from_checkpoint=asked)


def test_the_best_model_comes_with_its_modifiers_state(tmp_path, monkeypatch, warned):
    """The mask of the best step, not of the last one, belongs to its weights."""
    trainer = trainer_of(
        tmp_path,
        recipe=recipe(end=2),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        eval_dataset=tiny.Rows(2),
    )
    original = trainer.evaluate

    def evaluate(*args, **kwargs):
        metrics = original(*args, **kwargs)
        return {**metrics, "eval_loss": abs(trainer.state.global_step - 3.0)}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    trainer.train()
    assert (
        json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())[
            "best_global_step"
        ]
        == 3
    )
    [modifier] = active_session().lifecycle.recipe.modifiers
    assert modifier._updates == 3
    assert modifier.finalized
    for name, mask in modifier._masks.items():
        weight = trainer.model.get_submodule(name).weight
        assert torch.equal(weight != 0, mask)
    assert any("best checkpoint is that of step 3" in each for each in warned)


@pytest.mark.parametrize(
    ("step", "accumulated"),
    [
        (2, 1),
        (4, 1),
        pytest.param(5, 1, marks=pytest.mark.slow),
        (7, 1),
        (3, 2),
        pytest.param(5, 2, marks=pytest.mark.slow),
    ],
)
def test_a_stream_goes_on_where_it_was(tmp_path, step, accumulated):
    """Four micro-batches in a pass: within the first, at its end, and in later ones."""
    given = {"max_steps": 8, "gradient_accumulation_steps": accumulated, "stream": 7}
    uninterrupted = trainer_of(tmp_path / "whole", **given)
    uninterrupted.train()
    killed_at(trainer_of(tmp_path / "killed", **given), step)
    resumed = trainer_of(tmp_path / "killed", **given)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.epoch == uninterrupted.state.epoch
    expected = weights(uninterrupted)
    for name, found in weights(resumed).items():
        assert torch.equal(found, expected[name]), name


QUANTIZED = """
    modifiers:
      MagnitudePruningModifier:
        {targets: Linear, init_sparsity: 0.25, final_sparsity: 0.5, start: 0, end: 2}
      QuantizationModifier: {targets: Linear, scheme: %s, start: 0.5, learned_scales: %s}
    """


@pytest.mark.parametrize(("scheme", "learned"), [("FP8", "false"), ("W8A8", "true")])
def test_broken_off_the_same_trainer_goes_on(tmp_path, scheme, learned, warned):
    """Fake quantization had begun: the error takes it back, and the checkpoint brings it again."""
    given = {"recipe": QUANTIZED % (scheme, learned), "learning_rate": 0.01}
    plain = set(tiny.tiny_model().state_dict())
    whole = trainer_of(tmp_path / "whole", **given)
    whole.train()
    assert any("scale" in name for name in weights(whole))
    warned.clear()
    trainer = trainer_of(tmp_path / "broken", **given)
    training_step = trainer.training_step
    killed_at(trainer, 5)
    assert set(weights(trainer)) == plain
    assert not any("quantization_" in name for one in trainer.model.modules() for name in vars(one))
    assert not warned, "nothing is said of a schedule that the error cut short"
    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=True)
    found = weights(trainer)
    assert found.keys() == weights(whole).keys()
    for name, expected in weights(whole).items():
        assert torch.equal(found[name].float(), expected.float()), name
