# SPDX-License-Identifier: Apache-2.0
"""A run that is killed while it tidies up leaves what the next call knows what to do with."""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import killed_at_the_last_step

from llmcompressor.checkpoint.atomic_output import (
    OnExisting,
    check_output_dir,
    staged_output,
    work_folder,
)
from llmcompressor.checkpoint.journal import open_workspace, remove_remains, reserve_output
from llmcompressor.errors import OutputError
from llmcompressor.runtime import folder_lock, temporary

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from llmcompressor.checkpoint.journal import open_workspace as opened

    left = [int(sys.argv[2])]

    def watch(event, arguments):
        if event in ("os.remove", "os.rmdir"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with opened(Path(sys.argv[1]), {"recipe": "r"}) as workspace:
        (workspace.files / "config.json").write_text("{}")
        for number in range(2):
            (workspace.scratch / str(number)).mkdir(parents=True)
            (workspace.scratch / str(number) / "weights").write_text("w")
        workspace.journal.mark_ready()
        sys.addaudithook(watch)
        workspace.publish(replace=True)
"""


@pytest.mark.parametrize("removed", [1, 3, 5])
def test_killed_while_the_work_folder_goes(removed: int, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(target), str(removed)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (target / "config.json").read_text() == "{}"
    with pytest.raises(OutputError, match="already holds files"):
        check_output_dir(target)
    with open_workspace(target, {"recipe": "another"}, overwrite=True) as workspace:
        assert not workspace.journal.is_ready
        assert not list(workspace.files.iterdir())
        assert not workspace.scratch.exists()
        (workspace.files / "config.json").write_text("new")
        workspace.publish(replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "config.json").read_text() == "new"


NEW = {"config.json": "new", "model.safetensors": "new", "tokenizer.json": "new"}
OLD = {"config.json": "old", "model-00001-of-00002.safetensors": "old", "vocab.json": "old"}


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("is_mount", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_publication_ends_whenever_it_was_cut(
    is_mount: bool, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call ends it; until then a configuration is never beside others' weights."""
    target = tmp_path / "out"
    monkeypatch.setattr(os.path, "ismount", lambda path: is_mount and Path(path) == target)
    monkeypatch.setattr(temporary.psutil, "pid_exists", lambda pid: False)
    for number in itertools.count():
        fill(target, OLD if overwrite else {})
        with pytest.MonkeyPatch.context() as patched:
            left = cut_after(number, patched)
            with suppress(KeyboardInterrupt), open_workspace(target, {}) as workspace:
                fill(workspace.files, NEW)
                workspace.mark_ready()
                left.append(None)  # armed
                workspace.publish(replace=overwrite)
                break
        found = contents(target) if target.exists() else {}
        assert "config.json" not in found or found in (NEW, OLD)
        if not work_folder(target).exists():  # all is done but for removing what is left
            assert found == NEW
            shutil.rmtree(target)
            continue
        check_output_dir(target, overwrite=overwrite)
        with open_workspace(target, {}, overwrite=overwrite) as workspace:
            assert workspace.journal.is_ready
            workspace.publish(replace=overwrite)
        assert contents(target) == NEW
        stray = [path.name for path in (*tmp_path.iterdir(), *target.iterdir())]
        assert sorted(stray) == sorted(["out", *NEW])
        shutil.rmtree(target)
    assert number > 3


def cut_after(number: int, patched: pytest.MonkeyPatch) -> list[None]:
    """End the process, as it were, at a change of names; to begin once the list has an item."""
    armed: list[None] = []
    left = [number]

    def arm(owner: Any, name: str) -> None:
        change = getattr(owner, name)

        def cut(*args: Any, **kwargs: Any) -> Any:
            if armed:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return change(*args, **kwargs)

        patched.setattr(owner, name, cut)

    for name in ("rename", "replace", "unlink", "rmdir"):
        arm(Path, name)
    arm(shutil, "rmtree")
    return armed


def test_another_run_finds_a_published_output_in_use(tmp_path: Path) -> None:
    """A run that was killed at its last step has left an output like any other."""
    target = tmp_path / "out"
    for opened in (partial(open_workspace, fingerprint={"recipe": "b"}), reserve_output):
        with killed_at_the_last_step(), open_workspace(target, {"recipe": "a"}) as workspace:
            fill(workspace.files, NEW)
            workspace.mark_ready()
            workspace.publish(replace=False)
        with pytest.raises(OutputError, match="already holds files"), opened(target):
            raise AssertionError
        assert contents(target) == NEW
        with opened(target, overwrite=True):
            pass
        remove_remains(target)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        shutil.rmtree(target)


def test_what_was_left_beside_an_output_is_told(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").touch()
    script = """
        import os, signal, sys
        from pathlib import Path
        from llmcompressor.checkpoint import atomic_output as staging

        staging.shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        with staging.staged_output(Path(sys.argv[1]), on_existing=staging.OnExisting.REPLACE):
            pass
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(target)], check=False)
    [left] = [path for path in tmp_path.iterdir() if path != target]
    (target / "config.json").touch()
    with pytest.raises(OutputError, match=f"left {left}"):
        check_output_dir(target)
    with staged_output(target, on_existing=OnExisting.REPLACE):
        pass
    assert not left.exists()


def test_a_system_without_file_locks_is_told_on_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ImportError, match=r"fcntl, which this system has not.* Linux and macOS"):
        runpy.run_path(str(folder_lock.__file__))


@pytest.mark.parametrize("name", ["lock", "journal", "moving", "files/model.safetensors"])
def test_a_link_in_the_work_folder_is_refused(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    link = tmp_path / "out.partial" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs)
    for opened in (partial(open_workspace, fingerprint={}), reserve_output):
        with pytest.raises(OutputError, match=f"{link} is a link"), opened(tmp_path / "out"):
            raise AssertionError
    assert theirs.read_text() == "theirs"
