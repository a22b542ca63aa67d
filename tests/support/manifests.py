# SPDX-License-Identifier: Apache-2.0
"""Manifests: computed anew from the files, as ``docs/manifest.md`` describes them, and compared."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
OF_THE_RUN = ("compression_report.json", "training_args.bin", "trainer_state.json")
OF_THE_TRAINER = ("all_results.json", "train_results.json", "trainer_state.json")
"""Its log, which lies beside a checkpoint and is no part of it."""
SPARED = (MANIFEST, "report.html", *OF_THE_TRAINER)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return found


def decided(folder: Path) -> dict[str, Any]:
    """All of it but what differs from run to run."""
    return {part: held for part, held in read(folder).items() if part != "about"}


def stable_bytes(path: Path) -> bytes:
    """The bytes of a file that runs in other ways have in common: all, but of a manifest."""
    if path.name != MANIFEST:
        return path.read_bytes()
    return json.dumps([read(path.parent)[part] for part in ("weights", "files")]).encode()


def weight_file(path: Path) -> dict[str, Any]:
    """What a manifest has to say of a weight file, from its bytes as a whole."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    places = {k: v for k, v in json.loads(data[8:start]).items() if k != "__metadata__"}
    tensors = {
        name: data[start + one["data_offsets"][0] : start + one["data_offsets"][1]]
        for name, one in places.items()
    }
    tree = data[:start] + b"".join(sha256(one).digest() for one in tensors.values())
    return {
        "bytes": len(data),
        "sha256": sha256(tree).hexdigest(),
        "header": sha256(data[:start]).hexdigest(),
        "tensors": {name: sha256(one).hexdigest() for name, one in tensors.items()},
    }


def check_written(folder: Path) -> dict[str, Any]:
    """Assert that a folder's manifest says of each file what its bytes say; return it."""
    found = read(folder)
    weights = {path.name: weight_file(path) for path in folder.glob("*.safetensors")}
    assert found["manifest"] == 1
    assert found["weights"] == weights
    assert [list(one["tensors"]) for one in found["weights"].values()] == [
        list(weights[name]["tensors"]) for name in found["weights"]
    ]  # in the order of the header
    others = [path for path in folder.rglob("*") if path.is_file() and path.name not in SPARED]
    beside = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in others
        if path.name not in weights and "checkpoint-" not in str(path.relative_to(folder))
    }
    told = {**found["files"], **found["about"]["files"]}
    assert not told.keys() ^ beside.keys(), sorted(told.keys() ^ beside.keys())
    assert told == beside
    assert not found["files"].keys() & set(OF_THE_RUN)
    return found
