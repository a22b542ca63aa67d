# SPDX-License-Identifier: Apache-2.0
"""Folder of kept statistics: sums of the inputs of a model's Linears, for runs without its data.

==========================  ====================================================================
file                        contents
==========================  ====================================================================
``statistics.json``         identity, and what each other file holds; written last
``inputs-BLOCK.safetensors``  of each input its ``gram`` (the upper triangle, row by row),
                            ``squares``, ``sizes``, ``least`` and ``greatest``, float32
``loss-BLOCK.safetensors``  of each Linear what a bit budget is chosen by
==========================  ====================================================================

Each file is durable before the next one is begun, and a folder without ``statistics.json`` holds
nothing: an interrupted collection is begun again. One block is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from llmcompressor.checkpoint.atomic_output import creation_errors, disk_errors
from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.errors import ArgumentError, CheckpointError, OutputError
from llmcompressor.numerics.gram import packed_upper, unpacked_upper
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.runtime import durable
from llmcompressor.runtime.folder_lock import locked

INDEX = "statistics.json"
FORMAT = 2
_LOCK = "statistics.lock"
_VECTORS = ("squares", "sizes", "least", "greatest")
_INPUTS, _LOSS = "inputs", "loss"
_OUTSIDE = "outside"
"""In the name of a file: what lies outside of blocks."""
_AGAIN = "Collect them again: save_statistics=... (--save-statistics), into another folder."
_FILLED = "Name a folder that a run with save_statistics (--save-statistics) has filled."


@dataclass(frozen=True)
class KeptGroup:
    """Linears that share an input.

    Attributes:
        modules: their names; the tensors of the input have that of the first.
        tokens: number of tokens of the input.
    """

    modules: Sequence[str]
    tokens: int


@dataclass(frozen=True)
class KeptBlock:
    """What is kept of a block.

    Attributes:
        checksum: of its file.
        stops: the groups that were complete at the same time, in the order of the forward.
    """

    checksum: str
    stops: Sequence[Sequence[KeptGroup]]


@dataclass
class _Contents:
    """Contents of the index.

    Attributes:
        identity: what the sums depend on.
        tokens: number of tokens of the data.
        modules: all Linears that were observed, reached or not.
        blocks: name of a block → its sums; :data:`REST` for what lies outside of blocks.
        loss: name of a block → checksum of its file and tokens by module; empty without a budget.
        loss_of: samples and tokens by which a budget is chosen.
    """

    identity: Mapping[str, Any]
    tokens: int = 0
    modules: list[str] = field(default_factory=list)
    blocks: dict[str, KeptBlock] = field(default_factory=dict)
    loss: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss_of: dict[str, int] = field(default_factory=dict)


def _file(folder: Path, kind: str, block: str) -> Path:
    return folder / f"{kind}-{_OUTSIDE if block == REST else block}.safetensors"


class StatisticsWriter:
    """Writes a folder of statistics, block by block; :func:`writing_statistics` makes it.

    Args:
        folder: exists, and holds no complete statistics.
        identity: what the sums depend on.

    Attributes:
        contents: what the index will hold.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._stops: dict[str, list[Sequence[KeptGroup]]] = {}
        self.contents = _Contents(identity)

    def add_stop(self, block: str, groups: Sequence[tuple[Sequence[str], InputSums]]) -> None:
        """Take the sums of Linears of a block that were complete at the same time.

        Args:
            block: its name; :data:`REST` outside of blocks.
            groups: names of Linears that share an input, and its sums.
        """
        tensors = self._tensors.setdefault(block, {})
        for names, sums in groups:
            every = {"gram": packed_upper(sums.gram_CC)}
            every |= {name: getattr(sums, f"{name}_C") for name in _VECTORS}
            tensors |= {f"{names[0]}.{name}": one.cpu() for name, one in every.items()}
        kept = [KeptGroup(list(names), sums.tokens) for names, sums in groups]
        self._stops.setdefault(block, []).append(kept)

    def write_inputs(self, block: str) -> None:
        """Write the sums of a block, if there are any."""
        if block in self._stops:
            checksum = self._write(_INPUTS, block, self._tensors.pop(block))
            self.contents.blocks[block] = KeptBlock(checksum, self._stops.pop(block))

    def write_loss(
        self, block: str, tensors: Mapping[str, Tensor], tokens: Mapping[str, int]
    ) -> None:
        """Write what a budget is chosen by; tensors by name, tokens by module."""
        checksum = self._write(_LOSS, block, tensors)
        self.contents.loss[block] = {"checksum": checksum, "tokens": dict(tokens)}

    def _write(self, kind: str, block: str, tensors: Mapping[str, Tensor]) -> str:
        file = _file(self._folder, kind, block)
        on_host = {name: one.cpu() for name, one in tensors.items()}
        with disk_errors(self._folder):
            durable.replace(file, lambda new: _save(on_host, new))
            return durable.checksum(file)

    def commit(self) -> None:
        """Write the index, with which the folder is complete."""
        text = json.dumps({"format": FORMAT, **asdict(self.contents)}, indent=1) + "\n"
        with disk_errors(self._folder):
            durable.replace(self._folder / INDEX, text.encode())


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    file.touch()  # with the permissions of other files; safetensors makes one for its owner alone
    mode = file.stat().st_mode
    save_file(dict(tensors), file)
    file.chmod(mode)


