# SPDX-License-Identifier: Apache-2.0
"""Identity of a run: hashes of all that decides its result, so that only the same run goes on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.journal import PROCESSOR, RunIdentity
from llmcompressor.checkpoint.manifest import RunRecord
from llmcompressor.checkpoint.side_files import PROCESSOR_FILES
from llmcompressor.checkpoint.source import CONFIG, SourceInfo, inspect_source
from llmcompressor.checkpoint.spread_weights import spread_values
from llmcompressor.checkpoint.tensor_files import bytes_of
from llmcompressor.datasets import rows
from llmcompressor.datasets.source import KIND_NAMES
from llmcompressor.errors import CheckpointError
from llmcompressor.modeling.sharded import full_shape, local_shard, reshard
from llmcompressor.numerics.products import is_slow_dtype
from llmcompressor.runtime.registry import normalize_name

OBJECT = "object"
"""In a recorded call, the class of an argument that was no JSON data."""
_LIBRARIES = ("llmcompressor", "torch", "transformers", "compressed-tensors")
_VECTOR = re.compile(r"amx|avx|fma|sve|sme|bf16|i8mm|dot|fp16|rvv|vnni|vsx|vxe")
"""Instructions that products are computed with; each library chooses among those that there are."""
_version = functools.cache(version)  # reads the package's metadata anew each time
_CALIBRATION = (
    "pipeline",
    "sequential_targets",
    "sequential_granularity",
    "propagate_error",
    "use_loss_mask",
    "moe_calibrate_all_experts",
    "starved_experts",
    "min_tokens_per_module",
)
"""Arguments that change what is found for a given set of batches."""


def run_identity(
    source: SourceInfo | None,
    *,
    recipe: str | None,
    batches: Iterable[Mapping[str, Any]] | None,
    dataset_args: DatasetArguments,
    dtype: torch.dtype,
    device: torch.device,
    output: Mapping[str, Any],
    statistics: str | None = None,
) -> RunIdentity:
    """Return the identity of a run, the first entry of its journal.

    Args:
        source: the original checkpoint; ``None`` if the model is in memory.
        recipe: as YAML.
        batches: calibration batches.
        dataset_args: calibration arguments.
        dtype: of the model.
        device: the device to compute on.
        output: options that determine how the output is written.
        statistics: hash of the kept statistics that take the place of batches.
    """
    found = RunIdentity(
        source=None if source is None else source_fingerprint(source),
        recipe=recipe,
        output=dict(output),
        **environment(dtype, device),
    )
    if batches is not None:
        found["calibration"] = {name: getattr(dataset_args, name) for name in _CALIBRATION}
        found["data"] = batches_fingerprint(batches)
        found["seed"] = dataset_args.seed
    if statistics is not None:
        found["statistics"] = statistics
    if batches is not None or statistics is not None:
        found[PROCESSOR] |= _processor(device)
        if device.type == "cpu":  # it determines the summation order of products
            found[PROCESSOR] |= {
                "threads": torch.get_num_threads(),
                "widened": is_slow_dtype(dtype),
            }
    return RunIdentity(json.loads(json.dumps(found)))  # as when read back


def environment(
    dtype: torch.dtype, device: torch.device, *, computes: bool = False
) -> dict[str, Any]:
    """Return what a run computes in: dtype, kind of device, processor and versions.

    Args:
        dtype: of the model.
        device: the device to compute on.
        computes: there are sums of products, whose order depends on the processor's instructions.
    """
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        PROCESSOR: {"machine": platform.machine(), **(_processor(device) if computes else {})},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute and write."""
    return {name: _version(name) for name in _LIBRARIES}


