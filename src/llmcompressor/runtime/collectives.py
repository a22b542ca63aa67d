# SPDX-License-Identifier: Apache-2.0
"""Sums, extremes and copies of tensors over the ranks of a run.

The letters are P for the ranks of a run, and N for the bytes of the tensor of one rank.

==================  ===============================  =============================
operation           a rank sends                     a rank receives
==================  ===============================  =============================
``sum_to``          N, the owner nothing             the owner (P - 1) N
``sum_all``, …      2 N (P - 1) / P                  the same
``broadcast_from``  N to its children in a tree      N, the owner nothing
``all_gather``      (P - 1) N                        (P - 1) N
==================  ===============================  =============================

These are the least possible if every rank owns its share. A triangle of a symmetric matrix counts
as half of it. Tensors travel as bytes of their own dtype, in panels of a limited size.

A rank adds the tensors of all ranks itself, in the order of the ranks. So neither the size of
panels nor the backend changes a result, a sum of symmetric matrices is symmetric, and NaN is in a
result wherever a rank has it. The collectives of torch that add promise none of this.

Before each operation all ranks compare what they are about to do. A rank that fails notifies the
others (:class:`Processes`) and closes its connections, which ends their waiting.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from heapq import heapreplace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed

from llmcompressor.errors import ProcessError
from llmcompressor.runtime.launch import PATIENCE, Patience, patience
from llmcompressor.runtime.processes import Processes

PANEL = 8 << 20
"""Bytes of a message, or of all that a rank receives at a time: gloo is slower with more."""
_LONGEST_PAUSE = 0.002
"""Seconds between two looks at an operation that is under way."""
_LOOK = 0.5
"""Seconds between two looks for failures of other ranks."""
_GRACE = 1.0
"""Seconds in which the ranks that are left report that a connection broke."""
_BAND = 64
"""Columns of a triangle that are taken at once: a square of them is small beside what is below."""
_DIGEST, _RECORD = 16, 24
"""Bytes of the digest of an operation, and of the record that ranks compare before it."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_Combine = Callable[..., Tensor]
"""``torch.add`` and the like, with ``out``."""


