# SPDX-License-Identifier: Apache-2.0
"""Scripts that make no process group run under launchers as they do alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from tests.support import launched_run
from tests.support.small_models import one_block, tree

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    one_block().save_pretrained(folder)
    return str(folder)


def assert_same_files(ranks: Path, alone: Path) -> None:
    """All bytes but those of reports, where losses have other digits and ranks their shares."""
    found, expected = tree(ranks), tree(alone)
    reports = {name for name in expected if name.endswith("compression_report.json")}
    assert {n: v for n, v in found.items() if n not in reports} == {
        n: v for n, v in expected.items() if n not in reports
    }
    for name in reports:
        report, wanted = (json.loads((one / name).read_text()) for one in (ranks, alone))
        shares = report.pop("ranks", [])
        assert len({one["samples"] for one in shares}) <= 1, "samples are shared evenly"
        for modifier, records in wanted["modifiers"].items():
            for module, record in records.items():
                own = report["modifiers"][modifier][module]
                assert own.pop("loss", 0) == pytest.approx(record.pop("loss", 0), rel=1e-4)
                assert own == record


def srun(rank: int, port: str) -> dict[str, str]:
    """What srun tells one of two tasks on one node."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
        "MASTER_PORT": port,
    }


@pytest.fixture(scope="module")
def tasks() -> Iterator[Ranks]:
    """Runs a function in two processes that were started as by srun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    context = multiprocessing.get_context("forkserver")
    workers = [
        ProcessPoolExecutor(1, context, initializer=launched_run.join, initargs=(srun(rank, port),))
        for rank in range(2)
    ]

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        futures = [worker.submit(function, *args) for worker in workers]
        ended, late = wait(futures, timeout=120)
        failed = [str(one.exception()) for one in ended if one.exception() is not None]
        assert not failed, failed  # and the other waits for that rank
        assert not late
        return [future.result() for future in futures]

    yield run
    for worker in workers:
        worker.shutdown(wait=False)


def test_runs_under_srun_write_what_one_process_writes(tasks, model, tmp_path):
    alone = launched_run.all_entrypoints(model, tmp_path / "alone")
    assert tasks(launched_run.all_entrypoints, model, tmp_path / "tasks") == [alone, alone]
    assert_same_files(tmp_path / "tasks", tmp_path / "alone")


def test_stages_under_srun_write_what_one_process_writes(tasks, model, tmp_path):
    launched_run.stages(model, str(tmp_path / "alone"))
    assert len(set(tasks(launched_run.stages, model, str(tmp_path / "tasks")))) == 1
    for name in ("stage_sparse", "stage_quant"):
        assert_same_files(tmp_path / "tasks" / name, tmp_path / "alone" / name)


def test_ranks_that_do_not_agree_are_told_once_each(tasks, model, tmp_path):
    first, second = tasks(launched_run.unlike, model, str(tmp_path / "out"))
    assert second[0].startswith("RecipeError")
    assert first[0].startswith("ProcessError: Process 1 has failed: RecipeError")
    for one in (first, second):
        assert one[1].startswith("ArgumentError")
        assert "different values of recipe" in one[1]
        assert "different values of output_dir" in one[2]
        assert "different values of recipe" in one[3]
        assert one[4] == "none"


def test_a_script_under_torchrun_writes_what_it_writes_alone(model, tmp_path):
    alone = launched_run.all_entrypoints(model, tmp_path / "alone")
    # Else they look for each other by the machine's own name, for minutes where nobody knows it.
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "localhost"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    ended = subprocess.run(
        [sys.executable, *command, launched_run.__file__, model, str(tmp_path / "torchrun")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert list(map(float, ended.stdout.split())) == [alone, alone]
    assert_same_files(tmp_path / "torchrun", tmp_path / "alone")
