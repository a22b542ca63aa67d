# SPDX-License-Identifier: Apache-2.0
"""A temporary folder goes with its process, or with the next one of its kind after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from llmcompressor.runtime import temporary
from llmcompressor.runtime.temporary import is_left, owner, temporary_folder

KILLED = """
import os, pathlib, signal, sys
from llmcompressor.runtime.temporary import temporary_folder
with temporary_folder("kind", pathlib.Path(sys.argv[1])) as folder:
    (folder / "model").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_goes_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("kind") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path
    assert not names(tmp_path)
    with pytest.raises(KeyError), temporary_folder("kind"):
        raise KeyError
    assert not names(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    [left] = names(tmp_path)
    assert (tmp_path / left / "model").exists()
    with temporary_folder("other", tmp_path):
        assert left in names(tmp_path)
    with temporary_folder("kind", tmp_path) as folder:
        assert names(tmp_path) == [folder.name]
    assert not names(tmp_path)


def test_what_is_in_use_or_of_others_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living process, another machine, a file, a link, another kind; and of another user."""
    machine = owner().rpartition("-")[0]
    gone = 2**22 + 1  # above the largest number that Linux gives
    stays = [f"kind-{owner()}-a", f"kind-elsewhere-{gone}-a", "kind-a", f"kinds-{machine}-{gone}-a"]
    for name in stays:
        (tmp_path / name).mkdir()
    (tmp_path / f"kind-{machine}-{gone}-file").write_text("x")
    (tmp_path / f"kind-{machine}-{gone}-link").symlink_to(tmp_path / "kind-a")
    before = names(tmp_path)
    with temporary_folder("kind", tmp_path):
        pass
    assert names(tmp_path) == before
    (tmp_path / f"kind-{machine}-{gone}-b").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(temporary.os, "geteuid", lambda: os.getuid() + 1)
        with temporary_folder("kind", tmp_path):
            pass
    assert f"kind-{machine}-{gone}-b" in names(tmp_path)
    with temporary_folder("kind", tmp_path):
        pass
    assert names(tmp_path) == before


def test_a_name_that_looks_like_a_pattern() -> None:
    machine = owner().rpartition("-")[0]
    assert is_left(f"a.b+-{machine}-4194305-x", "a.b+")
    assert not is_left(f"aXb+-{machine}-4194305-x", "a.b+")
