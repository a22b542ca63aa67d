# SPDX-License-Identifier: Apache-2.0
"""``train``: what it returns, what it writes, and that it does what transformers' trainer does."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from tests.support import small_models as small
from tests.support.logging_modifier import LoggingModifier
from tests.support.training_cases import QUANTIZE, Freezer, arguments

from llmcompressor import active_session, train, verify
from llmcompressor.core import modifier_registry
from llmcompressor.recipe import Recipe


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its module is there twice, by this import and as a test: recipes are to mean this one.
    monkeypatch.setitem(modifier_registry._registered, "LoggingModifier", LoggingModifier)
    LoggingModifier.seen.clear()
    Freezer.steps.clear()


def test_the_output_is_a_compressed_checkpoint_that_serves(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    model = train(str(one_block), QUANTIZE, **arguments(output))
    assert {path.name for path in output.iterdir()} == {
        "all_results.json",
        "compression_report.json",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "recipe.schema.json",
        "recipe.yaml",
        "train_results.json",
        "trainer_state.json",
    }
    assert list(tmp_path.iterdir()) == [output], "the folder of the training is gone"
    assert verify(output).ok
    assert Recipe.create_instance(output / "recipe.yaml") == Recipe.create_instance(QUANTIZE)
    assert not model.training
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(output)
    torch.testing.assert_close(small.logits(reloaded), small.logits(model), rtol=0, atol=0.05)


def test_the_metrics(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train(str(one_block), QUANTIZE, **arguments(output, logging_steps=1))
    found = json.loads((output / "train_results.json").read_text())
    state = json.loads((output / "trainer_state.json").read_text())
    assert found["train_samples"] == 16
    assert found["perplexity"] == pytest.approx(math.exp(found["train_loss"]))
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 4
    assert found["train_loss"] == pytest.approx(sum(losses) / 4, abs=1e-3)
    assert state["global_step"] == 4
    report = json.loads((output / "compression_report.json").read_text())
    assert report["training"]["steps"] == 4
    assert report["verification"]["ok"]
    assert report["left_behind"] == []


def test_without_a_recipe_it_is_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The same weights, to the bit, as those of the trainer that knows of no session."""
    rows = [
        {"input_ids": ids, "labels": ids, "attention_mask": [1] * 12}
        for ids in small.token_rows(samples=16, length=12)["input_ids"]
    ]
    plain = small.one_block().float()
    transformers.Trainer(
        model=plain,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "plain"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
    ).train()
    ours = small.one_block().float()
    assert train(ours, None, **arguments(tmp_path / "out")) is ours
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_a_model_object_is_trained_in_place_and_saves_itself(tmp_path: Path) -> None:
    model = small.one_block()
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    kept = model.model.norm.weight.clone()
    use_cache = model.config.use_cache
    recipe = [Freezer(), *Recipe.create_instance(QUANTIZE).modifiers]
    assert train(model, recipe, **arguments(None)) is model
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, before)
    assert torch.equal(model.model.norm.weight, kept), "held after each step"
    assert Freezer.steps == [1, 2, 3, 4]
    assert model.config.use_cache == use_cache
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]
    assert list(tmp_path.iterdir()) == [tmp_path / "saved"], "without output_dir nothing is written"


def test_mixed_precision_ends_with_the_training(tmp_path: Path) -> None:
    """What is returned computes as what was written does: in float32, without autocast."""
    output = tmp_path / "out"
    model = train(small.one_block(), QUANTIZE, **arguments(output, bf16=True))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(output)
    torch.testing.assert_close(small.logits(reloaded), small.logits(model), rtol=0, atol=1e-5)


def test_without_a_session_it_has_its_own() -> None:
    before = active_session()
    train(small.one_block(), "modifiers: {LoggingModifier: {}}", **arguments(None))
    assert active_session() is before
    assert not before.lifecycle.initialized_
    assert LoggingModifier.seen[0][3] is not before


