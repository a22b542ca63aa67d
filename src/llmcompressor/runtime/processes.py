# SPDX-License-Identifier: Apache-2.0
"""Coordination of the processes of one distributed run.

Each process has the whole model and does all of the work, so that all end with the same weights.
They synchronize a few times in a run: at the start, for their data, and when the output is
complete.

A synchronization uses the store of the ``torch.distributed`` process group. Unlike collectives it
waits as long as the others need, and a failed process notifies the others at once and waits for
nobody. Only large data is sent by collectives.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llmcompressor.errors import ArgumentError, ProcessError
from llmcompressor.logger import PASSING, logger
from llmcompressor.runtime.launch import PATIENCE, Patience, launch_of, meeting, patience
from llmcompressor.runtime.liveness import ended, is_alive, own_place, while_alive

T = TypeVar("T")
_ROOT = "llmcompressor"
_LONGEST_PAUSE = 0.5
"""Seconds between two looks into the store."""
_LOOK = 1.0
"""Seconds between two looks whether those that are waited for are alive."""
_PATIENCE = 60.0
"""Seconds after which a process that waits for others says so."""
_numbers = itertools.count()
_saves: Counter[Path] = Counter()
_here = threading.local()
"""``at_work``: the runs that this thread is in."""


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    from torch import distributed  # noqa: PLC0415  # importing the package loads no torch

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def is_first_rank() -> bool:
    """Return True in one process of the group, or else of the launch; and in one that is alone."""
    rank, count = rank_and_world_size()
    launch = launch_of(os.environ) if count == 1 else None
    return (rank if launch is None else launch.rank) == 0


class Processes:
    """The processes of one run; a single one by default.

    Attributes:
        rank: the rank of this process.
        count: the number of processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, run: str = "") -> None:
        self.rank = rank
        self.count = count
        self._run = f"{_ROOT}/{run}"
        self._round = 0

    @classmethod
    def from_process_group(cls) -> Processes:
        """Return the processes of the process group; a nested run has only its own process."""
        rank, count = rank_and_world_size()
        if count == 1 or getattr(_here, "at_work", None):
            return cls()
        found = cls(rank, count, f"run {next(_numbers)}")
        with _store_errors():
            _store().set(f"{found._run}/place/{rank}", own_place())
        return found

    @property
    def is_first(self) -> bool:
        """True for the process that writes and logs."""
        return self.rank == 0

    @contextmanager
    def notify_on_failure(self) -> Iterator[None]:
        """Notify the other processes if the body fails; they raise when they next synchronize."""
        if self.count == 1:
            yield
            return
        _here.at_work = getattr(_here, "at_work", 0) + 1
        try:
            yield
        except ProcessError:
            raise  # the others know already
        except BaseException as error:
            self.tell_failure(error)
            raise
        finally:
            _here.at_work -= 1

    def tell_failure(self, why: BaseException | str) -> None:
        """Tell the other processes that this one has failed, unless one has failed before.

        Args:
            why: the error, or the sentence that the others raise.
        """
        told = why if isinstance(why, str) else _failure_message(self.rank, why)
        with suppress(RuntimeError):  # the store is closed already
            if self.count > 1 and not _store().check([self._failed]):
                _store().set(self._failed, told)

    def failure(self) -> str | None:
        """Why a process of the run has failed; ``None`` if none has.

        Raises:
            ProcessError: the store cannot be reached any more.
        """
        with _store_errors():
            store = _store()
            if not store.check([self._failed]):
                return None
            return str(store.get(self._failed).decode(errors="replace"))

    def while_alive(self, function: Callable[[], T]) -> T:
        """Call a function that waits for all processes, as long as those of this machine live."""
        with _store_errors():
            store = _store()
            keys = [f"{self._run}/place/{rank}" for rank in range(self.count)]
            places = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        return while_alive(function, places)

    def note(self, text: str) -> None:
        """Leave a note of what this process does, in place of the one before."""
        with _store_errors():
            _store().set(f"{self._run}/note/{self.rank}", text)

    def notes(self) -> list[str]:
        """The last note of each process, empty where there is none."""
        with _store_errors():
            store = _store()
            keys = [f"{self._run}/note/{rank}" for rank in range(self.count)]
            return [
                store.get(key).decode(errors="replace") if store.check([key]) else ""
                for key in keys
            ]

    def all_gather(self, on: str, value: Any = None, *, is_long: bool = False) -> list[Any]:
        """Gather a small value of each process, in the order of their ranks.

        All processes must call with the same subjects ``on`` in the same order.

        Args:
            on: the subject.
            value: of this process.
            is_long: the others may have work left, so that waiting is no sign of a mistake.

        Raises:
            ProcessError: another process has failed, has ended, or has another subject; or it does
                not come as long as :func:`.launch.patience` says, if ``is_long`` is False.
        """
        if self.count == 1:
            return [value]
        self._round += 1
        keys = [f"{self._run}/{self._round}/{rank}" for rank in range(self.count)]
        with _store_errors():
            store = _store()
            store.set(keys[self.rank], pickle.dumps((on, value)))
            whom = "" if is_long else f"the other processes ({on})"
            longest = None if is_long else patience(PATIENCE)
            _wait(keys, self._failed, whom, partial(self._check_others, on, longest))
            found = [pickle.loads(store.get(key)) for key in keys]
        if {asked for asked, _ in found} != {on}:
            raise ProcessError(
                "The processes of a run do different things: "
                f"{', '.join(f'{rank}: {asked}' for rank, (asked, _) in enumerate(found))}. Give "
                "all of them the same model, recipe and arguments."
            )
        return [value for _, value in found]

    def gather_warnings(self, on: str, noted: Iterable[str]) -> None:
        """Wait for all processes; the first one logs the warnings of the others, each text once.

        Args:
            on: as in :meth:`all_gather`.
            noted: of this process; those of the first are in the log already.
        """
        own = list(noted)
        told = set(own)
        for rank, texts in enumerate(self.all_gather(on, own, is_long=True)):
            for text in texts if self.is_first else ():
                if text not in told:
                    told.add(text)
                    logger.warning("Rank {}: {}", rank, text)

    def check_equal(self, name: str, value: Any) -> None:
        """Refuse a run whose processes were given different values of an argument.

        Args:
            name: the argument.
            value: a small value, with an order of its items.

        Raises:
            ArgumentError: it differs; on all processes.
            ProcessError: as :meth:`all_gather`.
        """
        first, *others = self.all_gather(name, value)
        if any(one != first for one in others):
            raise ArgumentError(
                "The processes of torch.distributed make one model together, and were given "
                f"different values of {name}.",
                "Give all of them the same; for models of their own start them one by one, with "
                "WORLD_SIZE unset and without a process group.",
            )

    def pooled(
        self, batches: Sequence[Any], digest: str, samples: Sequence[str]
    ) -> tuple[Sequence[Any], int]:
        """Return the batches of all processes in the order of their ranks, in main memory.

        Equal sets of several processes occur once. Also the number of different sets; if all are
        equal, the batches are this process's own.

        Args:
            batches: of this process.
            digest: hash of all their values.
            samples: hash of each sample, in whatever batch it is.

        Raises:
            ArgumentError: two processes have more than half of their samples in common, which are
                neither the same data nor parts of it; on all processes.
        """
        sets = self.all_gather("calibration data", digest)
        first = [sets.index(each) for each in dict.fromkeys(sets)]
        if len(first) == 1:
            return batches, 1
        every = self.all_gather("hashes of calibration samples", list(samples))
        _check_parts({rank: every[rank] for rank in first})
        import torch  # noqa: PLC0415  # importing the package loads no torch

        packed = io.BytesIO()
        torch.save(list(batches) if self.rank in first else [], packed)
        self.all_gather("sending calibration data")  # nothing can fail from here on
        parts = _gather_bytes(packed.getvalue(), self.count)
        pool: list[Any] = []
        for rank in first:
            part = io.BytesIO(parts[rank])
            pool += torch.load(part, map_location="cpu", weights_only=False)
        return pool, len(first)

    @property
    def _failed(self) -> str:
        return f"{self._run}/failed"

    def _check_others(
        self, on: str, longest: Patience | None, waited: float, waiting: Sequence[str]
    ) -> None:
        """Refuse to wait for a process of this machine that has ended, or too long for any.

        Args:
            on: the subject.
            longest: how long to wait; of those on other machines that end launchers tell.
            waited: seconds so far.
            waiting: the keys that ranks have to set.
        """
        store = _store()
        absent = {key: int(key.rpartition("/")[2]) for key in waiting}
        for key, rank in absent.items():
            place = f"{self._run}/place/{rank}"
            if store.check([place]) and not is_alive(store.get(place).decode()):
                if store.check([key]) or store.check([self._failed]):
                    continue  # it did that first
                self._give_up(ended(rank))
        if longest is not None and waited > longest.seconds:
            self._give_up(
                f"Rank {self.rank} has waited {longest.seconds:g} s at {on!r} for rank "
                f"{', '.join(map(str, absent.values()))}, not there yet. If it needs that long, "
                f"{longest.remedy}."
            )

    def _give_up(self, why: str) -> NoReturn:
        self.tell_failure(why)
        raise ProcessError(why)


