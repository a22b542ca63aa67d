# SPDX-License-Identifier: Apache-2.0
"""Groups of processes in which a test runs a function on each rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.processes import Processes

Group = Callable[..., list[Any]]


def _join(rank: int, count: int, store: str, given: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    if "nccl" in given.get("backend", ""):
        torch.cuda.set_device(rank)
    arguments = {"backend": "gloo", "init_method": f"file://{store}", **given}
    distributed.init_process_group(rank=rank, world_size=count, **arguments)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def group_of(count: int, folder: Path, **arguments: Any) -> Iterator[Group]:
    """Yield a function that runs another one on all ranks: what it returned, or its error.

    The result of a rank that has died is ``None``. The arguments are those of the process group;
    with NCCL each rank has the device of its number.
    """
    context = multiprocessing.get_context("forkserver")
    given = [(rank, count, str(folder / "store"), arguments) for rank in range(count)]
    workers = [ProcessPoolExecutor(1, context, initializer=_join, initargs=one) for one in given]

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        futures = [worker.submit(_call, function, *args, **kwargs) for worker in workers]
        found = [(future.exception(timeout=100), future) for future in futures]
        return [None if error else future.result() for error, future in found]

    yield run
    for worker in workers:
        worker.shutdown()


def on_ranks(body: Callable[[Ranks], Any], **given: Any) -> Any:
    """Run a function with the ranks of the group."""
    with Ranks(Processes.from_process_group(), **given) as ranks:
        return body(ranks)


def die() -> None:
    """End this process as a kill would."""
    os.kill(os.getpid(), signal.SIGKILL)
