# SPDX-License-Identifier: Apache-2.0
"""Compression of partly quantized models: quantized modules keep their codes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel

from llmcompressor.checkpoint.existing_quantization import existing_quantization
from llmcompressor.checkpoint.load import check_unquantized
from llmcompressor.checkpoint.source import (
    SourceInfo,
    inspect_source,
    is_compressed_tensors,
    local_directory,
    quantization_method,
)
from llmcompressor.checkpoint.undeclared import codes_in
from llmcompressor.checkpoint.unpacking import lost_codes, unpack
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.facts import Severity
from llmcompressor.wording import listed

__all__ = ["go_on_with", "is_gone_on_with"]

_READ_HERE = {"L2", "L9"}
"""Rules of what transformers does not read, or some releases, unless it is loaded as it is here."""
_OF_STATES = {"L11"}
"""Rules of what is lost of caches, and not of weights."""


def is_gone_on_with(source: SourceInfo) -> bool:
    """Return True if a checkpoint is quantized by compressed-tensors and can be compressed further.

    Returns:
        ``False`` for other formats and for unquantized checkpoints.

    Raises:
        CheckpointError: a part of it cannot be kept, or would not be loaded as it was written.
    """
    if not is_compressed_tensors(quantization_method(source.config)):
        return False
    existing_quantization(str(source.directory), source.config)
    _check_read(source, but=_READ_HERE)
    return True


def go_on_with(model: PreTrainedModel) -> None:
    """Prepare a model that may be partly quantized; packed weights are unpacked.

    compressed-tensors may keep unpacked weights outside of the model.

    Raises:
        CheckpointError: it is quantized by another method, or its weights differ from those of its
            folder.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "")
    is_packed = is_compressed_tensors(str(getattr(method, "value", method)))
    if not is_packed:
        check_unquantized(model)
    names = [name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")]
    source = _source_of(model)
    if source is not None and names:
        is_gone_on_with(source)
    elif source is not None:  # all its weights are unquantized
        _check_read(source, but=_READ_HERE | _OF_STATES)
    if is_packed:
        unpack(model)
    if names:
        logger.warning(
            f"Quantized already: {listed(names, most=3)}. That keeps its codes, and the recipe "
            "goes on with the rest."
        )
    lost = [] if source is None else lost_codes(model, codes_in(source.tensors))
    if lost and source is not None:
        logger.warning(
            f"Of {source.directory} not all codes are kept: {listed(lost, most=3)}. transformers "
            "makes plain weights of these, with the values that the codes stand for. They are "
            "written in full, and rounded once more where the recipe means them."
        )


def _source_of(model: PreTrainedModel) -> SourceInfo | None:
    """Return the compressed-tensors checkpoint from which a model was loaded, if it exists."""
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    folder = local_directory(place) if isinstance(place, str) and place else None
    try:
        source = None if folder is None else inspect_source(folder, allow_quantized=True)
    except CheckpointError:  # the folder may have changed since the model was loaded
        return None
    is_compressed = source and is_compressed_tensors(quantization_method(source.config))
    return source if is_compressed else None


def _check_read(source: SourceInfo, *, but: Collection[str]) -> None:
    headers = {name: TensorInfo(one.dtype, one.shape) for name, one in source.tensors.items()}
    found = check_serving(source.config, headers, deployment=Deployment("transformers"))
    for one in found:
        if one.severity is Severity.ERROR and one.rule not in but:
            raise CheckpointError(
                f"The model {source.directory} is quantized already, and transformers does not "
                f"read it as it was written ({one.rule}). {one.module}: {one.message}",
                "Compress the original, unquantized model.",
            )
