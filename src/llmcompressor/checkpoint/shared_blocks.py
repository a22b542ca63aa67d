# SPDX-License-Identifier: Apache-2.0
"""Blocks that the ranks of a run share: each reads, quantizes and writes those of its share.

The files of the output are laid out before, so that each rank writes into its own places of them,
and the bytes are those that one process writes. The first rank makes the work folder, and gives
the output its name when all have written. All of them append to one journal, in which a later
call, of any number of ranks, finds what is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from llmcompressor.checkpoint.atomic_output import creation_errors, disk_errors
from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.checkpoint.block_stream import (
    PlannedOutput,
    Report,
    StreamedBlocks,
    _config_hash,
)
from llmcompressor.checkpoint.block_writer import BlockWriter
from llmcompressor.checkpoint.journal import BlockEntry, Workspace
from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.save import SaveOptions
from llmcompressor.checkpoint.shared_output import SharedOutput
from llmcompressor.errors import ProcessError
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.processes import Processes


def split_by_size(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split names over ranks: the largest first, each to the rank that has least so far.

    Args:
        sizes: name → its size. Of equal sizes the first name in the alphabet comes first, and of
            equal ranks the lowest.
        count: the number of ranks.

    Returns:
        The names of each rank, in the order in which they were dealt.

    >>> split_by_size({"a": 3, "b": 5, "c": 2, "d": 3}, 2)
    [['b', 'c'], ['a', 'd']]
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    held = [0] * count
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        rank = held.index(min(held))
        shares[rank].append(name)
        held[rank] += sizes[name]
    return shares


class SharedBlocks(StreamedBlocks):
    """The blocks of a run without data, in which no block depends on another, over several ranks.

    What is outside of the blocks counts as one more.

    Args:
        blueprint: the model, without weights.
        processes: the processes of the run, at least two.
        ranks: the same, connected.
    """

    def __init__(self, blueprint: MetaModel, processes: Processes, ranks: Ranks) -> None:
        super().__init__(blueprint)
        self._processes, self._peers = processes, ranks
        self._next: Mapping[str, str] = {}

    @contextmanager
    def shared_by(self, processes: Processes, ranks: Ranks | None) -> Iterator[None]:
        """Share a run with other processes, which is what this does block by block."""
        yield

    def load(self, *, check: bool, tied: bool) -> None:
        """Load everything outside the blocks; see :meth:`StreamedBlocks.load`."""
        super().load(check=check or self.weights.differ_over(self._peers), tied=tied)

    @contextmanager
    def writing(self, output: PlannedOutput | None, report: Report) -> Iterator[None]:
        """Open the output, deal the blocks, and run the pass in the body.

        Raises:
            ArgumentError: the ranks have different sources, settings or versions.
            OutputError: as :func:`~llmcompressor.checkpoint.journal.open_workspace`; or a rank does
                not see the folder of the first one.
            ProcessError: another rank has failed.
        """
        assert output is not None, "only a run with an output is streamed"
        assert output.passes == 1, "blocks wait for each other between passes"
        self._folder = SharedOutput(self._peers, (), ())
        identity = output.identity(self)
        self._folder.check_identity(identity)
        if self._peers.rank == 0:
            with super().writing(replace(output, identity=lambda _: identity), report):
                yield
            return
        # what is there is left to the first rank to replace
        self._made = {"config": _config_hash(output.target), "choices": {}}
        with disk_errors(output.target), super().writing(output, report), closing(self):
            self._open_beside(output.target)
            yield

    def _open(self, workspace: Workspace, output: PlannedOutput) -> None:
        """Allocate the output, find what is finished, and tell the other ranks."""
        super()._open(workspace, output)
        finished = [block for _, block in self._intact]
        self._folder.opened(workspace.files, workspace.folder, {"finished": finished})
        with self._peers.agreed("opening the output"):
            self._deal(finished)

    def _open_beside(self, target: Path) -> None:
        """Open the output that the first rank has made."""
        told = self._folder.join()
        with self._peers.agreed("opening the output"), creation_errors(target):
            if self._deal(told["finished"]):
                files = Path(told["files"])
                self._workspace = Workspace(target, files.parent)
                self._writer = BlockWriter(files, self._layout, joins=True)

    def _deal(self, finished: Sequence[str]) -> set[str]:
        """Return the blocks of this rank; those of the others count as finished."""
        every = [*self.weights.blocks, REST]
        written = dict.fromkeys(every, 0)
        for name, place in self._layout.places.items():
            written[self._block_of(name)] += place.nbytes
        sizes = {
            block: self.weights.source_bytes(block) + written[block]
            for block in every
            if block not in finished
        }
        own = set(split_by_size(sizes, self._peers.count)[self._peers.rank])
        self._intact = {(self._last, block) for block in every if block not in own}
        self._done = set(self._intact)
        self._next = dict(pairwise(block for block in every[:-1] if block in own))
        return own

    @contextmanager
    def _with_others(self) -> Iterator[None]:
        """Raise the error of a rank that has failed: before the body, or if that fails, too."""
        self._raise_failure()
        try:
            yield
        except Exception:  # the first rank may have removed the folder
            self._raise_failure()
            raise

    def _raise_failure(self) -> None:
        if told := self._processes.failure():
            raise ProcessError(told)

    def enter(self, block: str) -> None:
        """Load a block of this rank, and start to read its next one."""
        with self._with_others():
            super().enter(block)

    def leave(self, block: str) -> None:
        """Write a block of this rank, and free its tensors."""
        with self._with_others():
            super().leave(block)

    def complete(self) -> None:
        """Write what no pipeline visited, and wait until all ranks have written."""
        with self._peers.agreed("written"), self._with_others():
            super().complete()
            self._peers.patient(None, what="written blocks")
        entries = {} if self._workspace is None else self._journal.entries
        own = [vars(entry) for entry in entries.values()]
        every = self._peers.exchange(own, what="finished blocks")
        for entry in (BlockEntry(**one) for each in every for one in each):
            if self._peers.rank == 0:
                self._journal.note(entry)

    def publish(self, options: SaveOptions) -> None:
        """Let the first rank give the output its name, and wait until it has."""
        with self._peers.agreed("published"):
            refused = self._publish_alone(options) if self._peers.rank == 0 else None
            refused = self._peers.patient(refused, what="gates")[0]
        if refused is not None:
            raise refused

    def show(self) -> None:
        """Leave the model as it is: what was made stands in the output."""

    def _read_ahead(self) -> None:
        """Start to read the next block of this rank, unless two are loaded already."""
        following = self._next.get(self._inside[0]) if len(self._inside) == 1 else None
        if following is not None:
            self.weights.read_ahead(following)
