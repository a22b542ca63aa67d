# SPDX-License-Identifier: Apache-2.0
"""A call that is killed after its last block: it ends, or its output is whole and in use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.killed_runs import KILLED, Job, run, tree

from llmcompressor.errors import OutputError

Expected = Callable[[str], dict[str, str]]


@pytest.mark.parametrize("recipe", ["rtn", pytest.param("two", marks=pytest.mark.slow)])
def test_killed_at_each_step_after_the_last_block(
    recipe: str, model: Path, tmp_path: Path, expected: Expected
) -> None:
    """Names are changed, the working folder goes in one step, the model is handed over.

    Until it is gone the same call ends the run, also one whose output has its name already.
    """
    for number in itertools.count(1):
        job = Job(model, recipe, tmp_path / str(number) / "output")
        code = run(job, die_at=f"step {number}").code
        if code == 0:
            break
        assert code == KILLED
        if job.partial.exists():
            again = run(replace(job, resume="must"))
            assert again.code == 0, again.said
            assert "Continuing" in again.said
            assert [path.name for path in job.output.parent.iterdir()] == ["output"]
        else:
            assert "already holds files" in run(job).said
        assert tree(job.output) == expected(recipe)
    assert number > 6


def test_an_output_is_in_use_for_the_same_call(model: Path, tmp_path: Path) -> None:
    job = Job(model, "rtn", tmp_path / "output")
    job()
    before = tree(job.output)
    with pytest.raises(OutputError, match="already holds files"):
        job()
    assert tree(job.output) == before
    assert not job.partial.exists()
