# SPDX-License-Identifier: Apache-2.0
"""Loading of the teacher model for distillation, which may be a compressed checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoConfig

from llmcompressor.args import ModelArguments
from llmcompressor.checkpoint.load import (
    check_complete,
    check_declared,
    loading_error,
    model_class,
)
from llmcompressor.checkpoint.packed_zero_points import packed_zero_points_fit
from llmcompressor.checkpoint.source import is_hub_id, quantization_method
from llmcompressor.errors import CheckpointError

__all__ = ["check_teacher", "load_possibly_compressed", "load_teacher"]


def load_teacher(args: ModelArguments, device: torch.device | str | None) -> Module | None:
    """Load the teacher model in evaluation mode.

    Args:
        args: ``distill_teacher`` is the teacher; it is loaded with the model's settings for
            remote code, cache and token.
        device: device for a teacher that is loaded here; a model object is not moved.

    Returns:
        The teacher; ``None`` if there is none.

    Raises:
        CheckpointError: it does not exist, cannot be loaded, or lacks weights.
    """
    given = args.distill_teacher
    if given is None:
        return None
    check_teacher(given)
    if isinstance(given, Module):
        given.eval()
        return given
    path = Path(given).expanduser()
    teacher = load_possibly_compressed(str(path) if path.exists() else str(given), args)
    teacher.eval().requires_grad_(requires_grad=False)
    found: Module = teacher if device is None else teacher.to(device)
    return found


def check_teacher(given: Any) -> None:
    """Refuse an invalid teacher without reading its files.

    Raises:
        CheckpointError: it is neither a model nor the name of one, or its folder does not exist.
    """
    if isinstance(given, Module):
        return
    if not isinstance(given, str | Path):
        raise CheckpointError(
            f"The teacher is a {type(given).__name__}.",
            "Pass a folder, the id of a model on the hub, or a loaded model as distill_teacher.",
        )
    if not Path(given).expanduser().exists() and not is_hub_id(given):
        raise CheckpointError(f"There is no folder {given} with a teacher.", "Check the path.")


def load_possibly_compressed(place: str, args: ModelArguments) -> Any:
    """Load a model that may be quantized, with its weights on the CPU.

    Args:
        place: a folder, or an id on the hub.
        args: settings for remote code, cache and token.

    Raises:
        CheckpointError: it cannot be loaded, lacks weights, or has quantized weights that its
            configuration does not declare.
    """
    hub: dict[str, Any] = {
        "cache_dir": args.cache_dir,
        "token": args.use_auth_token,
        "trust_remote_code": args.trust_remote_code_model,
    }
    try:
        config = AutoConfig.from_pretrained(place, **hub)
        loader = model_class(config, trust_remote_code=args.trust_remote_code_model)
        with packed_zero_points_fit():
            model, info = loader.from_pretrained(
                place, config=config, dtype="auto", output_loading_info=True, **hub
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if isinstance(error, CheckpointError | torch.OutOfMemoryError):
            raise
        raise loading_error(place, error) from error
    if quantization_method(config.to_dict()) is None:
        check_complete(place, info)
        check_declared(place, cache_dir=args.cache_dir)
    return model
