# SPDX-License-Identifier: Apache-2.0
"""Inspection of a model's files before anything is loaded.

Only file sizes, JSON and the headers of safetensors files are read, so a folder of any size is
checked in milliseconds.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from llmcompressor.errors import CheckpointError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import (
    SIMPLER,
    check_model_files,
    check_regular,
    impossible_size,
    parse_json,
    timed_pattern,
)
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import commit_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHTS = re.compile(r".*\.(safetensors|gguf)|(pytorch_model|model|consolidated).*\.(bin|pth?)")
_OTHER_COPY = re.compile(r"(consolidated|adapter_model)\b.*")
"""Files of safetensors with names of their own: Mistral's for the whole model, PEFT's adapters."""
_PREFIX = re.compile(r"^(?:(?:model|language_model|transformer)\.)+")
"""What names of one tensor may differ in."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_HEADER = 100_000_000
_BITS = re.compile(r"[A-Z]+(\d+)")
_BYTE = 8
_DOWNLOAD = "Download or copy the file again."
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class TensorHeader:
    """The entry of a tensor in a safetensors header, and the place of its data in a file, in bytes.

    ``dtype`` is safetensors' name of the dtype, such as ``"BF16"``. The tensor may be a selection
    of ``rows`` (first, end, step) of a ``matrix`` of that shape, transposed first if ``turned``;
    ``offset`` is the matrix's then.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int = 0
    nbytes: int = 0
    matrix: tuple[int, ...] | None = None
    turned: bool = False
    rows: tuple[int, int, int] = (0, 0, 1)


@dataclass(frozen=True)
class SourceInfo:
    """A local model folder, with its ``config.json``, and the size of its tensors in bytes.

    ``tensors`` are the headers of all its safetensors files; empty for other formats. ``remarks``
    say where they are not what the index lists.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader] = field(repr=False)
    size: int
    remarks: tuple[str, ...] = ()


def is_hub_id(model: str | os.PathLike[str]) -> bool:
    """Return True if ``model`` has the form of a hub id and no local path of that name exists.

    >>> is_hub_id("some-owner/some-model"), is_hub_id("./some-model"), is_hub_id("/models/a/b")
    (True, False, False)
    """
    if not isinstance(model, str) or Path(model).exists():
        return False
    return _HUB_ID.fullmatch(model) is not None