class Ranks:
    """The ranks of a run; a single one by default, for which every operation is the identity.

    All ranks call the same operations with the same arguments in the same order. It is a context:
    at its end the connections are closed, and an error is told to the other ranks.

    Args:
        processes: the processes of the run.
        timeout: seconds that an operation waits for other ranks; ``None``: as
            :func:`.launch.patience` says.
        panel: bytes of a message, or of all messages that a rank receives at a time.

    Attributes:
        rank: the rank of this process.
        count: the number of ranks.
        sent: bytes that this rank has sent, as gloo sends them.
        received: bytes that this rank has received.
        tally: what this rank has done, by name, as its callers count it.

    Raises:
        ProcessError: in each operation, if another rank has failed, does something else, or does
            not come in time; the message has its ``what``. No operation works afterwards.
    """

    def __init__(
        self,
        processes: Processes | None = None,
        *,
        timeout: float | None = None,
        panel: int = PANEL,
    ) -> None:
        self._processes = processes or Processes()
        self.rank, self.count = self._processes.rank, self._processes.count
        self.sent = self.received = 0
        self.tally: Counter[str] = Counter()
        self._panel = panel
        self._number = 0
        self._broken = ""
        self._is_in_flight = False
        self._main: Any = None
        self._accelerator: Any = None
        if self.count > 1:
            longer = "give a longer timeout"
            self._patience = patience(PATIENCE) if timeout is None else Patience(timeout, longer)
            # a rank that has failed before would be missing while the group is made
            self._processes.all_gather("connections between ranks")
            self._main = self._processes.while_alive(lambda: self._new_group("gloo"))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ProcessError):
            self._processes.tell_failure(error)
            self._broken = self._broken or f"This rank has failed: {error}"
        self.close()

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._is_in_flight:
            return  # closing would wait for it: the connections end with the process
        groups, self._main, self._accelerator = (self._main, self._accelerator), None, None
        for group in groups:
            if group is not None and distributed.is_initialized():
                distributed.destroy_process_group(group)

    # ------------------------------------------------------------------ operations

    def patient(self, value: Any, *, what: str) -> list[Any]:
        """Small values of all ranks, in their order, however long one needs to come.

        Raises:
            ProcessError: another rank has failed or has ended.
        """
        return self._processes.all_gather(what, value, is_long=True)

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Let no rank leave the body before all have succeeded in it.

        Raises:
            ProcessError: the body has failed on another rank, with that rank's error.
        """
        try:
            yield
        except ProcessError:
            raise
        except BaseException as error:
            if self.count > 1:
                self._processes.tell_failure(error)
                self._broken = f"Rank {self.rank} has failed in {what}: {error}"
                self.close()
            raise
        if self.count > 1:
            self._meet(what, "agreed")

    def sum_to(
        self, owner: int, tensor: Tensor, *, what: str, symmetric: bool = False
    ) -> Tensor | None:
        """The sum of the tensors of all ranks, at one of them.

        Args:
            owner: the rank that gets the sum.
            tensor: of the same shape and dtype on all ranks; it is only read.
            what: the name of the sum, for errors.
            symmetric: the matrices are symmetric: only their lower triangles are sent.

        Returns:
            At the owner the sum, added in the order of the ranks: in float64 for float64, in
            float32 for other floats, in int64 for integers and bool. ``None`` on other ranks. Of
            one rank, the tensor itself if it has that dtype.
        """
        wide = _dtype_of_sums(tensor, what)
        _check_form(tensor, what, symmetric=symmetric)
        if self.count == 1:
            return tensor.to(wide)
        self._meet(what, f"sum to rank {owner}", tensor, symmetric)
        total = tensor.new_empty(tensor.shape, dtype=wide) if self.rank == owner else None
        size = max(1, self._panel // (tensor.itemsize * self.count))
        for panel in _panels(tensor, size, symmetric=symmetric):
            parts = self._gather(owner, panel.pack(tensor), what)
            if total is not None:
                panel.unpack(_combined(parts, wide, torch.add), total)
        return total

    def sum_all(self, tensor: Tensor, *, what: str, symmetric: bool = False) -> Tensor:
        """The sum of the tensors of all ranks, on each of them; see :meth:`sum_to`."""
        return self._combine_all(tensor, _dtype_of_sums(tensor, what), torch.add, what, symmetric)

    def max_all(self, tensor: Tensor, *, what: str) -> Tensor:
        """The greatest elements of all ranks, NaN where a rank has NaN; of bool, any."""
        wide = _dtype_of_extremes(tensor, what)
        return self._combine_all(tensor, wide, torch.maximum, what).to(tensor.dtype)

    def min_all(self, tensor: Tensor, *, what: str) -> Tensor:
        """The least elements of all ranks, NaN where a rank has NaN; of bool, all."""
        wide = _dtype_of_extremes(tensor, what)
        return self._combine_all(tensor, wide, torch.minimum, what).to(tensor.dtype)

    def broadcast_from(
        self, owner: int, tensors: Mapping[str, Tensor], *, what: str
    ) -> dict[str, Tensor]:
        """Copy named tensors of one rank to all ranks, bit by bit.

        Args:
            owner: the rank that has the tensors.
            tensors: at the owner, all of them, of any dtype. On other ranks those to write into;
                others are made.
            what: the name of them, for errors.

        Returns:
            The tensors of the owner's names, in its order. New ones are in main memory, or on this
            rank's accelerator if all of the owner's are and NCCL is there.

        Raises:
            ProcessError: a tensor to write into has another shape or dtype; see :class:`Ranks`.
        """
        if self.count == 1:
            return dict(tensors)
        is_owner, header = self.rank == owner, b""
        if is_owner:
            on_device = bool(tensors) and all(map(self._stays_on_device, tensors.values()))
            told = [[name, _name(one.dtype), list(one.shape)] for name, one in tensors.items()]
            header = json.dumps([on_device, told]).encode()
        lengths = self._meet(what, f"copy from rank {owner}", length=len(header))
        message = _as_bytes(header) if is_owner else torch.empty(lengths[owner], dtype=torch.uint8)
        self._broadcast(owner, message, what)
        on_device, told = json.loads(bytes(message.tolist()))
        device = _own_device() if on_device else torch.device("cpu")
        with self._telling_failures():
            found = {
                name: _to_write(tensors.get(name), getattr(torch, dtype), shape, device, name)
                for name, dtype, shape in told
            }
        self._copy(owner, list(found.values()), device, what)
        return found

    def all_gather(
        self, tensor: Tensor, shapes: Sequence[Sequence[int]], *, what: str
    ) -> list[Tensor]:
        """The tensors of all ranks, in their order, bit by bit.

        Args:
            tensor: of this rank; on all ranks of the same dtype.
            shapes: of the tensor of each rank, which all ranks know.
            what: the name of them, for errors.
        """
        if self.count == 1:
            return [tensor]
        told = f"{_name(tensor.dtype)} {[list(one) for one in shapes]}"
        self._meet(what, f"gathering of {told}")
        sizes = [math.prod(one) for one in shapes]
        own, longest = tensor.reshape(-1), max(sizes)
        found = [own.new_empty(size) for size in sizes]
        step = max(1, self._panel // (tensor.itemsize * self.count))
        for start in range(0, longest, step):
            width = min(step, longest - start)
            piece = own[start : start + width]
            padded = own.new_zeros(width)
            padded[: piece.numel()] = piece
            for one, row in zip(
                found, self._gather_all(padded, what).chunk(self.count), strict=True
            ):
                place = one[start : start + width]
                place.copy_(row[: place.numel()])
        return [one.reshape(shape) for one, shape in zip(found, map(list, shapes), strict=True)]

    def exchange(self, value: Any, *, what: str) -> list[Any]:
        """The small values of all ranks, in their order, as JSON reads them back.

        Args:
            value: of this rank: numbers, text, lists and mappings with keys of text.
            what: the name of the values, for errors.
        """
        if self.count == 1:
            return [value]
        own = json.dumps(value).encode()
        lengths = self._meet(what, "exchange", length=len(own))
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = self._gather_all(padded, what).reshape(self.count, -1)
        pairs = zip(rows, lengths, strict=True)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in pairs]

    # ------------------------------------------------------------------ messages

    def _combine_all(
        self,
        tensor: Tensor,
        wide: torch.dtype,
        combine: _Combine,
        what: str,
        symmetric: bool = False,
    ) -> Tensor:
        """Combine panels: each rank a part of each, and all get the parts."""
        _check_form(tensor, what, symmetric=symmetric)
        if self.count == 1:
            return tensor.to(wide)
        self._meet(what, f"{combine.__name__} of all", tensor, symmetric)
        total = tensor.new_empty(tensor.shape, dtype=wide)
        size = max(1, self._panel // wide.itemsize)
        for panel in _panels(tensor, size, symmetric=symmetric):
            flat = panel.pack(tensor)
            share = -(-flat.numel() // self.count)
            padded = flat.new_zeros(share * self.count)
            padded[: flat.numel()] = flat
            mine = _combined(self._exchange(padded, what), wide, combine)
            panel.unpack(self._gather_all(mine, what)[: flat.numel()], total)
        return total

    def _gather(self, owner: int, flat: Tensor, what: str) -> list[Tensor]:
        """The vectors of all ranks, at the owner."""
        own, group = self._bytes_and_group(flat)
        is_owner = self.rank == owner
        parts = [torch.empty_like(own) for _ in range(self.count)] if is_owner else []
        self._wait(
            lambda: distributed.gather(own, parts or None, dst=owner, group=group, async_op=True),
            what,
        )
        others = self.count - 1
        self._count(0 if is_owner else len(own), others * len(own) if is_owner else 0)
        return [part.view(flat.dtype).to(flat.device) for part in parts]

    def _exchange(self, flat: Tensor, what: str) -> list[Tensor]:
        """Of P equal parts of a vector, this rank's part of each rank."""
        own, group = self._bytes_and_group(flat)
        found = torch.empty_like(own)
        self._wait(
            lambda: distributed.all_to_all_single(found, own, group=group, async_op=True), what
        )
        others = len(own) // self.count * (self.count - 1)
        self._count(others, others)
        return [part.view(flat.dtype).to(flat.device) for part in found.chunk(self.count)]

    def _gather_all(self, flat: Tensor, what: str) -> Tensor:
        """The vectors of all ranks, one after another."""
        own, group = self._bytes_and_group(flat)
        found = own.new_empty(self.count, len(own))
        self._wait(
            lambda: distributed.all_gather(list(found), own, group=group, async_op=True), what
        )
        others = len(own) * (self.count - 1)
        self._count(others, others)
        return found.reshape(-1).view(flat.dtype).to(flat.device)

    def _broadcast(self, owner: int, message: Tensor, what: str) -> None:
        group = self._group_of(message)
        self._wait(
            lambda: distributed.broadcast(message, src=owner, group=group, async_op=True),
            what,
        )
        children = tree_children((self.rank - owner) % self.count, self.count)
        self._count(children * len(message), len(message) if self.rank != owner else 0)

    def _copy(self, owner: int, tensors: list[Tensor], device: torch.device, what: str) -> None:
        """Send the bytes of tensors, joined to messages of one panel, and write them in place."""
        whole = [one.detach().resolve_conj().resolve_neg().contiguous() for one in tensors]
        flats = [_flat_bytes(one) for one in whole]
        for pieces in _pieces([len(flat) for flat in flats], self._panel):
            views = [flats[index][start:stop] for index, start, stop in pieces]
            if self.rank == owner:
                message = torch.cat([view.to(device) for view in views])
            else:
                total = sum(map(len, views))
                message = torch.empty(total, dtype=torch.uint8, device=device)
            self._broadcast(owner, message, what)
            if self.rank != owner:
                for view, part in zip(views, _split(message, map(len, views)), strict=True):
                    view.copy_(part)
        if self.rank != owner:
            for one, written in zip(tensors, whole, strict=True):
                if one.data_ptr() != written.data_ptr():  # it is not contiguous
                    _as_integers(one).copy_(_as_integers(written))

    # ------------------------------------------------------------------ waiting and failing

    def _meet(
        self, what: str, operation: str, tensor: Tensor | None = None, *told: Any, length: int = 0
    ) -> list[int]:
        """Compare with all ranks what is to be done; the ``length`` of each rank."""
        if self._broken:
            raise ProcessError(self._broken)
        text = f"{operation} of {what!r}"
        if tensor is not None:
            kind = "accelerator" if self._stays_on_device(tensor) else "main memory"
            text += f", {_name(tensor.dtype)} {tuple(tensor.shape)} in {kind}"
            text += ", symmetric" if any(told) else ""
        self._number += 1
        self._processes.note(f"{self._number}:{text}")
        digest = hashlib.sha256(f"{self._number}:{text}".encode()).digest()[:_DIGEST]
        own = _as_bytes(digest + length.to_bytes(_RECORD - _DIGEST, "little"))
        found = self._gather_all(own, what).reshape(self.count, _RECORD)
        records = [bytes(row) for row in found.tolist()]
        if {record[:_DIGEST] for record in records} != {digest}:
            at = [note.partition(":")[2] for note in self._processes.notes()]
            differ = "; ".join(f"{rank}: {one}" for rank, one in enumerate(at))
            raise self._failure(
                f"The ranks of a run do different things ({differ}). Give all of them the same "
                "model, recipe and arguments."
            )
        return [int.from_bytes(record[_DIGEST:], "little") for record in records]

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        """Run an operation of the backend to its end."""
        if self._broken:
            raise ProcessError(self._broken)
        begun = looked = time.monotonic()
        pause = 0.0
        try:
            work = begin()
            self._is_in_flight = True
            while not work.is_completed():
                now = time.monotonic()
                if now - looked > _LOOK:
                    looked = now
                    told = self._told_failure()
                    if told and not work.is_completed():  # else it failed after the operation
                        raise self._failure(told)
                if now - begun > self._patience.seconds + _GRACE:  # the backend ends most by itself
                    raise TimeoutError
                time.sleep(pause)
                pause = min(1.5 * pause + 1e-5, _LONGEST_PAUSE)
            self._is_in_flight = False
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, ProcessError):
                raise
            late = time.monotonic() - begun >= self._patience.seconds
            why = self._late(what) if late else self._lost(what, error)
            raise self._failure(why) from error

    def _told_failure(self) -> str | None:
        try:
            return self._processes.failure()
        except ProcessError as error:
            return str(error)

    def _late(self, what: str) -> str:
        """Why an operation took too long: the ranks that have not come to it."""
        numbers = [int(note.partition(":")[0] or 0) for note in self._processes.notes()]
        absent = [str(rank) for rank, number in enumerate(numbers) if number < self._number]
        whom = f"rank {', '.join(absent)}, not there yet" if absent else "the other ranks"
        return (
            f"Rank {self.rank} has waited {self._patience.seconds:g} s at {what!r} for {whom}. If "
            f"it needs that long, {self._patience.remedy}."
        )

    def _lost(self, what: str, error: BaseException) -> str:
        """Why a connection broke: the failure of a rank, or the ranks that report nothing."""
        end = time.monotonic() + _GRACE
        try:
            self._processes.note(f"{self._number}:lost")
            while time.monotonic() < end:
                if told := self._processes.failure():
                    return told
                time.sleep(_GRACE / 20)
            notes = self._processes.notes()
        except ProcessError as unreachable:
            return f"Rank {self.rank} was at {what!r}. {unreachable}"
        gone = [str(rank) for rank, note in enumerate(notes) if not note.endswith(":lost")]
        whom = f"Rank {' or '.join(gone)}" if gone else "A connection"
        return f"{whom} has ended while rank {self.rank} was at {what!r} ({error})."

    def _failure(self, why: str) -> ProcessError:
        """The error to raise, which ends all operations and is told to the other ranks."""
        self._broken = why
        self._processes.tell_failure(why)
        self.close()
        return ProcessError(why)

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except ProcessError as error:
            raise self._failure(f"Process {self.rank}: {error}") from None

    # ------------------------------------------------------------------ groups

    def _new_group(self, backend: str) -> Any:
        timeout = timedelta(seconds=self._patience.seconds)
        return distributed.new_group(backend=backend, timeout=timeout)

    def _stays_on_device(self, tensor: Tensor) -> bool:
        """Return True for a tensor of an accelerator whose backend the default group has."""
        return tensor.is_cuda and "nccl" in str(distributed.get_backend_config())

    def _group_of(self, tensor: Tensor) -> Any:
        if not tensor.is_cuda:
            return self._main
        if self._accelerator is None:
            self._accelerator = self._new_group("nccl")
        return self._accelerator

    def _bytes_and_group(self, flat: Tensor) -> tuple[Tensor, Any]:
        """The bytes of a vector where a group can send them, and this group."""
        own = _flat_bytes(flat if self._stays_on_device(flat) else flat.cpu())
        return own, self._group_of(own)

    def _count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received


