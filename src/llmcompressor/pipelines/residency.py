# SPDX-License-Identifier: Apache-2.0
"""Blocks that are in memory only while batches pass through them.

Whoever has the weights (a stream over a checkpoint) is asked for a block when a pass enters it,
and told when all passes have left it and every modifier is done with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.nn import Module

from llmcompressor.modifiers.modifier import Modifier

if TYPE_CHECKING:
    from llmcompressor.core.state import State

__all__ = ["Keeper", "Residency"]


class Keeper(Protocol):
    """Who has the weights of the blocks."""

    names: Mapping[Module, str]
    """Block → name, in order."""
    one_by_one: bool
    """Whether each modifier sees the model as those before it leave it (``independent``)."""

    @property
    def finished(self) -> Collection[str]:
        """Blocks that an earlier run has finished."""

    @property
    def rest_is_finished(self) -> bool:
        """Whether an earlier run has finished everything."""

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded when they are written, and need not be before."""

    def decide(self, name: str, value: Any) -> Any:
        """A choice that depends on the machine's state: the one made when the run began."""

    def enter(self, block: str) -> None:
        """Load a block's original weights."""

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Put modules of a block in place as an earlier run has left them."""

    def leave(self, block: str) -> None:
        """Keep a finished block elsewhere, and let go of its weights."""

    def visiting(self) -> AbstractContextManager[None]:
        """While the body runs, a forward finds each block loaded; nothing is written."""

    def visits(self) -> AbstractContextManager[Callable[[Module, Module | None], None]]:
        """The same, at the call of what is given: it loads a block and reads another one ahead."""

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Keep how far the present pass is with something, in the place of what was kept of it."""

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What an earlier run, or this one, has kept last in the present pass."""

    def forget(self) -> None:
        """Take nothing of the present pass, nor of those behind it, for finished."""


class Residency:
    """Which blocks are loaded.

    Args:
        keeper: who has the others.
        state: what modifiers are called with.
        modifiers: those that finish a block before it is written.
    """

    def __init__(self, keeper: Keeper, state: State, modifiers: Sequence[Modifier]) -> None:
        self._keeper = keeper
        self._state = state
        self._modifiers = modifiers
        self._region = {
            inner: name for block, name in keeper.names.items() for inner in block.modules()
        }
        self._blocks = {name: block for block, name in keeper.names.items()}
        self._visited: set[str] = set()
        self._early = [
            one for one in _before_data(modifiers) if keeper.one_by_one or one.changes_at_once
        ]
        self.loaded: dict[str, Module] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Load every block when it is called while the body runs."""
        handles = [
            block.register_forward_pre_hook(self._arrive, prepend=True)
            for block in self._keeper.names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def block_of(self, module: Module) -> str | None:
        """The block that a module lies in."""
        return self._region.get(module)

    def is_finished(self, module: Module) -> bool:
        """Whether an earlier run has finished the block that a module lies in."""
        return self._region.get(module) in self._keeper.finished

    def replace_finished(self, module: Module) -> None:
        """Have the compressed weights of a finished block take the place of the original ones.

        Only those that passes would have gone on with. What lost parts loses them first.
        """
        name = self._region[module]
        inside = set(self.modules_of(name))
        outlining = [one for one in self._modifiers if one.changes_structure]
        if self._state.propagates:
            for modifier in outlining:
                modifier.adopt(self._state, self.modules_of(name))
        changed = {
            one
            for modifier in self._modifiers
            if modifier.changes_at_once and modifier not in [*self._early, *outlining]
            for one in modifier.calibrated_modules(self._state)
            if one in inside
        }
        if changed:
            self._keeper.restore(name, changed)

    def enter(self, name: str) -> None:
        """Load a block unless it is loaded."""
        if name in self.loaded:
            return
        self.loaded[name] = self._blocks[name]
        self._visited.add(name)
        self._keeper.enter(name)
        self._finish(self._early, self.modules_of(name))

    def leave(self, name: str) -> None:
        """Have a block finished, written and let go of."""
        self.loaded.pop(name)
        if name in self._keeper.finished:
            self._adopt(self.modules_of(name))
        else:
            self._finish(self._modifiers, self.modules_of(name), written=self._keeper.rounds)
        self._keeper.leave(name)

    def begin(self) -> None:
        """Have finished what lies in no block and what the data is to see so."""
        if not self.rest_is_finished:
            self._finish(self._early, self.others(self._state.model.modules()))

    def visit_rest(self) -> None:
        """See to the blocks that no pass has come by.

        They are loaded, finished and let go of; those that an earlier run has finished are marked
        so. That comes last: a marked module quantizes its inputs, which passes are not to see.
        """
        for name in self.unfinished:
            if name not in self._visited:
                self.enter(name)
                self.leave(name)
        for name in self._keeper.finished:
            self._adopt(self.modules_of(name))
        if self.rest_is_finished:
            self._adopt(self.others(self._state.model.modules()))

    def _adopt(self, modules: Sequence[Module]) -> None:
        for modifier in self._modifiers:
            modifier.adopt(self._state, modules)

    def _finish(
        self, modifiers: Sequence[Modifier], modules: Sequence[Module], *, written: bool = False
    ) -> None:
        for modifier in modifiers:
            modifier.finish(self._state, modules, written=written)

    @property
    def unfinished(self) -> list[str]:
        """Blocks that no earlier run has finished, in order."""
        return [name for name in self._blocks if name not in self._keeper.finished]

    @property
    def rest_is_finished(self) -> bool:
        """Whether an earlier run has finished everything."""
        return self._keeper.rest_is_finished

    def modules_of(self, name: str) -> tuple[Module, ...]:
        """A block and its parts."""
        return tuple(self._blocks[name].modules())

    def others(self, modules: Iterable[Module]) -> tuple[Module, ...]:
        """Those of ``modules`` that lie in no block."""
        return tuple(module for module in modules if module not in self._region)

    def _arrive(self, module: Module, args: object) -> None:
        self.enter(self._region[module])


def _before_data(modifiers: Sequence[Modifier]) -> list[Modifier]:
    """Those that need no data and stand before one that does: it may see what they have done."""
    needing = [place for place, one in enumerate(modifiers) if one.requires_calibration_data]
    return list(modifiers[: needing[0]]) if needing else []