def test_invalid_settings_of_generation_are_told_and_kept(
    one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    """transformers loads such a file with a warning, and refuses to write it."""
    folder = shutil.copytree(one_block, tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.7}))
    with warnings.catch_warnings(action="ignore"):
        train(str(folder), QUANTIZE, **arguments(tmp_path / "out", save_steps=2))
    told = [number for number, line in enumerate(said) if "generation_config.json" in line]
    steps = [number for number, line in enumerate(said) if line.startswith("Step")]
    assert told
    assert told[0] < min(steps, default=len(said))
    for written in ("out", "out/checkpoint-2"):
        found = json.loads((tmp_path / written / "generation_config.json").read_text())
        assert found["temperature"] == 0.7


def test_a_stage_has_its_own_folder(one_block: Path, tmp_path: Path) -> None:
    recipe = (
        "first_stage: {a_modifiers: {LoggingModifier: {}}}\n"
        "second_stage: {a_modifiers: {Freezer: {}}}\n"
    )
    train(str(one_block), recipe, stage="second", **arguments(tmp_path / "out"))
    assert (tmp_path / "out" / "second" / "config.json").is_file()
    assert Freezer.steps
    assert not LoggingModifier.seen


def test_embeddings_have_the_dtype_of_the_model(one_block: Path, tmp_path: Path) -> None:
    """Lists of numbers become float32, and the weights are bfloat16."""
    width = json.loads((one_block / "config.json").read_text())["hidden_size"]
    rows = [{"inputs_embeds": [[0.5] * width] * n, "labels": [1] * n} for n in (3, 4)]
    options = arguments(tmp_path / "output", precision="bfloat16", dataset=rows, max_steps=1)
    model = train(str(one_block), None, **options)
    assert model.dtype == torch.bfloat16


def test_samples_of_several_lengths_are_padded(tmp_path: Path) -> None:
    """Cutting to the shortest, as in calibration, would throw most of the text away."""
    rows = Dataset.from_dict({"input_ids": [list(range(3, 3 + n)) for n in (4, 12, 4, 12)]})
    seen: list[dict[str, Any]] = []

    class Watcher(LoggingModifier):
        def on_event(self, state: Any, event: Any, **kwargs: Any) -> None:
            if state.batch_data is not None:
                seen.append(dict(state.batch_data))

    given = arguments(None, dataset=rows, max_steps=1, per_device_train_batch_size=4)
    train(small.one_block(), Watcher(), **given)
    assert seen[0]["input_ids"].shape == (4, 12)
    assert int((seen[0]["labels"] != -100).sum()) == 32
    assert torch.equal(seen[0]["labels"] != -100, seen[0]["attention_mask"].bool())


def test_an_evaluation(one_block: Path, tmp_path: Path) -> None:
    data = DatasetDict(
        train=small.token_rows(samples=8, length=12),
        held_out=small.token_rows(samples=4, length=12, seed=1),
    )
    given = arguments(
        tmp_path / "out",
        dataset=data,
        splits={"train": "train", "eval": "held_out"},
        eval_strategy="steps",
        eval_steps=2,
    )
    model = train(str(one_block), QUANTIZE, **given)
    found = json.loads((tmp_path / "out" / "all_results.json").read_text())
    ids = torch.tensor(data["held_out"]["input_ids"])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert found["eval_loss"] == pytest.approx(loss, rel=2e-2)
    assert found["train_samples"] == 8


@pytest.mark.parametrize("how", ["object", "folder", "compressed"])
def test_the_teacher(how: str, one_block: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    class TeacherWatcher(LoggingModifier):
        def on_initialize(self, state: Any, **kwargs: Any) -> bool:
            seen.append(state.teacher_model)
            return True

    teacher: Any = small.one_block(seed=5).train()
    if how == "folder":
        teacher = str(one_block)
    elif how == "compressed":
        train(str(one_block), QUANTIZE, **arguments(tmp_path / "teacher"))
        teacher = str(tmp_path / "teacher")
    train(small.one_block(), TeacherWatcher(), distill_teacher=teacher, **arguments(None))
    [found] = seen
    assert not found.training
    if how == "object":
        assert found is teacher
    else:
        original = transformers.AutoModelForCausalLM.from_pretrained(teacher)
        assert torch.equal(small.logits(found), small.logits(original))
        assert not any(parameter.requires_grad for parameter in found.parameters())
