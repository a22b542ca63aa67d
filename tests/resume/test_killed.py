# SPDX-License-Identifier: Apache-2.0
"""Killed at any moment, the same call goes on and ends with the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import BLOCKS, KILLED, NEEDS_DATA, Job, run, tree

from llmcompressor.checkpoint.finished_run import RUN_FILE

Expected = Callable[[str], dict[str, str]]


def lines(recipe: str) -> int:
    """Lines of the journal behind the first: choices, blocks of each pass, the rest, ready."""
    passes = 2 if recipe == "two" else 1
    choices = passes if recipe in NEEDS_DATA else 0
    return choices + passes * BLOCKS + 1 + 1


BOUNDARIES = [
    (recipe, kind, number)
    for recipe in ("rtn", "gptq", "two")
    for number in range(1, lines(recipe) + 1)
    for kind in ("append", *(["appended"] if number == lines(recipe) else []))
]
OTHERS = [
    *((recipe, "torn", number) for recipe in ("rtn", "gptq") for number in (1, 3)),
    *((recipe, "appended", number) for recipe in ("one_pass", "cache") for number in (2, 3)),
    *(("sparse", "append", number) for number in (2, 4, 5, 7, 9)),
    *(("pruned", "append", number) for number in (3, 5)),
    *(("pruned_rounded", "append", number) for number in (3, 5, 7)),
    *(("rotated", "append", number) for number in (2, 3, 5)),
    *(("rotated_between", "append", number) for number in (3, 5, 6, 8)),
    *(("smoothed", "append", number) for number in (1, 2, 3, 5)),
    *(("learned", "append", number) for number in (1, 2, 3, 4, 6, 8, 10)),
    ("learned", "torn", 3),
    ("learned", "appended", 2),
    *(("dropped", "append", number) for number in (3, 4, 6, 9, 11)),
    *(("dropped_quantized", "append", number) for number in range(1, 14)),
    *(("dropped_rounded", "append", number) for number in range(1, 10)),
    *(("dropped_pruned", "append", number) for number in (3, 5, 9, 12, 15)),
    *(("starved", "append", number) for number in (3, 4)),
    *(("starved_pruned", "append", number) for number in (3, 5, 6)),
    ("starved_rotated", "append", 3),
    ("linear_by_linear", "append", 3),
    ("gptq", "write", 9),
    ("gptq", "write", 30),
]


@pytest.mark.parametrize(("recipe", "kind", "number"), [*BOUNDARIES, *OTHERS], ids=str)
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


def remembers(job: Job) -> bool:
    """Whether the call that made the output did not come to its end."""
    return (job.output / RUN_FILE).exists()


@pytest.mark.parametrize("recipe", ["rtn", "gptq", "two", "learned"])
@pytest.mark.parametrize("moments", [6, pytest.param(50, marks=pytest.mark.slow)])
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
        if job.partial.exists() or remembers(job):  # killed when the output had its name
            assert run(job).code == 0
        assert tree(job.output) == whole
        assert not job.partial.exists()
        finished += 1
    assert run(Job(model, recipe, tmp_path / f"output-{finished}")).code == 0
    assert tree(tmp_path / f"output-{finished}") == whole


def test_killed_when_the_output_has_its_name(
    model: Path, tmp_path: Path, expected: Expected
) -> None:
    """Only the working folder was left to be removed: the call finds everything done."""
    whole = expected("gptq")
    job = Job(model, "gptq", tmp_path / "output")
    assert run(job, die_at=f"appended {lines('gptq')}").code == KILLED
    (job.partial / "files").rename(job.output)
    again = run(job)
    assert again.code == 0, again.said
    assert tree(job.output) == whole
    assert not job.partial.exists()


def test_killed_while_it_tidies_up(model: Path, tmp_path: Path, expected: Expected) -> None:
    """What is left of the working folder does not look like one to go on with."""
    job = Job(model, "rtn", tmp_path / "output")
    assert run(job, die_at="remove 1").code == KILLED
    assert not job.partial.exists()
    assert remembers(job)
    again = run(job)
    assert again.code == 0, again.said
    assert tree(job.output) == expected("rtn")
    assert not job.partial.exists()
