# SPDX-License-Identifier: Apache-2.0
"""A stream for an output that an earlier call completed: its model is loaded, nothing written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.block_weights import REST, BlockWeights
from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.finished_blocks import FinishedBlocks
from llmcompressor.checkpoint.finished_run import FinishedRun
from llmcompressor.checkpoint.output_layout import OutputLayout
from llmcompressor.checkpoint.prediction import Prediction

__all__ = ["FinishedOutput"]


class FinishedOutput:
    """A block stream in which every block is finished.

    Args:
        blueprint: the model; everything but its blocks is loaded.
        weights: the blocks.
        prediction: the tensors and modules of the output.
        layout: the place of each tensor in the output.
        run: the identity of the run that the output stores.

    Attributes:
        names: block → its name, in order.
        stage: the index of the current pass.
        one_by_one: each modifier sees the model as those before it leave it.
    """

    rest_is_finished = True
    rounds = False

    def __init__(
        self,
        blueprint: Blueprint,
        weights: BlockWeights,
        prediction: Prediction,
        layout: OutputLayout,
        run: FinishedRun,
    ) -> None:
        self._weights = weights
        self._layout = layout
        self._run = run
        self._blocks = FinishedBlocks(
            blueprint.model, prediction.quantized, layout, weights, weights.device
        )
        self.names: dict[Module, str] = {
            blueprint.model.get_submodule(name): name for name in weights.blocks
        }
        self.stage = 0
        self.one_by_one = True

    def is_of(self, folder: Path) -> bool:
        """Return True if the output and the original are both unchanged; reads all weights."""
        if self._run.source != self._weights.read_digest():
            return False
        groups = {name: self._blocks.names_of(name) for name in [*self._weights.blocks, REST]}
        return self._run.is_whole(folder, self._layout, groups)

    def complete(self) -> None:
        """Do nothing, as everything is written."""

    def restore_rest(self, folder: Path) -> None:
        """Load everything outside the blocks from the output."""
        self._blocks.restore(REST, folder)

    def hand_over(self, folder: Path) -> None:
        """Make the model load its blocks lazily from the output."""
        self._blocks.hand_over(folder, self.names)

    def close(self) -> None:
        """Stop reading the original."""
        self._weights.close()

    # ------------------------------------------------------------------ for pipelines

    @property
    def finished(self) -> Collection[str]:
        """The names of all blocks."""
        return set(self.names.values())

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a choice that depended on the data."""
        return self._run.choices.get(f"{self.stage}.{name}", value)

    def enter(self, block: str) -> None:
        """Refuse to load a block."""
        _refuse(block)

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Refuse to restore modules."""
        _refuse(block)

    def leave(self, block: str) -> None:
        """Refuse to write a block."""
        _refuse(block)

    def visiting(self) -> AbstractContextManager[None]:
        """Refuse to run forward passes."""
        _refuse("")

    def visits(self) -> AbstractContextManager[Any]:
        """Refuse to visit blocks."""
        _refuse("")

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Refuse to save progress."""
        _refuse(name)

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Refuse to load progress."""
        _refuse(name)

    def forget(self) -> None:
        """Refuse to redo blocks."""
        _refuse("")


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"everything is finished, and something is asked for: {name}")
