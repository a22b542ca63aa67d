# SPDX-License-Identifier: Apache-2.0
"""An error of the file system at any call of a run: what surfaces names a file."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import small_models as small
from tests.support.thinned import few
from transformers import AutoModelForCausalLM

from llmcompressor import evaluate, model_free_ptq, oneshot, plan, reset_session, train, verify

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")

RTN = "modifiers: {QuantizationModifier: {targets: Linear, scheme: W8A16, ignore: [lm_head]}}"
GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
OPENED = ("read", "write", "pread", "preadv", "pwrite", "pwritev", "fsync", "ftruncate", "sendfile")
WITH_DATA: dict[str, Any] = {"max_seq_length": 16, "num_calibration_samples": 2}


def _save(model: Path, target: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    oneshot(loaded, RTN)
    loaded.save_pretrained(target)


RUNS: dict[str, Callable[[Path, Path], Any]] = {
    "oneshot": lambda model, target: oneshot(model, GPTQ, small.token_rows(2), str(target)),
    "save_pretrained": _save,
    "model_free_ptq": lambda model, target: model_free_ptq(model, target, "FP8_DYNAMIC"),
    "train": lambda model, target: train(
        str(model), RTN, small.token_rows(2), str(target), max_steps=1, save_steps=1
    ),
    "plan": lambda model, target: plan(
        str(model), GPTQ, small.token_rows(2), str(target), measure=False
    ),
    "evaluate": lambda model, target: evaluate(
        str(model), dataset=small.token_rows(2), num_samples=1
    ),
    "verify": lambda model, target: verify(model, reference=model),
}


def _path_of(descriptor: int) -> str:
    link = f"/proc/self/fd/{descriptor}"
    return os.readlink(link) if os.path.islink(link) else ""


class Disk:
    """Counts the calls that read or write files below ``root``, and lets one of them fail."""

    def __init__(self, root: Path) -> None:
        self.root, self.fails_at = str(root), -1
        self.places: list[tuple[str, str, int]] = []

    def call(self, name: str, descriptor: int) -> None:
        if not _path_of(descriptor).startswith(self.root):
            return
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and "llmcompressor" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame.f_back is None:
            return  # the test's own
        self.places.append((name, frame.f_code.co_filename, frame.f_lineno))
        if len(self.places) - 1 == self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # as Python does for a number

    def firsts(self) -> list[int]:
        """The first call of each kind from each line."""
        return sorted({place: at for at, place in reversed([*enumerate(self.places)])}.values())


def _raw(disk: Disk) -> type[io.FileIO]:
    class Raw(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            disk.call("read", self.fileno())
            return super().readinto(buffer)

        def readall(self) -> bytes:
            disk.call("read", self.fileno())
            return super().readall()

        def write(self, content: Any) -> int:
            disk.call("write", self.fileno())
            return super().write(content)

    return Raw


@contextmanager
def watched(disk: Disk) -> Iterator[None]:
    """Lead all that Python does with open files through ``disk``."""
    real_open, raw_file = io.open, _raw(disk)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        if isinstance(file, int) or buffering not in (-1, 0) or "+" in mode or more.get("opener"):
            return real_open(file, mode, buffering, *rest, **more)
        raw = raw_file(file, mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        held: Any = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return held if "b" in mode else io.TextIOWrapper(held, *rest, **more)

    def numbered(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(descriptor: int, *rest: Any) -> Any:
            disk.call(name, descriptor)
            return real(descriptor, *rest)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, "open", opened)
        patched.setattr(io, "open", opened)
        for name in OPENED:
            patched.setattr(os, name, numbered(name))
        yield


@pytest.mark.parametrize(
    ("name", "step"),
    few(itertools.product(RUNS, (1, 12)), *((name, 12) for name in ("oneshot", "save_pretrained"))),
)
def test_what_surfaces_names_a_file(name: str, step: int, tmp_path: Path) -> None:
    small.one_block().save_pretrained(tmp_path / "source")

    def run(at: int) -> tuple[Disk, Exception | None]:
        place = tmp_path / str(at)
        place.mkdir()
        shutil.copytree(tmp_path / "source", place / "model")
        disk, raised = Disk(place), None
        disk.fails_at = at
        with watched(disk):
            try:
                RUNS[name](place / "model", place / "out")
            except Exception as error:
                raised = error
        reset_session()
        shutil.rmtree(place)
        return disk, raised

    disk, raised = run(-1)
    assert raised is None
    assert len(disk.firsts()) > 2
    bare = []
    for at in disk.firsts()[::step]:
        failed, raised = run(at)
        if raised is not None and not any(text in str(raised) for text in (failed.root, ".json")):
            bare.append((failed.places[at], str(raised)))
    assert not bare
