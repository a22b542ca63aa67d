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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from safetensors import SafetensorError
from torch.distributed import get_world_size, is_initialized
from torch.nn import Module, Parameter
from transformers import (
    AutoConfig,
    CompressedTensorsConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from llmcompressor.args.model_arguments import PRECISIONS
from llmcompressor.checkpoint.copied_files import module_folders, other_named_folders
from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.checkpoint.side_files import SPEAKERS_FILE
from llmcompressor.checkpoint.source import (
    CONFIG,
    check_config_unquantized,
    check_dense,
    check_format,
    check_no_adapter,
    check_patterns,
    code_tensors,
    inspect_source,
    is_compressed_tensors,
    is_empty_quantization,
    is_hub_id,
    local_directory,
    quantization_method,
    quantization_settings,
    quantized_error,
    read_config,
    source_of,
    tell_remarks,
    undeclared_error,
    whole_source,
)
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    CompressorError,
    NonFiniteError,
    did_you_mean,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.patches import ANEW, MERGE, modules_with_adapters, quantized_by_hand
from llmcompressor.modeling.weights import first_nonfinite, untie_embeddings
from llmcompressor.runtime.memory import free_host_memory
from llmcompressor.runtime.progress import format_bytes, join_names
from llmcompressor.transformers_internals import auto_mapping
from llmcompressor.verification.scheme import NAME_METHOD
from llmcompressor.verification.transformers_model import unread_method

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
_OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]
_SPEAKING = "qwen2_5_omni"


def load_decompressed(
    load: Callable[..., Any], settings: Mapping[str, Any], **arguments: Any
) -> Any:
    """Load a model by ``load`` (a ``from_pretrained``) and decompress it; schemes are kept."""
    # Since transformers 5.23 a single scheme is used to decompress all modules. That also handles
    # models that cannot be loaded packed, as where a class's initialization accesses a weight.
    groups = dict(settings.get("config_groups") or {}).values()
    if is_simple := len([one for one in groups if dict(one).get("weights")]) <= 1:
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with loading_compressed(), warnings.catch_warnings():
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
    """Return those of some code tensors whose scheme the model lost, as those of fused experts."""
    scales = {name: f"{name.rpartition('.')[0]}.weight_scale" for name in names}
    found = NameMap(model).loaded(scales.values(), model.state_dict())
    lost = []
    for name, scale in scales.items():
        own = found.get(scale)
        module = None if own is None else model.get_submodule(own.target.rpartition(".")[0])
        if own is None or own.merged or not hasattr(module, "quantization_scheme"):
            lost.append(name)
    return lost


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
    """Load a model from a folder or the hub, in evaluation mode, on the device of transformers.

    The configuration may come from elsewhere; ``precision`` is a dtype (:func:`parse_precision`);
    with ``tie_word_embeddings=False`` the output head is untied; with ``unpacks`` a model
    compressed by compressed-tensors is accepted and decompressed. All others are arguments of
    ``from_pretrained``.

    Raises:
        CheckpointError: the model is not there, is damaged, incomplete or quantized already.
    """
    if not is_hub_id(model):
        tell_remarks(inspect_source(model, allow_quantized=unpacks, allow_absent=True))
        check_quantization_declared(model)
        read_generation_config(Path(model).expanduser())
    hub: dict[str, Any] = {
        "revision": revision or "main",
        "cache_dir": cache_dir,
        "token": token,
        "trust_remote_code": trust_remote_code,
    }
    place = str(Path(model).expanduser()) if Path(model).expanduser().exists() else str(model)
    with loading_errors(place):
        config = load_config(config_name or place, **hub)
        written = config.to_dict()
        is_kept = unpacks and is_compressed_tensors(quantization_method(written))
        settings = quantization_settings(written) if is_kept else None
        if settings is None:
            check_config_unquantized(place, written)
        dtype = parse_precision(precision)
        loaded = load_pretrained(place, config, settings=settings, dtype=dtype, **hub)
        if is_hub_id(model):  # the files are on this machine now
            check_quantization_declared(place, revision=revision, cache_dir=cache_dir)
    if not tie_word_embeddings:
        untie_embeddings(loaded)
    loaded.train(mode=False)
    return loaded


