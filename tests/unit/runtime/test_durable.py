# SPDX-License-Identifier: Apache-2.0
"""A cut of the power at any system call leaves the old content or the new one, whole."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tests.support.power_cuts import State, power_cuts

from llmcompressor.errors import RecipeError
from llmcompressor.runtime import durable

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"old")
    returned: list[bytes] = []

    def check(state: State) -> None:
        assert state.get("record") in (returned[-1:] or [b"old", b"new"])

    with power_cuts(tmp_path, check) as calls:
        durable.replace(tmp_path / "record", b"new")
        returned.append(b"new")
        durable.sync(tmp_path)
    assert "fsync" in calls
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_what_is_appended_stays(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"a")
    with power_cuts(tmp_path, lambda state: None) as calls:
        durable.append(tmp_path / "journal", b"b")
    assert calls == ["open", "write", "fsync"]


def test_a_new_folder_has_its_name_and_those_above(tmp_path: Path) -> None:
    returned: list[bool] = []

    def check(state: State) -> None:
        assert not returned or "a/b/file" in state

    with power_cuts(tmp_path, check):
        durable.make_folder(tmp_path / "a" / "b")
        durable.replace(tmp_path / "a" / "b" / "file", b"x")
        returned.append(True)
        durable.sync(tmp_path)


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    for name in ("record.new", "journal"):
        (tmp_path / name).symlink_to(other)
    durable.replace(tmp_path / "record", b"ours")
    with pytest.raises(OSError, match="journal"):
        durable.append(tmp_path / "journal", b"ours")
    assert other.read_bytes() == b"theirs"
    assert (tmp_path / "record").read_bytes() == b"ours"


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"record\.new"):
        durable.replace(tmp_path / "record", b"x")


def test_errors_name_the_file_that_is_nearest(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path
    file.write_text("text")
    mine = OSError(errno.EIO, "mine")

    def with_path(path: Path) -> None:
        raise mine

    def with_file(path: Path) -> None:
        with file.open() as opened:
            assert opened
            raise mine

    def with_number(path: Path) -> None:
        fd = os.open(file, os.O_RDONLY)
        try:
            raise mine
        finally:
            os.close(fd) if path == file else None

    for function, given, wanted in (
        (with_path, folder, folder),
        (with_file, folder, file),
        (with_number, file, file),
    ):
        mine = OSError(errno.EIO, "mine")
        with pytest.raises(OSError, match="mine") as caught, durable.errors_with_files():
            function(given)
        assert caught.value.filename == str(wanted)


def test_errors_of_rust_get_their_number_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"

    def failing(path: Path, error: Exception) -> None:
        raise error

    for error in (SafetensorError("I/O error: full (os error 28)"), Exception("x (os error 28)")):
        with pytest.raises(OSError, match="weights") as caught, durable.errors_with_files():
            failing(file, error)
        assert caught.value.errno == errno.ENOSPC
    for kept in (RecipeError("x (os error 28)"), ValueError("os error"), OSError("no number")):
        with pytest.raises(type(kept), match=re.escape(str(kept))), durable.errors_with_files():
            raise kept


def test_saving_takes_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(durable.time, "monotonic", lambda: now[0])
    pace = durable.SavingPace()
    assert pace.is_due(), "nothing is known of what it takes"
    with pace.saving():
        now[0] += 2.0
    for worked, due in ((19.0, False), (21.0, True)):
        now[0] = 102.0 + worked
        assert pace.is_due() is due
