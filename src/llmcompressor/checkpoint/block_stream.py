# SPDX-License-Identifier: Apache-2.0
"""Block streaming: load one block at a time, hand it to a pipeline, write it, free it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
import xxhash
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
from transformers import PreTrainedModel

from llmcompressor.checkpoint.atomic_output import creation_errors, disk_errors
from llmcompressor.checkpoint.block_reader import REST, BlockWeights, ReadBlocks
from llmcompressor.checkpoint.block_writer import (
    BlockWriter,
    ScratchBlocks,
    check_space,
    non_weight_bytes,
    unallocated_bytes,
)
from llmcompressor.checkpoint.journal import (
    BlockEntry,
    Journal,
    ProgressEntry,
    RunIdentity,
    Workspace,
    open_workspace,
)
from llmcompressor.checkpoint.load import check_finite_weights
from llmcompressor.checkpoint.manifest import WrittenWeights
from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.model_config import read_report
from llmcompressor.checkpoint.moe_names import dense_experts_fused, fuse_dense_experts
from llmcompressor.checkpoint.names import LoadedName, NameMap
from llmcompressor.checkpoint.packing import QuantizedModule
from llmcompressor.checkpoint.planned_tensors import PlannedTensors, compress_block
from llmcompressor.checkpoint.save import SaveOptions, save_checkpoint, write_non_weight_files
from llmcompressor.checkpoint.shared_output import SharedOutput, merged
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.checkpoint.tensor_files import (
    OutputLayout,
    TensorReader,
    digest_of,
    layout_files,
    read_tensors,
)
from llmcompressor.core.block_source import BlockSource, Visit
from llmcompressor.errors import (
    ArgumentError,
    DatasetError,
    GateError,
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.logger import log_progress, logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.memory import TOLERATED, malloc_trim
from llmcompressor.runtime.processes import Processes
from llmcompressor.runtime.threads import one_thread

_CPU = torch.device("cpu")
_RETURNED_EVERY = 8
"""Blocks after which freed memory is returned, however little: each leaves a few megabytes."""
_IN_THE_CALL = (ArgumentError, DatasetError, NonFiniteError, RecipeError, TargetError)
"""What the same call runs into again, while another call would not go on from its progress."""

Room = Callable[[int, int], tuple[int | None, bool]]
Report = Callable[[Sequence[str] | None], dict[str, dict[str, Any]]]
"""Modifier → module → what it recorded, for the named modules or for all."""


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


class BlockRestorer:
    """Restores blocks of a written checkpoint into the model, dense as they were in memory.

    Args:
        model: its modules are marked as quantized.
        quantized: its quantized modules.
        layout: the places of the checkpoint's tensors.
        weights: the loader of the source's blocks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quantized: Sequence[QuantizedModule],
        layout: OutputLayout,
        weights: BlockWeights,
    ) -> None:
        self._model = model
        self._weights = weights
        self._layout = layout
        self._quantized = {entry.name: entry for entry in quantized}
        names = NameMap(model)
        stored = names.stored(self._quantized)
        by_place = {place: self._quantized[name] for name, place in stored.items()}
        self._packed: dict[str, QuantizedModule] = {}
        for name in layout.places:
            place, _, own = name.rpartition(".")
            if place in by_place and by_place[place].owns_tensor(own):
                self._packed[name] = by_place[place]
        plain = (name for name in layout.places if name not in self._packed)
        self._plain = names.loaded(plain, model.state_dict())

    def names_of(self, block: str) -> list[str]:
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

    def attach_lazy_blocks(self, folder: Path, blocks: Mapping[Module, str]) -> None:
        """Make blocks load lazily from the checkpoint, wherever ``folder`` is moved later."""
        reader = TensorReader(self._layout.headers(folder), opened=True)
        for module, name in blocks.items():
            _load_lazily(module, partial(self._restore_from, reader, name))

    def restore(self, block: str, folder: Path, modules: Collection[Module] | None = None) -> None:
        """Load a block, or some of its modules, from the checkpoint in ``folder``."""
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
        for name in self.names_of(block):
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


