# SPDX-License-Identifier: Apache-2.0
"""``train``: what it returns, what it writes, and that it does what transformers' trainer does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.logging_modifier import LoggingModifier
from tests.support.training_cases import QUANTIZE, Freezer, arguments
from torch.utils.data import IterableDataset

from llmcompressor import active_session, create_session, oneshot, train, verify
from llmcompressor.core import State, modifier_registry
from llmcompressor.entrypoints.training_task import open_training_folder
from llmcompressor.errors import LifecycleError
from llmcompressor.modifiers import Modifier
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
        "model.safetensors",
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


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_a_modifier_replaces_is_refused(what: str, one_block: Path, tmp_path: Path) -> None:
    """The trainer would go on with its own, and write it."""

    class Replacer(Modifier):
        def on_initialize(self, state: State, **kwargs: Any) -> bool:
            other = small.one_block(seed=5)
            fresh = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.0)}
            setattr(state, what, fresh[what])
            return True

    with pytest.raises(LifecycleError, match=f"replaced state.{what}, and the trainer"):
        train(str(one_block), [Replacer()], **arguments(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


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


def test_another_default_dtype_changes_no_training(tmp_path: Path) -> None:
    static = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8, ignore: [lm_head]}}"
    train(small.one_block(), static, **arguments(tmp_path / "plain"))
    model = small.one_block()
    torch.set_default_dtype(torch.bfloat16)
    try:
        train(model, static, **arguments(tmp_path / "inside"))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    plain, inside = (tmp_path / name / "model.safetensors" for name in ("plain", "inside"))
    assert plain.read_bytes() == inside.read_bytes()


def test_a_modifier_of_a_users_sees_the_model_the_device_and_the_optimizer() -> None:
    model = small.one_block()
    with create_session() as session:
        train(model, "modifiers: {LoggingModifier: {}}", **arguments(None))
        assert active_session() is session
    [(seen, device, optimizer, its_session)] = LoggingModifier.seen
    assert seen is model
    assert device == torch.device("cpu")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {
        id(each) for each in model.parameters()
    }
    assert its_session is session


def test_without_a_session_it_has_its_own() -> None:
    before = active_session()
    train(small.one_block(), "modifiers: {LoggingModifier: {}}", **arguments(None))
    assert active_session() is before
    assert not before.lifecycle.initialized_
    assert LoggingModifier.seen[0][3] is not before


def test_a_stage_has_its_own_folder(one_block: Path, tmp_path: Path) -> None:
    recipe = (
        "first_stage: {a_modifiers: {LoggingModifier: {}}}\n"
        "second_stage: {a_modifiers: {Freezer: {}}}\n"
    )
    train(str(one_block), recipe, stage="second", **arguments(tmp_path / "out"))
    assert (tmp_path / "out" / "second" / "config.json").is_file()
    assert Freezer.steps
    assert not LoggingModifier.seen


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


class _Endless(IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Any:
        ids = small.token_rows(samples=4, length=12)["input_ids"]
        while True:
            yield from ({"input_ids": one} for one in ids)


def test_a_stream_is_read_as_far_as_it_is_trained_on() -> None:
    train(small.one_block(), Freezer(), **arguments(None, dataset=_Endless()))
    assert Freezer.steps == [1, 2, 3, 4]


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


def test_checkpoints_stay_for_who_asked_for_them(one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train(str(one_block), QUANTIZE, **arguments(output, save_steps=2, save_total_limit=1))
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-4"]
    weights = load_file(output / "checkpoint-4" / "model.safetensors")
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16, "uncompressed"
    assert verify(output).ok
    longer = arguments(
        tmp_path / "longer", max_steps=6, resume_from_checkpoint=str(output / "checkpoint-4")
    )
    train(str(one_block), QUANTIZE, **longer)
    state = json.loads((tmp_path / "longer" / "trainer_state.json").read_text())
    assert state["global_step"] == 6


def test_the_best_checkpoint_is_named_where_it_is(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = small.token_rows(samples=8, length=12)
    given: dict[str, Any] = {
        "dataset": rows,
        "splits": {"train": "train[:6]", "eval": "train[6:]"},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
    }
    output = tmp_path / "out"
    train(str(one_block), None, **arguments(output, **given))
    best = _best(output / "trainer_state.json")
    assert best is not None
    assert best.parent == output
    assert best.is_dir()
    assert _best(best / "trainer_state.json") == best
    told: list[str] = []
    monkeypatch.setattr(
        transformers.trainer.logger, "warning", lambda text, *_, **__: told.append(text)
    )
    longer = arguments(tmp_path / "longer", **given) | {"max_steps": 6}
    train(str(one_block), None, resume_from_checkpoint=str(output / "checkpoint-4"), **longer)
    assert not [text for text in told if "does not exist" in text]
    found = _best(tmp_path / "longer" / "trainer_state.json")
    assert found in (best, tmp_path / "longer" / "checkpoint-6"), "of both trainings"


def test_a_best_checkpoint_that_is_not_kept_is_not_named(tmp_path: Path) -> None:
    with open_training_folder(tmp_path / "out", {}, resume="auto", is_main=True) as folder:
        state = {"best_model_checkpoint": str(folder.training / "checkpoint-2"), "epoch": 1.0}
        (folder.training / "checkpoint-2").mkdir()
        (folder.training / "trainer_state.json").write_text(json.dumps(state))
        folder.mark_written()
        folder.publish(replace=False, keep_checkpoints=False)
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text()) == {
        "best_model_checkpoint": None,
        "epoch": 1.0,
    }


def _best(state_file: Path) -> Path | None:
    named = json.loads(state_file.read_text())["best_model_checkpoint"]
    return None if named is None else Path(named)


def test_metrics_of_the_model_before_are_not_carried_over(one_block: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    rows = small.token_rows(samples=4, length=12)
    given = arguments(first, eval_strategy="epoch")
    train(str(one_block), None, **{**given, "dataset": {"train": rows, "validation": rows}})
    of_training = {"all_results.json", "train_results.json", "trainer_state.json"}
    found = {path.name for path in first.iterdir()}
    assert of_training | {"eval_results.json"} <= found
    train(str(first), None, **arguments(second, max_steps=2))
    assert {path.name for path in second.iterdir()} == found - {"eval_results.json"}
    assert json.loads((second / "trainer_state.json").read_text())["global_step"] == 2
    assert "eval_loss" not in json.loads((second / "all_results.json").read_text())
    recipe = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC}}"
    oneshot(str(first), recipe, output_dir=third)
    assert not any(path.name.endswith("_results.json") for path in third.iterdir())
    assert not (third / "trainer_state.json").exists()
    assert (third / "generation_config.json").exists()
