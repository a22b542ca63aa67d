# SPDX-License-Identifier: Apache-2.0
"""Outputs that cannot be written: one clear error, and nothing is left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from llmcompressor.checkpoint.atomic_output import check_file, check_output_dir, staged_output
from llmcompressor.checkpoint.journal import open_workspace, reserve_output
from llmcompressor.errors import OutputError

HOLDERS = {
    "opened": lambda target: open_workspace(target, {}),
    "reserved": reserve_output,
    "staged": staged_output,
}


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path: Path) -> None:
    for length in (240, 248, 256):
        with pytest.raises(OutputError, match=r"has \d+ bytes.*Choose a shorter name"):
            check_output_dir(tmp_path / ("n" * length))
    with pytest.raises(OutputError, match="has 256 bytes"):
        check_output_dir(tmp_path / ("n" * 256) / "out")
    assert check_output_dir(tmp_path / ("n" * 150) / "out")


@pytest.mark.parametrize("address", ["s3://bucket/model", "gs://b/m", "hf://o/m", "file:///tmp/m"])
def test_an_address_is_no_folder_to_write_to(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (address, Path(address)):
        with pytest.raises(OutputError, match="an address, and files are written to folders"):
            check_output_dir(given)
        with pytest.raises(OutputError, match=r"X: report is .*, an address"):
            check_file(Path(given), "X: report")
    scheme = Path(address).parts[0]
    (tmp_path / scheme).mkdir()  # a folder that somebody named so
    assert check_output_dir(address) == tmp_path / Path(address)
    assert not list((tmp_path / scheme).iterdir())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    long_name = tmp_path / ("n" * 256) / "report.json"
    not_made = Path("/proc/report.json")
    for file in (tmp_path / "folder", tmp_path / "file" / "report.json", not_made, long_name):
        with pytest.raises(OutputError, match=r"X: file is .*, which cannot be written"):
            check_file(file, "X: file")


@pytest.mark.parametrize(
    ("holder", "number"),
    [("opened", errno.ENOENT), ("reserved", errno.EACCES), ("staged", errno.EROFS)],
)
def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str, number: int
) -> None:
    made = Path.mkdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if ".partial" in path.name:
            path.parent.mkdir(parents=True, exist_ok=True)
            raise OSError(number, "it may not be", str(path))
        made(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    target = tmp_path / "a" / "out"
    wanted = r"(cannot be created|can only be read).*Choose another output directory"
    with pytest.raises(OutputError, match=wanted), HOLDERS[holder](target):
        raise AssertionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("holder", "error"),
    [
        ("opened", OSError(errno.EFBIG, "File too large")),
        ("staged", ValueError("File too large (os error 27)")),
    ],
)
def test_a_file_that_is_too_large(tmp_path: Path, holder: str, error: Exception) -> None:
    target = tmp_path / "a" / "out"
    with (
        pytest.raises(OutputError, match=r"larger than the limit.*ulimit"),
        HOLDERS[holder](target),
    ):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("holder", ["opened", "staged"])
def test_what_torch_could_not_write_is_told(tmp_path: Path, holder: str) -> None:
    """It says where in the file it is, and not why."""
    wanted = "could not be written to its end"
    with pytest.raises(OutputError, match=wanted), HOLDERS[holder](tmp_path / "out"):
        torch.save(torch.zeros(10**5), "/dev/full")
    with pytest.raises(RuntimeError, match="size of tensor"), HOLDERS[holder](tmp_path / "out"):
        torch.add(torch.zeros(2), torch.zeros(3))
    with pytest.raises(RuntimeError, match="decoder"), HOLDERS[holder](tmp_path / "out"):
        raise RuntimeError("iostream error in a decoder: unexpected pos 3")
