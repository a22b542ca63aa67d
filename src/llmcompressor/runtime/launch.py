# SPDX-License-Identifier: Apache-2.0
"""The ranks that a launcher has started, and a process group of them for the time of a run.

``torchrun`` and ``accelerate launch`` set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``
and ``MASTER_PORT``. Slurm's ``srun`` sets variables of its own, from which the same five follow.
Only a script that ``srun`` itself started counts: the batch script has most of them, too.

The ranks meet in a store of torch, as by ``env://``. It is kept to the end of the process, so that
each run can make a group and destroy it.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from llmcompressor.errors import ArgumentError, ProcessError
from llmcompressor.logger import PASSING, logger
from llmcompressor.runtime.liveness import is_alive, own_place, while_alive

TIMEOUT = "LLM_COMPRESSOR_RANKS_TIMEOUT"
"""The environment variable with the seconds that ranks wait for each other."""
JOIN = 600.0
"""Seconds that a rank waits for the others to begin a run, by default."""
PATIENCE = 1800.0
"""Seconds that it waits for them within a run, by default."""
_LONGEST = 1e8
"""Seconds, some three years: the store does not take much more."""
_FAREWELL = 10.0
"""Seconds that the rank with the store waits at its end for the others to end."""
_QUIET = 60.0
"""Seconds after which a rank that waits for others says so."""
_PAUSE = 0.02
_ENDED, _PLACE = "llmcompressor/ended", "llmcompressor/place"
"""Keys of the store, with the number of a rank behind: it reads no more, and where it is."""
_FIRST_PORT, _PORTS = 12_000, 20_000
"""Where Slurm gives no port: below those that systems give to programs that ask for any."""
_ALONE = "To run alone, unset WORLD_SIZE and RANK."
_numbers = itertools.count()
_joined: list[Meeting] = []
"""The one meeting of this process, if it has joined any."""
_made: list[int] = []
"""The number of the group that :func:`launched_group` has made, while it is there."""


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that a launcher has started.

    Attributes:
        rank: its rank.
        count: the number of ranks, at least 2.
        local_rank: its rank on this machine.
        address: the host of rank 0, or of the launcher's store.
        port: the port of the store there.
    """

    rank: int
    count: int
    local_rank: int
    address: str
    port: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Read a launch from the environment; ``None`` for a process that runs alone.

    Raises:
        ArgumentError: variables are missing, no numbers, or contradict each other.
    """
    if "WORLD_SIZE" in environment or "RANK" in environment:
        return _of_torchrun(environment)
    return _of_slurm(environment)


def _of_torchrun(environment: Mapping[str, str]) -> Launch | None:
    count, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    if (count or 1) == 1 and not rank:
        return None
    needed = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if not environment.get(name)]:
        given = ", ".join(f"{name}={environment[name]}" for name in needed if name not in missing)
        raise ArgumentError(
            f"The environment says that this is one of several processes ({given}), and lacks "
            f"{', '.join(missing)}.",
            f"Start the script with torchrun, which sets all of them. {_ALONE}",
        )
    port = _number(environment, "MASTER_PORT")
    assert rank is not None
    assert count is not None
    assert port is not None
    local = _number(environment, "LOCAL_RANK")
    return _checked(
        Launch(rank, count, rank if local is None else local, environment["MASTER_ADDR"], port),
        "WORLD_SIZE",
        "RANK",
    )


def _of_slurm(environment: Mapping[str, str]) -> Launch | None:
    is_step = {"SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR"} & environment.keys()
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    count = _number(environment, name)
    if not is_step or (count or 1) == 1:
        return None
    rank = _number(environment, "SLURM_PROCID")
    if count is None or rank is None:
        raise ArgumentError(
            f"The environment says that srun has started {count} tasks, and lacks SLURM_PROCID.",
            "Start the script with srun, which sets it, or with torchrun.",
        )
    port = _number(environment, "MASTER_PORT")
    if port is None:
        job = _number(environment, "SLURM_JOB_ID") or 0
        port = _FIRST_PORT + (job + (_number(environment, "SLURM_STEP_ID") or 0)) % _PORTS
    local = _number(environment, "SLURM_LOCALID") or 0
    return _checked(
        Launch(rank, count, local, _slurm_host(environment), port), name, "SLURM_PROCID"
    )


def _slurm_host(environment: Mapping[str, str]) -> str:
    """The host of rank 0: the first node of the step."""
    if given := environment.get("MASTER_ADDR"):
        return given
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if nodes == "1":
        return "localhost"
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names:
        return first_node(names)
    return environment.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")


def first_node(names: str) -> str:
    """Return the first node of a list in Slurm's notation.

    >>> first_node("gpu[03-05,9],login")
    'gpu03'
    >>> first_node("rack2-n[1-4]-ib")
    'rack2-n1-ib'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ArgumentError(
            f"The environment variable {name} is {text!r}, which is no number.",
            f"Launchers set it, torchrun for one. {_ALONE}",
        )
    return int(text)


