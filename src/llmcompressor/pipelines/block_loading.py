# SPDX-License-Identifier: Apache-2.0
"""Block loading: blocks are loaded when a pass enters them, and finished when all have left.

A streamed block is in memory only meanwhile; of a model in memory blocks are finished at the same
points, so that both give the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch.nn import Module

from llmcompressor.core.contract import Edits
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.pipelines.shared_work import SharedWork
from llmcompressor.runtime.run_record import READING, WRITING, phase


class BlockLoader:
    """Loads blocks when passes enter them, and finishes and frees them when passes have left.

    Args:
        state: of the run, with the source of the blocks.
        modifiers: those that finish a block before it is stored.
        work: the part of this rank.

    Attributes:
        loaded: name → block, for those that passes are in.
    """

    def __init__(
        self, state: State, modifiers: Sequence[Modifier], work: SharedWork | None = None
    ) -> None:
        self.work = work or SharedWork(state, modifiers)
        self._source = source = state.run.block_source
        self._state = state
        self._modifiers = modifiers
        self._blocks = {name: block for block, name in source.names.items()}
        self._region = {
            inner: name for block, name in source.names.items() for inner in block.modules()
        }
        self._visited: set[str] = set()
        # those without data that precede the first one with data, which may see their changes
        needing = [place for place, one in enumerate(modifiers) if one.traits.needs_data]
        self._early = [
            one
            for one in (modifiers[: needing[0]] if needing else [])
            if source.one_by_one or Edits.AT_ONCE in one.traits.edits
        ]
        self.loaded: dict[str, Module] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Load every block when it is called while the body runs."""
        handles = [
            block.register_forward_pre_hook(
                lambda module, args: self.enter(self._region[module]), prepend=True
            )
            for block in self._blocks.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def block_of(self, module: Module) -> str | None:
        """Name of the block that contains a module; ``None`` outside of blocks."""
        return self._region.get(module)

    def is_finished(self, module: Module) -> bool:
        """Return True if an earlier run has finished the block that contains a module."""
        return self._region.get(module) in self._source.finished

    def replace_finished(self, module: Module) -> None:
        """Replace the original weights of a finished block by the compressed ones.

        Only weights with which passes would have gone on are replaced. Removed parts are removed
        first.
        """
        name = self._region[module]
        inside = set(self.modules_of(name))
        outlining = [one for one in self._modifiers if Edits.STRUCTURE in one.traits.edits]
        if self._state.calibration.propagates_error:
            for modifier in outlining:
                modifier.adopt(self._state, self.modules_of(name))
        changed = {
            one
            for modifier in self._modifiers
            if modifier not in [*self._early, *outlining] and Edits.AT_ONCE in modifier.traits.edits
            for one in modifier.select(self._state).modules
            if one in inside
        }
        if changed:
            self._source.restore(name, changed)

    def begin(self) -> None:
        """Finish modules outside of blocks with the modifiers that work before calibration."""
        if not self._source.rest_is_finished:
            self._finish_early(self.others())

    def enter(self, name: str) -> None:
        """Load a block unless it is loaded."""
        if name in self.loaded:
            return
        self.loaded[name] = self._blocks[name]
        self._visited.add(name)
        with phase(READING):
            self._source.enter(name)
        self._finish_early(self.modules_of(name))

    def enter_block_of(self, module: Module) -> None:
        """Load the block that contains a module, if any does."""
        if module in self._region:
            self.enter(self._region[module])

    def leave(self, name: str) -> None:
        """Finish a block with all modifiers, store it and free it."""
        self.loaded.pop(name)
        if name in self._source.finished:
            self._adopt(self.modules_of(name))
        else:
            self._finish_owned(self.modules_of(name), name)
        with phase(WRITING):
            self._source.leave(name)

    def finish_others(self) -> None:
        """Finish the modules outside of blocks where ranks share the work.

        Else modifiers do that when the calibration ends.
        """
        if self.work.ranks.count > 1 and not self._source.rest_is_finished:
            self._finish_owned(self.others(), "what lies outside of blocks")

    def _finish_owned(self, modules: Sequence[Module], name: str) -> None:
        """Finish the modules that this rank owns, and take over those of other ranks."""
        rounds = self._source.rounds
        self.work.sum_observed(modules)
        for modifier in self._modifiers:
            solved = self.work.solved_here(modifier, modules)
            modifier.finish(self._state, solved, written=rounds)
            if len(solved) < len(modules):
                modifier.adopt(self._state, self.work.others(modules))
        self.work.copy_finished(modules, name)

    def finish_unvisited(self) -> None:
        """Finish the blocks that no pass has entered.

        They are loaded, finished and freed. Blocks that an earlier run has finished are then marked
        as quantized. That comes last because a marked module quantizes its inputs.
        """
        for name in self.unfinished:
            if name not in self._visited:
                self.enter(name)
                self.leave(name)
        for name in self._source.finished:
            self._adopt(self.modules_of(name))
        if self._source.rest_is_finished:
            self._adopt(self.others())

    def _adopt(self, modules: Sequence[Module]) -> None:
        for modifier in self._modifiers:
            modifier.adopt(self._state, modules)

    def _finish_early(self, modules: Sequence[Module]) -> None:
        for modifier in self._early:
            modifier.finish(self._state, modules)

    @property
    def unfinished(self) -> list[str]:
        """Names of the blocks that no earlier run has finished, in order."""
        return [name for name in self._blocks if name not in self._source.finished]

    @property
    def is_complete(self) -> bool:
        """True if an earlier run has finished all blocks."""
        return bool(self._blocks) and not self.unfinished

    def modules_of(self, name: str) -> tuple[Module, ...]:
        """All modules of a block, itself included."""
        return tuple(self._blocks[name].modules())

    def others(self) -> tuple[Module, ...]:
        """The modules of the model outside of all blocks."""
        every: Iterable[Module] = self._state.model.modules()
        return tuple(module for module in every if module not in self._region)
