# SPDX-License-Identifier: Apache-2.0
"""Files of a source folder besides the weights that are read: which are copied, and which are not.

All are copied but weights in other formats, models of their own in folders, caches, version
control, and what is written anew or told of another model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from llmcompressor.checkpoint.side_files import PROCESSOR_FILES, SPEAKERS_FILE
from llmcompressor.checkpoint.source import CONFIG, INDEX, SIDE_FILES, whole_source
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import parse_json

_WRITTEN_HERE = frozenset(
    {
        CONFIG,
        INDEX,
        "recipe.yaml",
        "recipe.schema.json",
        "compression_report.json",
        "manifest.json",
        "report.html",
        *SIDE_FILES,
    }
)
"""What the output has of its own, and what other methods say of how they quantized."""
OF_A_RUN = re.compile(
    r"(?:all|eval|train)_results\.json|trainer_state\.json|training_args\.bin|events\.out\..*"
    r"|(?:optimizer|scheduler|scaler|rng_state)\b.*\.(?:pth?|bin)|checkpoint-\d+|.*\.(?:partial|old)(?:-.+)?|.*\.converted"
)
"""What a run leaves beside its model: of the model that is copied from, not of the copy."""
_NOT_OF_THE_MODEL = re.compile(r"\..*|__pycache__|README\.md")
"""Version control and other hidden files, caches, and the card of the model as it was."""
_WEIGHTS = re.compile(
    r".*\.(?:safetensors|index\.json|bin|pth?|ckpt|gguf|ggml|h5|keras|msgpack|onnx\w*|ot|tflite"
    r"|mlmodel|mlpackage|nemo|llamafile|pdparams|distcp)"
)
_TORCH_WEIGHTS = re.compile(r"pytorch_model.*\.bin(?:\.index\.json)?")
_FOLDERS = frozenset({"additional_chat_templates"})
_MODULES = "modules.json"
"""Of sentence-transformers."""
_TOKENIZER = re.compile(r".*tokenizer.*", re.IGNORECASE)
_PYTHON = ".py"
_REQUIREMENTS = "requirements.txt"
"""What transformers checks before it runs the code beside it."""


def copy_side_files(source: Path, target: Path, *, without: Collection[str] = frozenset()) -> None:
    """Copy the :func:`side_files` of a model into another folder, byte by byte."""
    for path in side_files(source, without):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def side_files(source: Path, without: Collection[str] = frozenset()) -> list[Path]:
    """Return the files of a model that are copied, also those in folders."""
    return sorted(path for path, is_copied in _every(source, without) if is_copied)


def left_behind(source: Path) -> list[str]:
    """Return the files and folders of a source that hold something the output has not."""
    read = whole_source(source)
    names = set() if read is None else {one.file.name for one in read.tensors.values()}
    left = []
    for path, is_copied in _every(source, ()):
        is_read = path.name in names or (not names and _TORCH_WEIGHTS.fullmatch(path.name))
        if not is_copied and not (is_read and path.parent == source):
            left.append(path.relative_to(source).as_posix() + "/" * path.is_dir())
    return sorted(left)


def _every(source: Path, without: Collection[str]) -> Iterator[tuple[Path, bool]]:
    """Yield the files and folders that matter, and whether they are copied."""
    whole = _whole_folders(source)
    for path in source.iterdir():
        if path.name not in _WRITTEN_HERE and path.name not in without:
            yield from _under(path, source, whole)


def _under(path: Path, source: Path, whole: Collection[str]) -> Iterator[tuple[Path, bool]]:
    if _NOT_OF_THE_MODEL.fullmatch(path.name) or OF_A_RUN.fullmatch(path.name):
        return
    if path.relative_to(source).as_posix() in whole:
        yield from ((one, True) for one in _files_below(path))
    elif path.is_dir():
        yield from _in_folder(path, source, whole)
    else:
        is_kept = not _WEIGHTS.fullmatch(path.name) or path.name == SPEAKERS_FILE
        yield path, is_kept and path.is_file()


def _in_folder(folder: Path, source: Path, whole: Collection[str]) -> Iterator[tuple[Path, bool]]:
    """Yield what is in a folder; of a folder with weights only Python code is copied.

    One that leads elsewhere, or holds a model of its own, is left behind.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        logger.warning(f"The folder {folder}, which may not be read, is not copied.")
        yield folder, False
        return
    inside = sorted(folder.iterdir())
    names = {path.name for path in inside}
    has_weights = any(map(_WEIGHTS.fullmatch, names))
    is_model = CONFIG in names and (has_weights or not _has_tokenizer(names))
    if folder.is_symlink() or has_weights or is_model:
        yield folder, False
    if folder.is_symlink() or is_model:
        return
    has_code = any(path.suffix == _PYTHON for path in inside)
    for path in inside:
        is_code = path.suffix == _PYTHON or (has_code and path.name == _REQUIREMENTS)
        if not has_weights or is_code or path.is_dir():
            yield from _under(path, source, whole)


def _has_tokenizer(names: Collection[str]) -> bool:
    return any(name in PROCESSOR_FILES or _TOKENIZER.fullmatch(name) for name in names)


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if _NOT_OF_THE_MODEL.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        elif path.is_file():
            yield path


def _whole_folders(source: Path) -> set[str]:
    """Return the folders that are copied whole, whatever the format of weights in them."""
    named = {*_FOLDERS, *module_folders(source), *other_named_folders(source)}
    places = {name: source / name for name in named}
    return {  # a link may lead out of the checkpoint
        name
        for name, path in places.items()
        if path.is_dir() and path.resolve().is_relative_to(source.resolve())
    }


def module_folders(source: Path) -> list[str]:
    """Return the folders of sentence-transformers' modules after the model, by ``modules.json``."""
    held = _json(source / _MODULES)
    entries = held if isinstance(held, list) else []
    modules = [one for one in entries if isinstance(one, dict) and isinstance(one.get("type"), str)]
    named = [one.get("path") for one in modules]  # a type may be a class of the model's own code
    paths = [PurePosixPath(one) for one in named if isinstance(one, str)]
    inside = [one for one in paths if one.parts and not one.is_absolute() and ".." not in one.parts]
    return [str(one) for one in inside]


def other_named_folders(source: Path) -> list[str]:
    """Return the folders that ``config.json`` names, or that are called a tokenizer."""
    named = set(_strings(_json(source / CONFIG)))
    folders = [path.name for path in source.iterdir() if path.is_dir()]
    return [name for name in folders if name in named or _TOKENIZER.fullmatch(name)]


def _strings(held: Any) -> Iterator[str]:
    """Yield the strings of JSON data that may name a folder."""
    if isinstance(held, str):
        yield held.removeprefix("./").rstrip("/")
    elif isinstance(held, dict | list):
        values = held if isinstance(held, list) else held.values()
        for one in values:
            yield from _strings(one)


def _json(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # missing, or unreadable to its readers too
        return None
