# SPDX-License-Identifier: Apache-2.0
"""An output that an earlier call has finished: its model is made, and nothing is written."""

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
    """Stands where a stream stands while a run is at work, and has everything finished.

    Args:
        blueprint: the model, of which everything but the blocks is loaded.
        weights: the blocks.
        prediction: what the output holds.
        layout: where.
        run: what the output remembers.

    Attributes:
        names: module of a block → its name, in order.
        stage: the present pass.
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
        """Whether the output is as it was written, of the original as it is now: all are read."""
        if self._run.source != self._weights.read_digest():
            return False
        groups = {name: self._blocks.names_of(name) for name in [*self._weights.blocks, REST]}
        return self._run.is_whole(folder, self._layout, groups)

    def complete(self) -> None:
        """Nothing is left to be written."""

    def restore_rest(self, folder: Path) -> None:
        """Put in place what lies in no block."""
        self._blocks.restore(REST, folder)

    def hand_over(self, folder: Path) -> None:
        """Have the model read its blocks from the output when they are needed."""
        self._blocks.hand_over(folder, self.names)

    def close(self) -> None:
        """Stop reading the original."""
        self._weights.close()

    # ------------------------------------------------------------------ for pipelines

    @property
    def finished(self) -> Collection[str]:
        """All blocks."""
        return set(self.names.values())

    def decide(self, name: str, value: Any) -> Any:
        """What was chosen, where the data decided it."""
        return self._run.choices.get(f"{self.stage}.{name}", value)

    def enter(self, block: str) -> None:
        """Nothing is to be loaded."""
        _refuse(block)

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Nothing is to be put in place for passes."""
        _refuse(block)

    def leave(self, block: str) -> None:
        """Nothing is to be written."""
        _refuse(block)

    def visiting(self) -> AbstractContextManager[None]:
        """No forward runs."""
        _refuse("")

    def visits(self) -> AbstractContextManager[Any]:
        """No forward runs."""
        _refuse("")

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Nothing is learned."""
        _refuse(name)

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Nothing is learned."""
        _refuse(name)

    def forget(self) -> None:
        """Nothing is done again."""
        _refuse("")


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"everything is finished, and something is asked for: {name}")
