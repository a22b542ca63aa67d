# SPDX-License-Identifier: Apache-2.0
"""An output that several ranks write at once, each the byte ranges of its own tensors.

The layout of the files is known before any tensor. So every rank computes, without a message,
which tensors it packs and writes; all ranks have the finished block. The first rank allocates the
files and keeps the journal: it notes a block once every rank has told that its part is durable.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.checkpoint.journal import PROCESSOR, RunIdentity
from llmcompressor.checkpoint.tensor_files import StoredTensor
from llmcompressor.errors import ArgumentError, OutputError
from llmcompressor.runtime.collectives import Ranks, least_loaded
from llmcompressor.runtime.progress import join_names

Records = dict[str, dict[str, Any]]
"""Modifier → module → what it recorded."""


class SharedOutput:
    """The part of this rank in the output; all of it for a single rank.

    Args:
        ranks: the ranks of the run.
        stored: the tensors of the output.
        places: stored names of quantized modules, whose tensors are packed together.

    Attributes:
        ranks: the ranks of the run.
    """

    def __init__(self, ranks: Ranks, stored: Iterable[StoredTensor], places: Iterable[str]) -> None:
        self.ranks = ranks
        self._places = frozenset(places)
        self._durable: dict[str, Mapping[str, str]] = {}
        self._records: dict[str, Records] = {}
        sizes: dict[str, int] = {}
        for one in stored:
            unit = self._unit_of(one.name)
            sizes[unit] = sizes.get(unit, 0) + one.nbytes
        found = least_loaded([*sizes.items()], ranks.count)
        self._writers = dict(zip(sizes, found, strict=True))

    def _unit_of(self, name: str) -> str:
        place = name.rpartition(".")[0]
        return place if place in self._places else name

    def writes(self, name: str) -> bool:
        """Return True if this rank writes a tensor."""
        return self._writers[self._unit_of(name)] == self.ranks.rank

    def packs(self, place: str) -> bool:
        """Return True if this rank packs and writes the quantized module of a stored name."""
        return self._writers[place] == self.ranks.rank

    # ------------------------------------------------------------------ opening

    def check_identity(self, identity: RunIdentity) -> None:
        """Refuse ranks whose runs would not end with the same output; see :func:`check_alike`."""
        check_alike(identity, lambda value, what: self.ranks.exchange(value, what=what))

    def opened(self, files: Path, folder: Path, told: Mapping[str, Any]) -> None:
        """Tell the other ranks where the first has opened the output, and what is finished.

        A file of a random name shows whether they see the same folder, and not a copy of it.

        Args:
            files: the folder of the output's files.
            folder: the work folder.
            told: returned by :meth:`join`.

        Raises:
            OutputError: a rank does not see the same files; on all ranks.
        """
        token = folder / f"seen-{secrets.token_hex(8)}"
        token.touch()
        try:
            places = {"files": str(files), "token": str(token)}
            self.ranks.exchange({**places, **told}, what="the output")
            self._check_seen(files, is_seen=True)
        finally:
            token.unlink(missing_ok=True)

    def join(self) -> dict[str, Any]:
        """Wait until the first rank has opened the output, and return what it told.

        Raises:
            OutputError: a rank does not see the same files; on all ranks.
        """
        found: dict[str, Any] = self.ranks.exchange(None, what="the output")[0]
        is_seen = Path(found["files"]).is_dir() and Path(found["token"]).is_file()
        self._check_seen(found["files"], is_seen=is_seen)
        return found

    def _check_seen(self, files: Path | str, *, is_seen: bool) -> None:
        every = self.ranks.exchange(is_seen, what="who sees the output")
        if not all(every):
            raise OutputError(
                f"Rank {every.index(False)} does not see {files}, which the first rank has made.",
                "Give an output directory that all ranks see and can write to, or start the "
                "ranks on one machine.",
            )

    # ------------------------------------------------------------------ blocks

    def merged(self, records: Records, block: str) -> Records:
        """What the modifiers of all ranks have recorded of a block."""
        return merged(self.ranks.exchange(records, what=f"records of {block or 'the rest'}"))

    def add(self, block: str, records: Records, digests: Mapping[str, str]) -> None:
        """Note that this rank's part of a block is durable."""
        self._durable[block], self._records[block] = digests, records

    def take_durable(self) -> dict[str, tuple[Records, dict[str, str]]]:
        """Blocks whose parts are durable on all ranks: what was recorded, and each tensor's hash.

        All ranks call it when they have written the same blocks.
        """
        parts = self.ranks.exchange(self._durable, what="written parts of blocks")
        records, self._durable, self._records = self._records, {}, {}
        return {
            block: (records[block], {k: v for part in parts for k, v in part[block].items()})
            for block in records
        }


def merged(every: Iterable[Records]) -> Records:
    """Join what the modifiers of all ranks have recorded: the first record of a module counts."""
    found: Records = {}
    for records in every:
        for modifier, own in records.items():
            known = found.setdefault(modifier, {})
            known.update({module: one for module, one in own.items() if module not in known})
    return found


def check_alike(identity: Mapping[str, Any], exchange: Callable[[Any, str], Sequence[Any]]) -> None:
    """Refuse ranks whose runs would not end with the same output.

    Args:
        identity: of this rank's run, as JSON values.
        exchange: gives the values of all ranks, in their order; and says what they are.

    Raises:
        ArgumentError: names what differs; on all ranks.
    """
    own = {name: one for name, one in identity.items() if name != PROCESSOR}
    text = json.dumps(own, sort_keys=True)
    what = "arguments of the run"
    if len(set(exchange(xxhash.xxh3_128_hexdigest(text.encode()), what))) == 1:
        return
    first, *others = exchange(own, f"{what}, which differ")
    for rank, other in enumerate(others, start=1):
        told = [
            one.removesuffix(" now").replace(" then, ", " on rank 0, ") + f" on rank {rank}"
            for one in RunIdentity(other).differences(first)
        ]
        if told:
            raise ArgumentError(
                "The ranks of a run make one model together, and would not make the same one: "
                f"{join_names(told, most=4, separator='; ')}.",
                "Give all of them the same model, data, arguments and versions.",
            )