def local_directory(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path | None:
    """Return the folder that ``model`` names: itself, or its snapshot in the hub's cache.

    The hub is not contacted. ``None`` if there is no such folder on this machine.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if not is_hub_id(model):
        return None
    cache = None if cache_dir is None else Path(cache_dir)
    cached = try_to_load_from_cache(str(model), CONFIG, cache_dir=cache, revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def check_no_adapter(directory: Path) -> None:
    """Refuse (CheckpointError) a folder with a PEFT adapter, alone or alongside a model."""
    if (directory / _ADAPTER).is_file():
        is_alone = not (directory / CONFIG).is_file()
        raise CheckpointError(
            f"The folder {directory} holds an adapter (PEFT) "
            f"{'and no model' if is_alone else 'beside the model, which transformers would add'}.",
            "Merge it into the model (AutoPeftModelForCausalLM.from_pretrained(...)"
            ".merge_and_unload()) and give the folder that this is saved in"
            f"{'' if is_alone else f', or take {_ADAPTER} out of the folder'}.",
        )


def inspect_source(
    model: str | os.PathLike[str],
    *,
    allow_quantized: bool = False,
    allow_absent: bool = False,
    headers_only: bool = False,
) -> SourceInfo:
    """Check a local model folder and list its tensors.

    ``allow_quantized`` accepts a model that is quantized already, by its config or its headers;
    ``allow_absent`` an index that names tensors of no file, where the model's class will tell if it
    lacks them; and ``headers_only`` weight files that end after their headers.

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged, or holds a quantized model.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        check_regular(directory, CheckpointError)
        raise _not_a_directory(directory)
    check_model_files(directory)
    if not (directory / CONFIG).is_file():
        check_no_adapter(directory)
        below = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG}"))
        near = f"It holds folders with models: {', '.join(below[:5])}." if below else ""
        raise CheckpointError(
            f"The folder {directory} holds no model: it has no {CONFIG}.",
            near or "Give the folder that holds config.json and the weights.",
        )
    config = read_config(directory)
    named = config.get("architectures") or []
    if not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise CheckpointError(
            f"The architectures in {directory / CONFIG} are {named!r:.80}, and no list of classes.",
            'Write the class of the model, as in ["LlamaForCausalLM"].',
        )
    if not allow_quantized:
        check_config_unquantized(str(directory), config)
    weights = _read_weights(directory, headers_only=headers_only)
    tensors = weights.tensors
    if weights.absent and not allow_absent:
        raise CheckpointError(
            f"The index of {directory} places the tensor {weights.absent[0]} in a file, and none "
            f"holds it ({len(weights.absent)} such tensors).",
            _DOWNLOAD,
        )
    size = sum(file.stat().st_size for file in {header.file for header in tensors.values()})
    if not allow_quantized:
        check_dense(tensors)
    remarks = tuple(weights.remarks(directory))
    return SourceInfo(directory.resolve(), config, tensors, size, remarks)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder.

    Raises:
        CheckpointError: it is no JSON object, or describes what cannot be built.
    """
    config = _read_json(directory / CONFIG)
    if found := impossible_size(config):
        raise CheckpointError(
            f"{directory / CONFIG} says {found}.",
            "Correct it; compare it with that of the original model.",
        )
    return config


def tell_remarks(source: SourceInfo) -> None:
    """Log what a user has to know of a source's files before it is worked on."""
    for remark in source.remarks:
        logger.warning(remark)


def whole_source(folder: Path | None) -> SourceInfo | None:
    """Return the source in a folder; ``None`` without one, and where reading it will fail."""
    try:
        return (
            None
            if folder is None
            else inspect_source(folder, allow_quantized=True, allow_absent=True)
        )
    except CheckpointError:
        return None


def source_of(model: Any) -> SourceInfo | None:
    """Return the source that a model was loaded from, if it is still there and whole."""
    config = getattr(model, "config", None)
    place = getattr(config, "name_or_path", None)
    if not isinstance(place, str) or not place:
        return None
    return whole_source(local_directory(place, revision=commit_of(config)))


