# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of model folders and loaded models, from sampled weights.

Tensors of up to 256 KiB are hashed completely, larger ones in 16 windows of 4 KiB spread evenly,
including the first and the last bytes. That detects other, fine-tuned and merged weights; a change
of a few values of a large matrix may lie between the windows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import xxhash
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.checkpoint.processor import PROCESSOR_FILES
from llmcompressor.checkpoint.source import SourceInfo, inspect_source
from llmcompressor.entrypoints.fingerprint import source_print
from llmcompressor.entrypoints.sampled import (
    WEIGHTS,
    file_print,
    update_with_file,
    update_with_tensor,
)
from llmcompressor.errors import CheckpointError
from llmcompressor.modeling.flat_pieces import shape_of
from llmcompressor.modeling.spread import local, whole

__all__ = ["folder_print", "model_print", "note_change", "was_left_by"]

_NO_MATTER = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Settings that saving and training change, and that decide nothing beside the tensors."""

_changed: WeakKeyDictionary[Module, dict[str, list[dict[str, str]]]] = WeakKeyDictionary()
"""Model object → as a run has left it → its prints when such runs began."""


def model_print(model: Module) -> dict[str, str]:
    """Return the fingerprint of a loaded model.

    A model that is sharded over processes is gathered tensor by tensor, so all of them have to
    call this function.

    Args:
        model: weights on the meta device count by name, shape and dtype only.

    Returns:
        ``class``; ``config``, a hash of it, if there is one; ``tensors``, their number and a hash
        of their names, shapes and dtypes; ``weights``, a hash of their sampled values.
    """
    return _print(_unwrapped(model), whole)


def folder_print(folder: Path) -> dict[str, Any]:
    """Return the fingerprint of a model's folder from all headers and a sample of each tensor.

    Args:
        folder: if it holds no readable model, sizes and samples of its files are used.

    Returns:
        ``files``, the size and a hash of the header of each and a hash of ``config.json``;
        ``weights``, a hash of sampled values; ``processor``, a hash of the tokenizer's or
        processor's files, if there are any.
    """
    try:
        source = inspect_source(folder, allow_quantized=True)
    except CheckpointError:  # the loader reports it
        return {"files": {each.name: file_print(each, WEIGHTS) for each in _files(folder)}}
    found: dict[str, Any] = {"files": source_print(source), "weights": _stored_weights(source)}
    processor = xxhash.xxh3_128()
    names = [name for name in sorted(PROCESSOR_FILES) if (folder / name).is_file()]
    for name in names:
        processor.update(f"{name} {(folder / name).stat().st_size}\n".encode())
        processor.update((folder / name).read_bytes())
    return {**found, "processor": processor.hexdigest()} if names else found


def note_change(model: Any, begun: Mapping[str, str] | None) -> None:
    """Record that a run may have changed a model object, whether it succeeded or failed.

    Args:
        model: the object; the name of a model is ignored.
        begun: its fingerprint at the start of the run; ``None`` if none was computed.
    """
    model = _unwrapped(model)
    if begun is None or not isinstance(model, Module):
        return
    try:
        left = _key(model)
    except RuntimeError:  # of a broken accelerator; the run's own error is raised
        return
    known = _changed.setdefault(model, {}).setdefault(left, [])
    if begun not in known:
        known.append(dict(begun))


def was_left_by(model: Any, begun: Any) -> bool:
    """Return True if the object is in the state in which a run from that fingerprint left it.

    Args:
        model: the object.
        begun: its :func:`model_print` at the start of the run.

    Returns:
        ``False`` also if it was changed since by other code.
    """
    model = _unwrapped(model)
    if not isinstance(model, Module) or model not in _changed:
        return False
    return begun in _changed[model].get(_key(model), ())


def _unwrapped(model: Any) -> Any:
    """Return the model without torch.compile's wrapper, which renames all parameters."""
    return getattr(model, "_orig_mod", model)


def _key(model: Module) -> str:
    """Key of a model's state from the local shards, as other processes may have ended."""
    return json.dumps(_print(model, local))


def _print(model: Module, values_of: Callable[[Tensor], Tensor]) -> dict[str, str]:
    names, weights = xxhash.xxh3_128(), xxhash.xxh3_128()
    count = 0
    for name, tensor in _tensors(model):
        count += 1
        names.update(f"{name} {tensor.dtype} {shape_of(tensor)}\n".encode())
        values = values_of(tensor)
        if not values.is_meta and type(values) in (Tensor, Parameter):
            update_with_tensor(weights, values, WEIGHTS)
    found = {"class": type(model).__name__}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        text = json.dumps(_settings(config.to_dict()), sort_keys=True, default=_kind)
        found["config"] = xxhash.xxh3_64_hexdigest(text.encode())
    found["tensors"] = f"{count}, {names.hexdigest()}"
    found["weights"] = weights.hexdigest()
    return found


def _tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the persistent buffers with their names."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _settings(config: Any) -> Any:
    if isinstance(config, Mapping):
        kept = {str(name): each for name, each in config.items() if name not in _NO_MATTER}
        return {name: _settings(each) for name, each in kept.items()}
    return config


def _kind(value: Any) -> str:
    return type(value).__name__


def _stored_weights(source: SourceInfo) -> str:
    digest = xxhash.xxh3_128()
    for name, header in sorted(source.tensors.items()):
        digest.update(name.encode())
        update_with_file(digest, header.file, WEIGHTS, header.offset, header.nbytes)
    if not source.tensors:  # of another format
        for file in sorted(source.directory.glob("*.bin")):
            digest.update(f"{file.name} {file_print(file, WEIGHTS)}".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())
