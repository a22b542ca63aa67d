# SPDX-License-Identifier: Apache-2.0
"""Processes of one group, each with a whole model, end with what one makes of all data."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support import process_pair
from tests.support.process_pair import FP8, GPTQ

Pair = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Runs a function in two processes of one group; what it returns in each."""
    store = str(tmp_path_factory.mktemp("group") / "store")
    context = multiprocessing.get_context("forkserver")
    workers = [
        ProcessPoolExecutor(1, context, initializer=process_pair.join, initargs=(rank, store))
        for rank in range(2)
    ]

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        futures = [worker.submit(function, *args, **kwargs) for worker in workers]
        return [future.result(timeout=120) for future in futures]

    yield run
    for worker in workers:
        worker.shutdown()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("recipe", [GPTQ, FP8], ids=lambda recipe: next(iter(recipe)))
def test_parts_of_the_data_give_what_all_of_it_gives_one_process(pair, tmp_path, recipe):
    one, _ = process_pair.saved(str(tmp_path / "one"), recipe, parts=False)
    found = pair(process_pair.saved, str(tmp_path / "two"), recipe, parts=True)
    assert [weights for weights, _ in found] == [one, one]
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert "8 samples, those of 2 processes together" in found[0][1]
    assert "Calibration with" not in found[1][1], "the first process has said it"
    assert sum(lines.count("Saved") for _, lines in found) == 1


def test_data_that_all_processes_have_counts_once(pair, tmp_path):
    one, _ = process_pair.saved(str(tmp_path / "one"), FP8, parts=False, output=True)
    found = pair(process_pair.saved, str(tmp_path / "two"), FP8, parts=False, output=True)
    assert [weights for weights, _ in found] == [one, one]
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert "8 samples, the same for all" in found[0][1]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one", "two"]


def test_from_folder_to_folder_one_process_works_for_all(pair, tmp_path, one_block):
    assert process_pair.streamed(str(tmp_path / "one"), str(one_block))
    for given in ({}, {"overwrite": True}, {"overwrite": True, "resume": "never"}):
        found = pair(process_pair.streamed, str(tmp_path / "two"), str(one_block), **given)
        assert found[0] == found[1]
        assert content(tmp_path / "two") == content(tmp_path / "one")
        assert content(tmp_path / "two-again").keys() == content(tmp_path / "one-again").keys()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("where", ["arguments", "data", "weights", "output"])
def test_an_error_of_one_process_ends_all(pair, tmp_path, where):
    first, second = pair(process_pair.broken, str(tmp_path / "two"), where)
    assert not first.startswith(("none", "ProcessError"))
    assert second == f"ProcessError: Process 0 has failed: {first}"
    assert not (tmp_path / "two").exists()


def test_different_recipes_are_refused(pair, tmp_path):
    for found in pair(process_pair.broken, str(tmp_path), "recipe"):
        assert "given different values of recipe" in found


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_each_takes_all_of_what_all_have_and_its_part_of_its_own(pair, kind):
    assert pair(process_pair.taken, kind) == [[0, 1, 2, 3, 4, 5]] * 2
    assert pair(process_pair.taken, f"own {kind}") == [[0, 1, 2], [100, 101, 102]]


def test_a_group_for_accelerators_exchanges_data_in_main_memory(pair):
    assert pair(process_pair.through_main_memory) == [[bytes([0]), bytes([1])]] * 2
