# SPDX-License-Identifier: Apache-2.0
"""What tells one model from another, cheaply: of folders and of loaded models.

Of each tensor up to 256 KiB every byte is hashed, of a larger one 16 windows of 4 KiB that lie
evenly over it, the first and the last bytes among them. Other weights, further trained ones and
merged ones are told apart so; a change of a few values of a large matrix may lie between windows.
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
    """What tells a loaded model from others.

    A model that is spread over processes is put together tensor by tensor: all of them have to
    call it then.

    Args:
        model: weights that are nowhere (on the meta device) count by name, shape and dtype only.

    Returns:
        ``class``; ``config``, a hash of it, if there is one; ``tensors``, how many there are and
        a hash of their names, shapes and dtypes; ``weights``, a hash of their values, sampled as
        the head of this module says.
    """
    return _print(_unwrapped(model), whole)


def folder_print(folder: Path) -> dict[str, Any]:
    """What tells a model's folder from others; all headers and a sample of each tensor are read.

    Args:
        folder: one that holds no model that can be read is told by the sizes and samples of its
            files.

    Returns:
        ``files``, the size and a hash of the header of each and a hash of ``config.json``;
        ``weights``, a hash of values, sampled as the head of this module says; ``processor``, a
        hash of the tokenizer's or processor's files, if there are any.
    """
    try:
        source = inspect_source(folder, allow_quantized=True)
    except CheckpointError:  # whoever is to read it says so
        return {"files": {each.name: file_print(each, WEIGHTS) for each in _files(folder)}}
    found: dict[str, Any] = {"files": source_print(source), "weights": _stored_weights(source)}
    processor = xxhash.xxh3_128()
    names = [name for name in sorted(PROCESSOR_FILES) if (folder / name).is_file()]
    for name in names:
        processor.update(f"{name} {(folder / name).stat().st_size}\n".encode())
        processor.update((folder / name).read_bytes())
    return {**found, "processor": processor.hexdigest()} if names else found


def note_change(model: Any, begun: Mapping[str, str] | None) -> None:
    """Note that a run has changed a model object, or may have, however it ended.

    Args:
        model: the object; a name is none, and is passed over.
        begun: its print when the run began; ``None`` if it did not come so far.
    """
    model = _unwrapped(model)
    if begun is None or not isinstance(model, Module):
        return
    try:
        left = _key(model)
    except RuntimeError:  # of a broken accelerator; the error that the run ended with is told
        return
    known = _changed.setdefault(model, {}).setdefault(left, [])
    if begun not in known:
        known.append(dict(begun))


def was_left_by(model: Any, begun: Any) -> bool:
    """Whether a run that began with a model of this print has left the object as it is now.

    Args:
        model: the object.
        begun: what :func:`model_print` gave of it then.

    Returns:
        ``False``, too, if somebody else has changed it since.
    """
    model = _unwrapped(model)
    if not isinstance(model, Module) or model not in _changed:
        return False
    return begun in _changed[model].get(_key(model), ())


def _unwrapped(model: Any) -> Any:
    """Without torch.compile's wrapper, which names all parameters anew."""
    return getattr(model, "_orig_mod", model)


def _key(model: Module) -> str:
    """By this process's part of each tensor: when a run ends, the other processes may be gone."""
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
    """Parameters, and the buffers that are saved."""
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
