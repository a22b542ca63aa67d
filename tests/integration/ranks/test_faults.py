# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed end the others, publish nothing, and any number of ranks goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.killed_ranks import run_on
from tests.support.killed_runs import KILLED, Job, tree, write_model

RECIPE = "gptq_fitted"
SOON = 15.0
"""Seconds within which the other ranks end; alone on a machine it takes about two."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of one process."""
    job = Job(model, RECIPE, tmp_path_factory.mktemp("whole") / "output")
    assert run_on(1, job).codes == [0]
    return files_of(job.output)


def files_of(output: Path) -> dict[str, str]:
    """All but the report, which holds losses, in other digits, and the shares of ranks."""
    return {name: one for name, one in tree(output).items() if "report" not in name}


def test_ranks_write_what_one_process_writes(
    model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    job = Job(model, RECIPE, tmp_path / "output")
    ended = run_on(2, job)
    assert ended.codes == [0, 0], ended.said
    assert files_of(job.output) == whole


@pytest.mark.parametrize(
    ("seed", "everyone"),
    [
        (0, False),
        (0, True),
        *(
            pytest.param(seed, everyone, marks=pytest.mark.slow)
            for seed in range(1, 20)
            for everyone in (False, True)
        ),
    ],
)
def test_killed_at_a_random_moment(
    seed: int, everyone: bool, model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    chooser = random.Random(f"{seed} {everyone}")
    count = chooser.choice([2, 4]) if seed else 2
    job = Job(model, RECIPE, tmp_path / "output")
    victims = range(count) if everyone else [chooser.randrange(count)]
    ended = run_on(count, job, kill=victims, after_s=chooser.uniform(0.1, 2.5))
    if ended.codes != [0] * count:
        assert [ended.codes[rank] for rank in victims] == [KILLED] * len(victims), ended.said
        assert 0 not in ended.codes or job.output.exists(), ended.said
        assert ended.seconds < SOON, ended.said
        again = chooser.choice([1, 2, 4])
        if not job.output.exists():  # else the kill came when the output had its name
            ended = run_on(again, job)
            assert set(ended.codes) == {0}, ended.said
    assert files_of(job.output) == whole
    assert not job.partial.exists()


@pytest.fixture(scope="module")
def learned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of two ranks that have learned rotations, each from a part of every batch."""
    job = Job(model, "learned", tmp_path_factory.mktemp("learned") / "output", batch_size=2)
    assert run_on(2, job).codes == [0, 0]
    return files_of(job.output)


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, "step 2"),
        (0, "append 3"),
        pytest.param(0, "step 3", marks=pytest.mark.slow),
        pytest.param(0, "torn 2", marks=pytest.mark.slow),
    ],
)
def test_killed_while_rotations_are_learned(
    rank: int, where: str, model: Path, learned: dict[str, str], tmp_path: Path
) -> None:
    job = Job(model, "learned", tmp_path / "output", batch_size=2)
    ended = run_on(2, job, kill=[rank], die_at=where)
    assert ended.codes[rank] == KILLED, ended.said
    assert ended.codes[1 - rank] == 1, ended.said
    assert ended.seconds < 2 * SOON  # the whole run is in it
    assert not job.output.exists()
    again = run_on(2, job)
    assert again.codes == [0, 0], again.said
    assert "Learning goes on behind step" in again.said[0]
    assert files_of(job.output) == learned
    assert not job.partial.exists()
