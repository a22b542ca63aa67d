# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llmcompressor.checkpoint.atomic_output import (
    OnExisting,
    check_output_dir,
    publish_folder,
    staged_output,
)
from llmcompressor.errors import OutputError


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(target: Path, error: BaseException) -> None:
    with staged_output(target, on_existing=OnExisting.REPLACE) as folder:
        (folder / "config.json").write_text("new")
        raise error


def test_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with staged_output(target) as folder:
        (folder / "config.json").write_text("{}")
        assert folder.parent == target.parent
        assert not target.exists()
    assert names(target) == ["config.json"]
    assert names(target.parent) == ["out"]


def write_while_another_writes(target: Path) -> None:
    with staged_output(target) as folder:
        fill(folder, config="ours")
        fill(target, thesis="theirs")


def test_what_has_come_since_the_beginning_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="were not there when the run began"):
        write_while_another_writes(target)
    assert names(tmp_path) == ["out", "out.finished"]
    assert names(tmp_path / "out.finished") == ["config.json"]
    assert (target / "thesis.json").read_text() == "theirs"
    finished = fill(tmp_path / "out.partial" / "files", config="ours")
    with pytest.raises(OutputError, match="were not there when the run began"):
        publish_folder(finished, target, replace=False)
    assert names(target) == ["thesis.json"]
    assert names(finished) == ["config.json"]
    publish_folder(finished, target, replace=True)
    assert names(target) == ["config.json"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            write_half(tmp_path / "deep" / "out", error)
        assert names(tmp_path) == []


def test_full_disk_is_named_also_as_the_cause_of_another_error(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            raise OSError(errno.EDQUOT, "quota")
        except OSError as error:
            raise RuntimeError("could not serialize") from error

    with pytest.raises(OutputError, match="is full"), staged_output(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match="is full"), staged_output(tmp_path / "out"):
        fail()
    assert names(tmp_path) == []


def test_used_target_is_refused(tmp_path: Path) -> None:
    target = fill(tmp_path / "out", config="{}")
    with pytest.raises(OutputError, match="already holds files"):
        check_output_dir(target)
    with pytest.raises(OutputError, match="already holds files"), staged_output(target):
        pass
    assert names(tmp_path) == ["out"]


def test_replace_happens_at_the_end(tmp_path: Path) -> None:
    target = fill(tmp_path / "out", config="old", other="old")
    check_output_dir(target, overwrite=True)
    with staged_output(target, on_existing=OnExisting.REPLACE) as folder:
        (folder / "config.json").write_text("new")
        assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]
    assert names(target) == ["config.json"]
    assert (target / "config.json").read_text() == "new"


def test_failed_replace_keeps_the_old(tmp_path: Path) -> None:
    target = fill(tmp_path / "out", config="old")
    with pytest.raises(ValueError, match="no"):
        write_half(target, ValueError("no"))
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_failed_rename_puts_the_old_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fill(tmp_path / "out", config="old")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "broken")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(OSError, match="broken"),
        staged_output(target, on_existing=OnExisting.REPLACE),
    ):
        pass
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_merge_keeps_strangers_and_drops_stale_weights(tmp_path: Path) -> None:
    target = fill(tmp_path / "out", config="old", tokenizer="kept")
    (target / "model-00001-of-00002.safetensors").touch()
    with staged_output(target, on_existing=OnExisting.MERGE) as folder:
        (folder / "config.json").write_text("new")
        (folder / "model.safetensors").touch()
        assert (target / "config.json").read_text() == "old"
    assert names(target) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_a_killed_writer_leaves_no_target_and_is_cleaned_up(tmp_path: Path) -> None:
    target = tmp_path / "out"
    script = f"""
        import os, signal
        from llmcompressor.checkpoint.atomic_output import staged_output as staged
        with staged({str(target)!r}) as folder:
            (folder / "config.json").write_text("{{}}")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode
    assert code == -signal.SIGKILL
    assert not target.exists()
    assert len(names(tmp_path)) == 1
    with staged_output(target):
        pass
    assert names(tmp_path) == ["out"]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with staged_output(tmp_path / "out") as first:
        with staged_output(tmp_path / "out", on_existing=OnExisting.REPLACE) as second:
            assert first != second
            assert first.is_dir()
        (tmp_path / "out" / "config.json").unlink(missing_ok=True)
    assert names(tmp_path) == ["out"]


def test_a_mount_point_is_filled_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fill(tmp_path / "out", config="old", other="old")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    with staged_output(target, on_existing=OnExisting.REPLACE) as folder:
        assert folder.parent == target
        (folder / "config.json").write_text("new")
        (folder / "sub").mkdir()
    assert names(target) == ["config.json", "sub"]


def _killed(*args: object) -> None:
    raise KeyboardInterrupt


class TestCheck:
    def test_a_file_and_what_is_below_it(self, tmp_path: Path) -> None:
        (tmp_path / "out").touch()
        with pytest.raises(OutputError, match="is a file"):
            check_output_dir(tmp_path / "out", overwrite=True)
        with pytest.raises(OutputError, match="out is a file"):
            check_output_dir(tmp_path / "out" / "deeper")

    def test_overlap_with_the_input(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "models" / "source", config="{}")
        (tmp_path / "link").symlink_to(source)
        for output, reason in (
            (source, "input model itself"),
            (tmp_path / "link", "input model itself"),
            (source.parent / "." / "source", "input model itself"),
            (source.parent, "contains the input"),
            (source / "out", "inside the input"),
        ):
            with pytest.raises(OutputError, match=reason):
                check_output_dir(output, source=source, overwrite=True)
        check_output_dir(source.parent / "source-out", source=source)

    def test_overwrite_never_deletes_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="no checkpoint"):
            check_output_dir(fill(tmp_path / "letters", love="dear"), overwrite=True)
        repository = fill(tmp_path / "repository", config="{}")
        (repository / ".git").mkdir()
        with pytest.raises(OutputError, match="no checkpoint"):
            check_output_dir(repository, overwrite=True)
