# SPDX-License-Identifier: Apache-2.0
"""Block streaming: load one block at a time, hand it to a pipeline, write it, free it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)
from compressed_tensors.transform import HadamardTransform
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F  # noqa: N812

from llmcompressor.checkpoint.block_reader import REST, BlockWeights
from llmcompressor.checkpoint.block_writer import (
    BlockWriter,
    ScratchBlocks,
    non_weight_bytes,
    unallocated_bytes,
)
from llmcompressor.checkpoint.journal import BlockEntry, ProgressEntry, Workspace
from llmcompressor.checkpoint.manifest import OutputManifest, compress_block
from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.names import LoadedName, NameMap
from llmcompressor.checkpoint.packing import QuantizedModule
from llmcompressor.checkpoint.tensor_files import OutputLayout, TensorReader, read_tensors
from llmcompressor.logger import logger
from llmcompressor.modeling.names import named_modules
from llmcompressor.runtime.memory import TOLERATED, malloc_trim
from llmcompressor.runtime.threads import one_thread

_CPU = torch.device("cpu")
_RETURNED_EVERY = 8
"""Blocks after which freed memory is returned, however little: each leaves a few megabytes."""

Report = Callable[[Sequence[str]], Mapping[str, Any]]
Visit = Callable[[Module, Module | None], None]


# Lazy parameters: after a run the blocks are on disk and not in memory. The returned model is
# complete all the same: a block is loaded when one of its parameters is first accessed.


def _load_lazily(block: Module, load: Callable[[], None]) -> None:
    """Call ``load`` before the first access to a parameter of ``block``, all on the meta device."""
    modules = list(block.modules())

    def read() -> None:
        for module in modules:
            if isinstance(module._parameters, _LazyParameters):
                module._parameters = dict(dict.items(module._parameters))
        load()

    for module in modules:
        if dict(module._parameters):
            module._parameters = _LazyParameters(module, read)


class _LazyParameters(dict[str, Any]):
    """The lazy parameters of one module; any access to a value loads them.

    A caller that holds this dict when that happens (the module itself, in the middle of a lookup)
    reads the module's new parameters from then on.
    """

    def __init__(self, module: Module, read: Callable[[], None]) -> None:
        super().__init__(module._parameters)
        self._module = module
        self._read = read

    def _loaded(self) -> dict[str, Any]:
        if self._module._parameters is self:
            self._read()
        return self._module._parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._loaded(), memo)

    def __reduce__(self) -> Any:
        return dict, (self._loaded(),)


def _after_loading(method: str) -> Any:
    def call(self: _LazyParameters, *arguments: Any) -> Any:
        return getattr(self._loaded(), method)(*arguments)

    return call


for _name in ("__getitem__", "__setitem__", "__delitem__", "get", "pop", "items", "values", "copy"):
    setattr(_LazyParameters, _name, _after_loading(_name))


class CompletedOutput:
    """A block stream of an output that is written: every block is finished.

    It restores blocks into the model, dense as they were in memory.

    Args:
        blueprint: the model; everything but its blocks is loaded.
        weights: the blocks.
        prediction: the tensors and modules of the output.
        layout: the place of each tensor in the output.
        choices: the choices that the data decided during the run.

    Attributes:
        names: block → its name, in order.
        stage: the index of the current pass.
        one_by_one: each modifier sees the model as those before it leave it.
    """

    def __init__(
        self,
        blueprint: MetaModel,
        weights: BlockWeights,
        prediction: OutputManifest,
        layout: OutputLayout,
        choices: Mapping[str, Any],
    ) -> None:
        self._model = blueprint.model
        self._weights = weights
        self._layout = layout
        self._choices = choices
        self._name_map = NameMap(self._model)
        self.names: dict[Module, str] = {
            self._model.get_submodule(name): name for name in weights.blocks
        }
        self.stage = 0
        self.one_by_one = True
        self._quantized = {entry.name: entry for entry in prediction.quantized}
        stored = self._name_map.stored(self._quantized)
        by_place = {place: self._quantized[name] for name, place in stored.items()}
        self._packed: dict[str, QuantizedModule] = {}
        for name in layout.places:
            place, _, own = name.rpartition(".")
            if place in by_place and by_place[place].owns_tensor(own):
                self._packed[name] = by_place[place]
        plain = (name for name in layout.places if name not in self._packed)
        self._plain = self._name_map.loaded(plain, self._model.state_dict())

    @property
    def finished(self) -> set[str]:
        """The blocks that are finished in the current pass."""
        return set(self._weights.blocks)

    @property
    def rest_is_finished(self) -> bool:
        """True if the whole output was written before."""
        return True

    @property
    def rounds(self) -> bool:
        """True if weights are rounded on writing, so that nothing has to round them before."""
        return False

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a choice that depended on the data."""
        return self._choices.get(f"{self.stage}.{name}", value)

    def complete(self) -> None:
        """Write what is left to write."""

    def close(self) -> None:
        """Stop the threads that read and write."""
        self._weights.close()

    def restore_rest(self, folder: Path) -> None:
        """Load everything outside the blocks from the output, now in ``folder``."""
        self._restore(REST, folder)

    def attach_lazy_blocks(self, folder: Path) -> None:
        """Make the model load blocks lazily from the output, wherever ``folder`` is moved later."""
        reader = TensorReader(self._layout.headers(folder))
        reader.open_all()
        for module, name in self.names.items():
            _load_lazily(module, partial(self._restore_from, reader, name))

    def _names_of(self, block: str) -> list[str]:
        """Return the stored tensors of a block; for :data:`REST` those outside all blocks."""
        inside = tuple(f"{name}." for name in ([block] if block else self._weights.blocks))
        found = []
        for name in self._layout.places:
            if name in self._packed:
                target = f"{self._packed[name].name}."
            else:
                target = self._plain[name].target if name in self._plain else ""
            if target.startswith(inside) == bool(block):
                found.append(name)
        return found

    def _restore(self, block: str, folder: Path, modules: Collection[Module] | None = None) -> None:
        with closing(TensorReader(self._layout.headers(folder))) as reader:
            self._restore_from(reader, block, modules)

    @torch.no_grad()
    def _restore_from(
        self, reader: TensorReader, block: str, modules: Collection[Module] | None = None
    ) -> None:
        """Load a block, or some modules of it, from the written checkpoint into the model."""
        packed: dict[str, dict[str, Tensor]] = {}
        plain = {}
        every = () if modules is None else named_modules(self._model)
        own = set(modules or ())
        wanted = {name for name, one in every if one in own}
        for name in self._names_of(block):
            entry = self._packed.get(name)
            if entry is not None:
                if modules is None or entry.module in modules:
                    packed.setdefault(entry.name, {})[name.rpartition(".")[2]] = reader.read(name)
            elif name in self._plain:
                owner = self._plain[name].target.rpartition(".")[0]
                if modules is None or owner in wanted:
                    plain[name] = reader.read(name)
        self._weights.put(plain, self._plain)
        for module, tensors in packed.items():
            self._unpack(self._quantized[module], tensors)
        self._weights.settle()

    def _unpack(self, entry: QuantizedModule, tensors: Mapping[str, Tensor]) -> None:
        module, scheme = entry.module, entry.scheme
        values: dict[str, Tensor] = dict(tensors)
        dense = entry.is_attention or scheme.weights is None
        if not dense and scheme.format != CompressionFormat.dense.value:
            scale, own = tensors.get("weight_scale"), module._parameters.get("weight_scale")
            if scale is not None and own is not None and scale.dtype is torch.float32:
                values["weight_scale"] = scale.to(own.dtype)  # as loaders do
            values |= _decompressed(values, scheme, module._parameters["weight"])
        for name, present in list(module._parameters.items()):
            if present is not None and name in values:
                value = values[name].to(self._weights.device, present.dtype).reshape(present.shape)
                module._parameters[name] = Parameter(value, requires_grad=present.requires_grad)