def _processor(device: torch.device) -> dict[str, str]:
    """Return what decides how sums are ordered: instructions of a CPU, model of an accelerator."""
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device.type), "get_device_name", None)
        return {"accelerator": str(name(device))} if name is not None else {}
    found = {"instructions": torch.backends.cpu.get_cpu_capability()}
    tell: Callable[[], Mapping[str, Any]] | None = getattr(torch.cpu, "get_capabilities", None)
    if tell is None:
        return found
    known = tell()
    extensions = (name for name, holds in known.items() if holds is True and _VECTOR.match(name))
    maker = str(known.get("cpu_name") or "").partition(" ")[0]  # libraries have code for each
    return {**found, "extensions": " ".join(sorted(extensions)), "maker": maker}


def source_fingerprint(source: SourceInfo) -> dict[str, str]:
    """Fingerprint of a checkpoint by file: size and a hash of the header; of its config, a hash."""
    by_file: dict[Path, list[str]] = {}
    for name, header in source.tensors.items():
        entry = f"{name} {header.dtype} {header.shape} {header.offset}"
        by_file.setdefault(header.file, []).append(entry)
    prints = {}
    for file in sorted(by_file):
        digest = xxhash.xxh3_64_hexdigest("\n".join(sorted(by_file[file])).encode())
        prints[file.name] = f"{file.stat().st_size} bytes, header {digest}"
    config = (source.directory / CONFIG).read_bytes()
    return {**prints, CONFIG: xxhash.xxh3_64_hexdigest(config)}


def batches_fingerprint(batches: Iterable[Mapping[str, Any]]) -> str:
    """Return the number of batches and a hash of all that they hold."""
    digest = xxhash.xxh3_128()
    count = 0
    for batch in batches:
        count += 1
        for name in sorted(batch):
            value = batch[name]
            if isinstance(value, Tensor):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(bytes_of(value.detach().cpu().contiguous()))
            else:
                digest.update(name.encode())
                _update(digest, value)
    return f"{count} batches, {digest.hexdigest()}"


# --------------------
# What the manifest of an output says of the run.

_OF_THE_MODEL = frozenset({"source", "weights", "model", "registered", "place"})
"""Parts of an identity that the manifest has of its own, from the files as they were read."""
NOT_OF_A_CALL = frozenset(
    {
        *("cache_dir", "dry_run", "loggers", "log_dir", "max_memory", "overwrite", "report"),
        *("output_dir", "overwrite_output_dir", "resume", "resume_from_checkpoint", "verify"),
        *("save_statistics", "verify_with", "verify_python", "verify_timeout"),
        *("hub_token", "push_to_hub_token", "use_auth_token"),
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_revision", "hub_private_repo"),
        *("hub_always_push", "report_to", "run_name", "project", "trackio_space_id"),
        *("recipe", "recipe_args", "stage", "bits", "size", "max_kl", "candidates"),
        "keep_rejected",
    }
)
"""Arguments that decide no byte, that send something elsewhere, secrets, and those of the recipe,
whose text is recorded.
"""
_NOT_TOLD = frozenset({"dataset", "gate_dataset", "raw_kwargs"})
"""Arguments that may hold the data itself or a key to it: only a name is recorded."""
_MOST_RECORDED = 4096
"""Characters of an argument that is recorded as it is."""


