# SPDX-License-Identifier: Apache-2.0
"""The blocks of a model, as pipelines and modifiers see them: loaded, changed, stored and freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Visit: TypeAlias = "Callable[[Module, Module | None], None]"
"""Loads a block for reading, and starts to load another."""


class BlockSource:
    """The blocks of a model that is in memory as a whole: nothing is loaded, stored or resumed.

    A run gives its own: :class:`~llmcompressor.checkpoint.block_stream.ResidentBlocks` or
    :class:`~llmcompressor.checkpoint.block_stream.StreamedBlocks`.

    Attributes:
        names: block → its name, in order. Modifiers finish these one by one, and all else at the
            end of a pass.
        stage: the index of the current pass over the model.
        one_by_one: each modifier sees the model as those before it leave it (``independent``).
        holds_all: all blocks are in memory at once, so that a change may join several.
        rounds: weights are quantized when they are stored, and need not be before.
    """

    holds_all = True

    def __init__(self) -> None:
        self.names: Mapping[Module, str] = {}
        self.stage = 0
        self.one_by_one = False

    @property
    def rounds(self) -> bool:
        """True if weights are quantized when they are stored, and need not be before."""
        return False

    @property
    def finished(self) -> Collection[str]:
        """Names of the blocks that an earlier run has finished in this pass."""
        return ()

    @property
    def rest_is_finished(self) -> bool:
        """True if an earlier run has finished everything, modules outside of blocks too."""
        return False

    def decide(self, name: str, value: Any) -> Any:
        """Return the value that the run recorded for ``name`` at its start, or record ``value``."""
        return value

    def refuse_uncalled(self, names: Sequence[str]) -> None:
        """Refuse blocks whose forward the model runs without calling them, if that matters."""

    def enter(self, block: str) -> None:
        """Load the weights of a block as the pass before has left them."""

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Load the compressed weights of a block's modules from an earlier run."""

    def leave(self, block: str) -> None:
        """Store a finished block and free its weights."""

    def visits(self) -> AbstractContextManager[Visit]:
        """Yield a function that loads single blocks for reading while the body runs."""
        return _visits_without_loading()

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Load each block for reading when a forward calls it while the body runs."""
        following = dict(pairwise([*self.names, None]))
        with self.visits() as visit:
            handles = [
                one.register_forward_pre_hook(
                    lambda module, args: visit(module, following[module]), prepend=True
                )
                for one in self.names
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Save the progress of this pass under ``name``, replacing what was saved before."""

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the progress last saved under ``name`` in this pass, also by an earlier run."""
        return None

    def forget(self) -> None:
        """Discard the recorded progress of this pass and of all later ones."""


@contextmanager
def _visits_without_loading() -> Iterator[Visit]:
    yield lambda module, then: None