@contextmanager
def writing_statistics(folder: Path, identity: Mapping[str, Any]) -> Iterator[StatisticsWriter]:
    """Hold a folder for statistics while the body collects them, and complete it at the end.

    Raises:
        OutputError: it cannot be created, or another run holds it.
    """
    with creation_errors(folder):
        durable.make_folder(folder)
    with locked(folder / _LOCK, f"statistics to {folder}"):
        for old in [*folder.glob("*-*.safetensors"), *folder.glob("*-*.safetensors.new")]:
            old.unlink()  # of an interrupted collection
        writer = StatisticsWriter(folder, identity)
        yield writer
        writer.commit()


def check_statistics_folder(folder: Path) -> None:
    """Refuse (OutputError) a folder for statistics that holds something else, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            f"save_statistics names {folder}, and that is a file.", "Name a folder, new or empty."
        )
    known = (INDEX, f"{INDEX}.new", _LOCK)
    others = [
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name not in known and not path.name.startswith((f"{_INPUTS}-", f"{_LOSS}-"))
    ]
    if others:
        raise OutputError(
            f"save_statistics names {folder}, which holds something else: {sorted(others)[0]}.",
            "Name a folder that is new or empty.",
        )


def _without_index(folder: Path) -> ArgumentError:
    """The error for a path where statistics were to be, and no complete ones are."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        return ArgumentError(f"statistics names {folder}, which {why}.", _FILLED)
    if any(folder.glob(f"{_INPUTS}-*")):
        return ArgumentError(
            f"{folder} holds no complete statistics: their collection was interrupted, or goes on.",
            "Collect them again into the same folder, which begins anew: save_statistics=... "
            "(--save-statistics).",
        )
    return ArgumentError(f"{folder} holds no statistics: it has no {INDEX}.", _FILLED)


class KeptStatistics:
    """Statistics that an earlier run has kept in a folder.

    Attributes:
        folder: the folder.
        digest: hash of the index, and so of all files.
        tokens: number of tokens of the data.
        modules: names of all Linears that were observed.
        blocks: name of a block → what is kept of it.
        identity: what the sums depend on.
    """

    def __init__(self, folder: Path, digest: str, contents: _Contents) -> None:
        self.folder, self.digest, self._contents = folder, digest, contents
        self.identity, self.tokens = contents.identity, contents.tokens
        self.modules = frozenset(contents.modules)
        self.blocks: Mapping[str, KeptBlock] = contents.blocks

    @classmethod
    def open(cls, folder: Path) -> KeptStatistics:
        """Open a folder of statistics.

        Raises:
            ArgumentError: it does not exist or holds none, or these are incomplete, damaged or of
                another format.
        """
        file = folder / INDEX
        if not file.is_file():
            raise _without_index(folder)
        try:
            found = json.loads(file.read_bytes())
            number = found.pop("format")
            if number == FORMAT:
                found["blocks"] = {k: _block_of(one) for k, one in found["blocks"].items()}
                contents = _Contents(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"{file} cannot be read: {error}.", _AGAIN) from error
        if number != FORMAT:
            raise ArgumentError(
                f"The statistics in {folder} have format {number}, and this version reads "
                f"{FORMAT}.",
                _AGAIN,
            )
        kept = cls(folder, durable.checksum(file), contents)
        for path, checksum in kept._files():
            size = checksum.partition(" ")[0]
            if not path.is_file() or str(path.stat().st_size) != size:
                raise ArgumentError(
                    f"The statistics in {folder} are damaged: {path.name} is missing or has "
                    "another size.",
                    _AGAIN,
                )
        return kept

    def _files(self) -> Iterator[tuple[Path, str]]:
        for name, block in self.blocks.items():
            yield _file(self.folder, _INPUTS, name), block.checksum
        for name, loss in self._contents.loss.items():
            yield _file(self.folder, _LOSS, name), loss["checksum"]

    @property
    def modules_with_loss(self) -> frozenset[str]:
        """Names of the Linears of which they hold what a budget is chosen by."""
        return frozenset(name for one in self._contents.loss.values() for name in one["tokens"])

    @property
    def loss_of(self) -> Mapping[str, int]:
        """``samples`` and ``tokens`` of the data by which a budget is chosen."""
        return self._contents.loss_of

    def inputs(self, block: str) -> dict[str, InputSums]:
        """Read the sums of a block, by the name of each Linear.

        Raises:
            CheckpointError: the file is damaged.
        """
        own = self.blocks.get(block)
        if own is None:
            return {}
        tensors = self._read(_INPUTS, block, own.checksum)
        found: dict[str, InputSums] = {}
        for group in (one for stop in own.stops for one in stop):
            parts = [tensors[f"{group.modules[0]}.{name}"] for name in _VECTORS]
            packed = tensors.pop(f"{group.modules[0]}.gram")
            gram_CC = unpacked_upper(packed, len(parts[0]))
            found |= dict.fromkeys(group.modules, InputSums(group.tokens, gram_CC, *parts))
        return found

    def loss(self, block: str) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Read what a budget is chosen by: tensors by name, tokens by module; errors likewise."""
        own = self._contents.loss.get(block)
        if own is None:
            return {}, {}
        return self._read(_LOSS, block, own["checksum"]), own["tokens"]

    def _read(self, kind: str, block: str, checksum: str) -> dict[str, Tensor]:
        file = _file(self.folder, kind, block)
        try:
            if durable.checksum(file) == checksum:
                return load_file(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.", _AGAIN) from error
        raise CheckpointError(f"{file} is not as it was written.", _AGAIN)


def _block_of(found: Mapping[str, Any]) -> KeptBlock:
    stops = [[KeptGroup(**group) for group in stop] for stop in found["stops"]]
    return KeptBlock(found["checksum"], stops)
