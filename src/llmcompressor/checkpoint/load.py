# SPDX-License-Identifier: Apache-2.0
"""Loading of a model for compression: the class that its checkpoint names, with all weights."""

from __future__ import annotations

import os
import pickle
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from llmcompressor.checkpoint.layout import loaded_names
from llmcompressor.checkpoint.source import (
    SourceInfo,
    adapter_error,
    check_config_plain,
    check_format,
    holds_adapter,
    inspect_source,
    is_compressed_tensors,
    is_hub_id,
    local_directory,
    quantization_method,
    quantized_error,
    says_nothing,
    settings_of,
)
from llmcompressor.checkpoint.undeclared import check_dense, codes_in, undeclared_error
from llmcompressor.checkpoint.unpacking import load_unpacked
from llmcompressor.errors import ArgumentError, CheckpointError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.adapters import MERGE, adapters_of
from llmcompressor.modeling.embeddings import untie_embeddings
from llmcompressor.wording import listed

__all__ = [
    "AUTO_CLASSES",
    "LOADING_FAILURES",
    "check_complete",
    "check_declared",
    "check_object_declared",
    "check_unadapted",
    "check_unquantized",
    "config_of",
    "load_complete",
    "load_model",
    "loading_error",
    "model_class",
    "packing_of",
    "parse_precision",
    "read_config",
    "untie_embeddings",
]

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
_PRECISIONS = {
    "half": torch.float16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "full": torch.float32,
    "fp32": torch.float32,
    "float32": torch.float32,
}
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
    return _PRECISIONS.get(str(precision).strip().lower().removeprefix("torch."), "auto")


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
        check_declared(model)
    hub: dict[str, Any] = {
        "revision": revision or "main",
        "cache_dir": cache_dir,
        "token": token,
        "trust_remote_code": trust_remote_code,
    }
    place = str(Path(model).expanduser()) if Path(model).expanduser().exists() else str(model)
    try:
        config = config_of(config_name or place, **hub)
        settings = packing_of(config) if unpacks else None
        if settings is None:
            check_config_plain(place, config.to_dict())
        dtype = parse_precision(precision)
        loaded = load_complete(place, config, settings=settings, dtype=dtype, **hub)
        if is_hub_id(model):  # the files are on this machine now
            check_declared(place, revision=revision, cache_dir=cache_dir)
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


def config_of(place: str | os.PathLike[str], **hub: Any) -> PretrainedConfig:
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
        if hasattr(one, "quantization_config") and says_nothing(one.quantization_config):
            del one.quantization_config
    return config


def packing_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return a model's compressed-tensors configuration; ``None`` where it has none."""
    written = config.to_dict()
    return settings_of(written) if is_compressed_tensors(quantization_method(written)) else None


def load_complete(
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
        config: the result of :func:`config_of`.
        trust_remote_code: run modelling code that comes with the checkpoint.
        settings: its quantization configuration, if it is to be decompressed.
        arguments: further ones of ``from_pretrained``.

    Raises:
        CheckpointError: weights are missing or have another shape. For other faults transformers
            raises its own errors (:func:`loading_error`).
    """
    check_format(place, settings_of(config.to_dict()))
    loader = model_class(config, trust_remote_code=trust_remote_code)
    loaded: PreTrainedModel
    load = partial(loader.from_pretrained, place)
    if settings is not None:
        load = partial(load_unpacked, load, settings)
    loaded, info = load(
        config=config,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
        **arguments,
    )
    check_complete(place, info)
    return loaded


def check_unadapted(model: Module) -> None:
    """Refuse a model object with PEFT adapters.

    Raises:
        ArgumentError: it has some.
    """
    if adapted := adapters_of(model):
        raise ArgumentError(
            f"The model has adapters (PEFT) at {listed(adapted)}, and compressed checkpoints hold "
            "the weights of a model without.",
            MERGE,
        )


def check_declared(place: str | os.PathLike[str], **hub: Any) -> None:
    """Refuse a model with quantized weights whose ``config.json`` does not declare it.

    Args:
        place: a folder, or an id whose files are in the hub's cache; anything else passes.
        hub: ``revision`` and ``cache_dir``.

    Raises:
        CheckpointError: transformers would read codes as weights.
    """
    source = _undeclared(place, **hub)
    if source is not None:
        check_dense(source.tensors)


def check_object_declared(model: Module) -> None:
    """Refuse a model object whose weights are undeclared codes of its source folder.

    Raises:
        CheckpointError: its weights are codes. A model that was dequantized since passes.
    """
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    source = _undeclared(place) if isinstance(place, str) and place else None
    if source is None:
        return
    name = next(codes_in(source.tensors), None)
    if name is not None and _has_codes(model, name, source):
        error = undeclared_error(name, source.tensors[name])
        raise CheckpointError(
            f"{error.problem.rstrip('.')}, and the model object was loaded from there.",
            "Load the original, unquantized model.",
        )


def _undeclared(place: str | os.PathLike[str], **hub: Any) -> SourceInfo | None:
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
    found = loaded_names(model, [name], state).get(name)  # type: ignore[arg-type]  # or one like it
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
    check_object_declared(model)
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
        config = config_of(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise loading_error(str(place), error) from error
    check_config_plain(str(place), config.to_dict())
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
        found = auto._model_mapping.get(type(config), None)
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