def _check_parts(digests: Mapping[int, Sequence[str]]) -> None:
    """Refuse sets of samples, by rank, of which two are nearly the same."""
    for (one, ours), (other, theirs) in itertools.combinations(digests.items(), 2):
        common = (Counter(ours) & Counter(theirs)).total()
        size = min(len(ours), len(theirs))
        if 2 * common > size:  # a sampler that fills up parts repeats a few
            raise ArgumentError(
                f"The calibration data of ranks {one} and {other} differ, but {common} of {size} "
                "samples are the same: neither do they have the same data, nor parts of it.",
                "Give all ranks the same data in the same order, or each a part of its own.",
            )


@contextmanager
def working_alone() -> Iterator[None]:
    """Make what processes would share the work of this one alone in the body."""
    _here.at_work = getattr(_here, "at_work", 0) + 1
    try:
        yield
    finally:
        _here.at_work -= 1


@contextmanager
def write_once(place: Path) -> Iterator[bool]:
    """Yield True in the one process that is to write ``place``; others wait until it has written.

    The first process to arrive writes. A place may also be written by some of the processes only.
    After a run that made its process group itself, the processes are still those of the launch.

    Raises:
        ProcessError: the writing process has failed.
    """
    rank, count = rank_and_world_size()
    met = meeting()
    if count == 1 and met is not None:
        rank, count = met.launch.rank, met.launch.count
    if count == 1:
        yield True
        return
    _saves[place] += 1
    key = f"{_ROOT}/saved/{_saves[place]}/{place}"
    with _store_errors():
        is_mine = _store().add(f"{key}/asked", 1) == 1
    if not is_mine:
        with _store_errors():
            _wait([f"{key}/done"], f"{key}/failed", f"the process that writes {place}")
        yield False
        return
    try:
        yield True
    except BaseException as error:
        with suppress(RuntimeError):
            _store().set(f"{key}/failed", _failure_message(rank, error))
        raise
    with _store_errors():
        _store().set(f"{key}/done", b"")


