# SPDX-License-Identifier: Apache-2.0
"""Meta-device model: a model built without weights, and a map of its checkpoint's tensors.

transformers' own ``from_pretrained`` builds the model, so that everything it does (renaming and
merging tensors, computing rotary tables, tying weights, custom code) is done. Each tensor of the
checkpoint is passed to it as a placeholder with a shape, a dtype and no data, so that missing
tensors and shape mismatches are found without reading a weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as hf_logging

from llmcompressor.checkpoint.load import (
    AUTO_CLASSES,
    check_complete,
    load_config,
    loading_errors,
    model_class,
    parse_precision,
    read_generation_config,
)
from llmcompressor.checkpoint.names import LoadedName, NameMap, first_of_each, stacks_tensors
from llmcompressor.checkpoint.side_files import SPEAKERS_FILE
from llmcompressor.checkpoint.source import (
    SourceInfo,
    TensorHeader,
    check_config_unquantized,
    tell_remarks,
)
from llmcompressor.checkpoint.tensor_files import DTYPES, torch_dtype, torch_shape
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.modeling.weights import text_config
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import auto_mapping, build_from_config

_SPEAKERS = "load_speakers"
"""The method of a model whose voices are no tensors of its checkpoint."""


# Placeholders.
#
# A large MoE has some ten thousand matrices of experts, which transformers stacks: it copies a
# rule, starts a job and makes a tensor for each. Where a stack has matrices of one shape, one
# placeholder is passed for all of them under the first one's name, and its stack gets the full
# size.


def _placeholders(
    headers: Mapping[str, TensorHeader], stacks: Iterable[Sequence[str]]
) -> dict[str, Any]:
    """Return placeholders for all tensors, to pass to ``from_pretrained`` as ``state_dict``.

    ``stacks`` are names of tensors that are stacked and not converted otherwise before.
    """
    counts: dict[str, int] = {}
    left_out: set[str] = set()
    for names in stacks:
        if len({(headers[name].dtype, headers[name].shape) for name in names}) == 1:
            counts[names[0]] = len(names)
            left_out.update(names[1:])
    made: dict[Any, _MetaSlice] = {}
    found = {}
    for name, header in headers.items():
        if name not in left_out:
            key = (header.dtype, tuple(header.shape), counts.get(name, 1))
            if key not in made:
                made[key] = _MetaSlice(*key)
            found[name] = made[key]
    return found


class _MetaSlice:
    """A placeholder for a slice object of safetensors: transformers reads it by slicing."""

    def __init__(self, dtype: str, shape: Sequence[int], count: int) -> None:
        self.shape = torch.Size(torch_shape(dtype, shape))
        self.dtype = DTYPES.get(dtype, torch.uint8)
        self._absent = _meta_tensor(self.shape, self.dtype, count)

    def __getitem__(self, index: object) -> Tensor:
        return self._absent


class _MetaTensor(Tensor):
    """A meta tensor that stays on the device when it is moved.

    ``stands_for`` is the number of tensors of one shape and dtype that it represents.
    """

    stands_for: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is Tensor.to:
            dtype = named.get("dtype")
            if dtype is None or dtype is args[0].dtype:
                return args[0]
            return _meta_tensor(args[0].shape, dtype, getattr(args[0], "stands_for", 1))
        if func is torch.stack and len(args) == 1 and set(named) <= {"dim"}:
            first, *others = args[0]
            count = getattr(first, "stands_for", 1)
            if count > 1 and not others:  # torch stacks several
                shape = list(first.shape)
                shape.insert(named.get("dim", 0), count)
                return _meta_tensor(shape, first.dtype)
        as_before: Any = super().__torch_function__
        return as_before(func, types, args, named)


def _meta_tensor(shape: Sequence[int], dtype: torch.dtype, stands_for: int = 1) -> _MetaTensor:
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_MetaTensor)
    made.stands_for = stands_for
    return made


@dataclass
class MetaModel:
    """A model whose weights are on the meta device.

    Attributes:
        model: in evaluation mode; buffers that are computed, such as rotary tables, are real.
        source: its checkpoint.
        names: tensor of the checkpoint → the model's tensor that it becomes; tensors that the
            model class does not own are left out.
        dtype: the dtype that the model is loaded in.
        shared: the places of each tied parameter.
        stored_once: the places of each parameter that the checkpoint may store once: the initial
            ``shared``, before anything was untied.
    """

    model: PreTrainedModel
    source: SourceInfo
    names: Mapping[str, LoadedName]
    dtype: torch.dtype
    shared: Sequence[Sequence[tuple[Module, str]]] = field(default_factory=list)
    stored_once: Sequence[Sequence[tuple[Module, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.stored_once = self.shared

    def drop_broken_ties(self) -> None:
        """Update ``shared`` after parameters were untied, so that they are not tied again."""
        groups = []
        for places in self.shared:
            by_tensor: dict[int, list[tuple[Module, str]]] = {}
            for module, name in places:
                by_tensor.setdefault(id(module._parameters[name]), []).append((module, name))
            groups += [group for group in by_tensor.values() if len(group) > 1]
        self.shared = groups

    def tensors_of(self, block: str | None, blocks: Sequence[str]) -> list[str]:
        """Return the checkpoint's tensors of a block; for ``None`` those outside all ``blocks``."""
        inside = tuple(f"{name}." for name in (blocks if block is None else [block]))
        return [
            name
            for name, own in self.names.items()
            if own.target.startswith(inside) == (block is not None)
        ]


