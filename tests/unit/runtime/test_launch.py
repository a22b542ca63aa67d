# SPDX-License-Identifier: Apache-2.0
"""What the environment of a launcher says, and what a half of it does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import distributed

from llmcompressor.errors import ArgumentError, ProcessError
from llmcompressor.logger import logger
from llmcompressor.runtime import launch
from llmcompressor.runtime.launch import (
    PATIENCE,
    TIMEOUT,
    Launch,
    first_node,
    launch_of,
    launched_group,
    own_device,
    patience,
)
from llmcompressor.runtime.liveness import own_place

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "123",
}
SRUN = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


@pytest.fixture(autouse=True)
def not_met(monkeypatch):
    """A process that has met no other, and was started alone."""
    monkeypatch.setattr(launch, "_joined", [])
    monkeypatch.delenv(TIMEOUT, raising=False)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_torchrun_and_srun_are_read():
    assert launch_of(TORCHRUN) == Launch(3, 4, 1, "here", 123)
    assert launch_of(SRUN) == Launch(3, 4, 1, "10.0.0.1", 13_002)
    assert launch_of(SRUN | TORCHRUN | {"RANK": "0"}) == Launch(0, 4, 1, "here", 123), "within srun"
    without_local = {name: one for name, one in TORCHRUN.items() if name != "LOCAL_RANK"}
    assert launch_of(without_local).local_rank == 3


@pytest.mark.parametrize(
    ("more", "address", "port"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[07-09],x"}, "gpu07", 13_002),
        ({"SLURM_JOB_NODELIST": "a,b"}, "a", 13_002),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu7"}, "localhost", 13_002),
        ({"MASTER_ADDR": "there", "MASTER_PORT": "99"}, "there", 99),
    ],
)
def test_ranks_of_slurm_meet_at_the_first_node(more, address, port):
    found = launch_of(SRUN | more)
    assert (found.address, found.port) == (address, port)


def test_the_tasks_of_the_step_count():
    assert launch_of(SRUN | {"SLURM_STEP_NUM_TASKS": "5"}).count == 5
    assert launch_of(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_the_batch_script_of_a_job_of_several_tasks_is_alone():
    """Slurm gives it a rank too, but no srun has started the others."""
    batch = {name: one for name, one in SRUN.items() if "LAUNCH" not in name and "STEP" not in name}
    assert launch_of(batch | {"SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}])
def test_one_process_is_alone(given):
    assert launch_of(given) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"WORLD_SIZE": "2"}, r"\(WORLD_SIZE=2\), and lacks RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1"}, "lacks WORLD_SIZE, MASTER_ADDR"),
        (TORCHRUN | {"MASTER_PORT": ""}, "lacks MASTER_PORT"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 of WORLD_SIZE=4"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', which is no number"),
        (SRUN | {"SLURM_PROCID": ""}, "started 4 tasks, and lacks SLURM_PROCID"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 of SLURM_NTASKS=4"),
    ],
)
def test_half_of_an_environment_is_one_error(given, said):
    with pytest.raises(ArgumentError, match=said):
        launch_of(given)


@pytest.mark.parametrize(
    ("names", "first"),
    [("one", "one"), ("n[1,3]", "n1"), ("r[1-2]n[03-4]", "r1n03"), ("a-1,b", "a-1")],
)
def test_lists_of_nodes(names, first):
    assert first_node(names) == first


def test_alone_there_is_no_group():
    with launched_group():
        assert not distributed.is_initialized()


@pytest.fixture
def launched(monkeypatch):
    """The environment of the first of two ranks, the other of which never comes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, one in given.items():
        monkeypatch.setenv(name, one)
    monkeypatch.setattr(launch.atexit, "register", lambda *args, **kwargs: None)


def test_a_rank_that_never_comes_is_named(launched):
    said = "Rank 0 has waited 0.2 s for rank 1 of 2 to begin a run. Call .* on all ranks"
    with pytest.raises(ProcessError, match=said), launched_group(timeout=0.2):
        pass
    assert not distributed.is_initialized()


def test_a_rank_that_waits_says_for_whom(launched, monkeypatch):
    monkeypatch.setattr(launch, "_QUIET", 0.05)
    told = []
    handler = logger.add(lambda line: told.append(line.record["message"]), level="WARNING")
    with suppress(ProcessError), launched_group(timeout=0.3):
        pass
    logger.remove(handler)
    assert [one.partition(".")[0] for one in told] == [
        "Rank 0 waits for rank 1 of 2 to begin a run"
    ]


@pytest.mark.parametrize(("number", "waits"), [("own", True), ("of one that has died", False)])
def test_the_store_does_not_wait_for_the_dead(number, waits, monkeypatch):
    monkeypatch.setattr(launch, "_FAREWELL", 0.3)
    place = json.loads(own_place())
    if number != "own":
        with subprocess.Popen([sys.executable, "-c", ""]) as died:
            place[2] = died.pid
    store = distributed.HashStore()
    store.set(f"{launch._PLACE}/1", json.dumps(place))
    began = time.perf_counter()
    launch._part(Launch(0, 2, 0, "here", 1), store, is_host=True)
    assert (time.perf_counter() - began >= 0.3) is waits


def test_the_store_waits_until_others_have_ended(monkeypatch):
    monkeypatch.setattr(launch, "_FAREWELL", 30)
    store = distributed.HashStore()
    store.set(f"{launch._PLACE}/1", own_place())
    with ThreadPoolExecutor(1) as pool:
        parting = pool.submit(launch._part, Launch(0, 2, 0, "here", 1), store, is_host=True)
        time.sleep(0.1)
        assert not parting.done()
        launch._part(Launch(1, 2, 1, "here", 1), store, is_host=False)
        parting.result(timeout=10)


def test_the_environment_says_how_long_ranks_wait(launched, monkeypatch):
    assert patience(PATIENCE).seconds == PATIENCE
    monkeypatch.setenv(TIMEOUT, "0.25")
    said = rf"has waited 0.25 s for rank 1 .*; if they need longer, set .* {TIMEOUT} to more"
    with pytest.raises(ProcessError, match=said), launched_group():
        pass


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan", "inf", "1e12"])
def test_seconds_to_wait_are_a_positive_number(given, launched, monkeypatch):
    monkeypatch.setenv(TIMEOUT, given)
    with pytest.raises(ArgumentError, match=f"{TIMEOUT} is '{given}'"), launched_group():
        pass
    assert launch.meeting() is None, "before anything"


def test_a_rank_that_has_ended_is_not_waited_for(launched):
    with pytest.raises(ProcessError), launched_group(timeout=0.1):
        pass
    launch.meeting().store.set("llmcompressor/ended/1", b"")
    with (
        pytest.raises(ProcessError, match=r"Rank 0 waits for rank 1 of 2 .*, which has ended"),
        launched_group(timeout=60),
    ):
        pass


def test_a_first_rank_that_never_comes_is_named(launched, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with (
        pytest.raises(ProcessError, match="Rank 1 of 2 cannot reach rank 0 at localhost:"),
        launched_group(timeout=0.5),
    ):
        pass


def test_each_rank_has_the_device_of_its_number(launched, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(chosen.append(index)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with own_device():
        assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ArgumentError, match="which has 2 devices"), own_device():
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with own_device():  # Slurm shows each task its own
        assert chosen == [1]
