# SPDX-License-Identifier: Apache-2.0
"""Block-wise loading of weights into a model that was built on the meta device.

A block's tensors are read from the checkpoint just before a forward pass enters it and freed when
all batches have left it. A thread reads the next block meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from compressed_tensors.transform import HadamardTransform
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from llmcompressor.checkpoint.meta_model import MetaModel, meta_parameter, no_progress_bars
from llmcompressor.checkpoint.names import LoadedName
from llmcompressor.checkpoint.tensor_files import TensorReader
from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import CheckpointError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.weights import first_nonfinite
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.memory import malloc_trim
from llmcompressor.runtime.progress import progress
from llmcompressor.transformers_internals import conversions_of, dtype_plan, set_conversions

REST = ""
"""The name of what lies in no block: embeddings, the last norm, the head."""


# Tied parameters that the checkpoint stores twice: tied only if equal. transformers decides so too,
# but it needs the values, which a model built on the meta device does not have.


@dataclass(frozen=True)
class AssumedTie:
    """Two stored tensors that are assumed to be tied unread, and the bytes of one in memory."""

    source: str
    target: str
    nbytes: int


def resolve_ties(model: PreTrainedModel, equal: Callable[[str, str], bool | None]) -> None:
    """Tie two parameters as configured if they are equal, and untie them otherwise.

    ``equal`` compares two parameters by name; for ``None`` they are left as they are.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        path, _, own = target.rpartition(".")
        first, second = model.get_parameter(source), model.get_parameter(target)
        if first is second:
            continue
        same = equal(source, target)
        if same:
            model.get_submodule(path)._parameters[own] = first
        elif same is not None:
            logger.warning(
                f"The configuration ties {target} to {source}, but they have different values: "
                "they stay apart."
            )
            tied.pop(target)


def resolve_ties_by_config(blueprint: MetaModel) -> list[AssumedTie]:
    """Resolve ties of a model without weights: tensors of one shape are assumed to be equal.

    Returns the pairs that are assumed to be tied, though the files hold both.
    """
    headers = blueprint.source.tensors
    rest = blueprint.tensors_of(None, list(find_blocks(blueprint.model).values()))
    places = {blueprint.names[name].target: name for name in rest}
    believed = []

    def equal(source: str, target: str) -> bool | None:
        if source not in places or target not in places:
            return None  # those of a block are never both stored
        if headers[places[source]].shape != headers[places[target]].shape:
            return False
        nbytes = blueprint.model.get_parameter(target).nbytes
        believed.append(AssumedTie(source, target, nbytes))
        return True

    resolve_ties(blueprint.model, equal)
    return believed


def same_values(model: PreTrainedModel, source: str, target: str) -> bool | None:
    """Return True if two parameters are equal; ``None`` where one of them is on the meta device."""
    first, second = model.get_parameter(source), model.get_parameter(target)
    return None if first.is_meta or second.is_meta else torch.equal(first, second)


@dataclass(frozen=True)
class _ReadBlock:
    """A block that has been read but is not in the model yet, with the hash of each tensor."""

    tensors: dict[str, Tensor]
    hashes: dict[str, str]
    digest: str
    files: Mapping[str, str]


def _combined(hashes: Mapping[str, str]) -> str:
    lines = [f"{name} {digest}" for name, digest in hashes.items()]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