def build_meta_model(
    source: SourceInfo,
    *,
    config_name: str | None = None,
    precision: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build a model on the meta device from its configuration and the headers of its files.

    The arguments are those of :func:`~llmcompressor.checkpoint.load.load_model`.

    Raises:
        CheckpointError: the model class is not known, the checkpoint is quantized already, or
            lacks tensors of it.
    """
    place = str(source.directory)
    tell_remarks(source)
    with no_progress_bars(), loading_errors(place):
        config = load_config(config_name or place, trust_remote_code=trust_remote_code)
        check_config_unquantized(config_name or place, config.to_dict())
        dtype = _dtype(parse_precision(precision), config, source.tensors)
        loader = _loader_class(config, place, trust_remote_code=trust_remote_code)
        draft = _draft(loader, config)
        own = NameMap(draft) if draft is not None else None
        names = {} if own is None else own.loaded(source.tensors, draft.state_dict())
        stacks = [] if own is None else own.stacks(names)
        load = loader.from_pretrained
        if hasattr(loader, _SPEAKERS):  # its own would read a file of speakers
            load = partial(PreTrainedModel.from_pretrained.__func__, loader)  # type: ignore[attr-defined]  # of a class method
        model, info = load(
            None,
            config=config,
            dtype=dtype,
            state_dict=_placeholders(source.tensors, stacks),
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    check_complete(place, info)
    model.config.name_or_path = place
    if hasattr(model, _SPEAKERS) and (source.directory / SPEAKERS_FILE).is_file():
        model.load_speakers(str(source.directory / SPEAKERS_FILE))
    shared = _replace_placeholders(model)
    _read_generation_config(model, source.directory)
    if draft is None or draft.state_dict().keys() != model.state_dict().keys():
        names = NameMap(model).loaded(source.tensors, model.state_dict())
    chosen = first_of_each(names)
    if doubles := names.keys() - chosen.keys():
        logger.warning(
            f"{join_names(sorted(doubles), most=3)} of {place} has the place of another tensor: "
            "that one is read, as transformers does."
        )
    for name in chosen:
        if torch_dtype(name, source.tensors[name]) is torch.float4_e2m1fn_x2:
            raise CheckpointError(
                f"{name} of {place} is a weight of the model, and transformers reads none of the "
                "dtype F4.",
                "Convert the checkpoint.",
            )
    model.train(mode=False)
    return MetaModel(model, source, chosen, dtype, shared)


def _draft(loader: Any, config: PretrainedConfig) -> Any:
    """Return a model on the meta device if transformers stacks tensors while it loads one.

    Models whose experts are modules are slow to build and stack nothing, so they are skipped.
    """
    kinds = {config.model_type, text_config(config).model_type, loader.__name__}
    if not any(stacks_tensors(kind) for kind in kinds):
        return None
    with torch.device("meta"):
        return build_from_config(loader, copy.deepcopy(config))


def meta_parameter(tensor: Tensor) -> Parameter:
    """Return a meta parameter of the same shape and dtype."""
    empty = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")
    return Parameter(empty, requires_grad=tensor.requires_grad)


def _replace_placeholders(model: Module) -> list[list[tuple[Module, str]]]:
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
    """Return the dtype as transformers does: requested, configured, or of the first weights."""
    if isinstance(asked, torch.dtype):
        return asked
    stated = getattr(config, "dtype", None)
    if stated is not None:
        return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated))
    floats = (DTYPES[header.dtype] for header in headers.values() if header.dtype in DTYPES)
    return next((dtype for dtype in floats if dtype.is_floating_point), torch.float32)


def _loader_class(config: PretrainedConfig, place: str, *, trust_remote_code: bool) -> Any:
    remote = getattr(config, "auto_map", None) or {}
    name = next((name for name in AUTO_CLASSES if name in remote), None)
    if trust_remote_code and name is not None:
        return get_class_from_dynamic_module(remote[name], place)
    found = model_class(config, trust_remote_code=trust_remote_code)
    mapping = auto_mapping(found)
    if mapping is None:
        return found
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, tuple | list) else classes


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if not model.can_generate():
        return
    found = read_generation_config(folder)
    model.generation_config = found or GenerationConfig.from_model_config(model.config)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bar."""
    bars: Any = hf_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