# --------------------
# Division of work.


def least_loaded(costs: Sequence[tuple[str, int]], ranks: int) -> list[int]:
    """The rank of each thing: the costliest first, to the rank with the least so far.

    Of equal costs the first name comes first, and of equal ranks the first.

    >>> least_loaded([("a", 5), ("b", 3), ("c", 2)], 2)
    [0, 1, 1]
    """
    heap, found = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda at: (-costs[at][1], costs[at][0])):
        load, found[place] = heap[0]
        heapreplace(heap, (load + costs[place][1], found[place]))
    return found


# --------------------
# Panels of tensors. They depend on shapes alone, so that all ranks make the same ones.


class _Part:
    """A part of a tensor, by the ranges of its first dimensions."""

    def __init__(self, *at: slice) -> None:
        self._at = at

    def pack(self, tensor: Tensor) -> Tensor:
        """The elements as a vector of its own."""
        return tensor[self._at].reshape(-1).contiguous()  # of a column it is a view with gaps

    def unpack(self, flat: Tensor, whole: Tensor) -> None:
        """Write the elements to their place."""
        part = whole[self._at]
        part.copy_(flat.reshape(part.shape))


class _Columns:
    """Columns of the lower triangle of a symmetric matrix, from the diagonal down."""

    def __init__(self, start: int, stop: int) -> None:
        self._bands = [(at, min(at + _BAND, stop)) for at in range(start, stop, _BAND)]

    def pack(self, tensor: Tensor) -> Tensor:
        """The elements as a vector of its own."""
        parts = []
        for start, stop in self._bands:
            own = tensor[start:stop, start:stop]
            parts += [own[_lower(stop - start, own.device)], tensor[stop:, start:stop].reshape(-1)]
        return torch.cat(parts)

    def unpack(self, flat: Tensor, whole: Tensor) -> None:
        """Write the elements to their place, and to the mirrored one."""
        side = len(whole)
        for start, stop in self._bands:
            width = stop - start
            sizes = [width * (width + 1) // 2, (side - stop) * width]
            triangle, rest, flat = _split(flat, [*sizes, len(flat) - sum(sizes)])
            own, (rows, columns) = whole[start:stop, start:stop], _lower(width, whole.device)
            own[rows, columns] = triangle
            own[columns, rows] = triangle
            below = rest.view(side - stop, width)
            whole[stop:, start:stop] = below
            whole[start:stop, stop:] = below.T


@cache
def _lower(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower triangle of a small square."""
    rows, columns = torch.tril_indices(side, side, device=device)
    return rows, columns


def _panels(tensor: Tensor, size: int, *, symmetric: bool) -> Iterator[_Part | _Columns]:
    """The parts of at most ``size`` elements, if a column or row has not more."""
    if symmetric:
        side = len(tensor)
        step = max(1, size // max(1, side))
        for start in range(0, side, step):
            yield _Columns(start, min(side, start + step))
    elif tensor.numel():
        yield from _parts_of(tuple(tensor.shape), size)


def _parts_of(shape: tuple[int, ...], size: int, *before: slice) -> Iterator[_Part]:
    place = len(before)
    if place == len(shape):
        yield _Part(*before)
        return
    step = size // math.prod(shape[place + 1 :])
    if step:
        for start in range(0, shape[place], step):
            yield _Part(*before, slice(start, start + step))
    else:
        for row in range(shape[place]):
            yield from _parts_of(shape, size, *before, slice(row, row + 1))


def _pieces(sizes: Iterable[int], panel: int) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges (index, start, stop) of arrays of these sizes, joined to groups of one panel."""
    group: list[tuple[int, int, int]] = []
    room = panel
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            group.append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield group
                group, room = [], panel
    if group:
        yield group


def _combined(parts: list[Tensor], wide: torch.dtype, combine: _Combine) -> Tensor:
    """All parts combined in their order, in a dtype that is wide enough."""
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        combine(total, part.to(wide), out=total)
    return total


# --------------------
# Dtypes and bytes.


def _dtype_of_sums(tensor: Tensor, what: str) -> torch.dtype:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.dtype
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return _dtype_of_integers(tensor, what)


def _dtype_of_extremes(tensor: Tensor, what: str) -> torch.dtype:
    if tensor.dtype == torch.bool or (tensor.dtype.is_floating_point and tensor.itemsize > 1):
        return tensor.dtype
    if tensor.dtype.is_floating_point and tensor.dtype != torch.float4_e2m1fn_x2:
        return torch.float32
    return _dtype_of_integers(tensor, what)


def _dtype_of_integers(tensor: Tensor, what: str) -> torch.dtype:
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint64:
        raise TypeError(f"{what} is {_name(dtype)}, which cannot be combined over ranks.")
    return torch.int64


def _check_form(tensor: Tensor, what: str, *, symmetric: bool) -> None:
    if symmetric and (tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1]):
        raise ValueError(f"{what} has the shape {tuple(tensor.shape)}: no symmetric matrix.")


def tree_children(place: int, count: int) -> int:
    """Number of ranks to which the one at this place of a binomial tree sends a message.

    >>> [tree_children(place, 4) for place in range(4)]
    [2, 1, 0, 0]
    """
    bits = range(place.bit_length(), (count - 1).bit_length())
    return sum(place + (1 << bit) < count for bit in bits)


def _split(message: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield message[start : start + size]
        start += size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _as_bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which it shares."""
    # a single element may have any stride, with which no view as bytes is allowed
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_integers(tensor: Tensor) -> Tensor:
    """The same elements as integers, which copies any bits."""
    return tensor.detach().view(_SAME_SIZE[tensor.itemsize])


def _to_write(
    given: Tensor | None, dtype: torch.dtype, shape: list[int], device: torch.device, name: str
) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if given.dtype != dtype or list(given.shape) != shape:
        raise ProcessError(
            f"{name} is {_name(given.dtype)} {tuple(given.shape)} here, and {_name(dtype)} "
            f"{tuple(shape)} at its owner."
        )
    return given
