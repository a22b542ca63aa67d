# SPDX-License-Identifier: Apache-2.0
"""Activation offloading for suspended passes: in place, to main memory, or to files.

A suspended pass holds tensors in its frames (the residual stream, rotary tables, masks) and in
the arguments of the call at which it waits. They are moved by exchanging their storage, so that
every reference in the frames of the model's own code stays valid.

Small activations are kept in the pages of a memory-mapped file, whatever the budget. About half of
them are never read again (at a ``down_proj`` of Llama the frames refer to the embeddings, the
block's input, the residual and the normalized residual, of which only the residual is needed), and
keeping them out of the heap avoids fragmentation. Large activations would keep the disk busy.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.modeling.offload import MmapStoragePool, SpillFiles
from llmcompressor.modeling.paused_forward import Pass
from llmcompressor.runtime.memory import malloc_trim

LITTLE = 1024 * 2**20
"""Bytes that wait in the pages of a file: so few that it does not matter if they are written."""

_SMALLEST = 64 * 1024
"""Bytes below which a storage is not worth moving."""
_BEFORE, _AFTER = 48 * 2**20, 24 * 2**20
"""Bytes that may stay freed and held before a unit is solved and after it, with twin streams: the
workspace of a solver would lie beside activations that come after it."""
_DEPTH = 4


def held_tensors(one: Pass) -> list[Tensor]:
    """Tensors that a suspended pass refers to, in its call's arguments and its frames."""
    found: dict[int, Tensor] = {}
    _add_tensors(found, (one.args, one.kwargs), _DEPTH)
    frame: FrameType | None = one.frame
    while frame is not None:
        _add_tensors(found, _variables(frame), _DEPTH)
        frame = frame.f_back
    return list(found.values())


def _variables(frame: FrameType) -> list[Any]:
    """The values of a frame's variables.

    Before Python 3.13 a frame caches the dict of its variables, and with it values that the
    function has already dropped; that dict is emptied.
    """
    made = frame.f_locals
    values = list(made.values())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        made.clear()
    return values


def _add_tensors(found: dict[int, Tensor], values: Iterable[Any], depth: int) -> None:
    """Add the tensors among ``values`` by their ids, and those in containers that they hold."""
    for value in values:
        kind = _kind_of(type(value))  # type: ignore[arg-type]  # classes are hashable
        if kind is None:
            continue
        if kind is Tensor:
            if not isinstance(value, Parameter):
                found[id(value)] = value
        elif depth > 1:
            held = list(value.values()) if kind is Mapping else value
            _add_tensors(found, held, depth - 1)


@functools.lru_cache(maxsize=1024)  # the checks of abstract classes are slow
def _kind_of(own: type) -> type | None:
    """Return what values of a type are to the search for tensors; ``None`` if they hold none."""
    if issubclass(own, Module | str | bytes | int | float):
        return None
    return next((one for one in (Tensor, Mapping, list, tuple, set) if issubclass(own, one)), None)


@dataclass
class _ParkedStorage:
    """A storage that was moved, and the tensors that view it."""

    tensors: list[Tensor]
    bytes: int
    home: torch.device
    """Where it was, and belongs when its pass runs."""
    in_file: bool = False