def skip_write(place: Path) -> None:
    """Skip one write of ``place``, leaving it to the other processes."""
    _saves[place] += 1


def _gather_bytes(packed: bytes, count: int) -> list[Any]:
    """Gather bytes of all processes through main memory, whatever the group's backend."""
    from torch import distributed  # noqa: PLC0415  # see above

    is_own = distributed.get_backend() != "gloo" and distributed.is_gloo_available()
    group = distributed.new_group(backend="gloo") if is_own else None
    parts: list[Any] = [None] * count
    try:
        distributed.all_gather_object(parts, packed, group=group)
    finally:
        if is_own:
            distributed.destroy_process_group(group)
    return parts


def _store() -> Any:
    from torch import distributed  # noqa: PLC0415  # see above
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415  # see above

    met = meeting()
    if met is not None and not distributed.is_initialized():
        return met.store
    return _get_default_store()


def _failure_message(rank: int, error: BaseException) -> str:
    return f"Process {rank} has failed: {type(error).__name__}: {error}"


@contextmanager
def _store_errors() -> Iterator[None]:
    """Convert errors of the store, which lives in one of the processes."""
    try:
        yield
    except ProcessError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"The other processes cannot be reached any more: {error}") from error


def _wait(
    keys: list[str],
    failed: str,
    whom: str,
    check: Callable[[float, Sequence[str]], None] = lambda *_: None,
) -> None:
    looked = time.monotonic()
    begun, pause, has_told = time.monotonic(), 0.005, False
    store = _store()
    while not store.check(keys):
        if store.check([failed]):
            if store.check(keys):
                return  # the other one came here before it failed
            raise ProcessError(store.get(failed).decode(errors="replace"))
        if whom and not has_told and time.monotonic() - begun > _PATIENCE:
            has_told = True
            logger.bind(**{PASSING: True}).warning(
                f"Waiting for {whom}. Where torch.distributed has a process group, all of its "
                "processes have to call oneshot; one that works alone destroys the group first."
            )
        if time.monotonic() - looked > _LOOK:
            looked = time.monotonic()
            check(looked - begun, [one for one in keys if not store.check([one])])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