def _not_a_directory(path: Path) -> CheckpointError:
    if path.exists():
        return CheckpointError(
            f"The model {path} is a file.", "Give the folder that holds config.json."
        )
    folders = [found.parent.name for found in path.parent.glob(f"*/{CONFIG}")]
    remedy = did_you_mean(path.name, folders) if folders else ""
    return CheckpointError(
        f"The model folder {path} does not exist.",
        remedy
        if remedy.startswith("Did you mean")
        else "Give an existing folder or the id of a model on the hub.",
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The file {file} is not valid JSON: {error}.", _DOWNLOAD) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"The file {file} holds no JSON object.", _DOWNLOAD)
    return content


@dataclass
class _Weights:
    """The tensors of a folder's safetensors files, and where these are not what the index lists.

    ``several`` has tensors in more than one file, and the file that counts; ``unnamed`` those that
    the index does not name; ``beside`` those of files that nothing names; ``unread`` such files
    that are damaged or quantized; ``absent`` what the index names and no file holds.
    """

    tensors: dict[str, TensorHeader] = field(default_factory=dict)
    several: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def remarks(self, directory: Path) -> Iterator[str]:
        """Yield what a user has to know of them."""
        if self.several:
            taken = join_names(dict.fromkeys(self.several.values()), most=3)
            yield (
                f"More than one file of {directory} holds {join_names(self.several, most=3)}: that "
                f"of {taken} is taken, as transformers does."
            )
        if self.unnamed:
            yield (
                f"The index of {directory} does not name {join_names(self.unnamed, most=3)}, which "
                "its files hold: that is read and kept too, as by transformers."
            )
        if self.beside:
            files = sorted({self.tensors[name].file.name for name in self.beside})
            yield (
                f"Nothing names {join_names(files, most=3)} beside the weights of {directory}. "
                f"What only that holds is read and kept too: {join_names(self.beside, most=3)}."
            )
        if self.unread:
            yield (
                f"Nothing names {join_names(self.unread, most=3)} beside the weights of "
                f"{directory}, and it is damaged or quantized: it is left behind."
            )
        if self.absent:
            yield (
                f"The index of {directory} names {join_names(self.absent, most=3)}, which none of "
                "its files holds."
            )


def _read_weights(directory: Path, *, headers_only: bool) -> _Weights:
    """Read the headers of the files that transformers reads, and of those that nothing names.

    Of a tensor in two files transformers takes that of the later name. Where there is a
    ``model.safetensors`` it reads no other file, so that this one counts.
    """
    found = _Weights()
    has_single, has_index = ((directory / name).is_file() for name in (SINGLE, INDEX))
    if not has_single and not has_index:
        _check_other_weights(directory)
        return found
    weight_map = _weight_map(directory, has_single=has_single) if has_index else {}
    named = sorted({*weight_map.values()} - {SINGLE}) + [SINGLE] * has_single
    missing = [name for name in named if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"The folder {directory} lacks {len(missing)} of {len(named)} weight files: "
            f"{join_names(missing)}.",
            "Download or copy them.",
        )
    for file in named:
        own = read_header(directory / file, headers_only=headers_only)
        found.several |= dict.fromkeys((name for name in own if name in found.tensors), file)
        found.tensors |= own
    found.absent = [name for name in weight_map if name not in found.tensors]
    if weight_map:
        found.unnamed = [name for name in found.tensors if name not in weight_map]
    _read_unnamed(found, directory, named, headers_only=headers_only)
    return found


def _read_unnamed(
    found: _Weights, directory: Path, named: Collection[str], *, headers_only: bool
) -> None:
    """Add what only files hold that nothing names, if they are no copies in another format."""
    known = {_PREFIX.sub("", name) for name in found.tensors}
    is_dense = next(code_tensors(found.tensors), None) is None
    for path in sorted(directory.glob("*.safetensors")):
        if path.name in named or _OTHER_COPY.fullmatch(path.name) or not path.is_file():
            continue
        try:
            own = read_header(path, headers_only=headers_only)
        except CheckpointError:
            found.unread.append(path.name)
            continue
        if is_dense and next(code_tensors(own), None) is not None:
            found.unread.append(path.name)
            continue
        new = {name: one for name, one in own.items() if _PREFIX.sub("", name) not in known}
        found.beside += [name for name in new if name not in found.tensors]
        found.tensors |= new


def _weight_map(directory: Path, *, has_single: bool) -> dict[str, str]:
    """Return tensor → file by the index; empty if that is not of the ``model.safetensors`` here."""
    weight_map = _read_json(directory / INDEX).get("weight_map")
    # draft layers are stored beside the one file, in an index that names it too
    if has_single and not (isinstance(weight_map, dict) and SINGLE in weight_map.values()):
        return {}
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"The file {directory / INDEX} has no weight_map.", _DOWNLOAD)
    for name, file in weight_map.items():
        path = PurePosixPath(file) if isinstance(file, str) and file else None
        if path is None or path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"The index of {directory} places the tensor {name} in {file!r}, which is no file "
                "of that folder.",
                "Put the file into the folder, and its name there into the index.",
            )
    return dict(weight_map)


