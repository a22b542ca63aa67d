# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: headers, index, bytes of tensors, and the reports of earlier runs.

A safetensors file is a little-endian 64-bit length, so many bytes of JSON, and the data, tensor
after tensor without a gap. Data is read with plain reads rather than a mapping of the file, so that
what was read does not stay in the process.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompressor.errors import CheckpointError
from llmcompressor.runtime.limits import check_model_files, parse_json
from llmcompressor.verification.facts import Finding, Severity, TensorInfo

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
"""What PEFT writes instead of a configuration."""
_OTHER_FORMAT = re.compile(r"(?:consolidated|adapter_model)\b")
"""Files with names of their own for what they hold: Mistral's, and adapters."""
_OTHER_FILES = {
    ".gguf": "of llama.cpp and its kin, of which nothing is checked here",
    ".bin": "of torch: save_pretrained writes safetensors",
    ".pth": "of torch: save_pretrained writes safetensors",
    ".onnx": "of ONNX, of which nothing is checked here",
}
_PIECE = 1 << 22
_MOST_HEADER = 100 << 20
_DAMAGED = "Copy the file again, or compress the model anew."

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PAIRED = "F4"
"""Of two numbers in a byte, which is one element in torch."""


@dataclass(frozen=True)
class Place:
    """Place of a tensor's bytes.

    Attributes:
        file: the file.
        start: position of the first byte.
        size: bytes.
        info: dtype and shape.
    """

    file: Path
    start: int
    size: int
    info: TensorInfo


@dataclass
class Files:
    """A checkpoint that can be read.

    Attributes:
        directory: where it is.
        config: the content of ``config.json``; empty if it cannot be read.
        places: tensor name → its place.
        findings: what is wrong with the files.
        size: bytes of all weight files.
        broken: tensors whose bytes cannot be read.
        opened: files that were read, with their descriptors; :meth:`close` closes them.
        listener: told of all bytes of tensors that are read: name, position in the tensor, bytes.
    """

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    size: int = 0
    broken: set[str] = field(default_factory=set)
    opened: dict[Path, int] = field(default_factory=dict, repr=False)
    listener: Callable[[str, int, Any], None] | None = field(default=None, repr=False)

    def close(self) -> None:
        """Close what was opened; a later read opens it again."""
        while self.opened:
            os.close(self.opened.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if path not in self.opened:
            descriptor = os.open(path, os.O_RDONLY)
            # another thread may have been faster
            if self.opened.setdefault(path, descriptor) != descriptor:
                os.close(descriptor)
        return self.opened[path]

    @property
    def headers(self) -> dict[str, TensorInfo]:
        """Tensor name → dtype and shape."""
        return {name: place.info for name, place in self.places.items()}

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, flat: bool = False
    ) -> Tensor:
        """A tensor, or its rows from ``start`` up to ``stop``.

        Args:
            name: the tensor's name.
            start: the first row.
            stop: the row behind the last; all that follow by default.
            flat: take a stack of matrices for one matrix with the rows of all.

        Raises:
            CheckpointError: the file cannot be read that far.
        """
        place = self.places[name]
        shape = place.info.shape
        if flat and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        dtype = DTYPES[place.info.dtype]
        offset, size = place.start, place.size
        if shape and (start or stop is not None):
            last = shape[0] if stop is None else min(stop, shape[0])
            row = place.size // max(shape[0], 1)
            offset, size = offset + start * row, max(last - start, 0) * row
            shape = (max(last - start, 0), *shape[1:])
        if place.info.dtype == _PAIRED and shape:
            shape = (*shape[:-1], shape[-1] // 2)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        # not a bytearray, which would be filled with zeros first
        data = torch.empty(size, dtype=torch.uint8)
        view, done, descriptor = data.numpy().data, 0, self._descriptor(place.file)
        while done < size:
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                raise CheckpointError(f"The file {place.file} ends within {name}.", _DAMAGED)
            done += count
        if self.listener is not None:
            self.listener(name, offset - place.start, view)
        return data.view(dtype).reshape(shape)

    def hash_of(self, name: str) -> str:
        """The SHA-256 of a tensor's bytes.

        Raises:
            CheckpointError: the file cannot be read that far.
        """
        place = self.places[name]
        digest, descriptor, end = hashlib.sha256(), self._descriptor(place.file), 0
        while end < place.size:
            part = os.pread(descriptor, min(place.size - end, _PIECE), place.start + end)
            if not part:
                raise CheckpointError(f"The file {place.file} ends within {name}.", _DAMAGED)
            digest.update(part)
            end += len(part)
        return digest.hexdigest()

    def say(self, rule: str, module: str, message: str, remedy: str = _DAMAGED) -> None:
        """Note that something is wrong with the files."""
        self.findings.append(Finding(rule, module, message, remedy, Severity.ERROR))


def open_checkpoint(directory: str | os.PathLike[str]) -> Files:
    """Read configuration, index and headers; what is wrong with them is in ``findings``.

    Raises:
        CheckpointError: there is no such folder, or it holds neither configuration nor weights.
    """
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no checkpoint folder {directory}.", "Give a folder with config.json."
        )
    check_model_files(folder)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards and not (folder / CONFIG).exists():
        raise CheckpointError(
            f"The folder {directory} holds no model{_beside(folder)}.",
            "Give a folder with config.json and weights in safetensors.",
        )
    if not (folder / CONFIG).exists() and (folder / _ADAPTER).exists():
        raise CheckpointError(
            f"The folder {directory} holds an adapter (PEFT) and no model.",
            "Merge it into its base (merge_and_unload), and give the folder that that is saved in.",
        )
    files = Files(folder.resolve())
    files.config = _json(files, CONFIG, "F1") or {}
    headers = {path.name: _header(files, path) for path in shards}
    files.size = sum(path.stat().st_size for path in shards)
    if (folder / INDEX).exists():
        _by_index(files, headers)
    else:
        _without_index(files, headers)
    return files


