# SPDX-License-Identifier: Apache-2.0
"""Runs beside each other, in threads and in processes, do not disturb each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from tests.support import process_pair
from tests.support.manifests import MANIFEST, stable_bytes
from tests.support.process_pair import FP8, GPTQ
from tests.support.rank_runs import share_differing
from tests.support.small_models import one_block, token_rows, tree
from tests.support.thinned import few
from torch.nn import Module

from llmcompressor import active_session, create_session, oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

RUNS = 3


def _recipe() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


def _compress(seed: int, model: Module | None = None) -> dict[str, torch.Tensor]:
    model = one_block(seed=seed) if model is None else model
    made = oneshot(model=model, recipe=_recipe(), dataset=token_rows(32, seed=seed))
    return dict(made.state_dict())


def test_runs_of_several_threads_make_what_each_makes_alone() -> None:
    """They all find the one session that the process shares."""
    alone = [_compress(seed) for seed in range(RUNS)]
    models = [one_block(seed=seed) for seed in range(RUNS)]  # drawn from what threads share
    together = Barrier(RUNS)

    def compress(seed: int) -> dict[str, torch.Tensor]:
        together.wait()
        return _compress(seed, models[seed])

    with ThreadPoolExecutor(RUNS) as pool:
        threaded = list(pool.map(compress, range(RUNS)))
    for one, other in zip(alone, threaded, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_folders_of_several_threads_are_those_of_each_alone(tmp_path: Path) -> None:
    for seed in range(RUNS):
        one_block(seed=seed).save_pretrained(tmp_path / f"{seed}")

    def compress(place: str) -> Path:
        seed = place[0]
        oneshot(
            model=str(tmp_path / seed),
            recipe=_recipe(),
            dataset=token_rows(32, seed=int(seed)),
            output_dir=tmp_path / place,
        )
        return tmp_path / place

    alone = [compress(f"{seed}-alone") for seed in range(RUNS)]
    with ThreadPoolExecutor(RUNS) as pool:
        threaded = list(pool.map(compress, [f"{seed}-threaded" for seed in range(RUNS)]))
    for one, other in zip(alone, threaded, strict=True):
        assert tree(one) == tree(other)


class Inner(Modifier):
    """Compresses another model as soon as it is initialized."""

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        type(self).made = _compress(1)
        return True


@pytest.mark.parametrize("created", [False, True], ids=["shared session", "session of its own"])
def test_a_run_within_a_run_leaves_it_alone(created: bool) -> None:
    outer = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])

    def run() -> None:
        model = oneshot(model=one_block(), recipe=[Inner(), outer])
        assert model.model.layers[0].mlp.up_proj.weight_scale.shape == (128, 1)
        assert active_session().state.model is model

    if created:
        with create_session():
            run()
    else:
        run()
    expected = _compress(1)
    assert expected.keys() == Inner.made.keys()
    assert all(torch.equal(expected[name], Inner.made[name]) for name in expected)


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
    """All files but the report, where losses have other digits and ranks their shares."""
    files = (path for path in folder.iterdir() if path.name != "compression_report.json")
    return {path.name: stable_bytes(path) for path in files}


def assert_alike(found: Path, expected: Path) -> None:
    """The same files, but that sums in another order may have changed few codes."""
    ours, theirs = content(found), content(expected)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} <= {MANIFEST, "model.safetensors"}
    assert share_differing(found, expected) <= 0.001


@pytest.mark.parametrize("recipe", [GPTQ, FP8], ids=lambda recipe: next(iter(recipe)))
def test_parts_of_the_data_give_what_all_of_it_gives_one_process(pair, tmp_path, recipe):
    process_pair.saved(str(tmp_path / "one"), recipe, parts=False)
    found = pair(process_pair.saved, str(tmp_path / "two"), recipe, parts=True)
    assert found[0][0] == found[1][0]
    assert_alike(tmp_path / "two", tmp_path / "one")
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


def test_from_folder_to_folder_all_processes_write_one_output(pair, tmp_path, one_block):
    assert process_pair.streamed(str(tmp_path / "one"), str(one_block))
    for given in ({}, {"overwrite": True}, {"overwrite": True, "resume": "never"}):
        found = pair(process_pair.streamed, str(tmp_path / "two"), str(one_block), **given)
        assert found[0] == found[1]
        assert_alike(tmp_path / "two", tmp_path / "one")
        assert content(tmp_path / "two-again").keys() == content(tmp_path / "one-again").keys()
    assert len(list(tmp_path.iterdir())) == 4


def test_what_one_process_reads_waits_for_no_other(pair, tmp_path):
    process_pair.saved(str(tmp_path / "one"), FP8, parts=False, output=True)
    alone = process_pair.read_by_one(str(tmp_path / "one"))
    assert alone[0]
    assert pair(process_pair.read_by_one, str(tmp_path / "one")) == [alone, None]


@pytest.mark.parametrize("where", few(["arguments", "data", "weights", "output"], "data", "output"))
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