def _check_other_weights(directory: Path) -> None:
    """Refuse a folder without weights in any format that transformers finds."""
    if any((directory / name).is_file() for name in _OTHER_WEIGHTS):
        return
    every = sorted(path.name for path in directory.iterdir() if path.is_file())
    there = [name for name in every if _WEIGHTS.fullmatch(name)]
    shown = join_names(there, most=3) or "no weights"
    raise CheckpointError(
        f"The folder {directory} holds a {CONFIG} and {shown}, but neither {SINGLE} nor {INDEX}, "
        "by which a model's weights are found.",
        "Download or copy the missing files, or save the model with save_pretrained of "
        "transformers and use that.",
    )


def read_header(file: Path, *, headers_only: bool = False) -> dict[str, TensorHeader]:
    """Read the header of one safetensors file and check it against the file's size.

    A safetensors file is a little-endian 64-bit length ``n``, ``n`` bytes of JSON, and the data.
    With ``headers_only`` it may end after the header.

    Raises:
        CheckpointError: the file is truncated, or safetensors itself would refuse it.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise CheckpointError(
                f"The file {file} is a Git LFS pointer, not the weights.", "Run `git lfs pull`."
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length == 0 or length > _MAX_HEADER:
            raise CheckpointError(f"The file {file} is no safetensors file.", _DOWNLOAD)
        text = stream.read(length)
    data = expected = 8 + length
    try:
        tensors = {}
        for name, entry in parse_json(text).items() if len(text) == length else ():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                place = (file, data + begin, end - begin)
                tensors[name] = TensorHeader(entry["dtype"], tuple(entry["shape"]), *place)
                expected = max(expected, data + end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The header of {file} cannot be read.", _DOWNLOAD) from error
    if size < expected and not (headers_only and size == data):
        raise CheckpointError(
            f"The file {file} is truncated: it holds {size} of {expected} bytes.", _DOWNLOAD
        )
    _check_places(file, tensors, data)
    try:
        if size > data:
            with safe_open(str(file), framework="numpy"):
                pass
    except SafetensorError as error:
        raise CheckpointError(f"The file {file} is damaged: {error}.", _DOWNLOAD) from error
    return tensors


def _check_places(file: Path, tensors: Mapping[str, TensorHeader], begin: int) -> None:
    """Refuse tensors that do not lie one behind the other, each in the bytes that its shape takes.

    A tensor that is declared longer than it is would be read into the one behind it.
    """
    for name, one in sorted(tensors.items(), key=lambda each: (each[1].offset, each[1].nbytes)):
        bits = stored_bits(one.dtype) * prod(one.shape)
        if one.offset != begin or min(one.shape, default=0) < 0 or bits != _BYTE * one.nbytes:
            raise CheckpointError(
                f"The file {file} is damaged: {name}, {one.dtype} of {list(one.shape)}, has "
                f"{one.nbytes} bytes from {one.offset} on, and should have {bits / _BYTE:g} from "
                f"{begin} on.",
                _DOWNLOAD,
            )
        begin += one.nbytes


def stored_bits(dtype: str) -> int:
    """Return the bits of an element of a dtype, by safetensors' name of it.

    >>> [stored_bits(dtype) for dtype in ("BOOL", "F4", "F6_E2M3", "F8_E4M3FNUZ", "BF16", "C64")]
    [8, 4, 6, 8, 16, 64]
    """
    found = _BITS.match(dtype)
    return _BYTE if found is None else int(found[1])


_DEQUANTIZED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Method → transformers' class of settings; its save_pretrained would quantize again."""
_OF_WEIGHTS = ("config_groups", "kv_cache_scheme", "transform_config")
_RETIRED = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
"""Formats of earlier releases of compressed-tensors."""