class ActivationStore:
    """Keeps the activations of suspended passes within a memory budget.

    Args:
        budget: bytes that may stay in main memory; what exceeds it goes to memory-mapped files.
        keep: tensors that are never moved (the model's own, and the batches).
        fits: all activations fit where they are; nothing is searched for or moved.
        is_little: all passes run in main memory and hold less than :data:`LITTLE`.
        streams: 2 with twin streams, where freed memory is returned to the system more often.

    Attributes:
        peak: the most bytes that were held at once.
    """

    def __init__(
        self,
        budget: int,
        keep: Iterable[Tensor] = (),
        *,
        fits: bool = False,
        is_little: bool = False,
        streams: int = 1,
    ) -> None:
        self._budget = budget
        self._pages = MmapStoragePool(LITTLE) if is_little else None
        self._returns = is_little and streams > 1
        self._stays = fits and not is_little
        owned = () if self._stays else (tensor for tensor in keep if _is_plain(tensor))
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._parked: dict[Pass, list[_ParkedStorage]] = {}
        self._held = 0
        self._files = SpillFiles()
        self.peak = 0

    @property
    def spilled(self) -> int:
        """Total number of bytes written to files."""
        return self._files.written

    def park(self, one: Pass) -> None:
        """Offload the activations of ``one``, now suspended; if it has ended, release its pages."""
        if self._pages is not None and one.finished:
            self._pages.let_go()
        if self._stays or one.finished:
            return
        # views of one storage move together
        found = _by_storage(filter(_is_plain, _with_bases(filter(_is_plain, held_tensors(one)))))
        storages = [own for address, own in found.items() if address not in self._keep]
        if self._pages is not None:
            _move_to_pages(storages, self._pages)
            return
        size = sum(tensors[0].untyped_storage().nbytes() for tensors in storages)
        in_files = self._held + size > self._budget
        records = self._parked[one] = []  # kept up to date: an error leaves nothing unaccounted
        for tensors in storages:
            record = _ParkedStorage(
                tensors, tensors[0].untyped_storage().nbytes(), tensors[0].device
            )
            if record.home.type != "cpu":
                _move_storage(tensors, torch.device("cpu"))
            if in_files:
                _set_storage(tensors, self._files.put(tensors[0].untyped_storage()))
                record.in_file = True
            else:
                self._held += record.bytes
            records.append(record)
        self.peak = max(self.peak, self._held)

    def return_freed(self, *, is_solved: bool = False) -> None:
        """Return freed memory to the system, before a unit is solved or once it ``is_solved``."""
        if self._returns:
            malloc_trim(at_least=_AFTER if is_solved else _BEFORE)
        elif not is_solved:
            malloc_trim()

    def set_aside(self, parameters: Iterable[Parameter]) -> None:
        """Move parameters that all passes have used to the pages, where they can still be read.

        Nothing is moved unless activations wait in pages, too.
        """
        if self._pages is not None:
            storages = _by_storage(one for one in parameters if _is_plain(one))
            self._keep -= storages.keys()  # others may come to where they were
            _move_to_pages(storages.values(), self._pages)

    def fetch(self, one: Pass) -> None:
        """Load the activations of ``one`` back before it runs."""
        for record in self._parked.pop(one, []):
            if record.in_file or record.home.type != "cpu":
                _move_storage(record.tensors, record.home)
            if not record.in_file:
                self._held -= record.bytes

    def close(self) -> None:
        """Drop all records; offloaded tensors that are still referenced stay readable."""
        self._parked.clear()
        if self._pages is not None:
            self._pages.close()


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Group tensors by the addresses of their storages, without those that are small."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _SMALLEST:
            found.setdefault(storage.data_ptr(), []).append(tensor)
    return found


def _with_bases(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors and their bases: a view keeps its base alive, and with it the storage."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        base = tensor._base
        for each in (tensor,) if base is None else (tensor, base):
            found[id(each)] = each
    return list(found.values())


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a plain strided tensor, whose storage can be exchanged."""
    special = tensor.is_inference() or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not special


def _move_storage(tensors: list[Tensor], device: torch.device) -> None:
    """Move the storage that ``tensors`` share to ``device`` (or out of a file)."""
    old = tensors[0].untyped_storage()
    bytes_ = torch.empty(0, dtype=torch.uint8, device=old.device).set_(
        old, 0, (old.nbytes(),), (1,)
    )
    new = bytes_.to(device) if device != old.device else bytes_.clone()
    _set_storage(tensors, new.untyped_storage())


def _move_to_pages(storages: Iterable[list[Tensor]], pages: MmapStoragePool) -> None:
    """Move storages into the pages of a file, where they stay."""
    for tensors in storages:
        storage = tensors[0].untyped_storage()
        place = None if pages.owns(storage) else pages.put(storage)
        if place is not None:
            _set_storage(tensors, place)
    pages.let_go()


def _set_storage(tensors: list[Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = view