def _json(files: Files, name: str, rule: str) -> dict[str, Any] | None:
    path = files.directory / name
    if not path.is_file():
        files.say(rule, name, "The file is not there.")
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        files.say(rule, name, f"The file is no JSON: {error}.")
        return None
    if not isinstance(content, dict):
        files.say(rule, name, "The file holds no JSON object.")
        return None
    return content


def _header(files: Files, path: Path) -> dict[str, Place]:
    """The tensors of one file; empty if its header cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            files.say("F3", path.name, "It is a Git LFS pointer.", "Run `git lfs pull`.")
            return {}
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MOST_HEADER:
            files.say("F4", path.name, "It is no safetensors file.")
            return {}
        text = stream.read(length)
    try:
        raw = parse_json(text.decode())  # UTF-8 alone, and no mark of a byte order
        _check_notes(raw.get("__metadata__"))
        entries = {name: raw[name] for name in raw if name != "__metadata__"}
        places = {name: _place(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        short = len(text) < length
        said = "It is truncated within its header." if short else f"Its header is damaged: {error}."
        files.say("F3" if short else "F4", path.name, said)
        return {}
    _check_places(files, path, places, size, 8 + length)
    return places


def _check_notes(notes: Any) -> None:
    """Refuse what a header holds beside tensors, if it is no map of texts."""
    if notes is None:
        return
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise ValueError("its __metadata__ is no map of texts")


def _place(path: Path, base: int, entry: Any) -> Place:
    first, last = (_natural(offset) for offset in entry["data_offsets"])
    shape = tuple(_natural(size) for size in entry["shape"])
    return Place(path, base + first, last - first, TensorInfo(str(entry["dtype"]), shape))


def _natural(number: Any) -> int:
    """A size or an offset: readers take whole numbers from zero on, and no other spelling."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size or offset")
    return number