def run_record(
    identity: Mapping[str, Any],
    call: Mapping[str, Any],
    *,
    ranks: int = 1,
    source: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Return what the manifest says of a run.

    Args:
        identity: of the run.
        call: of :func:`call_record`.
        ranks: the number of processes that shared the work.
        source: fingerprint of a model in memory before the run.
    """
    decided = {name: value for name, value in identity.items() if name not in _OF_THE_MODEL}
    told = {name: decided.pop(name) for name in ("moment",) if name in decided}
    recipe = decided.pop("recipe", None)
    decided["recipe"] = None if recipe is None else hashlib.sha256(recipe.encode()).hexdigest()
    decided["ranks"] = ranks
    return RunRecord(decided, {**call, "recipe": recipe}, told, source or {})


def call_record(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as JSON data, to be made again.

    Args:
        function: its name.
        arguments: as they were given. An object that is no JSON data is recorded by its class, and
            has to be given again; so is data in memory. A token is not recorded.
    """
    kept = {
        name: _recorded(name, one)
        for name, one in sorted(arguments.items())
        if one is not None and name not in NOT_OF_A_CALL
    }
    return {"function": function, "arguments": kept}


def _recorded(name: str, value: Any) -> Any:
    text = ""
    if name not in _NOT_TOLD or isinstance(value, str | os.PathLike):
        with contextlib.suppress(TypeError, ValueError):
            text = json.dumps(value, default=_plain)
    is_short = 0 < len(text) <= _MOST_RECORDED
    return json.loads(text) if is_short else {OBJECT: type_fingerprint(value)}


def _plain(value: Any) -> Any:
    """Return a path or a scheme as JSON data; TypeError for another object."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return os.fspath(value)


# --------------------
# Sampled hashing: small data is hashed completely, larger data in evenly spread windows, the first
# and the last bytes included. Other, fine-tuned and merged weights are told apart so; a change
# between two windows is not.


@dataclass(frozen=True)
class _Sampling:
    """Selection of bytes to hash: all up to a size, else that many windows of a size."""

    all_up_to: int
    windows: int
    window: int

    def parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the number of bytes of each hashed part.

        >>> list(_Sampling(8, 3, 2).parts(8)), list(_Sampling(8, 3, 2).parts(100))
        ([(0, 8)], [(0, 2), (49, 2), (98, 2)])
        """
        if nbytes <= self.all_up_to:
            yield 0, nbytes
            return
        for place in range(self.windows):
            yield place * (nbytes - self.window) // (self.windows - 1), self.window


_WEIGHTS = _Sampling(all_up_to=2**18, windows=16, window=2**12)
"""Of each tensor of a model."""
_DATA = _Sampling(all_up_to=2**26, windows=256, window=2**16)
"""Of each file of a data set."""


def _update_with_tensor(digest: xxhash.xxh3_128, tensor: Tensor) -> None:
    """Add sampled values of a tensor to a hash; only these are moved to the CPU."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return
    raw = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element has any stride
    parts = [raw[start : start + count] for start, count in _WEIGHTS.parts(raw.numel())]
    digest.update(bytes_of(torch.cat(parts).cpu() if len(parts) > 1 else parts[0].cpu()))


def _update_with_file(
    digest: xxhash.xxh3_128, file: Path, sampling: _Sampling, start: int = 0, nbytes: int = -1
) -> None:
    """Add sampled bytes of a file, or of a range in it, to a hash."""
    length = file.stat().st_size - start if nbytes < 0 else nbytes
    with file.open("rb", buffering=0) as stream:
        for first, count in sampling.parts(length):
            stream.seek(start + first)
            digest.update(stream.read(count))


def _file_fingerprint(file: Path, sampling: _Sampling) -> str:
    digest = xxhash.xxh3_128()
    _update_with_file(digest, file, sampling)
    return f"{file.stat().st_size} bytes, {digest.hexdigest()}"


# --------------------
# Fingerprints of model folders and loaded models, from sampled weights.

_NO_MATTER = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Settings that saving and training change, and that decide nothing beside the tensors."""

_changed: WeakKeyDictionary[Module, dict[str, list[dict[str, str]]]] = WeakKeyDictionary()
"""Model object → as a run has left it → its prints when such runs began."""


def model_fingerprint(model: Module) -> dict[str, str]:
    """Return the fingerprint of a loaded model.

    A model that is sharded over processes is gathered tensor by tensor, so all of them have to
    call this function.

    Args:
        model: weights on the meta device count by name, shape and dtype only.

    Returns:
        ``class``; ``config``, a hash of it, if there is one; ``tensors``, their number and a hash
        of their names, shapes and dtypes; ``weights``, a hash of their sampled values.
    """
    return _fingerprint(_unwrapped(model), spread_values(model))


def folder_fingerprint(folder: Path) -> dict[str, Any]:
    """Return the fingerprint of a model's folder from all headers and a sample of each tensor.

    Args:
        folder: if it holds no readable model, sizes and samples of its files are used.

    Returns:
        ``files``, as :func:`source_fingerprint`; ``weights``, a hash of sampled values;
        ``processor``, a hash of the tokenizer's or processor's files, if there are any.
    """
    try:
        source = inspect_source(folder, allow_quantized=True, allow_absent=True)
    except CheckpointError:  # the loader reports it
        files = sorted(path for path in folder.iterdir() if path.is_file())
        return {"files": {each.name: _file_fingerprint(each, _WEIGHTS) for each in files}}
    weights = xxhash.xxh3_128()
    for name, header in sorted(source.tensors.items()):
        weights.update(name.encode())
        _update_with_file(weights, header.file, _WEIGHTS, header.offset, header.nbytes)
    if not source.tensors:  # of another format
        for file in sorted(source.directory.glob("*.bin")):
            weights.update(f"{file.name} {_file_fingerprint(file, _WEIGHTS)}".encode())
    found = {"files": source_fingerprint(source), "weights": weights.hexdigest()}
    processor = xxhash.xxh3_128()
    names = [name for name in sorted(PROCESSOR_FILES) if (folder / name).is_file()]
    for name in names:
        content = (folder / name).read_bytes()
        processor.update(f"{name} {len(content)}\n".encode())
        processor.update(content)
    return {**found, "processor": processor.hexdigest()} if names else found


def fingerprint_of(given: Any, model: Module, folder: str | None) -> dict[str, Any]:
    """Return the fingerprint of a model in memory: of its files, if it was given by its place.

    Args:
        given: the argument: a place, or the model itself.
        model: the model.
        folder: the local folder of that place.
    """
    if isinstance(given, str | os.PathLike) and folder is not None:
        return folder_fingerprint(Path(folder))
    return model_fingerprint(model)


def record_change(model: Any, begun: Mapping[str, str] | None) -> None:
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


def is_result_of(model: Any, begun: Any) -> bool:
    """Return True if the object is in the state in which a run from that fingerprint left it."""
    model = _unwrapped(model)
    if not isinstance(model, Module) or model not in _changed:
        return False
    return begun in _changed[model].get(_key(model), ())


def _unwrapped(model: Any) -> Any:
    """Return the model without torch.compile's wrapper, which renames all parameters."""
    return getattr(model, "_orig_mod", model)


def _key(model: Module) -> str:
    """Key of a model's state from the local shards, as other processes may have ended."""
    return json.dumps(_fingerprint(model, local_shard))


def _fingerprint(model: Module, values_of: Callable[[Tensor], Tensor]) -> dict[str, str]:
    names, weights = xxhash.xxh3_128(), xxhash.xxh3_128()
    count = 0
    reshard(model)  # FSDP cannot free a tensor once numpy has looked at it
    for name, tensor in _tensors(model):
        count += 1
        names.update(f"{name} {tensor.dtype} {full_shape(tensor)}\n".encode())
        values = values_of(tensor)
        if not values.is_meta and type(values) in (Tensor, Parameter):
            _update_with_tensor(weights, values)
    found = {"class": type(model).__name__}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        settings = _settings(config.to_dict())
        text = json.dumps(settings, sort_keys=True, default=lambda one: type(one).__name__)
        found["config"] = xxhash.xxh3_64_hexdigest(text.encode())
    found["tensors"] = f"{count}, {names.hexdigest()}"
    found["weights"] = weights.hexdigest()
    return found


def weight_digests(model: Module) -> dict[str, str]:
    """Return a hash of all bytes of each parameter and persistent buffer, by its name.

    Those on an accelerator are moved to the CPU one by one.
    """
    found = {}
    for name, tensor in _tensors(model):
        values = "no values"
        if not tensor.is_meta and type(tensor) in (Tensor, Parameter):
            values = xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach().cpu().contiguous()))
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {values}"
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


