# SPDX-License-Identifier: Apache-2.0
"""The blocks of a model that is spread over processes, or over the memory and the disk.

A block is whole in memory while it is worked on. Then each process takes its shard of the finished
block, or the block goes back to where accelerate keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from torch.nn import Module

from llmcompressor.checkpoint.block_reader import REST, ReadBlocks
from llmcompressor.checkpoint.block_stream import PlannedOutput, Report, ResidentBlocks
from llmcompressor.checkpoint.load import check_finite_weights
from llmcompressor.checkpoint.save import SaveOptions, save_in_parts
from llmcompressor.checkpoint.spread_weights import SpreadWeights
from llmcompressor.core.block_source import BlockSource, Visit
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.memory import malloc_trim
from llmcompressor.runtime.processes import Processes


class SpreadBlocks(ResidentBlocks):
    """The blocks of a model that is spread; see :class:`ResidentBlocks`.

    The model is spread as before when the run ends, with the weights of the blocks that were
    finished.
    """

    _weights: SpreadWeights

    @property
    def holds_all(self) -> bool:  # type: ignore[override]  # of others it is a constant
        """True if no weight has to be loaded: those that are on several devices are there."""
        return not self._weights.is_partial

    @contextmanager
    def shared_by(self, processes: Processes, ranks: Ranks | None) -> Iterator[None]:
        """Share a run with other processes, which hold the shards of the model.

        Args:
            processes: the processes of the run.
            ranks: those that share the work; ``None``: each does all of it.
        """
        self._ranks = ranks or Ranks()
        with ExitStack() as stack:
            self._stack = stack
            alone = ranks is None and processes.count > 1
            self._holders = stack.enter_context(Ranks(processes)) if alone else self._ranks
            yield

    def load(self, *, check: bool, tied: bool) -> None:
        """Open the model, and load what lies outside of blocks.

        Args:
            check: has no effect: all weights are looked at.
            tied: has no effect: the model is as it was given.

        Raises:
            ArgumentError: it is sharded over other processes than those of the run.
            NonFiniteError: NaN or infinity in a weight.
        """
        check_finite_weights(self.model)
        self._weights = SpreadWeights(self.model, self._holders, by_block=self._by_block)
        self._stack.callback(self._weights.close)
        self._weights.check_finite()
        self._weights.load(REST)

    def update(self, model: Module) -> None:
        """Take the model that the modifiers have initialized.

        Raises:
            ArgumentError: weights that FSDP holds as one are no longer one.
        """
        self.model = model
        self._weights.refuse_untied()
        self.names = {block: name for name, block in self._weights.blocks.items()}

    def enter(self, block: str) -> None:
        """Gather or load the weights of a block."""
        self._weights.load(block)

    def reading(self) -> BlockSource:
        """The blocks for a pass that changes nothing."""
        return ReadBlocks(self, self._weights.load, self._weights.release)

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Do nothing: no block was finished by an earlier run."""

    def leave(self, block: str) -> None:
        """Store the weights of a finished block, and free them."""
        self._weights.store(block)
        self._weights.release(block)
        malloc_trim()

    @contextmanager
    def writing(self, output: PlannedOutput | None, report: Report) -> Iterator[None]:
        """Run the passes in the body; all processes write the output in :meth:`publish`."""
        self._planned = output
        with super().writing(output, report):
            yield

    @contextmanager
    def visits(self) -> Iterator[Visit]:
        """Load blocks one at a time, without storing changes."""
        inside: list[str] = []

        def let_go() -> None:
            while inside:
                self._weights.release(inside.pop())
                malloc_trim()

        def visit(module: Module, then: Module | None) -> None:
            del then
            name = self.names[module]
            if name not in inside:
                let_go()
                self._weights.load(name)
                inside.append(name)

        try:
            yield visit
        finally:
            let_go()

    def publish(self, options: SaveOptions) -> None:
        """Write the model to the output: each process its own tensors."""
        malloc_trim()
        assert self._planned is not None, "only a run with an output is published"
        output = self._planned
        save_in_parts(
            self._weights, output.target, options, overwrite=output.overwrite, was_free=True
        )
