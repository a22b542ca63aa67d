# SPDX-License-Identifier: Apache-2.0
"""A model built without its weights, and which tensors of its checkpoint belong to which block.

transformers' own ``from_pretrained`` builds the model, so that everything it does (renaming and
merging tensors, computing rotary tables, tying weights, custom code) is done; but each tensor of
the checkpoint is given to it as a stand-in that has a shape, a dtype and no data. What the
checkpoint lacks, or holds in another shape, is found without reading a weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as hf_logging

from llmcompressor.checkpoint.extras import SPEAKERS_FILE
from llmcompressor.checkpoint.layout import (
    LoadedName,
    loaded_names,
    stacked_names,
    stacks_tensors,
)
from llmcompressor.checkpoint.load import (
    AUTO_CLASSES,
    check_complete,
    model_class,
    parse_precision,
    read_config,
)
from llmcompressor.checkpoint.reading import DTYPES
from llmcompressor.checkpoint.source import SourceInfo, TensorHeader
from llmcompressor.checkpoint.stand_ins import stand_ins
from llmcompressor.errors import CheckpointError
from llmcompressor.modeling.settings import text_config

__all__ = ["Blueprint", "build_blueprint", "meta_parameter", "quiet_loading"]


_SPEAKERS = "load_speakers"
"""The method of a model whose voices are no tensors of its checkpoint."""


@dataclass
class Blueprint:
    """A model whose weights are on the meta device.

    Attributes:
        model: in evaluation mode; what is computed and not stored (rotary tables) is real.
        source: its checkpoint.
        names: tensor of the checkpoint → the model's tensor that it becomes; without those that
            the model class does not own.
        dtype: what the model was asked to be loaded in.
        shared: parameters that are one tensor: the places of each.
        stored_once: those that the checkpoint may hold one tensor for: as ``shared``, before
            anything was given a tensor of its own.
    """

    model: PreTrainedModel
    source: SourceInfo
    names: Mapping[str, LoadedName]
    dtype: torch.dtype
    shared: Sequence[Sequence[tuple[Module, str]]] = field(default_factory=list)
    stored_once: Sequence[Sequence[tuple[Module, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.stored_once = self.shared

    def forget_ties(self) -> None:
        """Where a module has got a parameter of its own, nothing is to make it one again."""
        groups = []
        for places in self.shared:
            by_tensor: dict[int, list[tuple[Module, str]]] = {}
            for module, name in places:
                by_tensor.setdefault(id(module._parameters[name]), []).append((module, name))
            groups += [group for group in by_tensor.values() if len(group) > 1]
        self.shared = groups

    def tensors_of(self, block: str | None, blocks: Sequence[str]) -> list[str]:
        """The checkpoint's tensors of one block; those of none of ``blocks`` for ``None``."""
        if block is not None:
            return [name for name, own in self.names.items() if own.target.startswith(f"{block}.")]
        inside = tuple(f"{name}." for name in blocks)
        return [
            name
            for name, own in self.names.items()
            if not inside or not own.target.startswith(inside)
        ]