def _decompressed(
    tensors: Mapping[str, Tensor], scheme: QuantizationScheme, weight: Tensor | None
) -> dict[str, Tensor]:
    """Return a module's stored tensors with a dense weight, shaped as ``weight``, for the codes.

    compressed-tensors decompresses whole groups only. Where the last group is incomplete, the codes
    are padded to its end and the padding is cut off again.
    """
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    assert weight is not None
    assert scheme.weights is not None
    columns, missing = weight.shape[-1], 0
    if scheme.weights.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        missing = -columns % int(scheme.weights.group_size)  # in a row's last group
    values = dict(tensors)
    if missing:
        name = "weight_packed" if "weight_packed" in values else "weight"
        stored = values[name]
        wider = -(-stored.shape[-1] * (columns + missing) // columns)
        values[name] = F.pad(stored, (0, wider - stored.shape[-1]))
        if "weight_shape" in values:
            rows = int(values["weight_shape"][0])
            values["weight_shape"] = torch.tensor([rows, columns + missing])
    found: dict[str, Tensor] = compressor.decompress(values, scheme)
    if missing:
        found["weight"] = found["weight"][..., :columns].contiguous()
    return found


class BlockStream(CompletedOutput):
    """Stream blocks from the source checkpoint into the model and from there into the output.

    A recipe may need several passes over the model. All but the last store their blocks in a
    scratch folder, dense, and the next pass reads them from there.

    Args:
        blueprint: as for :class:`CompletedOutput`, like ``weights``, ``prediction``, ``layout``.
        weights: see there.
        prediction: see there.
        layout: see there.
        workspace: the folder and journal of the run.
        report: return what the modifiers recorded for the named modules.
        stages: number of passes.
        scratch: bytes that all passes but the last store in scratch files.
        compressed: store weights as packed codes.
    """

    def __init__(
        self,
        blueprint: MetaModel,
        weights: BlockWeights,
        prediction: OutputManifest,
        layout: OutputLayout,
        workspace: Workspace,
        report: Report,
        *,
        stages: int = 1,
        scratch: int = 0,
        compressed: bool = True,
    ) -> None:
        super().__init__(blueprint, weights, prediction, layout, workspace.journal.choices)
        self._prediction = prediction
        self._workspace = workspace
        self._journal = workspace.journal
        self._report = report
        self._last = stages - 1
        self._compressed = compressed
        self._scratch = ScratchBlocks(workspace.scratch)
        left = 0 if self._journal.is_ready else unallocated_bytes(workspace.scratch, scratch)
        beside = non_weight_bytes(blueprint.source.directory, len(layout.places))
        self._writer = BlockWriter(workspace.files, layout, scratch=left, beside=beside)
        self._block_names = set(weights.blocks)
        self._entries: dict[str, list[QuantizedModule]] = {}
        for entry in prediction.quantized:
            self._entries.setdefault(self._block_of(entry.name), []).append(entry)
        self._inside: list[str] = []
        self._left = 0
        try:
            self._intact = self._find_intact()
        except BaseException:
            self.close()
            raise
        self._done = set(self._intact)

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
        return self._journal.decide(f"{self.stage}.{name}", value)

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
        self._restore(block, self._workspace.files, modules)

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Save a progress checkpoint of the current pass, replacing that of the same name."""
        last = self._journal.progress.get((self.stage, name))
        number = 0 if last is None else last.number + 1
        digest = self._scratch.write(self.stage, f"{name}-{number}", tensors)
        self._journal.advance(ProgressEntry(self.stage, name, number, digest, dict(figures)))
        if last is not None:
            self._scratch.remove(self.stage, f"{name}-{last.number}")

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last intact progress checkpoint of that name in this pass, or ``None``."""
        entry = self._journal.progress.get((self.stage, name))
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

        Yields a function that loads a block, frees the one before and starts to read another.
        """
        inside: list[Module] = []

        def let_go() -> None:
            while inside:
                self._weights.release(self.names[inside.pop()])
                malloc_trim()

        def visit(module: Module, then: Module | None) -> None:
            if module not in inside:
                let_go()
                if self.stage > 0:
                    self._put_scratch(self.stage - 1, self.names[module])
                else:
                    self._weights.load(self.names[module])
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
        malloc_trim(at_least=2 * TOLERATED if self._left % _RETURNED_EVERY else 0)
        if block in self._inside:
            self._inside.remove(block)
            self._read_ahead()

    def complete(self) -> None:
        """Write the blocks that no pipeline visited, and everything outside the blocks."""
        assert self.stage == self._last
        for block in self._weights.blocks:
            if (self.stage, block) not in self._done:
                self.enter(block)
                self.leave(block)
        if not self.rest_is_finished:
            state = self._model.state_dict()
            rest = {name: one for name, one in state.items() if self._block_of(name) == REST}
            self._write(REST, _only_tensors(rest) | dict(read_tensors(self._prediction.extras)))
        self._writer.flush()

    @property
    def choices(self) -> dict[str, Any]:
        """The choices that the data decided, without what the free memory decides."""
        chosen = self._journal.choices.items()
        return {key: value for key, value in chosen if not key.endswith(".granularity")}

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all blocks, from whichever run: modifier → module → record."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._journal.entries.values():
            for modifier, records in entry.report.items():
                found.setdefault(modifier, {}).update(records)
        return found

    def close(self) -> None:
        """Stop the threads that read and write; lazy blocks keep this, but nothing of the run."""
        self._report = lambda names: {}
        self._writer.close()
        super().close()

    def _read_ahead(self) -> None:
        following = self._weights.after(self._inside[-1]) if len(self._inside) == 1 else None
        if following is not None:
            self._weights.read_ahead(following)

    def _keep(self, block: str) -> None:
        tensors = self._tensors_of(block)
        self._done.add((self.stage, block))
        if self.stage == self._last:
            self._write(block, tensors)
            return
        rotations = tuple(
            f"{name}."
            for name, module in self._model.get_submodule(block).named_modules(prefix=block)
            if isinstance(module, HadamardTransform)
        )
        # the next pass needs all but the matrices of rotations
        kept = {name: one for name, one in tensors.items() if not name.startswith(rotations)}
        digest = self._scratch.write(self.stage, block, kept)
        self._commit(block, self._records(block), digest)

    def _records(self, block: str) -> dict[str, Any]:
        if block == REST:
            every = (name for name, _ in self._model.named_modules())
            outside = (name for name in every if name not in self._block_names)
            names = [name for name in outside if self._block_of(name) == REST]
        else:
            inner = self._model.get_submodule(block).named_modules(prefix=block)
            names = [name for name, _ in inner]
        return dict(self._report(names))

    def _write(self, block: str, tensors: Mapping[str, Tensor]) -> None:
        entries = self._entries.get(block, [])
        stored = compress_block(self._name_map, tensors, entries, self._prediction.plain_keys)
        for entry in entries:
            if entry.is_raw:  # its weight is rounded when it is read back
                entry.module.quantization_status = QuantizationStatus.DECOMPRESSED
        extras = {name: tensors[name] for name in self._prediction.extras if name in tensors}
        commit = partial(self._commit, block, self._records(block))
        self._writer.write(stored | extras, commit)

    def _commit(self, block: str, report: Mapping[str, Any], digest: str) -> None:
        source, files = "", dict[str, str]()
        if self.stage == 0:
            source = self._weights.digests.get(block, "")
            files = dict(self._weights.files.get(block, {}))
        self._journal.add(BlockEntry(block, digest, source, report, self.stage, files))

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
        self._weights.settle()

    def _tensors_of(self, block: str) -> dict[str, Tensor]:
        state = self._model.get_submodule(block).state_dict()
        return _only_tensors({f"{block}.{name}": value for name, value in state.items()})

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
        entries = self._journal.entries
        groups = {block: self._names_of(block) for s, block in entries if s == self._last}
        written = self._writer.digests_of(groups)
        intact = set()
        for (stage, block), entry in entries.items():
            kept = self._scratch.digest(stage, block) if stage < self._last else written[block]
            if kept == entry.digest:
                intact.add((stage, block))
            if stage == 0 and entry.source:  # all blocks must come from one source
                self._weights.verify_digest(block, entry.source, entry.files)
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


def _only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