def check_config_unquantized(model: str, config: Mapping[str, Any]) -> None:
    """Refuse (CheckpointError) a ``config.json`` that declares quantized weights."""
    method = quantization_method(config)
    if method is not None:
        check_format(model, quantization_settings(config))
        raise quantized_error(model, method)


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization configuration in ``config.json``; empty without one."""
    found = config.get("quantization_config") or config.get("compression_config")
    return found if isinstance(found, Mapping) else {}


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return the name of the quantization method in ``config.json``, or ``None``.

    >>> quantization_method({"quantization": {"group_size": 64, "bits": 4}})
    'mlx'
    """
    own = config.get("quantization")  # mlx may write it as quantization_config too
    is_mlx = isinstance(own, Mapping) and {"group_size", "bits"} <= own.keys()
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, Mapping) else {}
    for holder, key in (
        (config, "quantization_config"),
        (inner, "quantization_config"),
        (config, "compression_config"),
    ):
        settings = holder.get(key)
        if is_empty_quantization(settings):
            continue
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"The {key} of {CONFIG} is {settings!r}, and not a JSON object that says how the "
                "model is quantized.",
                "Remove it if the weights are plain; else download or copy the file again.",
            )
        return str(settings.get("quant_method") or ("mlx" if is_mlx else "an unnamed method"))
    return "mlx" if is_mlx else None


def is_empty_quantization(settings: Any) -> bool:
    """Return True if a ``quantization_config`` describes no quantized or packed weights.

    Nor does that of a model that an earlier release only pruned: it reports the number of zeros.
    """
    if not settings or not isinstance(settings, Mapping):
        return not settings
    sparsity = settings.get("sparsity_config")
    return (
        is_compressed_tensors(settings.get("quant_method"))
        and isinstance(sparsity, Mapping)
        and sparsity.get("format") == "dense"
        and not any(settings.get(name) for name in _OF_WEIGHTS)
    )


def check_format(model: str, settings: Mapping[str, Any]) -> None:
    """Refuse (CheckpointError) a format in ``quantization_config`` that nothing loads any more."""
    groups, sparsity = settings.get("config_groups"), settings.get("sparsity_config")
    parts = list(groups.values()) if isinstance(groups, Mapping) else []
    found = [one.get("format") for one in (settings, sparsity, *parts) if isinstance(one, Mapping)]
    retired = next((name for name in found if name in _RETIRED), None)
    if retired is not None:
        raise CheckpointError(
            f"The model {model} is stored in the format {retired}, which compressed-tensors and "
            "all that read it have dropped.",
            "Compress the original model, or save this one in full with the release that wrote it.",
        )


def check_patterns(
    model: str, settings: Mapping[str, Any], names: Callable[[], Iterable[str]]
) -> None:
    """Refuse (CheckpointError) patterns of a ``quantization_config`` that readers never finish.

    ``names`` returns the names of the tensors. It is called if a pattern is of the kind.
    """
    groups = settings.get("config_groups")
    parts = list(groups.values()) if isinstance(groups, Mapping) else []
    held = [settings.get("ignore"), *(one.get("targets") for one in parts if isinstance(one, dict))]
    every = [text for one in held if isinstance(one, list) for text in one]
    for text in every:
        if isinstance(text, str) and text.startswith("re:"):
            with suppress(re.error):
                pattern = timed_pattern(text.removeprefix("re:"))
                if pattern.may_be_slow and pattern.is_slow_on(
                    name.rpartition(".")[0] for name in names()
                ):
                    raise CheckpointError(
                        f"The quantization_config of {model} holds the pattern {text!r:.200}, and "
                        "matching names with it takes without end.",
                        SIMPLER,
                    )


def is_compressed_tensors(method: str | None) -> bool:
    """Return True if a quantization method is compressed-tensors."""
    return method in ("compressed-tensors", "compressed_tensors")


