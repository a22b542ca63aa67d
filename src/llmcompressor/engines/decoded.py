# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for an engine: a model with decoded weights, and the first blocks of a model.

The decoded model is an ordinary one without quantization. Its weights are what ``verify``'s own
code makes of the codes; rotations that stay in the forward are multiplied into them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmcompressor.errors import ArgumentError
from llmcompressor.verification.check import codes_of_entry
from llmcompressor.verification.expected import Codes
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.files import CONFIG, INDEX, Files
from llmcompressor.verification.modules import Entry, text_settings
from llmcompressor.verification.rules.view import View
from llmcompressor.verification.scheme import compiled

_DTYPES = ("bfloat16", "float16", "float32")
_SHARD = 1 << 30
"""Bytes of tensors that are held and written together."""
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)\.")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_QUANTIZATION = ("quantization_config", "compression_config")
_CACHE_SCALE = re.compile(r".*\.[qkv]_(?:scale|zero_point)$|.*\.(?:prob|output)_scale$")
_BESIDE = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")


class UndecodableError(Exception):
    """A module's codes cannot be decoded; the message names it."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open.

    Attributes:
        files: its files.
        view: its structure.
        blocks: how many of its first blocks count; ``None`` for all.
    """

    files: Files
    view: View
    blocks: int | None = None

    @cached_property
    def names(self) -> list[str]:
        """The tensors of the blocks that count, and those outside of blocks."""
        return [name for name in self.files.places if self.counts(name)]

    @property
    def dtype(self) -> str:
        """The dtype that the model runs in, where that is one that engines take."""
        return self.view.dtype if self.view.dtype in _DTYPES else "bfloat16"

    def counts(self, name: str) -> bool:
        """True for a tensor or module of the blocks that count, or outside of blocks."""
        found = _LAYER.match(name) if self.blocks is not None else None
        return found is None or self.blocks is None or int(found[1]) < self.blocks

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the blocks that count."""
        config: dict[str, Any] = json.loads(json.dumps(self.files.config))
        if self.blocks is not None:
            _cut(text_settings(config), self.blocks)  # type: ignore[arg-type]  # of a copy
        return config


def blocks_of_each_kind(files: Files, view: View) -> int | None:
    """How many of the first blocks hold one of each kind; ``None`` if all are needed.

    Blocks are of one kind if they hold the same tensors, and every list of the configuration with
    an entry for each block has the same entry for them.
    """
    tensors: dict[int, set[tuple[str, TensorInfo]]] = {}
    stacks = set()
    for name, place in files.places.items():
        if found := _LAYER.match(name):
            stacks.add(name[: found.start(1)])
            tensors.setdefault(int(found[1]), set()).add((name[found.end() :], place.info))
    text = view.text
    count = next((text[key] for key in _LAYERS if isinstance(text.get(key), int)), 0)
    if len(stacks) != 1 or set(tensors) != set(range(count)):
        return None  # several stacks of blocks, or some that the configuration does not count
    lists = [one for one in text.values() if isinstance(one, list) and len(one) == count]
    kinds = [(frozenset(tensors[at]), str([one[at] for one in lists])) for at in range(count)]
    needed = max(kinds.index(kind) for kind in kinds) + 1
    return needed if needed < count else None


def _cut(text: dict[str, Any], blocks: int) -> None:
    """Let a configuration describe the first blocks alone."""
    count = next((text[key] for key in _LAYERS if isinstance(text.get(key), int)), 0)
    for key, value in text.items():
        if key in _LAYERS:
            text[key] = blocks
        elif isinstance(value, list) and len(value) == count:
            text[key] = value[:blocks]


def write_cut(source: Source, folder: Path) -> None:
    """Write a checkpoint of the blocks that count, as they are stored."""
    tensors = ((name, source.files.read(name)) for name in source.names)
    _write(source, folder, source.config, tensors)


def write_decoded(source: Source, folder: Path) -> None:
    """Write the model with decoded weights, in the dtype that it runs in.

    Raises:
        UndecodableError: the codes of a module cannot be decoded.
    """
    config = source.config
    for holder in (config, config.get("text_config")):
        for key in _QUANTIZATION:
            if isinstance(holder, dict):
                holder.pop(key, None)
    _write(source, folder, config, _decoded(source))


def _decoded(source: Source) -> Iterator[tuple[str, Tensor]]:
    files, view = source.files, source.view
    rotations = Rotations(files, view)
    names, schemes = set(source.names), {one.name: scheme for one, scheme in view.coded}
    dtype = getattr(torch, source.dtype)
    for entry in view.entries.values():
        prefix = f"{entry.name}." if entry.name else ""
        own = [one for one in entry.own if f"{prefix}{one}" in names]
        if not own or rotations.is_one(entry.name):
            continue
        if entry.is_quantized or view.kept_scales(entry):
            codes = codes_of_entry(
                files, view, entry, schemes.get(entry.name) or view.written(entry)
            )
            if codes is None:
                raise UndecodableError(entry.name)
            yield f"{prefix}weight", rotations.undone(entry, weight_of(codes)).to(dtype)
            own = ["bias"] if "bias" in own else []
        for name in (f"{prefix}{one}" for one in own):
            if not _CACHE_SCALE.match(name):
                yield name, files.read(name)


def weight_of(codes: Codes) -> Tensor:
    """The decoded weight of a module, float32 ``[rows, columns]``."""
    return torch.cat([(part.units * part.scale).flatten(1) for part in codes.parts()])


@dataclass
class Rotations:
    """Rotations that stay in the forward of a checkpoint's Linears.

    Attributes:
        files: the checkpoint.
        view: its structure.
    """

    files: Files
    view: View
    _known: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def is_one(self, module: str) -> bool:
        """True if a module holds the matrix of a rotation."""
        return module.rpartition(".")[2] in self.view.transforms

    def undone(self, entry: Entry, weight_RC: Tensor) -> Tensor:
        """A weight that computes without rotations what this one computes between its own.

        With ``y = x A W^T B`` it is ``B^T W A^T``; a smaller matrix is one for each part.
        """
        for place, matrix in self._of(entry, weight_RC):
            size = len(matrix)
            if place == "input":
                cells = weight_RC.reshape(len(weight_RC), -1, size)
                weight_RC = (cells @ matrix.T).flatten(1)
            else:
                cells = weight_RC.reshape(-1, size, weight_RC.shape[1])
                weight_RC = (matrix.T @ cells).flatten(0, 1)
        return weight_RC

    def _of(self, entry: Entry, weight_RC: Tensor) -> Iterator[tuple[str, Tensor]]:
        settings = self.view.settings.get("transform_config")
        groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
        for name, scheme in groups.items() if isinstance(groups, Mapping) else ():
            for args in scheme.get("apply") or ():
                place = str(args.get("location"))
                if place not in ("input", "output") or not _selects(args, entry.name):
                    continue
                width = weight_RC.shape[1] if place == "input" else weight_RC.shape[0]
                matrix = self._stored(entry.name, name, place, scheme.get("head_dim") or width)
                yield place, matrix.T if args.get("inverse") else matrix

    def _stored(self, module: str, scheme: str, place: str, size: int) -> Tensor:
        """The matrix that loaders take: a module's own, or that of another of the same scheme."""
        key = (scheme, size)
        if key not in self._known:
            last = f".{scheme}_{place}.weight"
            tied = f".{scheme}_{'output' if place == 'input' else 'input'}.weight"
            own = f"{module}{last}"
            found = [own, *(n for n in self.files.places if n.endswith((last, tied)))]
            fits = [
                name
                for name in found
                if name in self.files.places and self.files.places[name].info.shape == (size, size)
            ]
            if not fits:
                raise UndecodableError(module)
            self._known[key] = self.files.read(fits[0]).float() / size**0.5
        return self._known[key]


