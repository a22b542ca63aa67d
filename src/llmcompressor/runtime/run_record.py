# SPDX-License-Identifier: Apache-2.0
"""Time, memory and warnings of a run, by phase, for its report.

::

    with recording_run() as record:
        with phase("reading"):
            ...
    record.phases  # {"reading": Phase(seconds=1.2, bytes=530_000_000), ...}

Phases nest; the time of an inner one is not counted in the outer one. Without a record, and in
other threads than the one that records, a phase is only its body.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from llmcompressor.logger import logger

FORWARD = "calibration data through the model"
READING = "reading the model"
WRITING = "writing the output"
EXCHANGE = "exchange between ranks"
CHECKING = "checking the output"

_LOOK_EVERY_S = 0.05
_OTHERWISE = "preparing"
_MOST_WARNINGS = 200


@dataclass
class Phase:
    """What a phase took, all its times together.

    Attributes:
        seconds: wall time, without that of phases inside it.
        bytes: the most that the process held of main memory, looked at twenty times a second.
    """

    seconds: float = 0.0
    bytes: int = 0


@dataclass
class RunRecord:
    """The record of a run.

    Attributes:
        phases: by name, in the order in which they began.
        warnings: what was warned of.
        data: what it was calibrated with, and how many samples; empty without any.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    data: str = ""

    def warn(self, message: str) -> None:
        """Keep a warning, each once, and no more than a page has room for."""
        if message not in self.warnings and len(self.warnings) < _MOST_WARNINGS:
            self.warnings.append(message)


class _Recorder:
    """Attributes time to the innermost phase that is open, and looks at the memory meanwhile."""

    def __init__(self, clock: Callable[[], float], memory: Callable[[], int]) -> None:
        self.record = RunRecord()
        self.thread = threading.get_ident()
        self._clock, self._memory = clock, memory
        self._open = [_OTHERWISE]
        self._since = clock()
        self._stopped = threading.Event()

    def enter(self, name: str) -> None:
        self._count()
        self._open.append(name)

    def leave(self) -> None:
        self._count()
        self._open.pop()

    def now(self) -> RunRecord:
        """Return the record with the time of the phase that is open."""
        self._count()
        return self.record

    def _count(self) -> None:
        now, of_now = self._clock(), self._of_now
        of_now.seconds += now - self._since
        of_now.bytes = max(of_now.bytes, self._memory())
        self._since = now

    @property
    def _of_now(self) -> Phase:
        return self.record.phases.setdefault(self._open[-1], Phase())

    def _look(self) -> None:
        while True:
            of_now = self._of_now
            of_now.bytes = max(of_now.bytes, self._memory())
            if self._stopped.wait(_LOOK_EVERY_S):
                return

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the memory while the body runs."""
        thread = threading.Thread(target=self._look, name="memory", daemon=True)
        thread.start()
        sink = logger.add(
            lambda text: self.record.warn(str(text).strip()),
            level="WARNING",
            format="{message}",
            filter="llmcompressor",
        )
        try:
            yield
        finally:
            logger.remove(sink)
            self._stopped.set()
            thread.join()
            self._count()


# no context variable: forwards that are paused have contexts of their own
_recorders: list[_Recorder] = []


def _resident() -> Callable[[], int]:
    process = psutil.Process()
    return lambda: int(process.memory_info().rss)


@contextmanager
def recording_run(
    clock: Callable[[], float] = time.perf_counter, memory: Callable[[], int] | None = None
) -> Iterator[RunRecord]:
    """Record the phases of the body; within another record that goes on, and is returned.

    Args:
        clock: gives seconds.
        memory: gives the bytes of main memory that this process holds, by default resident ones.
    """
    outer = _own_recorder()
    if outer is not None:
        yield outer.record
        return
    recorder = _Recorder(clock, memory or _resident())
    _recorders.append(recorder)
    try:
        with recorder.looking():
            yield recorder.record
    finally:
        _recorders.remove(recorder)


def _own_recorder() -> _Recorder | None:
    """Return the recorder of this thread."""
    thread = threading.get_ident()
    return next((one for one in _recorders if one.thread == thread), None)


def run_record() -> RunRecord | None:
    """Return the record of the run that goes on, up to now; ``None`` without one."""
    recorder = _own_recorder()
    return None if recorder is None else recorder.now()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the body's time and memory to the phase ``name`` of the run that goes on."""
    recorder = _own_recorder()
    if recorder is None:
        yield
        return
    recorder.enter(name)
    try:
        yield
    finally:
        recorder.leave()
