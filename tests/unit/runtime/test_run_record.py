# SPDX-License-Identifier: Apache-2.0
"""Phases of a run by a clock and a memory that the test sets."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from llmcompressor.logger import logger
from llmcompressor.runtime.run_record import phase, recording_run, run_record


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_second_is_counted_once_in_the_innermost_phase(clock: Clock) -> None:
    with recording_run(clock, lambda: 0) as record:
        clock.now += 1
        with phase("outer"):
            clock.now += 2
            with phase("inner"):
                clock.now += 4
            clock.now += 8
            with phase("inner"):
                clock.now += 16
        clock.now += 32
    seconds = {name: one.seconds for name, one in record.phases.items()}
    assert seconds == {"preparing": 33, "outer": 10, "inner": 20}
    assert sum(seconds.values()) == clock.now


def fail_after_a_second(clock: Clock) -> None:
    with phase("failing"):
        clock.now += 1
        raise ValueError("no")


def test_a_failed_phase_ends(clock: Clock) -> None:
    with recording_run(clock, lambda: 0) as record:
        with pytest.raises(ValueError, match="no"):
            fail_after_a_second(clock)
        clock.now += 2
    assert record.phases["failing"].seconds == 1
    assert record.phases["preparing"].seconds == 2


def test_memory_is_that_of_its_phase(clock: Clock) -> None:
    held = [5]
    with recording_run(clock, lambda: held[0]) as record:
        with phase("large"):
            held[0] = 50
        held[0] = 7
    assert record.phases["large"].bytes == 50
    assert record.phases["preparing"].bytes in (7, 50)  # 50 if it was looked at as the phase ended


def test_a_record_within_another_is_the_same(clock: Clock) -> None:
    with recording_run(clock, lambda: 0) as outer, recording_run() as inner:
        assert inner is outer
        clock.now += 3
        found = run_record()
        assert found is outer
        assert found.phases["preparing"].seconds == 3
    assert run_record() is None


def test_other_threads_do_not_take_part(clock: Clock) -> None:
    def work() -> None:
        with phase("elsewhere"):
            clock.now += 1

    with recording_run(clock, lambda: 0) as record:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "elsewhere" not in record.phases
    assert record.phases["preparing"].seconds == 1


def test_warnings_are_kept_once_and_in_order() -> None:
    with recording_run() as record:
        for text in ("first", "second", "first"):
            logger.bind().opt(depth=0).patch(_as_ours).warning(text)
        logger.patch(_as_ours).info("no warning")
    logger.patch(_as_ours).warning("afterwards")
    assert record.warnings == ["first", "second"]


def _as_ours(record: dict[str, object]) -> None:
    record["name"] = "llmcompressor.somewhere"


def test_phases_are_in_the_order_in_which_they_began(clock: Clock) -> None:
    names = ["reading", "GPTQModifier", "writing"]
    with recording_run(clock, lambda: 0) as record:
        for _ in range(2):
            for name in names:
                with phase(name):
                    clock.now += 1
    order = list(record.phases)
    assert all(order.index(one) < order.index(other) for one, other in pairwise(names))
