# SPDX-License-Identifier: Apache-2.0
"""Loading of a model for compression: the class that its checkpoint names, with all weights."""

from __future__ import annotations

import copy
import glob
import os
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, remove_hook_from_module
from accelerate.utils.modeling import named_module_tensors, set_module_tensor_to_device
from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.offload.cache.base import OffloadCache
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import get_world_size, is_initialized
from torch.nn import Module, Parameter
from transformers import AutoConfig, CompressedTensorsConfig, PretrainedConfig, PreTrainedModel

from llmcompressor.args.model_arguments import PRECISIONS
from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.packing import patch_packed_zero_points
from llmcompressor.checkpoint.side_files import SPEAKERS_FILE, module_folders
from llmcompressor.checkpoint.source import (
    CONFIG,
    SourceInfo,
    adapter_error,
    check_config_unquantized,
    check_dense,
    check_format,
    code_tensors,
    holds_adapter,
    inspect_source,
    is_compressed_tensors,
    is_empty_quantization,
    is_hub_id,
    local_directory,
    quantization_method,
    quantization_settings,
    quantized_error,
    undeclared_error,
)
from llmcompressor.errors import ArgumentError, CheckpointError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.patches import MERGE, modules_with_adapters
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.runtime.memory import free_host_memory
from llmcompressor.runtime.progress import format_bytes, join_names
from llmcompressor.transformers_internals import auto_mapping

__all__ = [
    "AUTO_CLASSES",
    "LOADING_FAILURES",
    "check_complete",
    "check_model_declared",
    "check_no_peft_adapters",
    "check_quantization_declared",
    "check_unquantized",
    "codes_without_scheme",
    "compressed_tensors_settings",
    "copy_without_weights",
    "decompress_weights",
    "fetch",
    "has_offload_caches",
    "is_dispatched",
    "is_offloaded",
    "load_config",
    "load_decompressed",
    "load_model",
    "load_pretrained",
    "loading_error",
    "model_class",
    "parse_precision",
    "read_config",
    "remove_accelerate_hooks",
    "remove_offload_caches",
    "untie_embeddings",
]


# --------------------
# Decompression of models in the compressed-tensors format while they are loaded.

_SCALE = "weight_scale"


