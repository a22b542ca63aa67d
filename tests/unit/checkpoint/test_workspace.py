# SPDX-License-Identifier: Apache-2.0
"""A run that is killed while it tidies up leaves what the next call knows what to do with."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llmcompressor.checkpoint import workspace
from llmcompressor.checkpoint.atomic_output import OnExisting, check_output_dir, staged_output
from llmcompressor.checkpoint.workspace import is_being_published, open_workspace
from llmcompressor.errors import OutputError

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from llmcompressor.checkpoint.workspace import open_workspace as opened

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


@pytest.mark.parametrize("removed", [0, 3, 5, 6, 7, 8])
def test_killed_while_the_working_folder_goes(removed: int, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(target), str(removed)]
    code = subprocess.run(command, check=False).returncode
    assert (target / "config.json").read_text() == "{}"
    left = {path.name for path in tmp_path.iterdir()}
    if code == 0:
        assert left == {"out"}
        return
    assert code == -signal.SIGKILL
    if "out.partial" not in left:  # what is left of it is nobody's, and goes with the next run
        [aside] = left - {"out"}
        assert aside.startswith("out.old-")
        with staged_output(target, on_existing=OnExisting.REPLACE):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        return
    assert left == {"out", "out.partial"}
    assert {"journal", "lock"} <= {path.name for path in (tmp_path / "out.partial").iterdir()}
    assert is_being_published(target)
    with open_workspace(target, {"recipe": "r"}) as workspace:
        assert workspace.is_published
        workspace.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
        runpy.run_path(str(workspace.__file__))
