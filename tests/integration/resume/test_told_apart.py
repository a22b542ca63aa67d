# SPDX-License-Identifier: Apache-2.0
"""A training goes on, and a stage is skipped, only with the model and the data that it had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.support import small_models as small
from tests.support.training_cases import Breaker, Freezer, arguments

from llmcompressor import run_stages, train
from llmcompressor.checkpoint.journal import Journal
from llmcompressor.errors import OutputError
from llmcompressor.recipe import Recipe

DISTILL = "modifiers: {OutputDistillationModifier: {}}"
PRUNE = """
modifiers:
  MagnitudePruningModifier:
    {targets: Linear, ignore: [lm_head], init_sparsity: 0.1, final_sparsity: 0.5, start: 0, end: 1}
"""
STAGES = """
fine_stage: {a_modifiers: {Freezer: {}, Breaker: {}}}
halving_stage: {a_modifiers: {WeightHalver: {}}}
"""


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Freezer.steps.clear()


def _rows(changed: int | None = None) -> Dataset:
    rows: list[list[int]] = list(small.token_rows(samples=80, length=8)["input_ids"])
    if changed is not None:
        rows[changed] = rows[changed][::-1]
    return Dataset.from_dict({"input_ids": rows})


def _train(output: Path, model: Any = None, *, stop: int | None = None, **changes: Any) -> Any:
    """Four steps, with a checkpoint after each."""
    given: dict[str, Any] = {
        "dataset": _rows(),
        "distill_teacher": small.one_block(seed=7),
        "save_steps": 1,
        **changes,
    }
    recipe = [*Recipe.create_instance(DISTILL).modifiers, Breaker()]
    Breaker.at = stop
    try:
        return train(model or small.one_block(), recipe, **arguments(output, **given))
    except KeyboardInterrupt:
        assert stop is not None
        return None
    finally:
        Breaker.at = None


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_another_training_is_not_continued(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _train(output, stop=2)
    before = {**small.tree(tmp_path), "out.partial/lock": ""}
    assert any("checkpoint-2" in name for name in before)
    for named, changes in {
        r": model\.weights: \w+ then, \w+ now\.": {"model": small.one_block(seed=1)},
        r"model\.tensors: .*model\.weights": {"model": small.one_block(hidden_size=32)},
        r": teacher\.weights: \w+ then, \w+ now\.": {"distill_teacher": small.one_block(seed=8)},
        r": data: list of 80, \w+ then, .*now\.": {"dataset": _rows(changed=79)},
        r": data: list of 80, .*, \w+ now": {"dataset": _rows(changed=4)},
    }.items():
        with pytest.raises(OutputError, match=named):
            _train(output, **changes)
        assert {**small.tree(tmp_path), "out.partial/lock": ""} == before
    _train(output)
    assert (output / "model.safetensors").is_file(), "the one that was broken off still goes on"


def test_a_folder_whose_weights_were_replaced_is_not_continued(tmp_path: Path) -> None:
    source, teacher = tmp_path / "source", tmp_path / "teacher"
    for folder, seed in ((source, 0), (teacher, 7)):
        small.one_block(seed=seed).save_pretrained(folder)
    given = {"model": str(source), "distill_teacher": str(teacher)}
    _train(tmp_path / "out", stop=2, **given)
    small.one_block(seed=8).save_pretrained(teacher)
    with pytest.raises(OutputError, match=r": teacher\.weights: "):
        _train(tmp_path / "out", **given)
    small.one_block(seed=7).save_pretrained(teacher)
    small.one_block(seed=1).save_pretrained(source)
    with pytest.raises(OutputError, match=r": model\.weights: "):
        _train(tmp_path / "out", **given)
    small.one_block(intermediate_size=256).save_pretrained(source)
    with pytest.raises(OutputError, match=r": source\.model\.safetensors: .* bytes"):
        _train(tmp_path / "out", **given)
    small.one_block().save_pretrained(source)
    _train(tmp_path / "out", **given)


def test_the_object_that_a_broken_training_has_changed_goes_on(tmp_path: Path) -> None:
    """Twice, and to the weights of a training that nothing interrupted."""
    whole = _weights(_train(tmp_path / "whole"))
    model = small.one_block()
    first = _weights(model)
    _train(tmp_path / "out", model, stop=2)
    assert not _equal(_weights(model), first)
    _train(tmp_path / "out", model, stop=3)
    _train(tmp_path / "out", model)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert _equal(_weights(model), whole)


def test_the_object_changed_by_somebody_else_does_not(tmp_path: Path) -> None:
    model = small.one_block()
    _train(tmp_path / "out", model, stop=2)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(OutputError, match=r"model\.weights"):
        _train(tmp_path / "out", model)


def test_an_older_mark_is_refused_by_the_item_that_it_lacks(tmp_path: Path) -> None:
    _train(tmp_path / "out", stop=2)
    journal = tmp_path / "out.partial" / "journal"
    opened = Journal(journal)
    assert opened.fingerprint is not None
    older = {**opened.fingerprint, "model": "LlamaForCausalLM"}
    entries = list(opened.entries.values())
    opened.begin(older)
    for entry in entries:
        opened.add(entry)
    with pytest.raises(OutputError, match=r"model\.class: nothing then, \w+ now"):
        _train(tmp_path / "out")


def _stages(output: Path, model: Any = None, **changes: Any) -> Any:
    given: dict[str, Any] = {"dataset": list(_rows()), "save_steps": 1, **changes}
    return run_stages(model or small.one_block(), STAGES, **arguments(output, **given))


def test_stages_of_another_model_or_other_data(tmp_path: Path) -> None:
    first = _stages(tmp_path / "out", distill_teacher=small.one_block(seed=7))
    before = small.tree(tmp_path)
    for named, changes in {
        r"'fine'.*: model\.weights: \w+ then, \w+ now\.": {"model": small.one_block(seed=1)},
        r"'fine'.*model\.tensors: .*model\.weights": {"model": small.one_block(hidden_size=32)},
        r"arguments\.dataset: list of 80, \w+ then": {"dataset": list(_rows(changed=79))},
        r"arguments\.distill_teacher\.weights: ": {"distill_teacher": small.one_block(seed=8)},
    }.items():
        with pytest.raises(OutputError, match=named):
            _stages(tmp_path / "out", **{"distill_teacher": small.one_block(seed=7), **changes})
        assert small.tree(tmp_path) == before
    Freezer.steps.clear()
    again = _stages(tmp_path / "out", distill_teacher=small.one_block(seed=7))
    assert Freezer.steps == [], "the same model, data and teacher, made anew"
    assert _equal(_weights(again), _weights(first))
    assert small.tree(tmp_path) == before


def test_stages_of_paths_whose_content_has_changed(tmp_path: Path) -> None:
    folder, data = tmp_path / "source", tmp_path / "data.jsonl"
    small.one_block().save_pretrained(folder)
    rows = "\n".join(json.dumps(row) for row in _rows())
    data.write_text(rows)
    given = {"model": str(folder), "dataset": str(data)}
    _stages(tmp_path / "out", **given)
    Freezer.steps.clear()
    copied = Path(shutil.copytree(folder, tmp_path / "copied", copy_function=shutil.copyfile))
    shutil.rmtree(folder)
    data.unlink()
    _stages(tmp_path / "out", **given)
    assert Freezer.steps == [], "of what is gone nothing can be said"
    copied.rename(folder)
    data.write_text(rows.replace("4", "5"))
    with pytest.raises(OutputError, match=r": arguments\.dataset\.files: \d+ bytes"):
        _stages(tmp_path / "out", **given)
    data.write_text(rows)
    _stages(tmp_path / "out", **given)
    assert Freezer.steps == [], "the same bytes are the same data, and the same model"
    small.one_block(hidden_size=32).save_pretrained(folder)
    with pytest.raises(OutputError, match=r": model\.files\.model\.safetensors: .* bytes"):
        _stages(tmp_path / "out", **given)
    small.one_block(seed=1).save_pretrained(folder)
    with pytest.raises(OutputError, match=r": model\.weights: "):
        _stages(tmp_path / "out", **given)
    _stages(tmp_path / "out", overwrite=True, **given)
    assert Freezer.steps == [1, 2, 3, 4]