def _selects(args: Mapping[str, Any], name: str) -> bool:
    """True if a transform is one of a module of this path."""
    found = []
    for texts in (args.get("targets") or (), args.get("ignore") or ()):
        patterns = filter(None, map(compiled, texts))
        is_named = name in texts or "Linear" in texts
        found.append(is_named or any(one.match(name) for one in patterns))
    return found[0] and not found[1]


def _write(
    source: Source,
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write tensors in shards, the configuration, and what else lies beside the weights."""
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def put() -> None:
        shard = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(held, folder / shard, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, shard))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        if sum(one.nbytes for one in held.values()) > _SHARD:
            put()
    if held:
        put()
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    for file in source.files.directory.iterdir():
        is_side = file.suffix in _BESIDE and file.name not in (CONFIG, INDEX, "manifest.json")
        if is_side and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def check_room(source: Source) -> None:
    """Refuse what the folder for temporary files has no room for.

    Raises:
        ArgumentError: there is too little room.
    """
    place, needed = tempfile.gettempdir(), decoded_bytes(source)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ArgumentError(
            f"The decoded model needs {needed / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB "
            "left.",
            "Name a folder with more room by the environment variable TMPDIR.",
        )


def decoded_bytes(source: Source) -> int:
    """Bytes of the decoded model, but for what is no matrix."""
    schemes, names = (
        {one.name: one_scheme for one, one_scheme in source.view.coded},
        set(source.names),
    )
    size, found = getattr(torch, source.dtype).itemsize, 0
    for entry in source.view.matrices:
        if any(f"{entry.name}.{own}" in names for own in entry.own):
            scheme = schemes.get(entry.name)
            weight = entry.own.get("weight")
            columns = (
                weight.shape[1] if weight else source.view.columns(entry, scheme) if scheme else 0
            )
            found += (entry.rows or 0) * (columns or 0) * size
    return found
