# SPDX-License-Identifier: Apache-2.0
"""Block streaming: load one block at a time, hand it to a pipeline, write it, free it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.transform import HadamardTransform
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.block_weights import REST, BlockWeights
from llmcompressor.checkpoint.block_writer import BlockWriter
from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.compress import QuantizedModule
from llmcompressor.checkpoint.finished_blocks import FinishedBlocks
from llmcompressor.checkpoint.finished_run import FinishedRun, file_hashes, hash_of
from llmcompressor.checkpoint.journal import BlockEntry, ProgressEntry
from llmcompressor.checkpoint.layout import LoadedName
from llmcompressor.checkpoint.output_layout import OutputLayout
from llmcompressor.checkpoint.prediction import Prediction, stored_block
from llmcompressor.checkpoint.scratch_blocks import ScratchBlocks
from llmcompressor.checkpoint.space import beside_weights, lacking
from llmcompressor.checkpoint.workspace import Workspace
from llmcompressor.logger import logger
from llmcompressor.memory import TOLERATED, give_back_freed
from llmcompressor.threads import one_thread

__all__ = ["BlockStream"]

_CPU = torch.device("cpu")
_RETURNED_EVERY = 8
"""Blocks after which freed memory is returned, however little: each leaves a few megabytes."""

Report = Callable[[Sequence[str]], Mapping[str, Any]]
Visit = Callable[[Module, Module | None], None]


class BlockStream:
    """Stream blocks from the source checkpoint into the model and from there into the output.

    A recipe may need several passes over the model. All but the last store their blocks in a
    scratch folder, dense, and the next pass reads them from there.

    Args:
        blueprint: the model; everything but its blocks is loaded.
        weights: the blocks.
        prediction: the tensors and modules that the output will hold.
        layout: the place of each tensor in the output.
        workspace: the folder and journal of the run.
        report: return what the modifiers recorded for the named modules.
        stages: number of passes.
        scratch: bytes that all passes but the last store in scratch files.
        compressed: store weights as packed codes.

    Attributes:
        names: block → its name, in order.
        stage: the index of the current pass.
        one_by_one: each modifier sees the model as the modifiers before it leave it.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        weights: BlockWeights,
        prediction: Prediction,
        layout: OutputLayout,
        workspace: Workspace,
        report: Report,
        *,
        stages: int = 1,
        scratch: int = 0,
        compressed: bool = True,
    ) -> None:
        self._blueprint = blueprint
        self._model = blueprint.model
        self._weights = weights
        self._prediction = prediction
        self._workspace = workspace
        self._report = report
        self._layout = layout
        self._last = stages - 1
        self._compressed = compressed
        self._scratch = ScratchBlocks(workspace.scratch)
        left = 0 if workspace.journal.is_ready else lacking(workspace.scratch, scratch)
        beside = beside_weights(blueprint.source.directory, len(layout.places))
        self._writer = BlockWriter(workspace.files, layout, scratch=left, beside=beside)
        self._restorer = FinishedBlocks(
            self._model, prediction.quantized, layout, weights, weights.device
        )
        self.names: dict[Module, str] = {
            self._model.get_submodule(name): name for name in weights.blocks
        }
        self._block_names = set(weights.blocks)
        self._entries: dict[str, list[QuantizedModule]] = {}
        for entry in prediction.quantized:
            self._entries.setdefault(self._block_of(entry.name), []).append(entry)
        self.stage = 0
        self.one_by_one = True
        self._inside: list[str] = []
        self._left = 0
        try:
            self._intact = self._find_intact()
        except BaseException:
            self.close()
            raise
        self._done = {(stage, block) for stage, block in self._intact}

    # ------------------------------------------------------------------ for pipelines

    @property
    def finished(self) -> set[str]:
        """The blocks that an earlier run finished in the current pass."""
        return {block for stage, block in self._intact if stage == self.stage and block != REST}

    @property
    def rest_is_finished(self) -> bool:
        """True if an earlier run wrote the whole output."""
        return (self._last, REST) in self._intact

    @property
    def rounds(self) -> bool:
        """True if weights are rounded on writing, so that nothing has to round them before."""
        return self._compressed and self.stage == self._last

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a machine-dependent choice, or record ``value``."""
        return self._workspace.journal.decide(f"{self.stage}.{name}", value)

    def enter(self, block: str) -> None:
        """Load a block as the previous pass left it, and start to read the next one."""
        if self.stage > 0:
            self._put_scratch(self.stage - 1, block)
            return
        with one_thread(_CPU):
            self._weights.load(block)
        self._inside.append(block)
        self._read_ahead()

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Restore modules of a block to the state in which an earlier run left them."""
        if self.stage < self._last:
            self._put_scratch(self.stage, block, modules)
            return
        self._writer.flush()
        self._restorer.restore(block, self._workspace.files, modules)

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Save a progress checkpoint of the current pass, replacing that of the same name."""
        journal, stage = self._workspace.journal, self.stage
        last = journal.progress.get((stage, name))
        number = 0 if last is None else last.number + 1
        digest = self._scratch.write(stage, f"{name}-{number}", tensors)
        journal.advance(ProgressEntry(stage, name, number, digest, dict(figures)))
        if last is not None:
            self._scratch.remove(stage, f"{name}-{last.number}")

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last intact progress checkpoint of that name in this pass, or ``None``."""
        entry = self._workspace.journal.progress.get((self.stage, name))
        if entry is None:
            return None
        file = f"{name}-{entry.number}"
        if self._scratch.digest(self.stage, file) != entry.digest:
            logger.warning(f"{file}: damaged on the disk, and done again.")
            return None
        return self._scratch.read(self.stage, file), dict(entry.figures)

    def forget(self) -> None:
        """Mark the current pass and all later ones as not finished."""
        gone = {one for one in self._intact if one[0] >= self.stage}
        if gone:
            logger.warning("What all blocks depend on is lost: they are done again.")
        self._intact -= gone
        self._done -= gone

    @contextmanager
    def visits(self) -> Iterator[Visit]:
        """Load blocks one at a time, as the previous pass left them, without writing anything.

        Yields:
            A function that loads a block and starts to read another. It frees the block before,
            and the last block is freed at the end.
        """
        inside: list[Module] = []

        def let_go() -> None:
            while inside:
                self._weights.release(self.names[inside.pop()])
                give_back_freed()

        def visit(module: Module, then: Module | None) -> None:
            if module not in inside:
                let_go()
                block = self.names[module]
                if self.stage > 0:
                    self._put_scratch(self.stage - 1, block)
                else:
                    self._weights.load(block)
                inside.append(module)
            if then is not None and self.stage == 0:
                self._weights.read_ahead(self.names[then])

        try:
            yield visit
        finally:
            let_go()

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Load each block when a forward pass reaches it, one at a time, without writing."""
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

    def leave(self, block: str) -> None:
        """Write a block, unless an earlier run did so, and free its tensors."""
        if (self.stage, block) not in self._done:
            with one_thread(_CPU):  # large tensors are split into pieces; small ones are many
                self._keep(block)
        self._weights.release(block)
        self._left += 1
        give_back_freed(at_least=2 * TOLERATED if self._left % _RETURNED_EVERY else 0)
        if block in self._inside:
            self._inside.remove(block)
            self._read_ahead()

    # ------------------------------------------------------------------ the end

    def complete(self) -> None:
        """Write the blocks that no pipeline visited, and everything outside the blocks."""
        assert self.stage == self._last
        for block in self._weights.blocks:
            if (self.stage, block) not in self._done:
                self.enter(block)
                self.leave(block)
        if not self.rest_is_finished:
            self._write(REST, self._rest() | self._extras())
        self._writer.flush()

    def restore_rest(self, folder: Path) -> None:
        """Restore everything outside the blocks from the checkpoint of an earlier run.

        Args:
            folder: the checkpoint's present folder.
        """
        self._restorer.restore(REST, folder)

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all blocks, from whichever run: modifier → module → record."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._workspace.journal.entries.values():
            for modifier, records in entry.report.items():
                found.setdefault(modifier, {}).update(records)
        return found

    def remember_run(self, fingerprint: Mapping[str, Any]) -> None:
        """Store the identity of the finished run in the output; everything else is written already.

        Args:
            fingerprint: everything that decides the bytes of the output.
        """
        journal = self._workspace.journal
        stored = {
            block: one.digest for (s, block), one in journal.entries.items() if s == self._last
        }
        chosen = journal.choices.items()  # without what the free memory decides
        FinishedRun(
            hash_of(fingerprint["source"]),
            hash_of(fingerprint),
            self._weights.read_digest(),
            hash_of(stored),
            file_hashes(self._workspace.files, self._layout),
            {key: value for key, value in chosen if not key.endswith(".granularity")},
        ).write(self._workspace.files)

    def close(self) -> None:
        """Stop the reader and writer threads."""
        self._writer.close()
        self._weights.close()

    def hand_over(self, folder: Path) -> None:
        """Make the model load its blocks lazily from the written checkpoint.

        Args:
            folder: the checkpoint's present folder.
        """
        self._restorer.hand_over(folder, self.names)

    # ------------------------------------------------------------------ helpers

    def _read_ahead(self) -> None:
        """Start to read the next block, unless two are loaded or being read already."""
        following = self._weights.after(self._inside[-1]) if len(self._inside) == 1 else None
        if following is not None:
            self._weights.read_ahead(following)

    def _keep(self, block: str) -> None:
        tensors = self._tensors_of(block)
        self._done.add((self.stage, block))
        if self.stage == self._last:
            self._write(block, tensors)
            return
        digest = self._scratch.write(self.stage, block, self._passed_on(block, tensors))
        self._commit(block, dict(self._report(self._modules_of(block))), digest)

    def _modules_of(self, block: str) -> list[str]:
        """Return the names of a block and its submodules, or of the modules outside all blocks."""
        if block == REST:
            return [name for name, _ in self._model.named_modules() if self._is_rest(name)]
        return [name for name, _ in self._model.get_submodule(block).named_modules(prefix=block)]

    def _is_rest(self, name: str) -> bool:
        return name not in self._block_names and self._block_of(name) == REST

    def _write(self, block: str, tensors: Mapping[str, Tensor]) -> None:
        entries = self._entries.get(block, [])
        stored = stored_block(self._model, tensors, entries, self._prediction.plain_keys)
        for entry in entries:
            if entry.is_raw:  # its weight is rounded when it is read back
                entry.module.quantization_status = QuantizationStatus.DECOMPRESSED
        extras = {name: tensors[name] for name in self._prediction.extras if name in tensors}
        report = dict(self._report(self._modules_of(block)))
        self._writer.write(stored | extras, partial(self._commit, block, report))

    def _commit(self, block: str, report: Mapping[str, Any], digest: str) -> None:
        source, files = "", dict[str, str]()
        if self.stage == 0:
            source = self._weights.digests.get(block, "")
            files = dict(self._weights.files.get(block, {}))
        entry = BlockEntry(block, digest, source, report, self.stage, files)
        self._workspace.journal.add(entry)

    def _put_scratch(
        self, stage: int, block: str, modules: Collection[Module] | None = None
    ) -> None:
        # a modifier's own parameters exist only once it has initialized the module
        state = {
            name
            for name in self._tensors_of(block)
            if modules is None or self._model.get_submodule(name.rpartition(".")[0]) in modules
        }
        tensors = self._scratch.read(stage, block)
        present = {name: tensor for name, tensor in tensors.items() if name in state}
        self._weights.put(present, {name: LoadedName(name, merged=False) for name in present})
        self._weights.settle(block)

    def _passed_on(self, block: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the next pass needs: all but the rotation matrices."""
        stay = tuple(
            f"{name}."
            for name, module in self._model.get_submodule(block).named_modules(prefix=block)
            if isinstance(module, HadamardTransform)
        )
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(stay)}

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
        """Return the name of the block that contains a module or tensor, or :data:`REST`."""
        end = name.find(".")
        while end > 0:
            if name[:end] in self._block_names:
                return name[:end]
            end = name.find(".", end + 1)
        return REST

    def _find_intact(self) -> set[tuple[int, str]]:
        """Return the (pass, block) pairs whose data on disk matches the journal."""
        entries = self._workspace.journal.entries
        groups = {block: self._restorer.names_of(block) for s, block in entries if s == self._last}
        written = self._writer.digests_of(groups)
        intact = set()
        for (stage, block), entry in entries.items():
            kept = self._scratch.digest(stage, block) if stage < self._last else written[block]
            if kept == entry.digest:
                intact.add((stage, block))
            if stage == 0 and entry.source:  # all blocks must come from one source
                self._weights.confirm(block, entry.source, entry.files)
        if len([block for stage, block in intact if stage == self._last]) <= len(self.names):
            last = (self._last, REST)  # a redone block may change the rest
            damaged = set(entries) - intact
            intact.discard(last)
        else:  # the scratch blocks are not needed any more
            damaged = set()
            intact.update(entries)
        if damaged:
            names = sorted({block or "the rest" for _, block in damaged})
            logger.warning(f"{', '.join(names)}: damaged on the disk, and done again.")
        if intact:
            total = (self._last + 1) * len(self.names) + 1
            logger.info(f"{len(intact)} of {total} parts are finished already.")
        return intact
