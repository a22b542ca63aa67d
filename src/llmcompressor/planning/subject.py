# SPDX-License-Identifier: Apache-2.0
"""The planned model: its structure and file headers, without its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compressed_tensors.transform import HadamardTransform
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.args import ModelArguments
from llmcompressor.checkpoint.block_reader import (
    AssumedTie,
    resolve_ties,
    resolve_ties_by_config,
    same_values,
)
from llmcompressor.checkpoint.load import (
    check_no_peft_adapters,
    check_unquantized,
    copy_without_weights,
)
from llmcompressor.checkpoint.meta_model import MetaModel, build_meta_model
from llmcompressor.checkpoint.moe_names import unfuse_meta_model, unfuse_stored_experts
from llmcompressor.checkpoint.names import LoadedName, drop_dequantizing_conversions
from llmcompressor.checkpoint.source import (
    TensorHeader,
    check_no_adapter,
    inspect_source,
    local_directory,
)
from llmcompressor.checkpoint.tensor_files import DTYPES
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.pipelines.moe_selection import targeted_moes, unquantized_moes
from llmcompressor.runtime.progress import format_bytes

REST = ""
"""The name of what lies in no block."""


@dataclass(frozen=True)
class Part:
    """A block, or all modules outside of blocks.

    Attributes:
        name: of the block.
        modules: the block and everything inside, by name.
        loaded: bytes of its parameters in the model's dtype; matrices of online rotations, which
            stay when a block is freed, count for the part outside of blocks.
        source: bytes of its tensors in the files.
        converted: bytes of tensors that are converted while loading, to another dtype or by
            merging: both forms are held then.
    """

    name: str
    modules: Mapping[str, Module]
    loaded: int
    source: int
    converted: int


@dataclass(frozen=True)
class PlannedModel:
    """The planned model.

    Attributes:
        model: the model on the meta device; the plan may mark its modules.
        place: folder, hub id or name of the model.
        directory: its folder; ``None`` for an object without one.
        headers: headers of the tensors in its files.
        names: tensor of its files → its name in the model.
        source_bytes: bytes of its weight files, or of its parameters.
        is_in_memory: it was given as a loaded model.
        is_hollow: its files have headers but no data.
        blueprint: the meta model with its source; ``None`` if it was given as a loaded model.
        whole: reason why its blocks cannot be streamed; empty if its files allow it.
        believed: tensors that the configuration ties but the files store twice; they are assumed
            to be equal.
    """

    model: PreTrainedModel
    place: str
    directory: Path | None
    headers: Mapping[str, TensorHeader]
    names: Mapping[str, LoadedName]
    source_bytes: int
    is_in_memory: bool
    is_hollow: bool = False
    blueprint: MetaModel | None = None
    whole: str = ""
    believed: Sequence[AssumedTie] = ()

    @cached_property
    def module_names(self) -> Mapping[str, Module]:
        """All modules of the model by name."""
        return dict(named_modules(self.model))

    @property
    def notes(self) -> list[str]:
        """Notes on assumptions that a run would check on the data."""
        one = self.model.get_parameter  # a modifier may have untied them
        believed = [tie for tie in self.believed if one(tie.source) is one(tie.target)]
        hollow = "The weight files hold headers and no data: a run needs the data."
        return [hollow] * self.is_hollow + [
            f"The configuration ties {tie.target} to {tie.source}, and the files hold both. The "
            "plan reads no weights and takes them for one. The run compares them when it has "
            "loaded them: if they differ, it warns, keeps and writes both "
            f"({format_bytes(tie.nbytes)} more before anything is quantized), and "
            f"{tie.target.rpartition('.')[0]} is a module like others, which targets reach."
            for tie in believed
        ]

    def parts(self) -> list[Part]:
        """Return the blocks in order, and last the modules outside of blocks."""
        blocks = find_blocks(self.model)
        region = {
            inner: name for block, name in blocks.items() for _, inner in named_modules(block)
        }
        members: dict[str, dict[str, Module]] = {name: {} for name in [*blocks.values(), REST]}
        for name, module in self.module_names.items():
            members[region.get(module, REST)][name] = module
        source = self._source_of(members)
        # Parameters of online rotations are always loaded, others are freed with their block.
        loaded = {
            name: _own_bytes(one for one in own.values() if not isinstance(one, HadamardTransform))
            for name, own in members.items()
        }
        loaded[REST] += _own_bytes(
            one for one in self.model.modules() if isinstance(one, HadamardTransform)
        )
        return [
            Part(name, modules, loaded[name], *source[name]) for name, modules in members.items()
        ]

    def _source_of(self, members: Mapping[str, Mapping[str, Module]]) -> dict[str, tuple[int, int]]:
        part_of = {module: part for part, modules in members.items() for module in modules}
        found = {part: (0, 0) for part in members}
        for name, own in self.names.items():
            owner, _, last = own.target.rpartition(".")
            part, header = part_of.get(owner, REST), self.headers[name]
            present = self.module_names[owner]._parameters.get(last)
            same = present is None or DTYPES.get(header.dtype) is present.dtype
            whole, converted = found[part]
            changed = header.nbytes if own.merged or not same else 0
            found[part] = (whole + header.nbytes, converted + changed)
        return found


def open_planned_model(args: ModelArguments, modifiers: Sequence[Modifier] = ()) -> PlannedModel:
    """Open the model that the arguments name, without its weights.

    Args:
        args: the model arguments.
        modifiers: of the recipe; the experts they target are unfused.

    Raises:
        TargetError: targeted experts cannot be unfused.
        CheckpointError: it is not on this machine, is damaged, incomplete or quantized already.
        ArgumentError: the object is no model, or has adapters.
    """
    if isinstance(args.model, str | Path):
        return _from_folder(args, modifiers)
    if isinstance(args.model, Module):
        check_no_peft_adapters(args.model)
    if not isinstance(args.model, PreTrainedModel):
        raise ArgumentError(
            f"The model is a {type(args.model).__name__}, which cannot be planned.",
            "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
        )
    return _from_object(args.model, modifiers, tie=args.tie_word_embeddings)


def _from_folder(args: ModelArguments, modifiers: Sequence[Modifier]) -> PlannedModel:
    folder = local_directory(args.model, revision=args.model_revision, cache_dir=args.cache_dir)
    source = inspect_source(
        args.model if folder is None else folder, headers_only=True, allow_absent=True
    )
    check_no_adapter(source.directory)
    if not source.tensors:
        raise CheckpointError(
            f"The weights of {source.directory} are not safetensors files, whose headers are "
            "what is planned from.",
            "Load the model with transformers and save it; it writes safetensors.",
        )
    blueprint = build_meta_model(
        source,
        config_name=args.config_name,
        precision=args.precision,
        trust_remote_code=args.trust_remote_code_model,
    )
    ends: dict[Path, int] = {}  # of the files with all the data that their headers declare
    for header in source.tensors.values():
        ends[header.file] = max(ends.get(header.file, 0), header.offset + header.nbytes)
    size = sum(ends.values())
    is_hollow = source.size < size
    believed = resolve_ties_by_config(blueprint)
    if not args.tie_word_embeddings:
        untie_embeddings(blueprint.model)
    mixtures = targeted_moes(blueprint.model, modifiers)
    whole = unfuse_meta_model(
        blueprint, mixtures, unquantized_moes(mixtures, blueprint.model, modifiers)
    )
    if whole:
        unfuse_stored_experts(blueprint.model, mixtures)
    return PlannedModel(
        blueprint.model,
        str(args.model),
        source.directory,
        blueprint.source.tensors,
        blueprint.names,
        size,
        is_in_memory=False,
        is_hollow=is_hollow,
        blueprint=blueprint,
        whole=whole,
        believed=believed if args.tie_word_embeddings else (),
    )


def _from_object(
    model: PreTrainedModel, modifiers: Sequence[Modifier], *, tie: bool
) -> PlannedModel:
    check_unquantized(model)
    hollow: Any = copy_without_weights(model)
    drop_dequantizing_conversions(hollow)
    resolve_ties(hollow, lambda one, other: same_values(model, one, other))
    if not tie:
        untie_embeddings(hollow)
    unfuse_stored_experts(hollow, targeted_moes(hollow, modifiers))
    place = str(getattr(model.config, "name_or_path", "") or "")
    folder = local_directory(place) if place else None
    headers: Mapping[str, TensorHeader] = {}
    if folder is not None:
        headers = inspect_source(folder, allow_quantized=True, allow_absent=True).tensors
    size = _own_bytes(hollow.modules())
    name = place or type(model).__name__
    return PlannedModel(hollow, name, folder, headers, {}, size, is_in_memory=True)


def _own_bytes(modules: Iterable[Module]) -> int:
    """Bytes of the parameters of modules; shared ones count once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for one in own_parameters(module):
            found[id(one)] = one
    return sum(one.numel() * one.element_size() for one in found.values())