def load_decompressed(
    load: Callable[..., Any], settings: Mapping[str, Any], **arguments: Any
) -> Any:
    """Load a compressed model and decompress its weights, each by its own module's scheme.

    Args:
        load: a ``from_pretrained``.
        settings: the ``quantization_config`` of the model.
        arguments: arguments for ``load``.

    Returns:
        The result of ``load``. The modules keep their schemes.
    """
    # Since transformers 5.21 a single scheme is used to decompress all modules. That also handles
    # models that cannot be loaded packed, as where a class's initialization accesses a weight.
    groups = dict(settings.get("config_groups") or {}).values()
    if is_simple := len([one for one in groups if dict(one).get("weights")]) <= 1:
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with patch_packed_zero_points(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        loaded = load(**arguments)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if not is_simple:
        decompress_weights(model)
    return loaded


def decompress_weights(model: PreTrainedModel) -> None:
    """Decompress the weights of a model that was loaded packed; its modules keep their schemes."""
    quantizer: Any = model.hf_quantizer
    if quantizer.quantization_config.is_quantization_compressed:  # else it was written dense
        quantizer.compressor.decompress_model(model)
    quantizer.remove_quantization_config(model)


def codes_without_scheme(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the code tensors whose scheme the model lost, as those of fused experts.

    Args:
        model: the result of :func:`load_decompressed`.
        names: names of tensors that hold codes.
    """
    scales = {name: f"{name.rpartition('.')[0]}.{_SCALE}" for name in names}
    found = NameMap(model).loaded(scales.values(), model.state_dict())
    lost = []
    for name, scale in scales.items():
        own = found.get(scale)
        module = None if own is None else model.get_submodule(own.target.rpartition(".")[0])
        if own is None or own.merged or not hasattr(module, "quantization_scheme"):
            lost.append(name)
    return lost


# --------------------
# Loading of a model for compression: the class that its checkpoint names, with all weights.

LOADING_FAILURES = (
    EOFError,
    ImportError,
    OSError,
    RuntimeError,
    SafetensorError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
"""What transformers and torch raise of files that are damaged or no weights at all."""
_NO_DTYPE = re.compile(r"module 'torch' has no attribute '(.*)'")
_ROWS = 64
"""Of a tensor, that tell whether its codes were dequantized."""
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def parse_precision(precision: str | torch.dtype | None) -> torch.dtype | str:
    """Return the dtype that ``precision`` names; ``"auto"`` (the checkpoint's own) otherwise.

    >>> parse_precision("torch.bfloat16"), parse_precision("full"), parse_precision("mixed")
    (torch.bfloat16, torch.float32, 'auto')
    """
    if isinstance(precision, torch.dtype):
        return precision
    name = PRECISIONS.get(str(precision).strip().lower().removeprefix("torch."), "auto")
    return name if name == "auto" else getattr(torch, name)


def load_model(
    model: str | os.PathLike[str],
    *,
    config_name: str | os.PathLike[str] | None = None,
    precision: str | torch.dtype = "auto",
    tie_word_embeddings: bool = True,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    unpacks: bool = False,
) -> PreTrainedModel:
    """Load a model from a folder or the hub, in evaluation mode.

    Args:
        model: a folder, or the id of a model on the hub.
        config_name: the source of the configuration, if not ``model``.
        precision: the dtype of the weights; see :func:`parse_precision`.
        tie_word_embeddings: ``False`` unties the output head from the embeddings.
        trust_remote_code: run modelling code that comes with the checkpoint.
        revision: the hub's revision, ``"main"`` if ``None``.
        cache_dir: the hub's cache.
        token: the hub's token.
        unpacks: accept a model compressed by compressed-tensors: its weights are decompressed and
            its modules keep their schemes.

    Returns:
        The model, on the device that transformers put it on.

    Raises:
        CheckpointError: the model is not there, is damaged, incomplete or quantized already.
    """
    if not is_hub_id(model):
        inspect_source(model, allow_quantized=unpacks)
        check_quantization_declared(model)
    hub: dict[str, Any] = {
        "revision": revision or "main",
        "cache_dir": cache_dir,
        "token": token,
        "trust_remote_code": trust_remote_code,
    }
    place = str(Path(model).expanduser()) if Path(model).expanduser().exists() else str(model)
    try:
        config = load_config(config_name or place, **hub)
        settings = compressed_tensors_settings(config) if unpacks else None
        if settings is None:
            check_config_unquantized(place, config.to_dict())
        dtype = parse_precision(precision)
        loaded = load_pretrained(place, config, settings=settings, dtype=dtype, **hub)
        if is_hub_id(model):  # the files are on this machine now
            check_quantization_declared(place, revision=revision, cache_dir=cache_dir)
    except torch.OutOfMemoryError:
        raise
    except LOADING_FAILURES as error:
        if isinstance(error, CheckpointError):
            raise
        raise loading_error(place, error) from error
    if not tie_word_embeddings:
        untie_embeddings(loaded)
    loaded.train(mode=False)
    return loaded


def load_config(place: str | os.PathLike[str], **hub: Any) -> PretrainedConfig:
    """Return a model's configuration, without an empty ``quantization_config``.

    Args:
        place: a folder, or the id of a model on the hub.
        hub: arguments of ``from_pretrained``.

    Raises:
        CheckpointError: it names a dtype that torch does not know. For other faults transformers
            raises its own errors.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(place), **hub)
    except AttributeError as error:
        unknown = _NO_DTYPE.search(str(error))
        if unknown is None:
            raise
        raise CheckpointError(
            f"The config.json of {place} says that the dtype is {unknown.group(1)!r}, which "
            "neither torch nor transformers knows.",
            "Write that of the weights there, such as bfloat16.",
        ) from error
    holders: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for one in holders:
        if hasattr(one, "quantization_config") and is_empty_quantization(one.quantization_config):
            del one.quantization_config
    return config


def compressed_tensors_settings(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return a model's compressed-tensors configuration; ``None`` where it has none."""
    written = config.to_dict()
    return (
        quantization_settings(written)
        if is_compressed_tensors(quantization_method(written))
        else None
    )


def load_pretrained(
    place: str,
    config: PretrainedConfig,
    *,
    trust_remote_code: bool,
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> PreTrainedModel:
    """Load the model of the class that ``config`` names, with all of its weights.

    Args:
        place: a folder, or the id of a model on the hub.
        config: the result of :func:`load_config`.
        trust_remote_code: run modelling code that comes with the checkpoint.
        settings: its quantization configuration, if it is to be decompressed.
        arguments: further ones of ``from_pretrained``.

    Raises:
        CheckpointError: weights are missing or have another shape. For other faults transformers
            raises its own errors (:func:`loading_error`).
    """
    check_format(place, quantization_settings(config.to_dict()))
    loader = model_class(config, trust_remote_code=trust_remote_code)
    loaded: PreTrainedModel
    load = partial(loader.from_pretrained, place)
    if settings is not None:
        load = partial(load_decompressed, load, settings)
    loaded, info = load(
        config=config,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
        **arguments,
    )
    check_complete(place, info)
    return loaded


def check_no_peft_adapters(model: Module) -> None:
    """Refuse a model object with PEFT adapters.

    Raises:
        ArgumentError: it has some.
    """
    if adapted := modules_with_adapters(model):
        raise ArgumentError(
            f"The model has adapters (PEFT) at {join_names(adapted)}, and compressed checkpoints "
            "hold "
            "the weights of a model without.",
            MERGE,
        )


def check_quantization_declared(place: str | os.PathLike[str], **hub: Any) -> None:
    """Refuse a model with quantized weights whose ``config.json`` does not declare it.

    Args:
        place: a folder, or an id whose files are in the hub's cache; anything else passes.
        hub: ``revision`` and ``cache_dir``.

    Raises:
        CheckpointError: transformers would read codes as weights.
    """
    source = _undeclared_source(place, **hub)
    if source is not None:
        check_dense(source.tensors)


def check_model_declared(model: Module) -> None:
    """Refuse a model object whose weights are undeclared codes of its source folder.

    Raises:
        CheckpointError: its weights are codes. A model that was dequantized since passes.
    """
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    source = _undeclared_source(place) if isinstance(place, str) and place else None
    if source is None:
        return
    name = next(code_tensors(source.tensors), None)
    if name is not None and _has_codes(model, name, source):
        error = undeclared_error(name, source.tensors[name])
        raise CheckpointError(
            f"{error.problem.rstrip('.')}, and the model object was loaded from there.",
            "Load the original, unquantized model.",
        )


def _undeclared_source(place: str | os.PathLike[str], **hub: Any) -> SourceInfo | None:
    """Return the source in a folder that declares no quantization; ``None`` for others."""
    folder = local_directory(place, **hub)
    try:
        source = None if folder is None else inspect_source(folder, allow_quantized=True)
    except CheckpointError:  # reported when it is read; a model object may have outlived it
        return None
    return None if source is None or quantization_method(source.config) else source


def _has_codes(model: Module, name: str, source: SourceInfo) -> bool:
    """Return True if a model holds the values of a tensor of codes, as far as can be seen."""
    header, state = source.tensors[name], model.state_dict()
    found = NameMap(model).loaded([name], state).get(name)  # type: ignore[arg-type]  # or one like it
    if found is None or found.merged:
        return True  # packed: no class loads it, and the model's own tensor is random
    held = state[found.target]
    if held.is_meta or held.shape != header.shape or type(held) not in (Tensor, Parameter):
        return True
    with safe_open(str(header.file), framework="pt") as reader:
        codes = reader.get_slice(name)[:_ROWS]
    return torch.equal(held[:_ROWS].float().cpu(), codes.float())


def check_unquantized(model: PreTrainedModel) -> None:
    """Refuse a model object whose weights are quantized already.

    Raises:
        CheckpointError: it was loaded from a quantized checkpoint and not dequantized.
    """
    check_model_declared(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        method = getattr(quantizer.quantization_config, "quant_method", "an unnamed method")
        name = model.config.name_or_path or type(model).__name__
        raise quantized_error(name, str(getattr(method, "value", method)))


def read_config(place: str | os.PathLike[str], *, trust_remote_code: bool) -> PretrainedConfig:
    """Load the configuration of a model in a folder.

    Raises:
        CheckpointError: it cannot be read, or declares that the model is quantized.
    """
    try:
        config = load_config(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise loading_error(str(place), error) from error
    check_config_unquantized(str(place), config.to_dict())
    return config


def model_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Return the class that ``config.architectures`` names, else the first auto class that fits."""
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code:
        for name in AUTO_CLASSES:
            if name in remote:
                return getattr(transformers, name)
    architectures = list(config.architectures or ())
    mapped = []
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        found = auto_mapping(auto).get(type(config), None)
        classes = found if isinstance(found, tuple | list) else [found]
        mapped += [(auto, cls) for cls in classes if cls is not None]
    for _, cls in mapped:
        if cls.__name__ in architectures:
            return cls
    for name in architectures:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    if mapped:
        return mapped[0][0]
    raise CheckpointError(
        f"No model class for {' or '.join(architectures) or config.model_type} is known.",
        "If the checkpoint brings its own code, pass trust_remote_code_model=True.",
    )


def check_complete(place: str, info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with missing or misshapen tensors.

    Args:
        place: its name.
        info: the loading info of ``from_pretrained``.

    Raises:
        CheckpointError: some tensors would be random.
    """
    misshapen = sorted(info["mismatched_keys"])
    if misshapen:
        name, found, expected = misshapen[0]
        more = f", and {len(misshapen) - 1} more have another shape" if misshapen[1:] else ""
        raise CheckpointError(
            f"The tensor {name} of the checkpoint {place} is {list(found)}, and the model of its "
            f"config.json has {list(expected)}{more}.",
            "Check that config.json belongs to these weights.",
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"The checkpoint {place} lacks {len(missing)} of the model's tensors, which would be "
            f"random: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}.",
            "Check that config.json belongs to these weights.",
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        logger.info(
            f"{len(unexpected)} tensors of {place} are not part of the model: "
            f"{', '.join(unexpected[:5])}."
        )


def loading_error(place: str, error: BaseException) -> CheckpointError:
    """Convert an error of transformers or the hub while loading ``place`` into a clear one."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return CheckpointError(
            f"The model {place} brings its own code.",
            "Pass trust_remote_code_model=True to run it.",
        )
    if holds_adapter(Path(place)):
        return adapter_error(Path(place))
    remedy = "Check the name, the folder and (for a model on the hub) the connection and token."
    if not Path(place).exists():
        folders = [
            entry.name for entry in Path.cwd().iterdir() if (entry / "config.json").is_file()
        ]
        near = did_you_mean(place, folders) if folders else ""
        return CheckpointError(
            f"There is no folder {place} here, and the hub did not give it: {text}",
            f"{near} {remedy}".strip(),
        )
    return CheckpointError(f"The model {place} cannot be loaded: {text}", remedy)


# --------------------
# Download of a model from the Hugging Face Hub.

_OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]

_SPEAKING = "qwen2_5_omni"


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Download a model's files into the hub's cache, without its weights in other formats.

    Args:
        model: the model's id.
        revision: a branch, tag or commit.
        cache_dir: the cache's folder.
        token: a token for models that are not public.

    Returns:
        The folder of the snapshot.

    Raises:
        CheckpointError: the hub cannot be reached, or does not have it.
    """
    download = partial(
        snapshot_download, model, revision=revision, cache_dir=cache_dir, token=token
    )
    try:
        found = Path(download(ignore_patterns=_OTHER_FORMATS))
        # these are copied as they are, whatever their format
        further = [f"{glob.escape(folder)}/*" for folder in module_folders(found)]
        config = found / CONFIG
        if config.is_file() and f'"{_SPEAKING}"' in config.read_text(encoding="utf-8"):
            further.append(SPEAKERS_FILE)  # its class loads its voices from a separate file
        if further:
            download(allow_patterns=further)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise loading_error(model, error) from error
    return found


# --------------------
# Weights offloaded to memory or disk are brought back.
#
# accelerate's hooks and compressed-tensors' caches load a weight for one use of it and unload it
# again: between uses it can be neither read nor written in place. A run needs the weights
# themselves.


def is_dispatched(model: Module) -> bool:
    """Return True if accelerate's hooks move the model's inputs or its weights."""
    return any(True for one in model.modules() for _ in _align_hooks(one))


def is_offloaded(model: Module) -> bool:
    """Return True if accelerate's hooks offload weights, and do not merely move inputs."""
    return any(hook.offload for one in model.modules() for hook in _align_hooks(one))


def has_offload_caches(model: Module) -> bool:
    """Return True if compressed-tensors offloads any tensor of the model."""
    return any(map(_caches_of, model.modules()))


def remove_accelerate_hooks(model: Module) -> None:
    """Load all offloaded weights into memory and remove accelerate's hooks.

    Weights on an accelerator stay there; offloaded ones are loaded into main memory.

    Raises:
        ArgumentError: main memory has no room for those on the disk.
    """
    away = [
        (module, hook, name, tensor.nbytes, _is_in_memory(hook.weights_map, name))
        for module in model.modules()
        for hook in _align_hooks(module)
        if hook.offload
        for name, tensor in named_module_tensors(
            module,
            include_buffers=hook.offload_buffers,
            recurse=hook.place_submodules,
            remove_non_persistent=True,
        )
    ]
    on_disk = [size for *_, size, is_in_memory in away if not is_in_memory]
    _check_room(f"accelerate keeps {len(on_disk)} weights of the model on the disk", sum(on_disk))
    for module, hook, name, _, is_in_memory in away:
        value = hook.weights_map[name]
        kept = value if is_in_memory else value.clone()  # a file's
        set_module_tensor_to_device(module, name, "cpu", value=kept)
    for module in model.modules():
        for hook in _align_hooks(module):
            hook.offload = False  # else its removal would put the weights back where they were
    remove_hook_from_module(model, recurse=True)
    _forget_dispatch(model, loaded=bool(away))


def remove_offload_caches(model: Module) -> None:
    """Load all offloaded weights into memory and remove compressed-tensors' caches.

    Weights on an accelerator stay there; others are loaded into main memory.

    Raises:
        ArgumentError: main memory has no room for the weights to load.
    """
    away = [
        (path or type(model).__name__, module, name, tensor.nbytes)
        for path, module in model.named_modules()
        for cache in _caches_of(module)
        for name, tensor in cache.offloaded_values.items()
        # on the disk, or in memory that processes share
        if tensor is not None
        and (tensor.is_meta or (tensor.device.type == "cpu" and tensor.is_shared()))
    ]
    held = join_names(list(dict.fromkeys(path for path, *_ in away)))
    _check_room(
        f"compressed-tensors keeps the weights of {held} on the disk or in shared memory",
        sum(size for *_, size in away),
        processes=get_world_size() if is_initialized() else 1,  # each process gets its own
    )
    for module in model.modules():
        for cache in _caches_of(module):
            is_on_disk = cache.offload_device == "disk"
            cache.onload_device = "cpu" if is_on_disk else cache.offload_device
    remove_dispatch(model, onload_tensors=True)
    copied: dict[int, Tensor] = {}
    for _, module, name, _ in away:
        one = getattr(module, str(name))
        if id(one) not in copied:  # it is a mapped file, or shared memory
            copied[id(one)] = one
            one.data = one.data.clone()
    _forget_dispatch(model, loaded=bool(away))
    logger.info(
        "compressed-tensors kept the weights apart from the model: they are brought into memory, "
        "and the model is offloaded no longer."
    )


def copy_without_weights(model: Module) -> Module:
    """Return a copy of a model with parameters on the meta device and no offload caches."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        waiting = [cache.offloaded_values for cache in _caches_of(module)]
        for one in (waiting[0] if waiting else module._parameters).values():
            if one is not None:
                empty = torch.empty_like(one.detach(), device="meta")
                memo[id(one)] = Parameter(empty, requires_grad=one.requires_grad)
        for name, one in (waiting[1] if waiting else {}).items():
            if one is not None:
                memo[id(one)] = module._buffers[name].to("cpu", copy=True)  # type: ignore[union-attr]
    copied = copy.deepcopy(model, memo)
    remove_dispatch(copied)
    return copied


def _check_room(kept: str, size: int, processes: int = 1) -> None:
    """Refuse to load weights that main memory has no room for."""
    free = free_host_memory() // processes
    if size > free:
        raise ArgumentError(
            f"{kept} ({format_bytes(size)}), and main memory has {format_bytes(free)} left for "
            "them.",
            "Give the folder of the model instead: it is read block by block.",
        )


def _forget_dispatch(model: Module, *, loaded: bool) -> None:
    vars(model).pop("hf_device_map", None)  # transformers and its trainer rely on it
    tie = getattr(model, "tie_weights", None)
    if loaded and callable(tie):
        tie()  # modules that shared a weight each have a copy now


def _align_hooks(module: Module) -> Iterator[AlignDevicesHook]:
    waiting: list[ModelHook | None] = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, SequentialHook):
            waiting.extend(hook.hooks)
        elif isinstance(hook, AlignDevicesHook):
            yield hook


def _is_in_memory(held: Any, name: str) -> bool:
    """Return True if an offloaded weight is held in memory and not on the disk."""
    while isinstance(held, PrefixedDataset):
        held, name = held.dataset, f"{held.prefix}{name}"
    return not isinstance(held, OffloadedWeightsLoader) or name in held.state_dict


def _caches_of(module: Module) -> list[OffloadCache]:
    """Return the offload caches of a module's parameters and buffers."""
    every: tuple[Any, ...] = (module._parameters, module._buffers)
    return [one for one in every if isinstance(one, OffloadCache)]