# --------------------
# Fingerprints of data sets, computed without preparing them: of files and of values in memory a
# hash; of a ``datasets.Dataset`` the library's own fingerprint. Generators, streams, loaders and
# custom classes count by class and length, as reading them could exhaust them.


def data_fingerprint(data: Any) -> Any:
    """Return the fingerprint of any value of the argument ``dataset``, as a JSON value."""
    if data is None:
        return None
    if isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        known = rows.find(name) is not None or normalize_name(name) in KIND_NAMES
        return name if known or not Path(name).expanduser().exists() else path_fingerprint(name)
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return {
            name: values_fingerprint(each) if _is_value(each) else data_fingerprint(each)
            for name, each in data.items()
        }
    return values_fingerprint(data) if _is_value(data) else type_fingerprint(data)


def path_fingerprint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fingerprint of a path: ``path`` as given and, if it exists, ``files`` with size and hash."""
    given, place = os.fspath(path), Path(path).expanduser()
    if place.is_file():
        return {"path": given, "files": _file_fingerprint(place, _DATA)}
    if not place.is_dir():
        return {"path": given}
    digest, files = xxhash.xxh3_128(), sorted(one for one in place.rglob("*") if one.is_file())
    for file in files:
        digest.update(f"{file.relative_to(place)} {_file_fingerprint(file, _DATA)}\n".encode())
    return {"path": given, "files": f"{len(files)} files, {digest.hexdigest()}"}


def values_fingerprint(values: Any) -> str:
    """Fingerprint of values: their type, number and a hash of all of them."""
    digest = xxhash.xxh3_128()
    _update(digest, values)
    size = f" of {len(values)}" if hasattr(values, "__len__") else ""
    return f"{type(values).__name__}{size}, {digest.hexdigest()}"


def sample_fingerprints(batches: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a hash of each sample of ``batches``, the same in a batch of any size and padding.

    Of token ids of shape ``[samples, positions]`` with an attention mask; a batch of other values
    counts as one sample.
    """
    for batch in batches:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape == mask.shape:
            rows = (each[kept.bool()] for each, kept in zip(ids, mask, strict=True))
            yield from map(values_fingerprint, rows)
        else:
            yield values_fingerprint([batch])


