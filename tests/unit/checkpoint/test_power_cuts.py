# SPDX-License-Identifier: Apache-2.0
"""What a run has said is on the disk, and in the order that it was said in."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from tests.support.power_cuts import State, power_cuts, write_state

from llmcompressor.checkpoint.block_writer import BlockWriter
from llmcompressor.checkpoint.journal import BlockEntry, Journal, open_workspace
from llmcompressor.checkpoint.tensor_files import StoredTensor, layout_files

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")


@pytest.mark.parametrize("is_mount", [False, True])
def test_every_cut_of_a_run_leaves_what_was_said(
    is_mount: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks stay finished with their data, and an output with its name is whole."""
    root, scratch = tmp_path / "disk", tmp_path / "states"
    (root / "out").mkdir(parents=True)
    (root / "out" / "config.json").write_bytes(b"old")
    monkeypatch.setattr(os.path, "ismount", lambda path: is_mount and Path(path).name == "out")
    layout = layout_files([StoredTensor(name, "F32", (2,)) for name in ("a", "b")])
    finished: list[str] = []
    numbers = itertools.count()
    work = "out/out.partial" if is_mount else "out.partial"

    def check(state: State) -> None:
        output = {name[4:]: content for name, content in state.items() if name.startswith("out/")}
        if output.get("config.json") == b"new":
            assert output["model.safetensors"] == weights[0]
            return
        assert "config.json" not in output or "model.safetensors" not in output
        if f"{work}/journal" not in state:
            assert not finished
            return
        journal = Journal(write_state(scratch / str(next(numbers)), state) / work / "journal")
        assert journal.fingerprint == {"recipe": "r"}
        assert {*finished} <= {block for _, block in journal.entries}
        stored = state.get(f"{work}/files/model.safetensors") or output.get("model.safetensors")
        for (_, block), entry in journal.entries.items():
            place = layout.places[block]
            assert stored is not None
            assert stored[place.offset : place.offset + place.nbytes].hex() == entry.source

    weights: list[bytes] = []
    with power_cuts(root, check), open_workspace(root / "out", {"recipe": "r"}) as workspace:
        writer = BlockWriter(workspace.files, layout)
        for name in ("a", "b"):
            value = torch.full((2,), float(ord(name)))
            held = value.numpy().tobytes().hex()
            entry = BlockEntry(name, "", held)
            writer.write({name: value}, lambda digest, entry=entry: workspace.journal.add(entry))
            writer.flush()
            finished.append(name)
        writer.close()
        (workspace.files / "config.json").write_bytes(b"new")
        weights.append((workspace.files / "model.safetensors").read_bytes())
        workspace.mark_ready()
        workspace.publish(replace=True)
    assert (root / "out" / "config.json").read_bytes() == b"new"
