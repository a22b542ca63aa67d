# SPDX-License-Identifier: Apache-2.0
"""One pass over the weights: each block is read, handed to a pipeline, written, and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.block_weights import REST, BlockWeights
from llmcompressor.checkpoint.block_writer import BlockWriter
from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.finished_blocks import FinishedBlocks
from llmcompressor.checkpoint.journal import BlockEntry
from llmcompressor.checkpoint.on_demand import load_on_demand
from llmcompressor.checkpoint.output_layout import OutputLayout
from llmcompressor.checkpoint.prediction import Prediction, stored_block
from llmcompressor.checkpoint.workspace import Workspace
from llmcompressor.logger import logger
from llmcompressor.memory import give_back_freed

__all__ = ["BlockStream"]

Report = Callable[[Sequence[str]], Mapping[str, Any]]


class BlockStream:
    """Brings blocks into the model and their compressed forms into the output.

    Args:
        blueprint: the model, of which everything but the blocks is loaded.
        weights: the blocks.
        prediction: what the output will hold.
        layout: where.
        workspace: the folder and journal of the run.
        report: what was recorded of some modules, given their names.

    Attributes:
        names: module of a block → its name, in order.
        finished: blocks that an earlier run has written.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        weights: BlockWeights,
        prediction: Prediction,
        layout: OutputLayout,
        workspace: Workspace,
        report: Report,
    ) -> None:
        self._blueprint = blueprint
        self._model = blueprint.model
        self._weights = weights
        self._prediction = prediction
        self._workspace = workspace
        self._report = report
        self._layout = layout
        self._writer = BlockWriter(workspace.files, layout)
        self._restorer = FinishedBlocks(
            self._model, prediction.quantized, layout, weights, weights.device
        )
        self.names: dict[Module, str] = {
            self._model.get_submodule(name): name for name in weights.blocks
        }
        self.finished = self._intact()
        self._written = set(self.finished)

    # ------------------------------------------------------------------ for pipelines

    def decide(self, name: str, value: Any) -> Any:
        """A choice that depends on the machine's state: the one made when the run began."""
        return self._workspace.journal.decide(name, value)

    def enter(self, block: str) -> None:
        """Load a block's original weights; the next one is read meanwhile."""
        self._weights.load(block)
        following = self._weights.after(block)
        if following is not None:
            self._weights.read_ahead(following)

    def restore(self, block: str) -> None:
        """Put a block in place as an earlier run has left it."""
        self._writer.flush()
        self._restorer.restore(block, self._workspace.files)

    def leave(self, block: str) -> None:
        """Write a block, unless that was done by an earlier run, and let go of it."""
        if block not in self._written:
            self._write(block, self._tensors_of(block))
        self._weights.release(block)
        give_back_freed()

    # ------------------------------------------------------------------ the end

    def complete(self) -> None:
        """Write what no pipeline came by, and what lies in no block."""
        for block in self._weights.blocks:
            if block not in self._written:
                self.enter(block)
                self.leave(block)
        if REST not in self._written:
            self._write(REST, self._rest() | self._extras())
        self._writer.flush()

    def close(self) -> None:
        """Stop the threads."""
        self._writer.close()
        self._weights.close()

    def hand_over(self, folder: Path) -> None:
        """Have the model read its blocks from the written checkpoint when they are needed.

        Args:
            folder: where the checkpoint is now.
        """
        for module, name in self.names.items():
            load_on_demand(module, lambda name=name: self._restorer.restore(name, folder))

    # ------------------------------------------------------------------ helpers

    def _write(self, block: str, tensors: Mapping[str, Tensor]) -> None:
        entries = [
            entry for entry in self._prediction.quantized if self._block_of(entry.name) == block
        ]
        stored = stored_block(self._model, tensors, entries, self._prediction.plain_keys)
        extras = {name: tensors[name] for name in self._prediction.extras if name in tensors}
        source = self._weights.digests.get(block, "")
        report = dict(self._report([entry.name for entry in entries]))

        def commit(digest: str) -> None:
            self._workspace.journal.add(BlockEntry(block, digest, source, report))

        self._writer.write(stored | extras, commit)
        self._written.add(block)

    def _tensors_of(self, block: str) -> dict[str, Tensor]:
        state = self._model.get_submodule(block).state_dict()
        return {
            f"{block}.{name}": value for name, value in state.items() if isinstance(value, Tensor)
        }

    def _rest(self) -> dict[str, Tensor]:
        state = self._model.state_dict()
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and self._block_of(name) == REST
        }

    def _extras(self) -> dict[str, Tensor]:
        headers = self._blueprint.source.tensors
        found = {}
        for name in self._prediction.extras:
            with safe_open(str(headers[name].file), framework="pt") as reader:
                found[name] = reader.get_tensor(name)
        return found

    def _block_of(self, name: str) -> str:
        return next((block for block in self._weights.blocks if name.startswith(f"{block}.")), REST)

    def _intact(self) -> set[str]:
        """The blocks that the journal has and that are on disk as they were written."""
        journal = self._workspace.journal
        groups = {block: self._stored_names(block) for (_, block) in journal.entries}
        found = self._writer.digests_of(groups)
        intact = {
            block for (_, block), entry in journal.entries.items() if entry.digest == found[block]
        }
        damaged = sorted(set(groups) - intact)
        if damaged:
            logger.warning(f"{', '.join(damaged)}: damaged on the disk, and done again.")
        if intact:
            logger.info(f"{len(intact)} of {len(self.names) + 1} parts are finished already.")
        return intact

    def _stored_names(self, block: str) -> list[str]:
        if block:
            return self._restorer.names_of(block)
        inside = {name for one in self._weights.blocks for name in self._restorer.names_of(one)}
        return [name for name in self._layout.places if name not in inside]