def _checked(launch: Launch, counting: str, ranking: str) -> Launch:
    if launch.rank >= launch.count:
        raise ArgumentError(
            f"The environment says {ranking}={launch.rank} of {counting}={launch.count}: ranks "
            "count from 0.",
            f"Start the script with torchrun or srun, which set both. {_ALONE}",
        )
    return launch


# --------------------
# How long ranks wait for each other.


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for others.

    Attributes:
        seconds: the time.
        remedy: how a user makes it longer, for errors.
    """

    seconds: float
    remedy: str


def patience(default: float) -> Patience:
    """Return how long a rank waits: as long as the process group does that the script has made.

    Without one the environment variable :data:`TIMEOUT` has the seconds.

    Args:
        default: seconds, where neither says it.

    Raises:
        ArgumentError: the variable is no positive number.
    """
    seconds = None if _made else _seconds_of_group()
    if seconds is not None:
        return Patience(seconds, "give init_process_group a longer timeout")
    remedy = f"set the environment variable {TIMEOUT} to more seconds"
    given = os.environ.get(TIMEOUT)
    if not given:
        return Patience(default, remedy)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:  # also refuses nan
        raise ArgumentError(
            f"The environment variable {TIMEOUT} is {given!r}, and not a number of seconds above "
            f"0 and up to {_LONGEST:g}.",
            f"Give the seconds that ranks wait for each other, as {PATIENCE:g}, or unset it.",
        )
    return Patience(seconds, remedy)


def _seconds_of_group() -> float | None:
    """The timeout of the default process group, if there is one that tells it."""
    import torch  # noqa: PLC0415  # importing the package loads no torch

    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    group: Any = distributed.group.WORLD
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # the group has no backend for it
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            if options is not None:
                return float(options._timeout.total_seconds())
    return None


# --------------------
# Where the ranks meet.


@dataclass(frozen=True)
class Meeting:
    """A launch, and the store that all of its ranks have reached."""

    launch: Launch
    store: Any


def meeting() -> Meeting | None:
    """Where this process has met the other ranks for a run; ``None`` if for none so far."""
    return _joined[0] if _joined else None


@contextmanager
def launched_group(timeout: float | None = None) -> Iterator[None]:
    """Make the default process group of a launch for the time of the body.

    Nothing is done where a group exists, or where this process was started alone. With CUDA the
    group has NCCL beside gloo, and the device of the local rank is the current one.

    Args:
        timeout: seconds to wait for the other ranks; ``None``: as :func:`patience` says.

    Raises:
        ArgumentError: the environment is not that of a launcher; see :func:`launch_of`.
        ProcessError: a rank does not come; names it.
    """
    from torch import distributed  # noqa: PLC0415  # importing the package loads no torch

    if not distributed.is_available() or distributed.is_initialized():
        yield
        return
    launch = launch_of(os.environ)
    if launch is None:
        yield
        return
    waiting = patience(JOIN)
    if timeout is not None:
        waiting = replace(waiting, seconds=timeout)
    if not _joined:
        _joined.append(_meet(launch, waiting))
    store = _joined[0].store
    number = next(_numbers)
    places = _await_all(launch, store, f"llmcompressor/launch/{number}", waiting)
    with own_device():
        own = distributed.PrefixStore(  # type: ignore[attr-defined]  # its stubs hide it
            f"llmcompressor/group/{number}", store
        )

        def make_group() -> None:
            distributed.init_process_group(
                _backend(),
                store=own,
                rank=launch.rank,
                world_size=launch.count,
                timeout=timedelta(seconds=patience(PATIENCE).seconds),
            )

        while_alive(make_group, places)
        _made.append(number)
        try:
            yield
        finally:
            _made.remove(number)
            if distributed.is_initialized():
                distributed.destroy_process_group()


@contextmanager
def own_device() -> Iterator[None]:
    """Make the device of the local rank the current one, if a launcher started several ranks.

    Raises:
        ArgumentError: there are fewer devices than ranks on this machine.
    """
    import torch  # noqa: PLC0415  # importing the package loads no torch

    launch = launch_of(os.environ)
    if launch is None or not torch.cuda.is_available():
        yield
        return
    number = torch.cuda.device_count()
    if number == 1:  # Slurm may show each task its own device only
        yield
        return
    if launch.local_rank >= number:
        raise ArgumentError(
            f"Rank {launch.rank} is the one with the number {launch.local_rank} on this machine, "
            f"which has {number} devices.",
            "Start as many processes on a machine as it has devices.",
        )
    with torch.cuda.device(launch.local_rank):
        yield


def _backend() -> str:
    import torch  # noqa: PLC0415  # see above

    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


def _meet(launch: Launch, waiting: Patience) -> Meeting:
    from torch import distributed  # noqa: PLC0415  # see above

    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = distributed.TCPStore(  # type: ignore[attr-defined]  # its stubs hide it
            launch.address,
            launch.port,
            launch.count,
            is_master=is_host,
            timeout=timedelta(seconds=waiting.seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"Rank {launch.rank} of {launch.count} cannot reach rank 0 at {launch.address}:"
            f"{launch.port} (waited at most {waiting.seconds:g} s): {error}. Call the same "
            f"function on all ranks; if they need longer, {waiting.remedy}. {_ALONE}"
        ) from error
    store.set(f"{_PLACE}/{launch.rank}", own_place())
    atexit.register(_part, launch, store, is_host=is_host)
    return Meeting(launch, store)


def _part(launch: Launch, store: Any, *, is_host: bool) -> None:
    """Let the store live until the other ranks have read from it what they are told at the end."""
    with suppress(RuntimeError):
        store.set(f"{_ENDED}/{launch.rank}", b"")
        end = time.monotonic() + _FAREWELL
        while is_host and time.monotonic() < end and _may_read(launch, store):
            time.sleep(_PAUSE)


def _may_read(launch: Launch, store: Any) -> bool:
    """Return True while another rank has neither ended nor died, as far as is known here."""
    for rank in range(launch.count):
        place = f"{_PLACE}/{rank}"
        if store.check([f"{_ENDED}/{rank}"]):
            continue
        if not store.check([place]) or is_alive(store.get(place).decode()):
            return True
    return False


def _await_all(launch: Launch, store: Any, key: str, waiting: Patience) -> list[str]:
    """Wait until all ranks have set their places, and return these."""
    begun, has_told = time.monotonic(), False
    try:
        store.set(f"{key}/{launch.rank}", own_place())
        while absent := [
            str(rank) for rank in range(launch.count) if not store.check([f"{key}/{rank}"])
        ]:
            if ended := [one for one in absent if store.check([f"{_ENDED}/{one}"])]:
                raise ProcessError(
                    f"Rank {launch.rank} waits for rank {', '.join(ended)} of {launch.count} to "
                    f"begin a run, which has ended. Call the same function on all ranks. {_ALONE}"
                )
            waited = time.monotonic() - begun
            if waited > waiting.seconds:
                raise ProcessError(
                    f"Rank {launch.rank} has waited {waiting.seconds:g} s for rank "
                    f"{', '.join(absent)} of {launch.count} to begin a run. Call the same function "
                    f"on all ranks; if they need longer, {waiting.remedy}. {_ALONE}"
                )
            if waited > _QUIET and not has_told:
                has_told = True
                logger.bind(**{PASSING: True}).warning(
                    f"Rank {launch.rank} waits for rank {', '.join(absent)} of {launch.count} to "
                    f"begin a run. All ranks have to call the same function. {_ALONE}"
                )
            time.sleep(_PAUSE)
        return [store.get(f"{key}/{rank}").decode() for rank in range(launch.count)]
    except RuntimeError as error:
        if isinstance(error, ProcessError):
            raise
        raise ProcessError(
            f"The other ranks cannot be reached any more at {launch.address}:{launch.port}: {error}"
        ) from error
