# SPDX-License-Identifier: Apache-2.0
"""Runs of several ranks that can be killed, without a launcher that would end the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.support import killed_runs
from tests.support.killed_runs import Job

LATE = 60.0
"""Seconds that the ranks which are left may take to end."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended, what each said, and how long the last took after a kill."""

    codes: list[int]
    said: list[str]
    seconds: float


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def run_on(
    count: int,
    job: Job,
    *,
    kill: Collection[int] = (),
    after_s: float | None = None,
    die_at: str | None = None,
) -> Ended:
    """Do ``job`` on ``count`` ranks, and kill some of them.

    Args:
        count: the number of ranks.
        job: what to do.
        kill: the ranks.
        after_s: they are killed so many seconds after all have begun.
        die_at: they are killed there (see :func:`.killed_runs._armed`).
    """
    context = multiprocessing.get_context("forkserver")
    port = str(free_port())
    pipes, processes = [], []
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        armed = die_at if rank in kill else None
        process = context.Process(target=_rank, args=(job, rank, count, port, sender, armed))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    for receiver in pipes:
        with contextlib.suppress(EOFError):
            receiver.recv()  # the work begins
    began = time.perf_counter()
    if after_s is not None:
        while time.perf_counter() - began < after_s and any(p.is_alive() for p in processes):
            time.sleep(0.005)
        for rank in kill:
            processes[rank].kill()
        began = time.perf_counter()
    said = []
    for receiver in pipes:
        with contextlib.suppress(EOFError):
            if receiver.poll(LATE):
                said.append(receiver.recv())
                continue
        said.append("")
    for process in processes:
        process.join(LATE)
    seconds = time.perf_counter() - began
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
    assert not late, f"ranks {late} did not end: {said}"
    return Ended([process.exitcode or 0 for process in processes], said, seconds)


def _rank(job: Job, rank: int, count: int, port: str, sender: Any, die_at: str | None) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    if count == 1:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    killed_runs._child(job, die_at, sender)