def load_config(place: str | os.PathLike[str], **hub: Any) -> PretrainedConfig:
    """Return the configuration in a folder or on the hub, without an empty ``quantization_config``.

    Raises:
        CheckpointError: it names a dtype that torch does not know.
    """
    if (Path(place) / CONFIG).is_file():
        read_config(Path(place))
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


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the ``generation_config.json`` of a folder; ``None`` without one.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / "generation_config.json"
    try:
        return GenerationConfig.from_pretrained(str(folder)) if file.is_file() else None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"The file {file} cannot be read ({error!s:.200}).",
            "Restore it, or remove it: the model's configuration says the rest.",
        ) from error


def load_pretrained(
    place: str,
    config: PretrainedConfig,
    *,
    trust_remote_code: bool,
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> PreTrainedModel:
    """Load the model of the class that ``config`` names, with all of its weights.

    It is decompressed if its quantization ``settings`` are given; ``arguments`` are those of
    ``from_pretrained``. CheckpointError if weights are missing or have another shape.
    """
    written = quantization_settings(config.to_dict())
    check_format(place, written)
    check_patterns(
        place, written, lambda: getattr(whole_source(local_directory(place)), "tensors", ())
    )
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
    """Refuse a model object with PEFT adapters (ArgumentError)."""
    if adapted := modules_with_adapters(model):
        raise ArgumentError(
            f"The model has adapters (PEFT) at {join_names(adapted)}, and compressed checkpoints "
            "hold the weights of a model without.",
            MERGE,
        )


def check_quantization_declared(place: str | os.PathLike[str], **hub: Any) -> None:
    """Refuse (CheckpointError) a model whose quantization transformers would pass over.

    ``config.json`` declares none, or a method that transformers does not know. ``place`` is a
    folder, or an id whose files are in the hub's cache; anything else passes.
    """
    source = whole_source(local_directory(place, **hub))
    if source is None:
        return
    settings = quantization_settings(source.config)
    if quantization_method(source.config) is None:
        check_dense(source.tensors)
    elif next(code_tensors(source.tensors), None) and (said := unread_method(settings)):
        is_ours = is_compressed_tensors(settings.get("quant_method"))
        remedy = NAME_METHOD if is_ours else "Take a checkpoint that transformers reads."
        raise CheckpointError(f"The model {place} cannot be loaded: {said}", remedy)


def check_model_declared(model: Module) -> None:
    """Refuse (CheckpointError) a model object whose weights are undeclared codes of its folder."""
    source = source_of(model)
    if source is None or quantization_method(source.config) is not None:
        return
    name = next(code_tensors(source.tensors), None)
    if name is not None:
        error = undeclared_error(name, source.tensors[name])
        raise CheckpointError(
            f"{error.problem.rstrip('.')}, and the model object was loaded from there.",
            "Load the original, unquantized model; or, if its weights are dequantized since, save "
            "it to another folder and load that.",
        )


def check_unquantized(model: PreTrainedModel) -> None:
    """Refuse (CheckpointError) a model object that is quantized: by its loading, or by hand."""
    check_model_declared(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        method = getattr(quantizer.quantization_config, "quant_method", "an unnamed method")
        name = model.config.name_or_path or type(model).__name__
        raise quantized_error(name, str(getattr(method, "value", method)))
    if (found := quantized_by_hand(model)) is not None:
        raise CheckpointError(
            f"The {type(model).__name__} was quantized in memory by {found[1]}, at {found[0]}.",
            ANEW,
        )


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
    known = {cls.__name__: cls for _, cls in reversed(mapped)}
    for name in architectures:
        cls = known.get(name) or getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    if mapped:
        return mapped[0][0]
    raise CheckpointError(
        f"No model class for {' or '.join(architectures) or config.model_type} is known.",
        "If the checkpoint brings its own code, pass trust_remote_code_model=True.",
    )


def check_complete(place: str, info: Mapping[str, Any]) -> None:
    """Refuse (CheckpointError) missing or misshapen tensors, by the info of ``from_pretrained``."""
    misshapen, missing = sorted(info["mismatched_keys"]), sorted(info["missing_keys"])
    if misshapen:
        name, found, expected = misshapen[0]
        more = f", and {len(misshapen) - 1} more have another shape" if misshapen[1:] else ""
        problem = (
            f"The tensor {name} of the checkpoint {place} is {list(found)}, and the model of its "
            f"config.json has {list(expected)}{more}."
        )
    elif missing:
        problem = (
            f"The checkpoint {place} lacks {len(missing)} of the model's tensors, which would be "
            f"random: {join_names(missing)}."
        )
    else:
        if unexpected := sorted(info["unexpected_keys"]):
            logger.info(f"Tensors of {place} that are not of the model: {join_names(unexpected)}.")
        return
    raise CheckpointError(problem, "Check that config.json belongs to these weights.")


@contextmanager
def loading_errors(place: str) -> Iterator[None]:
    """Convert what transformers and the hub raise inside (:func:`loading_error`).

    A class may fail in any way on a configuration that it does not expect.
    """
    try:
        yield
    except (CompressorError, MemoryError, torch.OutOfMemoryError):
        raise
    except LOADING_FAILURES as error:
        raise loading_error(place, error) from error
    except Exception as error:
        raise _building_error(place, error) from error


def _building_error(place: str, error: Exception) -> CheckpointError:
    """Convert an error of a class of models, or of its configuration, into a clear one."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
    with suppress(CheckpointError):
        if inspect_source(place, allow_quantized=True).config.get("auto_map"):
            return CheckpointError(
                f"transformers {transformers.__version__} fails on the model {place}, which has "
                f"code of its own: {said}.",
                "If that code was written for version 4 of transformers, take a revision of the "
                "model for version 5, or change the code.",
            )
    return CheckpointError(
        f"transformers cannot build the model that the config.json of {place} describes: {said}.",
        "Correct its fields; compare them with those of the original model.",
    )


def loading_error(place: str, error: BaseException) -> CheckpointError:
    """Convert an error of transformers or the hub while loading ``place`` into a clear one."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return CheckpointError(
            f"The model {place} brings its own code.",
            "Pass trust_remote_code_model=True to run it.",
        )
    if not (Path(place) / CONFIG).is_file():
        try:
            check_no_adapter(Path(place))
        except CheckpointError as clear:
            return clear
    remedy = (
        "Check the name, the folder, that config.json belongs to the weights, and (for a model on "
        "the hub) the connection and token."
    )
    if Path(place).exists():
        return CheckpointError(f"The model {place} cannot be loaded: {text}", remedy)
    folders = [entry.parent.name for entry in Path.cwd().glob(f"*/{CONFIG}")]
    near = did_you_mean(place, folders) if folders else ""
    return CheckpointError(
        f"There is no folder {place} here, and the hub did not give it: {text}",
        f"{near} {remedy}".strip(),
    )


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Download a model's files into the hub's cache, without its weights in other formats.

    Raises:
        CheckpointError: the hub cannot be reached, or does not have it.
    """
    download = partial(
        snapshot_download, model, revision=revision, cache_dir=cache_dir, token=token
    )
    with loading_errors(model):
        found = Path(download(ignore_patterns=_OTHER_FORMATS))
        # these are copied as they are, whatever their format
        folders = [*module_folders(found), *other_named_folders(found)]
        further = [f"{glob.escape(folder)}/*" for folder in folders]
        config = found / CONFIG
        if config.is_file() and f'"{_SPEAKING}"' in config.read_text(encoding="utf-8"):
            further.append(SPEAKERS_FILE)  # its class loads its voices from a separate file
        if further:
            download(allow_patterns=further)
    return found


# Weights offloaded to memory or disk are brought back.
#
# accelerate's hooks and compressed-tensors' caches load a weight for one use of it and unload it
# again: between uses it can be neither read nor written in place. A run needs the weights
# themselves.


def remove_offloading(model: Module, *, hooks: bool = False) -> bool:
    """Load offloaded weights into main memory, and remove what offloads them.

    Weights on an accelerator stay there. With ``hooks`` those hooks of accelerate are removed too
    that only move inputs. Returns True if any weight was offloaded.

    Raises:
        ArgumentError: main memory has no room for the weights to load.
    """
    aligned = [(one, hook) for one in model.modules() for hook in align_hooks(one)]
    has_caches = any(map(_caches_of, model.modules()))
    was_offloaded = has_caches or any(hook.offload for _, hook in aligned)
    if not was_offloaded and not (hooks and aligned):
        return False
    is_loaded = has_caches and _remove_caches(model)
    is_loaded |= _remove_hooks(model, aligned)
    vars(model).pop("hf_device_map", None)  # transformers and its trainer rely on it
    tie = getattr(model, "tie_weights", None)
    if is_loaded and callable(tie):
        tie()  # modules that shared a weight each have a copy now
    return was_offloaded


def _remove_hooks(model: Module, aligned: Sequence[tuple[Module, AlignDevicesHook]]) -> bool:
    away = [
        (module, hook, name, tensor.nbytes, _is_in_memory(hook.weights_map, name))
        for module, hook in aligned
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
    for _, hook in aligned:
        hook.offload = False  # else its removal would put the weights back where they were
    remove_hook_from_module(model, recurse=True)
    return bool(away)


def _remove_caches(model: Module) -> bool:
    away = [
        (path or type(model).__name__, module, name, tensor.nbytes)
        for path, module in model.named_modules()
        for cache in _caches_of(module)
        for name, tensor in cache.offloaded_values.items()
        # on the disk, or in memory that processes share
        if tensor is not None
        and (tensor.is_meta or (tensor.device.type == "cpu" and tensor.is_shared()))
    ]
    held = join_names(dict.fromkeys(path for path, *_ in away))
    _check_room(
        f"compressed-tensors keeps the weights of {held} on the disk or in shared memory",
        sum(size for *_, size in away),
        processes=get_world_size() if is_initialized() else 1,  # each process gets its own
    )
    for cache in (cache for module in model.modules() for cache in _caches_of(module)):
        is_on_disk = cache.offload_device == "disk"
        cache.onload_device = "cpu" if is_on_disk else cache.offload_device
    remove_dispatch(model, onload_tensors=True)
    mapped = {id(one): one for _, module, name, _ in away for one in [getattr(module, str(name))]}
    for one in mapped.values():
        one.data = one.data.clone()  # it is a mapped file, or shared memory
    logger.info(
        "compressed-tensors kept the weights apart from the model: they are brought into memory, "
        "and the model is offloaded no longer."
    )
    return bool(away)


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
    free = free_host_memory() // processes
    if size > free:
        raise ArgumentError(
            f"{kept} ({format_bytes(size)}), and main memory has {format_bytes(free)} left for "
            "them.",
            "Give the folder of the model instead: it is read block by block.",
        )


def align_hooks(module: Module) -> Iterator[AlignDevicesHook]:
    """Yield the hooks of accelerate that move a module's inputs and weights."""
    waiting: list[ModelHook | None] = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, SequentialHook):
            waiting.extend(hook.hooks)
        elif isinstance(hook, AlignDevicesHook):
            yield hook


def _is_in_memory(held: Any, name: str) -> bool:
    while isinstance(held, PrefixedDataset):
        held, name = held.dataset, f"{held.prefix}{name}"
    return not isinstance(held, OffloadedWeightsLoader) or name in held.state_dict


def _caches_of(module: Module) -> list[OffloadCache]:
    every: tuple[Any, ...] = (module._parameters, module._buffers)
    return [one for one in every if isinstance(one, OffloadCache)]


def check_finite_weights(model: Module) -> None:
    """Refuse a model with NaN or infinity in any weight, targeted by a modifier or not.

    Raises:
        NonFiniteError: names the weight.
    """
    bad = first_nonfinite(model)
    if bad is not None:
        raise NonFiniteError(
            f"The weight {bad} holds NaN or infinity. The checkpoint is damaged or was saved in a "
            "dtype too narrow for it: get it anew, or load it with precision='float32' if its "
            "files are in float32."
        )
