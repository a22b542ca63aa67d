# SPDX-License-Identifier: Apache-2.0
"""Killed at any moment, the same call goes on and ends with the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import BLOCKS, KILLED, NEEDS_DATA, Job, run, tree
from tests.support.thinned import few

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
    *at("gptq", {1}, {3}, kind="torn"),
    *at("ragged", set(), {3}),
    *at("one_pass", {3}, {2}, "appended"),
    *at("cache", {3}, {2}, "appended"),
    *at("sparse", {7}, {2, 4, 5, 9}),
    *at("pruned", set(), {3, 5}),
    *at("pruned_rounded", {3}, {5, 7}),
    *at("rotated", set(), {2, 3, 5}),
    *at("rotated_between", {3}, {5, 6, 8}),
    *at("smoothed", {3}, {1, 2, 5}),
    *at("learned", {6}, {1, 2, 3, 4, 8, 10}),
    *at("learned", set(), {3}, kind="torn"),
    *at("learned", set(), {2}, kind="appended"),
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
        if job.partial.exists():  # killed when the output had its name
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
