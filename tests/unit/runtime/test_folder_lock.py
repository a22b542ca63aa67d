# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder is held by one process, and by nobody when that has ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from llmcompressor.errors import OutputError
from llmcompressor.runtime import folder_lock
from llmcompressor.runtime.folder_lock import locked


def test_a_second_holder_is_refused_until_the_first_goes(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock", "x"),
        pytest.raises(OutputError, match=rf"process {os.getpid()}\) is writing x"),
        locked(tmp_path / "lock", "x"),
    ):
        raise AssertionError
    with locked(tmp_path / "lock", "x"):
        pass


def test_a_folder_removed_meanwhile_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may remove the folder between opening the file and locking it."""
    folder, flock, others = tmp_path / "work", fcntl.flock, list[Any]()
    folder.mkdir()

    def late(handle: int, how: int) -> None:
        if not others:
            shutil.rmtree(folder)
            folder.mkdir()
            others.append((folder / "lock").open("w"))
            flock(others[0], how)
        flock(handle, how)

    monkeypatch.setattr(folder_lock.fcntl, "flock", late)
    with pytest.raises(OutputError, match="Another run"), locked(folder / "lock", "x"):
        raise AssertionError
    others.pop().close()
    others.append(None)
    with locked(folder / "lock", "x"):
        assert (folder / "lock").read_text() == str(os.getpid())


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from pathlib import Path
        from llmcompressor.runtime.folder_lock import locked

        with locked(Path({str(tmp_path / "lock")!r}), "x"):
            child = os.fork()
            if child == 0:
                os.write(1, b"begun\\n")  # a line at once: print may write the end apart
                time.sleep(60)
            os.write(1, f"{{child}}\\n".encode())
            os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        said = {started.stdout.readline().strip() for _ in range(2)}
        child = int((said - {"begun"}).pop())
        try:
            started.wait()
            with locked(tmp_path / "lock", "x"):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_waits_for_what_was_just_forked(tmp_path: Path) -> None:
    """A child shares the open file until it runs; a folder that went meanwhile comes again."""
    file = tmp_path / "gone" / "lock"
    with locked(file, "x"):
        shared = os.dup(next(iter(folder_lock._held)))
    closing = threading.Timer(0.1, os.close, [shared])
    closing.start()
    with locked(file, "x"):
        closing.join()


def test_an_owner_that_has_ended_is_not_said_to_write(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(str(2**22 + 1))
        held.flush()
        with (
            pytest.raises(OutputError, match=r"begun by process .* which has ended"),
            locked(tmp_path / "lock", "x"),
        ):
            raise AssertionError


def test_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(OutputError, match="is a link"), locked(tmp_path / "lock", "x"):
        raise AssertionError
    assert (tmp_path / "theirs").read_text() == "theirs"
