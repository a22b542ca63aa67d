# SPDX-License-Identifier: Apache-2.0
"""``manifest.json``: the hashes that a run has made of what it wrote, beside what is there now.

The tensors' bytes are hashed while the other rules read them, piece after piece. What these do not
read, or in another order, is read once more at the end.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcompressor.runtime.limits import parse_json
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.files import CONFIG, INDEX, Files

MANIFEST = "manifest.json"
_VERSION = 1
_AGAIN = "Copy the file again from where it was written, or compress the model anew."
_MEANT = "Nothing, if that was meant; else copy the file again from where it was written."
_SMALL = 16
"""Bytes of a tensor that says nothing of the run, such as the shape of a weight."""
_READ = re.compile(
    r"(?:generation_)?config\.json|.*\.(?:py|jinja|model)|.*(?:token|vocab|merges|chat_template"
    r"|special_tokens|processor).*\.(?:json|txt|model)|adapter_.*|modules\.json"
)
"""Files beside the weights that change what readers do."""


class ReadHashes:
    """SHA-256 of tensors that are read in pieces, by several threads.

    Args:
        names: the tensors.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._digests = {name: hashlib.sha256() for name in names}
        self._ends = dict.fromkeys(self._digests, 0)
        self._lock = threading.Lock()

    def take(self, name: str, begin: int, data: Any) -> None:
        """Take bytes of a tensor from position ``begin`` on, if all before them were taken."""
        with self._lock:
            if self._ends.get(name) != begin:
                return
            self._ends[name] = -1  # no other thread goes on meanwhile
        self._digests[name].update(data)
        self._ends[name] = begin + len(data)

    def digest(self, name: str, size: int) -> str | None:
        """Return the hash of a tensor of ``size`` bytes; ``None`` if not all were taken."""
        return self._digests[name].hexdigest() if self._ends[name] == size else None


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        headers: weight file → SHA-256 of its header.
        sizes: weight file → its bytes.
        homes: tensor → its weight file.
        tensors: tensor → SHA-256 of its bytes.
        beside: other file → its SHA-256.
        source: the place of the model that the run has read.
        origins: file of the source → modules of the output that were made of it.
    """

    headers: Mapping[str, str]
    sizes: Mapping[str, int]
    homes: Mapping[str, str]
    tensors: Mapping[str, str]
    beside: Mapping[str, str]
    source: str = ""
    origins: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def origin(self, tensor: str) -> str:
        """Return a sentence on the file of the source that a tensor was made of, if it is known."""
        module = tensor.rpartition(".")[0]
        found = [file for file, modules in self.origins.items() if module in modules]
        of = f" of {self.source}" if self.source else ""
        return f" It was made of {' and '.join(found)}{of}." if found else ""


def read_manifest(files: Files) -> Manifest | None:
    """Return the manifest beside the weights; ``None`` if there is none, or it cannot be read.

    Other tools write a ``manifest.json`` too: one without the version of this format is theirs.
    """
    path = files.directory / MANIFEST
    if not path.exists():
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        is_ours = isinstance(content, Mapping) and "manifest" in content
        return _manifest(content) if is_ours else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        files.say("M1", MANIFEST, f"It cannot be read: {error!r:.200}.", _AGAIN)
        return None


def _manifest(content: Mapping[str, Any]) -> Manifest:
    if content["manifest"] != _VERSION:
        raise ValueError(f"its version is {content['manifest']!r}, and {_VERSION} is known here")
    weights, about = content["weights"], content["about"]
    tensors = {name: str(one) for file in weights.values() for name, one in file["tensors"].items()}
    homes = {name: file for file, held in weights.items() for name in held["tensors"]}
    return Manifest(
        headers={file: str(held["header"]) for file, held in weights.items()},
        sizes={file: int(held["bytes"]) for file, held in weights.items()},
        homes=homes,
        tensors=tensors,
        beside={name: str(one) for name, one in {**content["files"], **about["files"]}.items()},
        source=str(about.get("source") or ""),
        origins=_origins(content["source"], homes),
    )


def _origins(source: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, frozenset[str]]:
    """File of the source → modules that were made of it; of a single file all of them."""
    if "modules" in source:
        return {file: frozenset(modules) for file, modules in source["modules"].items()}
    files = [name for name in source.get("files") or () if name.endswith(".safetensors")]
    every = frozenset(name.rpartition(".")[0] for name in tensors)
    return {files[0]: every} if len(files) == 1 else {}


def check_manifest(
    files: Files,
    manifest: Manifest,
    hashes: ReadHashes,
    each: Callable[[Callable[[str], str], list[str]], Iterable[str]] = map,
) -> Iterator[Finding]:
    """M2 to M4: what is not as it was written.

    Args:
        files: the checkpoint.
        manifest: its manifest.
        hashes: of what was read so far.
        each: applies a function to names, on several threads.
    """
    yield from _check_weight_files(files, manifest)
    yield from _check_tensors(files, manifest, hashes, each)
    yield from _check_beside(files, manifest)


def _check_weight_files(files: Files, manifest: Manifest) -> Iterator[Finding]:
    there = {path.name for path in files.directory.glob("*.safetensors")}
    for name, wanted in manifest.headers.items():
        if name not in there:
            yield _broken("M3", name, "The file that the run wrote is not there.")
        elif _hash_of_header(files.directory / name) != wanted:
            yield _broken("M3", name, "Its header has changed since it was written.")
        elif (size := (files.directory / name).stat().st_size) != manifest.sizes[name]:
            said = f"It has {size} bytes, and {manifest.sizes[name]} were written."
            yield _broken("M3", name, said)
    for name in sorted(there - manifest.headers.keys()):
        yield _broken("M3", name, "The run did not write this file.", "Remove it.")


def _hash_of_header(path: Path) -> str:
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        left = max(path.stat().st_size - len(start), 0)
        return hashlib.sha256(start + stream.read(min(length, left))).hexdigest()


def _check_tensors(
    files: Files,
    manifest: Manifest,
    hashes: ReadHashes,
    each: Callable[[Callable[[str], str], list[str]], Iterable[str]],
) -> Iterator[Finding]:
    names = [name for name in manifest.tensors if name in files.places]
    whole = [name for name in names if name not in files.broken]  # of others F tells

    def digest(name: str) -> str:
        known = hashes.digest(name, files.places[name].size)
        return known or files.hash_of(name)

    now = dict(zip(whole, each(digest, whole), strict=True))
    changed = [name for name in whole if now[name] != manifest.tensors[name]]
    held = [name for name in whole if files.places[name].size > _SMALL]
    yield from _changed(manifest, changed, now, held)
    for name in manifest.tensors.keys() - files.places.keys():
        said = f"The run wrote it into {manifest.homes[name]}, and it is not there."
        yield _broken("M2", name, said + manifest.origin(name))
    for name in files.places.keys() - manifest.tensors.keys():
        yield _broken("M2", name, "The run did not write it.")


def _changed(
    manifest: Manifest, changed: list[str], now: Mapping[str, str], held: list[str]
) -> Iterator[Finding]:
    """Findings for changed tensors; one for a file of which none that can tell is as it was.

    ``held`` are those that can tell: of shapes and the like all runs have the same.
    """
    known = {digest: name for name, digest in manifest.tensors.items()}
    by_file: dict[str, list[str]] = {}
    for name in changed:
        by_file.setdefault(manifest.homes[name], []).append(name)
    for file, names in by_file.items():
        telling = {name for name in held if manifest.homes[name] == file}
        if len(telling) > 1 and telling <= set(names):
            said = f"None of its {len(telling)} weights is as it was written: it is of another run."
            yield _broken("M2", file, said)
            continue
        for name in names:
            said = f"It has changed in {file} since it was written."
            if (other := known.get(now[name])) is not None:
                said = f"It holds the bytes that were written for {other}."
            yield _broken("M2", name, said + manifest.origin(name))


def _check_beside(files: Files, manifest: Manifest) -> Iterator[Finding]:
    for name, wanted in manifest.beside.items():
        path = files.directory / name
        if not path.is_file():
            yield _edited(name, "The file that the run wrote is not there.")
            continue
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != wanted:
            yield _edited(name, "It is not as the run wrote it.")
    known = {*manifest.beside, INDEX, CONFIG}
    for path in sorted(files.directory.iterdir()):
        if path.is_file() and path.name not in known and _READ.fullmatch(path.name):
            yield _edited(path.name, "The run did not write this file, and readers look at it.")


def _broken(rule: str, module: str, message: str, remedy: str = _AGAIN) -> Finding:
    return Finding(rule, module, message, remedy, Severity.ERROR)


def _edited(module: str, message: str) -> Finding:
    return Finding("M4", module, message, _MEANT, Severity.WARNING)