def quantized_error(model: str, method: str) -> CheckpointError:
    """Return the error for a model that is quantized already."""
    remedy = "Compress the original, unquantized model"
    if is_compressed_tensors(method):
        remedy += (
            ", or give this one to oneshot, without a plan: what is quantized stays so, and a "
            "recipe for other modules goes on. Loaded within llmcompressor.utils.load_context it "
            "begins with plain weights"
        )
    elif method in _DEQUANTIZED_BY:
        remedy += (
            ", or load this one with transformers and quantization_config="
            f"{_DEQUANTIZED_BY[method]}(dequantize=True) and give oneshot the model in place of "
            "the folder; without a recipe its output is a plain folder"
        )
    return CheckpointError(f"The model {model} is already quantized by {method}.", f"{remedy}.")


# Quantized weights that ``config.json`` does not declare, detected from headers alone.
#
# Codes that are loaded as weights give meaningless numbers, and no error. Codes are
#
# - integers under a name that only packed weights have (``qweight``, …);
# - a matrix of values of one byte or less, stored with its scales;
# - such a matrix named ``weight``, unless its module is named like a table or a draft head: an
#   embedding may be stored in float8 without scales, and no class loads a draft head.
#
# Other tensors of one byte (masks and tables in buffers) are not codes, nor is a dense weight that
# is stored with scales: it has its values.

SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""What exporters write beside ``config.json``, of the weights that they have quantized."""

_PACKED = frozenset({"weight_packed", "qweight", "W_q"})
_INTEGER = re.compile(r"[IU]\d+")
_NARROW = re.compile(r"[IU][48]|F[468](?:_.*)?")
_TABLE = re.compile(r"(?!.*proj).*emb|wte|wpe")
_DRAFT = re.compile(r"(?:.*\.)?(?:mtp|nextn|draft|eagle|medusa)")
_MATRIX = 2


def code_tensors(tensors: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Return the names of the tensors that hold codes."""
    return (name for name, header in tensors.items() if _holds_codes(name, header, tensors))


def with_scales(names: Iterable[str]) -> set[str]:
    """Return the names of code tensors and the possible names of their scales.

    >>> sorted(with_scales(["up.weight"]))[:3]
    ['up.SCB', 'up.scale', 'up.scales']
    """
    return {other for name in names for other in (name, *_scales_of(name))}


def _holds_codes(name: str, header: TensorHeader, tensors: Mapping[str, TensorHeader]) -> bool:
    path, _, own = name.rpartition(".")
    if own in _PACKED:
        return _INTEGER.fullmatch(header.dtype) is not None
    if len(header.shape) < _MATRIX or not _NARROW.fullmatch(header.dtype):
        return False
    if any(scale in tensors for scale in _scales_of(name)):
        return True
    is_weight = own == "weight" and len(header.shape) == _MATRIX
    is_table = _TABLE.match(path.rpartition(".")[2])  # embed_tokens or wte, but not embed_proj
    return is_weight and not is_table and not _DRAFT.match(path)


def _scales_of(name: str) -> list[str]:
    path, dot, own = name.rpartition(".")
    names = [f"{own}_scale", f"{own}_scale_inv", f"{own}_scales"]
    if own == "weight":
        names += ["scale", "scales", "SCB"]
    elif own.endswith("_blocks"):
        names.append(f"{own.removesuffix('_blocks')}_scales")
    return [f"{path}{dot}{scale}" for scale in names]


def check_dense(tensors: Mapping[str, TensorHeader]) -> None:
    """Refuse (CheckpointError) undeclared codes among the tensors of a checkpoint."""
    name = next(code_tensors(tensors), None)
    if name is not None:
        raise undeclared_error(name, tensors[name])


def undeclared_error(name: str, header: TensorHeader) -> CheckpointError:
    """Return the error for a tensor of codes that ``config.json`` does not declare."""
    told = [one for one in SIDE_FILES if (header.file.parent / one).is_file()]
    elsewhere = f" ({told[0]} beside it does)" if told else ""
    return CheckpointError(
        f"The tensor {name} of {header.file} ({header.dtype}) is quantized already, though "
        f"config.json does not say so{elsewhere}.",
        "Compress the original, unquantized model.",
    )