def _check_places(
    files: Files, path: Path, places: Mapping[str, Place], size: int, base: int
) -> None:
    position = base
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].size)):
        dtype, wanted = DTYPES.get(place.info.dtype), prod(place.info.shape)
        if dtype is not None:
            wanted = wanted * dtype.itemsize // (2 if place.info.dtype == _PAIRED else 1)
        if dtype is None:
            files.say("F4", name, f"Its dtype {place.info.dtype} is not known.")
            files.broken.add(name)
        elif place.size != wanted:
            files.say(
                "F4",
                name,
                f"It has {place.size} bytes, and {place.info.dtype} of {list(place.info.shape)} "
                f"takes {wanted}.",
            )
            files.broken.add(name)
        if place.start != position:
            what = "leaves a gap" if place.start > position else "overlaps another tensor"
            files.say("F4", name, f"It {what} in {path.name}.")
        position = max(position, place.start + place.size)
        if position > size:
            files.broken.add(name)
    if size < position:
        files.say("F3", path.name, f"It is truncated: it holds {size} of {position} bytes.")
    elif size > position:
        files.say("F4", path.name, f"It has {size - position} bytes beyond its tensors.")


def _by_index(files: Files, headers: Mapping[str, Mapping[str, Place]]) -> None:
    index = _json(files, INDEX, "F2") or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        files.say("F2", INDEX, "It has no weight_map.")
        weight_map = {name: file for file, own in headers.items() for name in own}
    for file in sorted({str(file) for file in weight_map.values()} - set(headers)):
        files.say("F3", file, "The index names this shard, and it is not there.")
    for name, file in weight_map.items():
        if str(file) in headers and name not in headers[str(file)]:
            files.say("F5", name, f"The index places it in {file}, which does not hold it.")
    files.places = _chosen(headers, {str(file) for file in weight_map.values()})
    _check_left_over(files, headers, weight_map)
    metadata = index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        files.say("F2", INDEX, "Its metadata is no JSON object.")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(place.size for place in files.places.values())
    if isinstance(total, int) and total != actual:
        files.say(
            "F8", INDEX, f"Its total_size is {total}, the tensors have {actual} bytes.", "Write it."
        )


def _chosen(headers: Mapping[str, Mapping[str, Place]], named: Iterable[str]) -> dict[str, Place]:
    """The tensors as readers choose them where files and index disagree.

    Of a tensor in two files the later name counts, but ``model.safetensors`` before all. Files that
    nothing names count where no other has the tensor, unless they hold the model in another format.
    """
    found: dict[str, Place] = {}
    for file in [*sorted({*named} - {SINGLE}), SINGLE]:
        found |= headers.get(file, {})
    known = {without_prefixes(name) for name in found}
    for file, own in headers.items():
        if not _OTHER_FORMAT.match(file):
            new = {name for name in own if without_prefixes(name) not in known}
            found |= {name: own[name] for name in new - found.keys()}
    return found


def _check_left_over(
    files: Files, headers: Mapping[str, Mapping[str, Place]], weight_map: Mapping[str, Any]
) -> None:
    used = {str(file) for file in weight_map.values()}
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file, own in headers.items():
        if file not in used:
            files.say("F6", file, "The index does not name this file.", "Remove it.")
            continue
        for name in own:
            homes[name].append(file)
            if name not in weight_map:
                files.say("F6", name, f"It is in {file}, and the index does not name it.")
    for name, where in homes.items():
        if len(where) > 1:
            files.say("F7", name, f"It is in {len(where)} shards: {', '.join(sorted(where))}.")


def _beside(folder: Path) -> str:
    """What a folder without safetensors files holds instead, for a message."""
    found = [path.name for path in sorted(folder.iterdir()) if path.suffix in _OTHER_FILES]
    return f" but {found[0]} ({_OTHER_FILES[Path(found[0]).suffix]})" if found else ""


def _without_index(files: Files, headers: Mapping[str, Mapping[str, Place]]) -> None:
    if not headers:
        said = f"The folder holds no safetensors file{_beside(files.directory)}."
        files.say("F3", SINGLE, said, "Give the folder of the model that was saved as safetensors.")
    elif SINGLE not in headers and len(headers) > 1:
        files.say("F2", INDEX, "There are several shards and no index.")
    for file in headers:
        if SINGLE in headers and file != SINGLE:
            files.say("F6", file, "Nothing names this file.", "Remove it.")
    files.places = _chosen(headers, [SINGLE] if SINGLE in headers else headers)