def build_blueprint(
    source: SourceInfo,
    *,
    config_name: str | None = None,
    precision: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> Blueprint:
    """Build a model from its configuration and the headers of its files alone.

    Args:
        source: the checkpoint, with safetensors files.
        config_name: where to take the configuration from, if not from the checkpoint.
        precision: see :func:`~llmcompressor.checkpoint.load.parse_precision`.
        trust_remote_code: run modelling code that comes with the checkpoint.

    Raises:
        CheckpointError: the model class is not known, the checkpoint is quantized already, or
            lacks tensors of it.
    """
    place = str(source.directory)
    config = read_config(config_name or place, trust_remote_code=trust_remote_code)
    dtype = _dtype(parse_precision(precision), config, source.tensors)
    loader = _class(config, place, trust_remote_code=trust_remote_code)
    with quiet_loading(), _one_clear_error(place):
        draft = _draft(loader, config, source.tensors)
        state = stand_ins(source.tensors, draft.stacks)
        model, info = _from_pretrained(loader)(
            None,
            config=config,
            dtype=dtype,
            state_dict=state,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    check_complete(place, info)
    model.config.name_or_path = place
    if hasattr(model, _SPEAKERS) and (source.directory / SPEAKERS_FILE).is_file():
        model.load_speakers(str(source.directory / SPEAKERS_FILE))
    shared = _plain_meta(model)
    _read_generation_config(model, source.directory)
    names = draft.names
    if draft.own != model.state_dict().keys():
        names = loaded_names(model, source.tensors, model.state_dict())
    model.train(mode=False)
    return Blueprint(model, source, names, dtype, shared)


def _from_pretrained(loader: Any) -> Any:
    """How to build a model: that of a class that also reads a file of speakers wants a folder."""
    if hasattr(loader, _SPEAKERS):
        return partial(PreTrainedModel.from_pretrained.__func__, loader)  # type: ignore[attr-defined]  # of a class method
    return loader.from_pretrained


class _Draft(NamedTuple):
    """What is known of the loading before it.

    Attributes:
        names: as in :class:`Blueprint`.
        own: names of the model's tensors; empty where nothing was found out.
        stacks: names of tensors that are stacked.
    """

    names: Mapping[str, LoadedName]
    own: Set[str]
    stacks: Sequence[Sequence[str]]


def _draft(loader: Any, config: PretrainedConfig, names: Iterable[str]) -> _Draft:
    """See which tensors are stacked while they are loaded, on a model that is built for it.

    Building it takes long where it holds modules and not stacks; then there is nothing to see.
    """
    kinds = {config.model_type, text_config(config).model_type, loader.__name__}
    if not any(stacks_tensors(kind) for kind in kinds):
        return _Draft({}, frozenset(), ())
    with torch.device("meta"):
        model = loader._from_config(copy.deepcopy(config))
    state = model.state_dict()
    found = loaded_names(model, names, state)
    return _Draft(found, state.keys(), stacked_names(model, found))


def meta_parameter(tensor: Tensor) -> Parameter:
    """A parameter of the same shape and dtype, without data."""
    empty = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")
    return Parameter(empty, requires_grad=tensor.requires_grad)


def _plain_meta(model: Module) -> list[list[tuple[Module, str]]]:
    """Put plain meta parameters in place of the stand-ins'; returns the places of shared ones."""
    places: dict[int, list[tuple[Module, str]]] = {}
    kept: dict[int, Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
                kept[id(parameter)] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer.as_subclass(Tensor), device="meta")
    for key, owners in places.items():
        if kept[key].is_meta:
            plain = meta_parameter(kept[key])
            for module, name in owners:
                module._parameters[name] = plain
    return [owners for owners in places.values() if len(owners) > 1]


def _dtype(
    asked: torch.dtype | str, config: PretrainedConfig, headers: Mapping[str, TensorHeader]
) -> torch.dtype:
    """As transformers decides: what was asked, the configuration's, that of the first weights."""
    if isinstance(asked, torch.dtype):
        return asked
    stated = getattr(config, "dtype", None)
    if stated is not None:
        return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated))
    floats = (DTYPES[header.dtype] for header in headers.values() if header.dtype in DTYPES)
    return next((dtype for dtype in floats if dtype.is_floating_point), torch.float32)


def _class(config: PretrainedConfig, place: str, *, trust_remote_code: bool) -> Any:
    """The class to build; one that comes with the checkpoint is loaded from its folder."""
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code:
        for name in AUTO_CLASSES:
            if name in remote:
                return get_class_from_dynamic_module(remote[name], place)
    found = model_class(config, trust_remote_code=trust_remote_code)
    mapping = getattr(found, "_model_mapping", None)
    if mapping is None:
        return found
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, tuple | list) else classes


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"The file {folder / 'generation_config.json'} cannot be read ({error!s:.200}).",
                "Restore it, or remove it: the model's configuration says the rest.",
            ) from error
    else:
        model.generation_config = GenerationConfig.from_model_config(model.config)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bar for loading nothing."""
    bars: Any = hf_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@contextmanager
def _one_clear_error(place: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if isinstance(error, CheckpointError):
            raise
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"The model {place} cannot be built: {text}",
            "Check that config.json belongs to these weights.",
        ) from error
