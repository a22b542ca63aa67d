# SPDX-License-Identifier: Apache-2.0
"""A call that was killed behind its last step finds that it has finished; others are refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import KILLED, RECIPES, Job, run, tree
from safetensors.torch import load_file, save_file

from llmcompressor import plan
from llmcompressor.checkpoint.workspace import RUN_FILE
from llmcompressor.entrypoints import run as streamed
from llmcompressor.errors import OutputError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import learned as rotations

Expected = Callable[[str], dict[str, str]]
SAID = "nothing is done again"


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are as if they had been killed when all was done."""
    monkeypatch.setattr(streamed, "remove_run_file", lambda folder: None)


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("recipe", ["rtn", pytest.param("two", marks=pytest.mark.slow)])
def test_killed_at_each_step_behind_the_last_line(
    recipe: str, model: Path, tmp_path: Path, expected: Expected
) -> None:
    """Names are changed, the working folder goes, the model is handed over."""
    for number in itertools.count(1):
        job = Job(model, recipe, tmp_path / str(number) / "output")
        code = run(job, die_at=f"step {number}").code
        if code == 0:
            break
        assert code == KILLED
        if not job.partial.exists() and not (job.output / RUN_FILE).exists():
            break  # the call was over
        again = run(replace(job, resume="must"))
        assert again.code == 0, again.said
        assert (SAID in again.said) == ("Continuing" not in again.said)
        assert tree(job.output) == expected(recipe)
        assert [path.name for path in job.output.parent.iterdir()] == ["output"]
    assert number > 8


MODELS = {"rtn", "two", "sparse", "rotated_between", "learned", "dropped_quantized"}
"""Recipes whose model is always looked at: what is rounded, pruned, rotated and dropped."""


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in MODELS else [pytest.mark.slow])
        for name in RECIPES
        if name not in ("one_pass", "cache")
    ],
)
def test_the_model_is_the_one_that_the_run_returned(
    recipe: str, model: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotations, "_is_better", rotations._is_better)  # one of the recipes does
    job = Job(model, recipe, tmp_path / "output")
    first = job()
    before, when = tree(job.output), stamps(job.output)
    said.clear()
    second = job()
    assert any(SAID in line for line in said)
    assert tree(job.output) == before
    assert stamps(job.output) == when
    assert not job.partial.exists()
    ids = torch.arange(3, 35)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


def other_recipe(job: Job) -> Job:
    return replace(job, recipe="pruned")


def other_data(job: Job) -> Job:
    return replace(job, reverse=True)


def anew(job: Job) -> Job:
    return replace(job, resume="never")


def other_values(job: Job) -> Job:
    """The same header, and one value of the last block is another."""
    for file in sorted(job.model.glob("*.safetensors")):
        tensors = load_file(file)
        for name in tensors:
            if name.startswith("model.layers.2.mlp.up"):
                tensors[name][0, 0] += 1
        save_file(tensors, file, metadata={"format": "pt"})
    return job


def other_header(job: Job) -> Job:
    file = sorted(job.model.glob("*.safetensors"))[0]
    save_file({**load_file(file), "more": torch.zeros(1)}, file, metadata={"format": "pt"})
    index = job.model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = file.name
    index.write_text(json.dumps(content))
    return job


def damaged(job: Job) -> Job:
    file = job.output / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return job


def cut(job: Job) -> Job:
    file = job.output / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return job


def edited(job: Job) -> Job:
    file = job.output / "config.json"
    file.write_text(file.read_text() + "\n")
    return job


def without_a_file(job: Job) -> Job:
    (job.output / "generation_config.json").unlink()
    return job


def forgetful(job: Job) -> Job:
    (job.output / RUN_FILE).write_text("{")
    return job


CHANGES = (
    other_recipe,
    anew,
    other_values,
    other_header,
    damaged,
    cut,
    edited,
    without_a_file,
    forgetful,
)


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize(
    ("recipe", "change", "resume"),
    [
        ("gptq", other_data, "auto"),
        ("gptq", other_data, "must"),
        *(
            pytest.param(recipe, change, resume, marks=[] if is_quick else [pytest.mark.slow])
            for number, change in enumerate(CHANGES)
            for turn, (recipe, resume) in enumerate(
                itertools.product(("rtn", "gptq"), ("auto", "must"))
            )
            for is_quick in [turn == number % 4]
        ),
    ],
)
def test_what_is_not_the_same_is_refused(
    change: Callable[[Job], Job], recipe: str, resume: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    job = Job(tmp_path / "model", recipe, tmp_path / "output", resume)
    replace(job, resume="auto")()
    other = change(job)
    before = tree(job.output)
    with pytest.raises(OutputError, match="already holds files"):
        other()
    assert tree(job.output) == before
    assert not job.partial.exists()


@pytest.mark.usefixtures("killed")
def test_a_plan_says_what_would_become_of_the_call(model: Path, tmp_path: Path) -> None:
    job = Job(model, "rtn", tmp_path / "output")
    job()
    given: dict[str, Any] = {"output_dir": job.output, "measure": False}
    same = plan(model, RECIPES["rtn"](), **given)
    assert same.ok
    assert [note for note in same.notes if "this very call" in note]
    other = plan(model, QuantizationModifier(targets="Linear", scheme="W8A16"), **given)
    assert [one for one in other.problems if "already holds files" in str(one.message)]


@pytest.mark.usefixtures("killed")
def test_what_is_remembered_is_no_place_of_the_machine(model: Path, tmp_path: Path) -> None:
    job = Job(model, "sparse", tmp_path / "output")
    job()
    text = (job.output / RUN_FILE).read_text()
    assert str(tmp_path) not in text
    assert str(model) not in text
    content: dict[str, Any] = json.loads(text)
    assert set(content["files"]) >= {"config.json", "recipe.yaml", "generation_config.json"}


def test_a_call_that_has_returned_remembers_nothing(model: Path, tmp_path: Path) -> None:
    job = Job(model, "rtn", tmp_path / "output")
    job()
    assert not (job.output / RUN_FILE).exists()
    before = tree(job.output)
    with pytest.raises(OutputError, match="already holds files"):
        job()
    assert tree(job.output) == before
