# SPDX-License-Identifier: Apache-2.0
"""Rounds between processes, two of which are threads here; integration tests have real ones."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from llmcompressor.errors import ProcessError
from llmcompressor.logger import logger, quiet
from llmcompressor.runtime import processes
from llmcompressor.runtime.launch import TIMEOUT
from llmcompressor.runtime.processes import Processes, write_once
from llmcompressor.runtime.progress import progress


@pytest.fixture
def two(monkeypatch):
    """Two processes that share a store."""
    store = HashStore()
    monkeypatch.setattr(processes, "_store", lambda: store)
    return [Processes(rank, 2, "a run") for rank in range(2)]


@pytest.fixture
def logged():
    """What is logged during a test."""
    lines = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    yield lines
    logger.remove(sink)


def both(function, things):
    with ThreadPoolExecutor(2) as pool:
        return [
            future.exception() or future.result()
            for future in [pool.submit(function, thing) for thing in things]
        ]


def test_one_process_is_alone():
    assert Processes.from_process_group().count == 1
    assert Processes().all_gather("anything", 3) == [3]
    assert Processes().pooled([1], "", [""]) == ([1], 1)
    with write_once(Path("anywhere")) as is_mine:
        assert is_mine


def test_a_round_gives_what_each_has(two):
    assert both(lambda one: one.all_gather("ranks", one.rank), two) == [[0, 1], [0, 1]]


def test_processes_that_do_different_things_are_told(two):
    found = both(lambda one: one.all_gather(f"step {one.rank}"), two)
    assert all(isinstance(error, ProcessError) for error in found)
    assert "0: step 0, 1: step 1" in str(found[0])


def test_who_waits_is_told_of_a_failure(two):
    with pytest.raises(KeyError), two[1].notify_on_failure():
        raise KeyError("gone")
    with pytest.raises(ProcessError, match="Process 1 has failed: KeyError: 'gone'"):
        two[0].all_gather("anything")


def test_a_failure_that_comes_after_a_round_does_not_end_it(monkeypatch):
    """The other comes and then fails, between two looks of who waits."""
    store = HashStore()
    one, other = (Processes(rank, 2, "a run") for rank in range(2))

    class Late:
        """Its first look is before the other comes."""

        looks = 0

        def check(self, keys):
            self.looks += 1
            if self.looks == 1:
                monkeypatch.setattr(processes, "_store", lambda: store)
                assert other.all_gather("a value", 1) == [0, 1]
                other.tell_failure("later")
            return self.looks > 1 and store.check(keys)

        def __getattr__(self, name):
            return getattr(store, name)

    late = Late()
    monkeypatch.setattr(processes, "_store", lambda: late)
    assert one.all_gather("a value", 0) == [0, 1]
    with pytest.raises(ProcessError, match="later"):
        one.all_gather("the next one")


def test_who_waits_too_long_says_for_whom_and_tells_the_others(two, monkeypatch):
    monkeypatch.setattr(processes, "_LOOK", 0.01)
    monkeypatch.setenv(TIMEOUT, "0.1")
    said = rf"Rank 0 has waited 0.1 s at 'moment' for rank 1, not there yet. .* set .*{TIMEOUT}"
    with pytest.raises(ProcessError, match=said):
        two[0].all_gather("moment")
    two[1].all_gather("moment")
    with pytest.raises(ProcessError, match="at 'moment' for rank 1"):
        two[1].all_gather("the next one")


def test_some_waiting_has_no_end(two, monkeypatch):
    monkeypatch.setattr(processes, "_LOOK", 0.01)
    monkeypatch.setenv(TIMEOUT, "0.05")

    def late(one):
        time.sleep(0.3 * one.rank)
        return one.all_gather("a long one", one.rank, is_long=True)

    assert both(late, two) == [[0, 1], [0, 1]]


def test_a_store_that_has_ended_is_an_error(two, monkeypatch):
    def gone():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(processes, "_store", gone)
    with pytest.raises(ProcessError, match="cannot be reached any more: Connection reset"):
        two[0].all_gather("anything")
    with pytest.raises(KeyError), two[0].notify_on_failure():
        raise KeyError("its own error is the one that is raised")


def test_a_quiet_process_logs_nothing_and_shows_no_bar(logged, capsys):
    with quiet():
        _log()
        with progress(2, "Work", terminal=True) as advance:
            advance()
    assert not logged
    assert not capsys.readouterr().err
    with quiet(wanted=False):
        _log()
    assert logged == ["heard\n"]


def _log():
    """As a module of the package does."""
    exec("logger.info('heard')", {"logger": logger, "__name__": "llmcompressor.runtime.processes"})
