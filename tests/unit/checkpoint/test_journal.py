# SPDX-License-Identifier: Apache-2.0
"""What the journal says is what was finished, whatever happened to the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcompressor.checkpoint.journal import (
    BlockEntry,
    Journal,
    RunIdentity,
)
from llmcompressor.errors import OutputError
from llmcompressor.runtime import durable

PRINT = {"recipe": "a", "versions": {"torch": "2"}}
ENTRIES = [
    BlockEntry(f"layers.{n}", f"d{n}", f"s{n}", {"GPTQ": {"x": {"loss": 0.1}}}) for n in (0, 1)
]


def written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal")
    journal.begin(PRINT)
    journal.decide("level", "linear")
    for entry in ENTRIES:
        journal.add(entry)
    return folder / "journal"


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    journal = Journal(written(tmp_path))
    assert journal.fingerprint == PRINT
    assert list(journal.entries.values()) == ENTRIES
    assert journal.decide("level", "block") == "linear"
    assert not journal.is_ready
    journal.mark_ready()
    assert Journal(tmp_path / "journal").is_ready


def test_every_prefix_is_a_valid_past(tmp_path: Path) -> None:
    """However much of the file is lost, what is left is a beginning of what was written."""
    file = written(tmp_path)
    content = file.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content)):
        file.write_bytes(content[:end])
        found = list(Journal(file).entries.values())
        assert found == ENTRIES[: len(found)]
        journal = Journal(file)
        journal.add(BlockEntry("layers.9", "d", "s"))  # a torn line does not swallow the next
        assert (0, "layers.9") in Journal(file).entries


def test_a_kill_while_it_is_mended_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    torn = file.read_bytes()[:-3]
    whole = Journal(written(tmp_path / "whole")).entries
    for moment in ("write", "replace"):
        file.write_bytes(torn)
        with monkeypatch.context() as patched:
            if moment == "write":
                patched.setattr(durable, "sync", _killed)
            else:
                patched.setattr(Path, "replace", _killed)
            with pytest.raises(KeyboardInterrupt):
                Journal(file)
        found = Journal(file).entries
        assert found
        assert all(whole[key] == entry for key, entry in found.items())
        assert len(found) >= len(whole) - 1


def _killed(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_a_flipped_byte_costs_one_line_at_most(tmp_path: Path) -> None:
    file = written(tmp_path)
    content = file.read_bytes()
    first = content.index(b"\n") + 1
    for place in range(first, len(content), 7):
        broken = bytearray(content)
        broken[place] ^= 0x20
        file.write_bytes(broken)
        found = list(Journal(file).entries.values())
        assert all(entry in ENTRIES for entry in found)
        assert len(found) >= len(ENTRIES) - 2


def test_without_its_first_line_it_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[5:])
    with pytest.raises(OutputError, match="damaged"):
        Journal(file)


def test_differences_are_named() -> None:
    now = {"recipe": "b", "versions": {"torch": "3"}}
    assert RunIdentity(now).differences(PRINT) == [
        "recipe: a then, b now",
        "versions.torch: 2 then, 3 now",
    ]