@dataclass(frozen=True)
class PlannedOutput:
    """The output of a run, as it is known before the first pass.

    Attributes:
        target: the folder.
        planned: the tensors and modules that it will hold.
        identity: everything that decides its bytes.
        resume: see :func:`~llmcompressor.checkpoint.journal.open_workspace`.
        passes: number of passes over the model.
        scratch: bytes that all passes but the last, and learning, keep on the disk meanwhile.
        compressed: weights are stored as packed codes.
        overwrite: an existing checkpoint is replaced.
        is_held: the whole output stays in the run's work folder, and gets no name.
    """

    target: Path
    planned: PlannedTensors
    identity: Callable[[StreamedBlocks], RunIdentity]
    resume: str
    passes: int
    scratch: int
    compressed: bool
    overwrite: bool
    is_held: bool = False


def check_output_space(target: Path, planned: PlannedTensors, source: str | None) -> None:
    """Refuse (OutputError) a disk without room for an output and the other files of its source."""
    stored = planned.stored
    beside = non_weight_bytes(None if source is None else Path(source), len(stored))
    check_space(target, output=layout_files(stored).file_size + beside)


class ResidentBlocks(BlockSource):
    """The blocks of a model in memory, which is written when all of it is finished.

    Args:
        model: the model.
        source_folder: the files of the original model, if there are any.
        by_block: modifiers finish single blocks; otherwise the whole model at once.
        writes: this process writes the output.
    """

    device = _CPU
    headers: Mapping[str, TensorHeader] = MappingProxyType({})
    processors: Sequence[Any] = ()

    def __init__(
        self, model: Module, source_folder: str | None, *, by_block: bool, writes: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.source_folder = source_folder
        self._by_block = by_block
        self._writes = writes
        self._ranks, self._processes = Ranks(), Processes()

    def shared_by(self, processes: Processes, ranks: Ranks | None) -> AbstractContextManager[None]:
        """Share a run with other processes: each has the whole model.

        Args:
            processes: the processes of the run.
            ranks: those that share the work; ``None``: each does all of it.
        """
        self._ranks, self._processes = ranks or Ranks(), processes
        return nullcontext()

    def activation_room(self, room: Room) -> int | None:
        """Return the bytes of activations that may be kept; ``None``: as the memory allows."""
        return None

    def load(self, *, check: bool, tied: bool) -> None:
        """Refuse a model with NaN or infinity in any weight, targeted by a modifier or not."""
        check_finite_weights(self.model)

    def update(self, model: Module) -> None:
        """Take the model that the modifiers have initialized, and find its blocks."""
        self.model = model
        self.names = find_blocks(model) if self._by_block else {}

    def as_written(self) -> AbstractContextManager[None]:
        """Give the model the structure in which it is written, without values."""
        return dense_experts_fused(self.model)  # type: ignore[arg-type]  # others have no MoE

    @contextmanager
    def writing(self, output: PlannedOutput | None, report: Report) -> Iterator[None]:
        """Run the passes in the body; the model is written by :meth:`publish`."""
        self._report = report
        self._output = output if self._writes else None
        if self._output is not None:
            check_output_space(self._output.target, self._output.planned, self.source_folder)
        yield

    def reading(self) -> BlockSource:
        """The blocks for a pass that changes nothing."""
        found = BlockSource()
        found.names = find_blocks(self.model)
        return found

    def complete(self) -> None:
        """Fuse the experts that are not quantized into stacks again, which have no record."""
        self._reports = merged(self._ranks.exchange(self._report(None), what="records"))
        fuse_dense_experts(self.model)  # type: ignore[arg-type]  # others have no MoE modules

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all modules: modifier → module → record."""
        return self._reports

    def publish(self, options: SaveOptions) -> None:
        """Write the model to the output; GateError on all processes if it fails its gates."""
        refused: GateError | None = None
        if self._output is not None:
            malloc_trim()
            model: Any = self.model
            target, overwrite = self._output.target, self._output.overwrite
            try:
                save_checkpoint(model, target, options, overwrite=overwrite, was_free=True)
            except GateError as error:
                refused = error
        if options.gate is not None:
            refused = self._processes.all_gather("gates", refused, is_long=True)[0]
        if refused is not None:
            raise refused

    def show(self) -> None:
        """Let the model be used; it is complete."""


class StreamedBlocks(BlockSource):
    """Blocks that are streamed from a checkpoint into the model, and from there into the output.

    A recipe may need several passes over the model. All but the last store their blocks in a
    scratch folder, dense, and the next pass reads them from there. Of several processes the first
    one writes; the others take the output that it has written, in which all blocks are finished.

    Args:
        blueprint: the model, without weights.

    Attributes:
        weights: the loader of the blocks.
    """

    holds_all = False
    _output: PlannedOutput

    def __init__(self, blueprint: MetaModel) -> None:
        super().__init__()
        self._blueprint = blueprint
        self.model = blueprint.model
        self.source = blueprint.source
        self.source_folder = str(blueprint.source.directory)
        self.headers = blueprint.source.tensors
        self.dtype = blueprint.dtype
        self.weights = BlockWeights(blueprint, list(find_blocks(self.model).values()))
        self._made: Mapping[str, Any] | None = None
        self._block_names = set(self.weights.blocks)
        self._ranks = Ranks()
        self._workspace: Workspace | None = None
        self._writer: BlockWriter | None = None
        self._intact: set[tuple[int, str]] = set()
        self._done: set[tuple[int, str]] = set()
        self._inside: list[str] = []
        self._left = 0

    @property
    def device(self) -> torch.device:
        """The device that weights are loaded to."""
        return self.weights.device

    def activation_room(self, room: Room) -> int | None:
        """Return the bytes of activations that may be kept; ``None``: as the memory allows.

        Args:
            room: from the bytes in use and those of the largest block to that number, and whether
                blocks may be read ahead.
        """
        malloc_trim(at_least=0)
        used = psutil.Process().memory_info().rss
        block = max(map(self.weights.source_bytes, self.weights.blocks), default=0)
        activations, self.weights.reads_ahead = room(used, block)
        return activations

    def load(self, *, check: bool, tied: bool) -> None:
        """Load everything outside the blocks.

        Args:
            check: read all weights once, so that a damaged file fails before any work. That is done
                also where ranks read other files, as the hashes of these are compared.
            tied: leave embeddings tied; modifiers may untie them all the same.
        """
        if check or self.weights.differ_over(self._ranks):
            self.weights.check()
        self.weights.load_rest()
        if not tied:
            untie_embeddings(self.model)
        self._blueprint.drop_broken_ties()

    def update(self, model: Module) -> None:
        """Take note of what the modifiers have changed when they were initialized."""
        self._blueprint.drop_broken_ties()
        self.names = {self.model.get_submodule(name): name for name in self.weights.blocks}

    def as_written(self) -> AbstractContextManager[None]:
        """Give the model the structure in which it is written, which it has."""
        return nullcontext()

    @contextmanager
    def shared_by(self, processes: Processes, ranks: Ranks | None) -> Iterator[None]:
        """Share a run with other processes.

        Args:
            processes: the processes of the run.
            ranks: those that share the work; ``None``: the first process does it, and the others
                load its output.
        """
        if ranks is not None:
            self._ranks = ranks
            yield
            return
        if processes.count > 1 and not processes.is_first:
            made = processes.all_gather("output", is_long=True)[0]
            if isinstance(made, GateError):
                raise made
            self._made = made
        try:
            yield
        except GateError as error:
            if processes.count > 1:
                processes.all_gather("output", error)
            raise
        if processes.count > 1:
            if processes.is_first:
                choices = self._journal.choices.items()
                # what the free memory decides does not bind the others
                told = {key: one for key, one in choices if not key.endswith(".granularity")}
                config = _config_hash(self._output.target)
                processes.all_gather("output", {"config": config, "choices": told})
            processes.all_gather("model of the output", is_long=True)

    @contextmanager
    def writing(self, output: PlannedOutput | None, report: Report) -> Iterator[None]:
        """Open the output and run the passes in the body.

        Raises:
            OutputError: as :func:`~llmcompressor.checkpoint.journal.open_workspace`; or the
                output is not what the first process has written.
        """
        assert output is not None, "only a run with an output is streamed"
        planned = output.planned
        self._output, self._report = output, report
        self._last = output.passes - 1
        self._stored_names = NameMap(self.model)
        self._layout = layout_files(planned.stored)
        self._restorer = BlockRestorer(self.model, planned.quantized, self._layout, self.weights)
        self._entries: dict[str, list[QuantizedModule]] = {}
        self._places = self._stored_names.stored({one.name: one for one in planned.quantized})
        for entry in planned.quantized:
            self._entries.setdefault(self._block_of(entry.name), []).append(entry)
        self._shared = SharedOutput(self._ranks, planned.stored, self._places.values())
        if self._made is not None:
            if _config_hash(output.target) != self._made["config"]:
                raise OutputError(
                    f"{output.target} is not what the first process has just written.",
                    "Give an output directory that all processes see.",
                )
            parts = [*self.weights.blocks, REST]
            self._intact = {(stage, one) for stage in range(output.passes) for one in parts}
            self._done = set(self._intact)
            yield
            return
        identity = output.identity(self)
        self._shared.check_identity(identity)
        if self._ranks.rank != 0:
            with disk_errors(output.target), closing(self):
                self._join()
                yield
            return
        with open_workspace(
            output.target, identity, resume=output.resume, overwrite=output.overwrite
        ) as workspace:
            try:
                with closing(self):
                    self._open(workspace, output)
                    yield
            except _IN_THE_CALL:
                workspace.abandon()
                raise

    def _join(self) -> None:
        """Open the output that the first rank has made."""
        told = self._shared.join()
        self._files = Path(told["files"])
        self._scratch = ScratchBlocks(Path(told["scratch"]))
        self._intact = {(stage, block) for stage, block in told["intact"]}
        self._done = set(self._intact)
        with self._ranks.agreed("opening the output"), creation_errors(self._output.target):
            self._writer = BlockWriter(self._files, self._layout, joins=True)

    def _open(self, workspace: Workspace, output: PlannedOutput) -> None:
        """Allocate the output, and find what an earlier run has finished."""
        self._workspace, self._files = workspace, workspace.files
        self._scratch = ScratchBlocks(workspace.scratch)
        is_ready, needed = workspace.journal.is_ready, output.scratch
        left = 0 if is_ready else unallocated_bytes(workspace.scratch, needed)
        beside = non_weight_bytes(self.source.directory, len(self._layout.places))
        self._writer = BlockWriter(workspace.files, self._layout, scratch=left, beside=beside)
        self._intact = self._find_intact(self._writer)
        self._done = set(self._intact)
        told = {"scratch": str(workspace.scratch), "intact": sorted(self._intact)}
        self._shared.opened(self._files, workspace.folder, told)
        with self._ranks.agreed("opening the output"):
            pass

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
        return self._output.compressed and self.stage == self._last

    @property
    def _journal(self) -> Journal:
        assert self._workspace is not None, "only the first process writes"
        return self._workspace.journal

    @property
    def processors(self) -> Sequence[Any]:
        """The processors that had a part in the run, if they are several."""
        return () if self._workspace is None else self._journal.processors

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a machine-dependent choice, or record ``value``."""
        key = f"{self.stage}.{name}"
        if self._made is not None:
            return self._made["choices"].get(key, value)
        made = self._journal.decide(key, value) if self._ranks.rank == 0 else None
        return self._ranks.exchange(made, what=f"the choice of {name}")[0]

    def refuse_uncalled(self, names: Sequence[str]) -> None:
        """Refuse blocks that are not called when their forward runs, as they would not be loaded.

        Raises:
            TargetError: names the first one.
        """
        if names:
            raise TargetError(
                f"The model's code runs the forward of {names[0]} without calling the module, so "
                "that its weights cannot be loaded for the time that it runs.",
                "Load the model, and give oneshot that in place of its folder.",
            )

    def enter(self, block: str) -> None:
        """Load a block as the previous pass left it, and start to read the next one."""
        if self.stage > 0:
            self._put_scratch(self.stage - 1, block)
            return
        with one_thread(_CPU):
            self.weights.load(block)
        self._inside.append(block)
        self._read_ahead()

    def restore(self, block: str, modules: Collection[Module]) -> None:
        """Restore modules of a block to the state in which an earlier run left them."""
        if self.stage < self._last:
            self._put_scratch(self.stage, block, modules)
            return
        self._flush()
        files = self._output.target if self._made is not None else self._files
        self._restorer.restore(block, files, modules)

    def remember(
        self, name: str, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]
    ) -> None:
        """Save a progress checkpoint of the current pass, replacing that of the same name."""
        journal, stage = self._journal, self.stage
        last = journal.progress.get((stage, name))
        number = 0 if last is None else last.number + 1
        digest = self._scratch.write(stage, f"{name}-{number}", tensors)
        journal.add(ProgressEntry(stage, name, number, digest, dict(figures)))
        if last is not None:
            self._scratch.remove(stage, f"{name}-{last.number}")

    def recall(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last intact progress checkpoint of that name in this pass, or ``None``."""
        entry = self._journal.progress.get((self.stage, name))
        if entry is None:
            return None
        file = f"{name}-{entry.number}"
        if self._scratch.digest(self.stage, file) != entry.digest:
            logger.warning(f"{file}: damaged on the disk, and done again.")
            return None
        return self._scratch.read(self.stage, file)[0], dict(entry.figures)

    def forget(self) -> None:
        """Mark the current pass and all later ones as not finished."""
        gone = {one for one in self._intact if one[0] >= self.stage}
        if gone:
            logger.warning("What all blocks depend on is lost: they are done again.")
        self._intact -= gone
        self._done -= gone

    def show_source(self) -> None:
        """Let the model be used as it is stored: its blocks are loaded when they are accessed."""
        weights = BlockWeights(self._blueprint, self.weights.blocks, self.device)
        for block in self.weights.blocks:
            _load_lazily(self.model.get_submodule(block), partial(weights.load, block))

    def reading(self) -> BlockSource:
        """The blocks for a pass that changes nothing, before the first pass."""

        def load(block: str) -> None:
            with one_thread(_CPU):
                self.weights.load(block)

        return ReadBlocks(self, load, self.weights.release)

    @contextmanager
    def visits(self) -> Iterator[Visit]:
        """Load blocks one at a time, as the previous pass left them, without writing anything.

        Yields a function that loads a block, frees the one before and starts to read another.
        """
        inside: list[Module] = []

        def let_go() -> None:
            while inside:
                self.weights.release(self.names[inside.pop()])
                malloc_trim()

        def visit(module: Module, then: Module | None) -> None:
            if module not in inside:
                let_go()
                block = self.names[module]
                if self.stage > 0:
                    self._put_scratch(self.stage - 1, block)
                else:
                    self.weights.load(block)
                inside.append(module)
            if then is not None and self.stage == 0:
                self.weights.read_ahead(self.names[then])

        try:
            yield visit
        finally:
            let_go()

    def leave(self, block: str) -> None:
        """Write a block, unless an earlier run did so, and free its tensors."""
        if (self.stage, block) not in self._done:
            with one_thread(_CPU):  # large tensors are split into pieces; small ones are many
                self._keep(block)
        self.weights.release(block)
        self._left += 1
        malloc_trim(at_least=2 * TOLERATED if self._left % _RETURNED_EVERY else 0)
        if block in self._inside:
            self._inside.remove(block)
            self._read_ahead()

    def complete(self) -> None:
        """Write the blocks that no pipeline visited, and everything outside the blocks."""
        assert self.stage == self._last
        for block in self.weights.blocks:
            if (self.stage, block) not in self._done:
                self.enter(block)
                self.leave(block)
        if not self.rest_is_finished:
            state, extras = self.model.state_dict(), self._output.planned.extras
            rest = {name: one for name, one in state.items() if self._block_of(name) == REST}
            self._write(REST, _only_tensors(rest) | dict(read_tensors(extras)))
        self._flush()
        self._note_durable()

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all blocks, from whichever run: modifier → module → record."""
        found: dict[str, dict[str, Any]] = {}
        if self._made is not None:
            written = read_report(self._output.target) or {}
            return {**written.get("modifiers", {}), "experts": written.get("experts", {})}
        entries = self._journal.entries.values() if self._ranks.rank == 0 else ()
        for entry in entries:
            for modifier, records in entry.report.items():
                found.setdefault(modifier, {}).update(records)
        return found

    def publish(self, options: SaveOptions) -> None:
        """Write all files but the weights, and give the output its name.

        Raises:
            GateError: it does not keep its gates, and is in ``NAME.rejected``; on all ranks.
        """
        if self._workspace is None and self._made is not None:  # the first process has done that
            return
        refused = self._publish_alone(options)
        refused = self._ranks.patient(refused, what="writing of the other files")[0]
        if refused is not None:
            raise refused
        if self._workspace is None:
            self._made = {"choices": {}}

    def _publish_alone(self, options: SaveOptions) -> GateError | None:
        """Write and publish the output in the one process that does; return why it may not be."""
        workspace = self._workspace
        if workspace is None:
            return None
        planned, overwrite = self._output.planned, self._output.overwrite
        if not workspace.is_published:
            weights = self._written_weights()
            write_non_weight_files(self.model, workspace.files, options, planned, weights)
            workspace.mark_ready()
        if self._output.is_held:
            return None
        try:
            workspace.publish(replace=overwrite, gate=options.gate)
        except GateError as error:
            return error
        logger.info(f"Saved {workspace.target}.")
        return None

    def _written_weights(self) -> WrittenWeights:
        """The weight files with all hashes, of this run and of those that it goes on from."""
        entries = self._journal.entries
        written: dict[str, str] = {}
        read = dict(self.weights.hashes.get(REST, {}))
        for (stage, _), entry in entries.items():
            written |= entry.written if stage == self._last else {}
            read |= entry.read
        return WrittenWeights(self._layout, written, self.headers, read)

    def show(self) -> None:
        """Make the model load its blocks lazily from the output, if that has its name."""
        if self._output.is_held:
            return
        if self.rest_is_finished:
            self._restorer.restore(REST, self._output.target)
        self._restorer.attach_lazy_blocks(self._output.target, self.names)

    def close(self) -> None:
        """Stop the reader and writer threads."""
        if self._writer is not None:
            self._writer.close()
        self.weights.close()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _read_ahead(self) -> None:
        """Start to read the next block, unless two are loaded or being read already."""
        if len(self._inside) != 1:
            return
        position = self.weights.blocks.index(self._inside[0]) + 1
        if position < len(self.weights.blocks):
            self.weights.read_ahead(self.weights.blocks[position])

    def _keep(self, block: str) -> None:
        tensors = self._tensors_of(block)
        self._done.add((self.stage, block))
        if self.stage == self._last:
            self._write(block, tensors)
            return
        rotations = tuple(
            f"{name}."
            for name, module in self.model.get_submodule(block).named_modules(prefix=block)
            if isinstance(module, HadamardTransform)
        )
        # the next pass needs all but the matrices of rotations
        kept = {name: one for name, one in tensors.items() if not name.startswith(rotations)}
        records = self._shared.merged(self._records(block), block)
        with self._ranks.agreed(f"writing {block}"):
            if self._ranks.rank == 0:
                self._commit(block, records, self._scratch.write(self.stage, block, kept))

    def _records(self, block: str) -> dict[str, Any]:
        if block == REST:
            every = (name for name, _ in self.model.named_modules())
            outside = (name for name in every if name not in self._block_names)
            names = [name for name in outside if self._block_of(name) == REST]
        else:
            inner = self.model.get_submodule(block).named_modules(prefix=block)
            names = [name for name, _ in inner]
        return dict(self._report(names))

    def _write(self, block: str, tensors: Mapping[str, Tensor]) -> None:
        entries = self._entries.get(block, [])
        planned = self._output.planned
        mine = [one for one in entries if self._shared.packs(self._places[one.name])]
        records = self._shared.merged(self._records(block), block)
        stored = compress_block(self._stored_names, tensors, mine, planned.plain_keys)
        for entry in entries:
            if entry.is_raw:  # its weight is rounded when it is read back
                entry.module.quantization_status = QuantizationStatus.DECOMPRESSED
        extras = {name: tensors[name] for name in planned.extras if name in tensors}
        assert self._writer is not None, "only processes that share the work write"
        own = {name: one for name, one in (stored | extras).items() if self._shared.writes(name)}
        self._ranks.tally["written"] += sum([one.nbytes for one in own.values()])
        if self._ranks.count == 1:
            alone = partial(self._commit, block, records)
            self._writer.write(own, lambda written: alone(digest_of(written), written))
            return
        self._writer.flush()
        self._note_durable()
        self._writer.write(own, partial(self._shared.add, block, records))

    def _note_durable(self) -> None:
        """Journal the blocks that all ranks have written."""
        if self._ranks.count > 1:
            for block, (records, written) in self._shared.take_durable().items():
                if self._ranks.rank == 0:
                    self._commit(block, records, digest_of(written), written)

    def _commit(
        self,
        block: str,
        report: Mapping[str, Any],
        digest: str,
        written: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        source, files, read = "", dict[str, str](), dict[str, str]()
        if self.stage == 0:
            source = self.weights.digests.get(block, "")
            files = dict(self.weights.files.get(block, {}))
            read = dict(self.weights.hashes.get(block, {}))
        entry = BlockEntry(block, digest, source, report, self.stage, files, dict(written), read)
        self._journal.add(entry)

    def _put_scratch(
        self, stage: int, block: str, modules: Collection[Module] | None = None
    ) -> None:
        # a modifier's own parameters exist only once it has initialized the module
        state = {
            name
            for name in self._tensors_of(block)
            if modules is None or self.model.get_submodule(name.rpartition(".")[0]) in modules
        }
        tensors, _ = self._scratch.read(stage, block)
        present = {name: tensor for name, tensor in tensors.items() if name in state}
        self.weights.put(present, {name: LoadedName(name, merged=False) for name in present})
        self.weights.settle()

    def _tensors_of(self, block: str) -> dict[str, Tensor]:
        state = self.model.get_submodule(block).state_dict()
        return _only_tensors({f"{block}.{name}": value for name, value in state.items()})

    def _block_of(self, name: str) -> str:
        """Return the name of the block that contains a module or tensor, or :data:`REST`."""
        end = name.find(".")
        while end > 0:
            if name[:end] in self._block_names:
                return name[:end]
            end = name.find(".", end + 1)
        return REST

    def _find_intact(self, writer: BlockWriter) -> set[tuple[int, str]]:
        """Return the (pass, block) pairs whose data on disk matches the journal."""
        entries = self._journal.entries
        groups = {block: self._restorer.names_of(block) for s, block in entries if s == self._last}
        written = writer.digests_of(groups)
        intact = set()
        for (stage, block), entry in entries.items():
            kept = self._scratch.digest(stage, block) if stage < self._last else written[block]
            if kept == entry.digest:
                intact.add((stage, block))
            if stage == 0 and entry.source:  # all blocks must come from one source
                self.weights.verify_digest(block, entry.source, entry.files)
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
            log_progress(f"{len(intact)} of {total} parts are finished already.")
        return intact


def _config_hash(folder: Path) -> str:
    file = folder / "config.json"
    return xxhash.xxh3_128_hexdigest(file.read_bytes()) if file.is_file() else ""


def _only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
