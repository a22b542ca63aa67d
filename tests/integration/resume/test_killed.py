# SPDX-License-Identifier: Apache-2.0
"""Killed or told to end at any moment, the same call goes on and ends with the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.killed_runs import BLOCKS, KILLED, NEEDS_DATA, Job, run, tree
from tests.support.thinned import few
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.cli import main

Expected = Callable[[str], dict[str, str]]


def lines(recipe: str) -> int:
    """Lines of the journal behind the first: choices, blocks of each pass, the rest, ready."""
    passes = 2 if recipe == "two" else 1
    choices = passes if recipe in NEEDS_DATA else 0
    return choices + passes * BLOCKS + 1 + 1


def at(
    recipe: str,
    quick: AbstractSet[int],
    others: AbstractSet[int] = frozenset(),
    kind: str = "append",
) -> Iterator[Any]:
    """Boundaries of a recipe: those that are always tried, and those of the whole suite alone."""
    for number in sorted(quick | others):
        marks = [pytest.mark.slow] if number not in quick else []
        yield pytest.param(recipe, kind, number, marks=marks)


def every(recipe: str, quick: AbstractSet[int]) -> Iterator[Any]:
    """All boundaries of a recipe, and the moment behind the last line."""
    last = lines(recipe)
    yield from at(recipe, quick, set(range(1, last + 1)))
    yield from at(recipe, {last}, kind="appended")


BOUNDARIES = [
    *every("rtn", {4}),
    *every("gptq", {2}),
    *every("two", {9}),
    *at("rtn", set(), {1, 3}, kind="torn"),
    *at("gptq", set(), {1, 3}, kind="torn"),
    *at("ragged", set(), {3}),
    *at("one_pass", {3}, {2}, "appended"),
    *at("cache", set(), {2, 3}, "appended"),
    *at("sparse", {7}, {2, 4, 5, 9}),
    *at("pruned", set(), {3, 5}),
    *at("pruned_rounded", set(), {3, 5, 7}),
    *at("rotated", set(), {2, 3, 5}),
    *at("rotated_between", {3}, {5, 6, 8}),
    *at("smoothed", set(), {1, 2, 3, 5}),
    *at("learned", {6}, {1, 2, 3, 4, 8, 10}),
    *at("learned", set(), {3}, kind="torn"),
    *at("learned", set(), {2}, kind="appended"),
    *at("tuned", {7}, {2, 5, 6, 8, 10}),
    *at("dropped", set(), {3, 4, 6, 9, 11}),
    *at("dropped_quantized", {5}, set(range(1, 14))),
    *at("dropped_rounded", set(), set(range(1, 10))),
    *at("dropped_pruned", set(), {3, 5, 9, 12, 15}),
    *at("starved", set(), {3, 4}),
    *at("starved_pruned", set(), {3, 5, 6}),
    *at("starved_rotated", {3}),
    *at("linear_by_linear", set(), {3}),
    *at("gptq", {9}, {30}, "write"),
]


@pytest.mark.parametrize(("recipe", "kind", "number"), BOUNDARIES, ids=str)
def test_killed_at_a_boundary(
    recipe: str, kind: str, number: int, model: Path, tmp_path: Path, expected: Expected
) -> None:
    job = Job(model, recipe, tmp_path / "output")
    assert run(job, die_at=f"{kind} {number}").code == KILLED
    assert not job.output.exists()
    assert job.partial.is_dir()
    again = run(job)
    assert again.code == 0, again.said
    assert "Continuing the run" in again.said
    assert tree(job.output) == expected(recipe)
    assert not job.partial.exists()


@pytest.mark.parametrize("recipe", few(["rtn", "gptq", "two", "learned"], "two"))
@pytest.mark.parametrize("moments", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(
    recipe: str, moments: int, model: Path, tmp_path: Path, expected: Expected
) -> None:
    """Some runs are killed several times; each makes progress or leaves what there was."""
    whole = expected(recipe)
    chooser = random.Random(f"{recipe} {moments}")
    length = run(Job(model, recipe, tmp_path / "timed")).seconds
    kills = finished = 0
    while kills < moments:
        job = Job(model, recipe, tmp_path / f"output-{finished}")
        ended = run(job, after_s=chooser.uniform(0, length))
        kills += ended.code == KILLED
        if not job.output.exists():
            continue
        assert tree(job.output) == whole
        finished += 1
    assert run(Job(model, recipe, tmp_path / f"output-{finished}")).code == 0
    assert tree(tmp_path / f"output-{finished}") == whole


def test_killed_when_the_output_has_its_name(
    model: Path, tmp_path: Path, expected: Expected
) -> None:
    """The output is whole; a second call would replace it, and does so only when told to."""
    whole = expected("gptq")
    job = Job(model, "gptq", tmp_path / "output")
    assert run(job, die_at=f"appended {lines('gptq')}").code == KILLED
    (job.partial / "files").rename(job.output)
    again = run(job)
    assert again.code == 1
    assert "already holds files" in again.said
    assert tree(job.output) == whole


LAYERS = 10


GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"


PATIENCE = 120.0


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    rows = [json.dumps({"input_ids": list(range(start, start + 32))}) for start in range(32)]
    (folder.parent / "rows.jsonl").write_text("\n".join(rows))
    return folder


def command(model: Path, kind: str, output: Path) -> list[str]:
    if kind == "model-free-ptq":
        given = [str(model), "--scheme", "W4A16", "--ignore", "lm_head"]
    else:
        data = str(model.parent / "rows.jsonl")
        given = [str(model), "--recipe", GPTQ, "--dataset", data]
    return [kind, *given, "--output", str(output)]


def finished_blocks(output: Path) -> int:
    journal = output.with_name(f"{output.name}.partial") / "journal"
    return journal.read_bytes().count(b'["block",') if journal.exists() else 0


def _child(arguments: list[str], stderr: Path) -> None:
    """The command in a process of its own."""
    torch.set_num_threads(1)
    sys.argv = ["llmcompressor", *arguments]
    with stderr.open("w", buffering=1) as sys.stderr:
        main()


@pytest.mark.parametrize("kind", few(["oneshot", "model-free-ptq"], "oneshot"))
def test_sigterm_ends_at_a_consistent_point(kind: str, deep_model: Path, tmp_path: Path) -> None:
    output, stderr = tmp_path / "out put", tmp_path / "stderr"
    arguments = command(deep_model, kind, output)
    context = multiprocessing.get_context("forkserver")
    running = context.Process(target=_child, args=(arguments, stderr))
    running.start()
    until = time.monotonic() + PATIENCE
    while finished_blocks(output) < 1 and time.monotonic() < until:
        assert running.is_alive(), stderr.read_text()
        time.sleep(0.005)
    assert running.pid is not None
    os.kill(running.pid, signal.SIGTERM)
    told = time.monotonic()
    running.join(PATIENCE)
    said = stderr.read_text()
    assert running.exitcode == 143, said
    assert time.monotonic() - told < 30  # seconds of a machine that others use too
    assert (
        said.splitlines()[-1]
        == f"Terminated. Continue with: {shlex.join(['llmcompressor', *arguments])}"
    )
    assert "Traceback" not in said
    assert 1 <= finished_blocks(output) < LAYERS
    assert not output.exists()

    if kind != "oneshot":
        return  # that the same call continues is the same there
    again = context.Process(target=_child, args=(arguments, stderr))
    again.start()
    again.join(PATIENCE)
    assert again.exitcode == 0, stderr.read_text()
    assert output.is_dir()
    assert not output.with_name(f"{output.name}.partial").exists()
    assert "ontinu" in stderr.read_text()