class BlockWeights:
    """Load and free the weights of a model block by block.

    Attributes:
        blocks: names of the modules that are loaded one by one, in order.
        device: the device that weights are loaded to.
        reads_ahead: enables :meth:`read_ahead`.
        digests: block → hash of its tensors as they were read.
        files: block → file that it was read from → the file's stamp before reading.
        hashes: block → tensor → its hash as it was read.
    """

    def __init__(
        self, blueprint: MetaModel, blocks: Sequence[str], device: torch.device | str = "cpu"
    ) -> None:
        self._blueprint = blueprint
        self._model = blueprint.model
        self.blocks = list(blocks)
        self.device = torch.device(device)
        self._names = {name: blueprint.tensors_of(name, blocks) for name in blocks}
        self._names[REST] = blueprint.tensors_of(None, blocks)
        self._reader = TensorReader(blueprint.source.tensors)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: dict[str, Future[_ReadBlock]] = {}
        self.reads_ahead = True
        self.digests: dict[str, str] = {}
        self.files: dict[str, Mapping[str, str]] = {}
        self.hashes: dict[str, Mapping[str, str]] = {}
        self._stamps: dict[str, str] = {}

    def source_bytes(self, block: str) -> int:
        """Bytes of a block's tensors in the checkpoint."""
        headers = self._blueprint.source.tensors
        return sum(headers[name].nbytes for name in self._names[block])

    @property
    def fingerprint(self) -> dict[str, str]:
        """The hashes of what was read so far: block, or name of a tensor outside blocks → hash."""
        blocks = {block: digest for block, digest in self.digests.items() if block != REST}
        return {**self.hashes.get(REST, {}), **blocks}

    def differ_over(self, ranks: Ranks) -> bool:
        """Return True unless all ranks read the same files, by their stamps, and not copies."""
        stamps = self._reader.file_stamps(self._blueprint.source.tensors)
        own = xxhash.xxh3_128_hexdigest(json.dumps(stamps, sort_keys=True).encode())
        return len(set(ranks.exchange(own, what="files of the model"))) > 1

    def load_rest(self) -> None:
        """Load everything outside the blocks, and resolve which embeddings are tied."""
        self.load(REST)
        resolve_ties(self._model, partial(same_values, self._model))

    def check(self) -> None:
        """Read every weight once, so that a damaged checkpoint fails before any work is done.

        Raises:
            CheckpointError: a file cannot be read.
            NonFiniteError: a tensor holds NaN or infinity.
        """
        headers = self._blueprint.source.tensors
        with progress(sum(map(len, self._names.values())), "Checking weights") as advance:
            for block, names in self._names.items():
                hashes: dict[str, str] = {}
                for name in names:
                    tensor, hashes[name] = self._read_tensor(name, once=block == REST)
                    if tensor.is_floating_point() and not is_finite(tensor):
                        raise NonFiniteError(
                            f"The weight {name} in {headers[name].file} holds NaN or infinity. "
                            "The checkpoint is damaged or was saved in a dtype too narrow for it: "
                            "get it anew."
                        )
                    advance(1)
                self.digests[block], self.hashes[block] = _combined(hashes), hashes

    def load(self, block: str) -> None:
        """Read a block's tensors and put them into the model.

        Raises:
            CheckpointError: a file cannot be read, was written to meanwhile, or the block is not
                complete.
            NonFiniteError: a tensor holds NaN or infinity.
        """
        future = self._ahead.pop(block, None)
        read = future.result() if future is not None else self._read(block)
        for file, stamp in read.files.items() if block not in self.digests else ():
            # there is no earlier hash to compare with
            if self._stamps.setdefault(file, stamp) != stamp:
                raise CheckpointError(
                    f"{file} was written to or replaced while this run reads it.",
                    "Start the same call again when the file is as it is to be: what is finished "
                    "is compared with it, and kept where nothing is another.",
                )
        self._check_digest(block, read.digest)
        self.files[block], self.hashes[block] = read.files, read.hashes
        self.put(read.tensors, self._blueprint.names)
        self.settle()
        self._fill_tied(block)
        self._check(block)

    def verify_digest(self, block: str, digest: str, files: Mapping[str, str]) -> None:
        """Check (CheckpointError) by its hash that a block is as an earlier run read it.

        It is read only where its files have other stamps, and this run has not read it yet.
        """
        if block not in self.digests and files != self._reader.file_stamps(self._names[block]):
            self.digests[block] = self._read(block).digest
        self._check_digest(block, digest)

    def read_ahead(self, block: str) -> None:
        """Start to read a block on a thread, for :meth:`load` to pick up."""
        if self.reads_ahead and block not in self._ahead:
            self._ahead[block] = self._pool.submit(self._read, block)

    def release(self, block: str) -> None:
        """Free a block's tensors, except those shared with other parts of the model.

        Online rotation matrices stay too: one block holds them for all.
        """
        inside = set(self._model.get_submodule(block).modules())
        kept = {
            id(owner._parameters[name])
            for owners in self._blueprint.shared
            if any(other not in inside for other, _ in owners)
            for owner, name in owners
        }
        for inner in inside:
            for name, parameter in inner._parameters.items():
                is_kept = isinstance(inner, HadamardTransform) or id(parameter) in kept
                if parameter is not None and not is_kept:
                    inner._parameters[name] = meta_parameter(parameter)

    def close(self) -> None:
        """Stop the reading thread and close the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._reader.close()

    def _read(self, block: str) -> _ReadBlock:
        names = self._names[block]
        files = self._reader.file_stamps(names)  # before the data: a write meanwhile is noticed
        read = {name: self._read_tensor(name, once=block == REST) for name in names}
        hashes = {name: digest for name, (_, digest) in read.items()}
        tensors = {name: tensor for name, (tensor, _) in read.items()}
        return _ReadBlock(tensors, hashes, _combined(hashes), files)

    def _read_tensor(self, name: str, *, once: bool = False) -> tuple[Tensor, str]:
        digest = xxhash.xxh3_128()
        return self._reader.read(name, digest, once=once), digest.hexdigest()

    def _check_digest(self, block: str, digest: str) -> None:
        if self.digests.setdefault(block, digest) != digest:
            raise CheckpointError(
                f"The weights of {block or 'the model'} are not what they were when this run "
                "began.",
                'Restore them, or throw the progress away with resume="never" (--resume never).',
            )

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], names: Mapping[str, LoadedName]) -> None:
        """Assign checkpoint tensors by ``names``, in the dtypes of the model."""
        merged = {name: tensor for name, tensor in tensors.items() if names[name].merged}
        for name, tensor in tensors.items():
            if name in merged:
                continue
            path, _, own = names[name].target.rpartition(".")
            module = self._model.get_submodule(path)
            present, buffer = module._parameters.get(own), module._buffers.get(own)
            if present is not None:
                value = tensor.to(self.device, present.dtype)
                module._parameters[own] = Parameter(value, requires_grad=value.is_floating_point())
            else:
                assert buffer is not None
                module._buffers[own] = tensor.to(self.device, buffer.dtype)
        if merged:
            self._convert(merged)

    def _convert(self, tensors: Mapping[str, Tensor]) -> None:
        model: Any = self._model
        conversions = conversions_of(model)
        mapping: Any = get_model_conversion_mapping(model)
        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self._blueprint.dtype,
            dtype_plan=dtype_plan(model, self._blueprint.dtype),
            weight_mapping=mapping,
        )
        with no_progress_bars():
            info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
        set_conversions(model, conversions)
        if info.conversion_errors:
            name, error = next(iter(info.conversion_errors.items()))
            raise CheckpointError(f"The tensors of {name} cannot be merged: {error}")

    def settle(self) -> None:
        """Tie again the parameters that were tied before a block was loaded."""
        for owners in self._blueprint.shared:
            loaded = [
                module._parameters[name] for module, name in owners if not _is_empty(module, name)
            ]
            if loaded:
                for module, name in owners:
                    module._parameters[name] = loaded[0]

    @torch.no_grad()
    def _fill_tied(self, block: str) -> None:
        """Fill tied parameters whose tensor the file stores under another block's name."""
        inside = {self._model.get_submodule(name) for name in self._own_modules(block)}
        names, paths = self._blueprint.names, dict[Module, str]()
        for owners in self._blueprint.stored_once:
            lacking = [one for one in owners if one[0] in inside and _is_empty(*one)]
            if not lacking:
                continue
            paths = paths or {module: path for path, module in self._model.named_modules()}
            targets = {f"{paths[module]}.{own}": (module, own) for module, own in owners}
            stored = [name for name, loaded in names.items() if loaded.target in targets]
            if not stored:
                continue
            module, own = targets[names[stored[0]].target]
            kept = module._parameters[own]  # its own place keeps its value
            self.put({name: self._reader.read(name) for name in stored}, names)
            read, module._parameters[own] = module._parameters[own], kept
            assert read is not None
            for place, name in lacking:
                place._parameters[name] = Parameter(read.clone(), requires_grad=read.requires_grad)
        self.settle()

    def _check(self, block: str) -> None:
        names = self._own_modules(block)
        empty = [
            f"{name}.{own}"
            for name in names
            for own, parameter in self._model.get_submodule(name)._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        if empty:
            raise CheckpointError(
                f"The checkpoint has nothing for {empty[0]} ({len(empty)} such tensors).",
                "Check that config.json belongs to these weights.",
            )
        bad = first_nonfinite(self._model, names)
        if bad is not None:
            kind = type(self._model.get_submodule(block)).__name__
            raise NonFiniteError(
                f"The weight {bad} holds NaN or infinity: the {kind} would "
                "compute nothing. Check the checkpoint it was read from."
            )

    def _own_modules(self, block: str) -> list[str]:
        if block:
            inner = self._model.get_submodule(block).named_modules(prefix=block)
            return [name for name, _ in inner]
        inside = tuple(f"{name}." for name in self.blocks)
        return [
            name
            for name, _ in self._model.named_modules()
            if not (inside and f"{name}.".startswith(inside))
        ]


def _is_empty(module: Module, name: str) -> bool:
    parameter = module._parameters[name]
    return parameter is None or parameter.is_meta


# --------------------
# Blocks for a pass that changes nothing.


class ReadBlocks(BlockSource):
    """Blocks that are loaded for a pass that only reads them, and freed unwritten.

    Args:
        blocks: the blocks of the run.
        load: loads the weights of a block, by name.
        release: frees them.
    """

    holds_all = False

    def __init__(
        self, blocks: BlockSource, load: Callable[[str], None], release: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.names = blocks.names
        self._blocks, self._load, self._release = blocks, load, release

    def enter(self, block: str) -> None:
        """Load the weights of a block."""
        self._load(block)

    def leave(self, block: str) -> None:
        """Free them."""
        self._release(block)
        malloc_trim()

    def refuse_uncalled(self, names: Sequence[str]) -> None:
        """Refuse what the blocks of the run refuse."""
        self._blocks.refuse_uncalled(names)