def tensor_chunks(files: Files, name: str, most: int) -> Iterator[Tensor]:
    """A tensor in slices of whole rows of about ``most`` elements."""
    shape = files.places[name].info.shape
    if len(shape) < 2 or prod(shape) <= most:
        yield files.read(name)
        return
    rows = max(most // max(prod(shape[1:]), 1), 1)
    for start in range(0, shape[0], rows):
        yield files.read(name, start, start + rows)


DROPS = "REAPPruningModifier"
"""The modifier that drops weights, and leaves the others as they are."""

_REPORT = "compression_report.json"
_EARLIER = "before"
_STORED_AS = "stored_as"
OF_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)(?:\.(?P<rest>.+))?$")
"""A module or tensor of one expert."""
_OF_FILES = "verification"
_PREFIXES = ("model.", "language_model.", "transformer.")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.\d+\.")


@dataclass(frozen=True)
class Run:
    """A run that changed a checkpoint.

    Attributes:
        records: class of a modifier → module → what was recorded.
        trained: the model was trained, so that any weight may have changed.
        stored_as: module → what the files call it, where that is something else.
    """

    records: Mapping[str, Any]
    trained: bool
    stored_as: Mapping[str, Any] = field(default_factory=dict)

    def names_of(self, module: str) -> list[str]:
        """Names that the files may have for a module that is recorded; its own name first."""
        expert = OF_EXPERT.match(module)
        stored = self.stored_as.get(module if expert is None else expert["experts"])
        return [module, *map(str, stored)] if isinstance(stored, list) else [module]


def runs_since(checkpoint: Files, reference: Files) -> list[Run]:
    """The runs that made the checkpoint of the reference.

    Args:
        checkpoint: the files at the end.
        reference: those at the beginning.

    Returns:
        The latest run first; nothing where no report can be read.
    """
    begin = _comparable(_report(reference))
    found = []
    report: Any = _report(checkpoint)
    while isinstance(report, Mapping) and report:
        if begin and _comparable(report) == begin:
            break
        records = report.get("modifiers")
        known = records if isinstance(records, Mapping) else {}
        stored = report.get(_STORED_AS)
        names = stored if isinstance(stored, Mapping) else {}
        found.append(Run(known, trained="training" in report, stored_as=names))
        report = report.get(_EARLIER)
    return found


class Changed:
    """The modules whose weights runs have changed and recorded.

    Args:
        runs: which.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self._all = any(run.trained for run in runs)
        self._names = {
            _key(name)
            for run in runs
            for modifier, modules in run.records.items()
            if isinstance(modules, Mapping) and not str(modifier).startswith(DROPS)
            for module in modules
            for name in run.names_of(str(module))
        }

    def __contains__(self, module: str) -> bool:
        return self._all or _key(module) in self._names


def without_prefixes(name: str) -> str:
    """A name without the prefixes that differ between versions of transformers."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def layer_of(tail: str) -> str:
    """The beginning of a name that says which layer it is in; empty for what is in none."""
    match = _LAYER.match(tail)
    return match[0] if match is not None else ""


def _key(module: str) -> str:
    """Equal for what files and the model may call differently: one expert or their stack."""
    tail = without_prefixes(module)
    return f"{layer_of(tail)}experts" if "experts" in tail.split(".") else tail


def left_by_run(files: Files) -> frozenset[str]:
    """The tensors of its source that the run has left behind, as its report says."""
    left = _report(files).get("left_behind")
    return frozenset(map(str, left)) if isinstance(left, list) else frozenset()


def _report(files: Files) -> Mapping[str, Any]:
    try:
        report = parse_json((files.directory / _REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, Mapping) else {}


def _comparable(report: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != _OF_FILES}