def type_fingerprint(value: Any) -> str:
    """Fingerprint of an object without reading it: class, length, and that of ``datasets``."""
    size = ""
    with contextlib.suppress(TypeError):  # a compiled module has __len__ for what it wraps
        size = f" of {len(value)}"
    return f"{type(value).__name__}{size} {getattr(value, '_fingerprint', '')}".strip()


def _is_value(data: Any) -> bool:
    """Return True if all values are in memory, so that reading them has no side effect."""
    return isinstance(data, str | list | tuple | Tensor | np.ndarray) or _is_frame(data)


def _is_frame(data: Any) -> bool:
    of_pandas = f"{type(data).__module__}.".startswith("pandas.")
    return of_pandas and hasattr(data, "to_dict")


def _update(digest: xxhash.xxh3_128, value: Any) -> None:
    """Add a value to a hash, with type and length so that adjacent values stay distinct."""
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(bytes_of(value.detach().cpu().contiguous()))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"array {value.dtype} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, list | tuple | np.ndarray):
        _update_with_items(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for name, each in value.items():
            _update(digest, name)
            _update(digest, each)
    elif _is_frame(value):
        _update(digest, value.to_dict("list"))
    elif isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        digest.update(f"{type(value).__name__} {len(text)};".encode())
        digest.update(text)
    elif value is None or isinstance(value, bool | int | float | np.generic):
        digest.update(f"{value!r};".encode())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image
        digest.update(f"image {value.mode} {value.size};".encode())
        digest.update(value.tobytes())
    else:
        digest.update(f"{type_fingerprint(value)};".encode())


def _update_with_items(digest: xxhash.xxh3_128, items: Any) -> None:
    digest.update(f"list {len(items)};".encode())
    if len(items) and type(items[0]) is int:
        try:
            digest.update(array("q", items).tobytes())  # token ids: most of a data set
        except (TypeError, OverflowError):
            pass
        else:
            return
    for each in items:
        _update(digest, each)
