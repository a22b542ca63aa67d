# SPDX-License-Identifier: Apache-2.0
"""``manifest.json``: the hashes of all that a run has written, and of all that decided it.

``docs/manifest.md`` describes it field by field. The hashes of tensors are made while their bytes
are written, so that a change of a single bit shows later, without the model that was compressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.checkpoint.copied_files import OF_A_RUN
from llmcompressor.checkpoint.model_config import GATES, REPORT_FILE, json_text
from llmcompressor.checkpoint.source import CONFIG, TensorHeader
from llmcompressor.checkpoint.tensor_files import OutputFile, OutputLayout, hashes_of
from llmcompressor.errors import CheckpointError
from llmcompressor.runtime.durable import errors_naming, replace
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.progress import join_names

MANIFEST_FILE = "manifest.json"
VERSION = 1
PAGE = "report.html"
"""Written anew by ``report`` and ``evaluate``, so that its bytes say nothing of the run."""
_PARTS = {"weights", "files", "source", "run", "about"}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class RunRecord:
    """What decided an output, as JSON data.

    Attributes:
        decided: by name, as in :class:`~llmcompressor.checkpoint.journal.RunIdentity`; equal for
            runs that write the same bytes.
        call: the function that was called and its arguments, by which ``reproduce`` calls it again.
        told: what else there is to say of this one run.
        source: a fingerprint of the model, where the run has not read the files itself.
    """

    decided: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenWeights:
    """Weight files on the disk, and the hashes that were made while they were written.

    Attributes:
        layout: of the files.
        written: tensor → SHA-256 of its bytes.
        headers: the tensors of the source, where the run itself has read its files.
        read: tensor of the source → its hash, where that was made while it was read.
    """

    layout: OutputLayout
    written: Mapping[str, str]
    headers: Mapping[str, TensorHeader] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)


def write_manifest(
    folder: Path,
    weights: WrittenWeights,
    origins: Mapping[str, Sequence[str]],
    source: Path | None,
    run: RunRecord | None,
) -> None:
    """Write the manifest of an output whose other files are all there.

    Args:
        folder: of the output.
        weights: its weight files.
        origins: file of the source → modules that were made of it; empty for a single file.
        source: the folder of the model that it was made of.
        run: what decided it.
    """
    run = run or RunRecord()
    named = run.call.get("arguments", {}).get("model")
    weight_files = {file.name: _weight_file(file, weights.written) for file in weights.layout.files}
    beside = dict(_hashes_beside(folder, weight_files))
    of_run = {name for name in beside if OF_A_RUN.fullmatch(name) or name == REPORT_FILE}
    content = {
        "manifest": VERSION,
        "weights": weight_files,
        "files": {name: one for name, one in beside.items() if name not in of_run},
        "source": {
            **({"files": _source_files(source, weights)} if weights.headers else run.source),
            **({"modules": dict(origins)} if origins else {}),
        },
        "run": dict(run.decided),
        "about": {
            "source": named if isinstance(named, str) else source and source.name,
            **run.told,
            **({"call": dict(run.call)} if run.call else {}),
            "files": {name: one for name, one in beside.items() if name in of_run},
        },
    }
    (folder / MANIFEST_FILE).write_text(json_text(content), encoding="utf-8")


def note_gates(folder: Path, found: Mapping[str, Any]) -> None:
    """Note in the report and in the manifest of a whole output what its gates have measured.

    Args:
        folder: of the output; one that has them noted already gets the new ones.
        found: as JSON data.
    """
    file, manifest = folder / REPORT_FILE, read_manifest(folder)
    report = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    content = json_text({**report, GATES: dict(found)}).encode()
    replace(file, content)
    about = manifest["about"]
    about["files"] = {**about["files"], REPORT_FILE: hashlib.sha256(content).hexdigest()}
    manifest["about"] = {**about, GATES: dict(found)}
    replace(folder / MANIFEST_FILE, json_text(manifest).encode())


def gates_of(folder: Path) -> dict[str, Any] | None:
    """Return what the manifest of an output says of its gates; ``None`` if it has none."""
    try:
        found = read_manifest(folder)["about"].get(GATES)
    except CheckpointError:
        return None
    return dict(found) if isinstance(found, Mapping) else None


def is_rejected(folder: Path) -> bool:
    """Return True if a folder holds an output that did not keep its gates."""
    return not (gates_of(folder) or {}).get("passed", True)


def source_of(folder: Path) -> dict[str, Any]:
    """Return what the manifest of an output says of the model that it was made of."""
    return {name: one for name, one in read_manifest(folder)["source"].items() if name != "modules"}


def _weight_file(file: OutputFile, written: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name in parse_json(file.header[8:].decode()) if name != _METADATA]
    tree = hashlib.sha256(file.header)
    for name in names:
        tree.update(bytes.fromhex(written[name]))
    return {
        "bytes": file.size,
        "sha256": tree.hexdigest(),
        "header": hashlib.sha256(file.header).hexdigest(),
        "tensors": {name: written[name] for name in names},
    }


def _hashes_beside(folder: Path, weight_files: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path in the folder and the SHA-256 of each file that holds no weights."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in weight_files and name not in (MANIFEST_FILE, PAGE):
            with errors_naming(path), path.open("rb") as stream:
                yield name, hashlib.file_digest(stream, "sha256").hexdigest()


def _source_files(folder: Path | None, weights: WrittenWeights) -> dict[str, Any]:
    """Return size and hash of each weight file of the source, and of its configuration."""
    found: dict[str, Any] = {}
    known = dict(weights.read)
    known |= hashes_of({name: one for name, one in weights.headers.items() if name not in known})
    by_file: dict[Path, list[str]] = {}
    for name, header in sorted(weights.headers.items()):
        line = f"{name} {header.dtype} {list(header.shape)} {known[name]}\n"
        by_file.setdefault(header.file, []).append(line)
    for file in sorted(by_file):
        digest = xxhash.xxh3_128_hexdigest("".join(by_file[file]).encode())
        found[file.name] = {"bytes": file.stat().st_size, "xxh3_128": digest}
    config = None if folder is None else folder / CONFIG
    if config is not None and config.is_file():
        content = config.read_bytes()
        found[CONFIG] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of a manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    file = folder / MANIFEST_FILE
    if not file.is_file():
        stages = sorted(one.parent.name for one in folder.glob(f"*/{MANIFEST_FILE}"))
        raise CheckpointError(
            f"The folder {folder} holds no {MANIFEST_FILE}.",
            f"Give one of the folders in it: {join_names(stages)}."
            if stages
            else "Give a folder that llmcompressor has written.",
        )
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        is_known = content["manifest"] == VERSION and content.keys() >= _PARTS
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.200}.", "Restore it.") from error
    if not is_known:
        raise CheckpointError(
            f"{file} is of another version of the format, {content['manifest']!r:.40}.",
            "Use the release of llmcompressor that wrote it.",
        )
    return dict(content)
