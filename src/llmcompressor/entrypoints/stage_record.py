# SPDX-License-Identifier: Apache-2.0
"""``stages.json``: the inputs of each stage, to detect stages that are finished already."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module

from llmcompressor.checkpoint.journal import differences
from llmcompressor.checkpoint.workspace import fingerprint_of_progress
from llmcompressor.entrypoints.data_prints import (
    data_print,
    kind_print,
    path_print,
    values_print,
)
from llmcompressor.entrypoints.model_prints import folder_print, model_print, was_left_by
from llmcompressor.errors import OutputError

__all__ = ["StageRecord", "shown", "shown_model"]

_RECORD = "stages.json"
_PATH = "path"
_SHOWN = 16
"""Items of a list that stand in the record; of a longer one a hash does."""


class StageRecord:
    """Reads and writes ``stages.json``, which is updated before a stage begins.

    Args:
        root: the folder of all stages.
        must_exist: refuse to begin without a record.

    Raises:
        OutputError: it cannot be read, is required but missing, or the folder holds other files.
    """

    def __init__(self, root: Path, *, must_exist: bool) -> None:
        self._root = root.expanduser().resolve()
        self._file = self._root / _RECORD
        self._stages: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._made: list[Path] = []
        if self._root.exists() and not self._root.is_dir():
            raise OutputError(f"The output {root} is a file.", "Choose another output directory.")
        if self._file.is_file():
            try:
                self._stages = json.loads(self._file.read_text(encoding="utf-8"))["stages"]
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{self._file} cannot be read: {error}.", "Choose another output directory."
                ) from error
        elif must_exist:
            raise OutputError(
                f"There is nothing to resume: {self._file} is not there.",
                'Start with resume="auto" (the default).',
            )
        elif self._root.is_dir() and any(self._root.iterdir()):
            raise OutputError(
                f"The output directory {self._root} already holds files, which are no stages.",
                "Choose another one.",
            )

    def settled(
        self, stage: str, present: Mapping[str, Any], folder: Path, model: Any, *, goes_on: bool
    ) -> dict[str, Any]:
        """Return the inputs of a stage, with recorded values for those that changed or vanished.

        A deleted folder or file counts as recorded. So does a model object that this stage itself
        changed in an earlier call of this process, if the stage is finished or resumes from a
        checkpoint that replaces the weights.

        Args:
            stage: its name.
            present: its inputs as they are now.
            folder: its output.
            model: the model that it begins with.
            goes_on: whether the stage resumes.
        """
        then, now = self._stages.get(stage, {}), dict(present)
        recorded = then.get("model")
        now["model"] = _where_gone(now["model"], recorded)
        past = then.get("arguments", {})
        now["arguments"] = {
            name: _where_gone(value, past.get(name)) for name, value in now["arguments"].items()
        }
        if recorded != now["model"] and was_left_by(model, recorded):
            known = {**now, "model": recorded}
            is_kept = _is_finished(folder) or (goes_on and _goes_on_from(folder, recorded))
            if is_kept and not list(differences(known, then)):
                return known
        return now

    def is_finished(
        self, stage: str, present: Mapping[str, Any], folder: Path, *, overwrite: bool
    ) -> bool:
        """Return True if a stage was finished with the same inputs.

        Raises:
            OutputError: it was finished with other inputs, and may not be overwritten.
        """
        if not _is_finished(folder):
            return False
        differing = list(differences(present, self._stages.get(stage, {})))
        if differing and not overwrite:
            raise OutputError(
                f"The folder {folder} holds the stage {stage!r} of another run: "
                f"{'; '.join(differing[:3])}.",
                "Choose another output directory, or pass overwrite=True (--overwrite) to run it "
                "again.",
            )
        return not differing

    def begin(self, stage: str, present: Mapping[str, Any]) -> None:
        """Record the inputs of a stage that begins."""
        self._before = dict(self._stages)
        self._stages[stage] = dict(present)
        self._made = [each for each in (self._root, *self._root.parents) if not each.exists()]
        self._write()

    def take_back(self, folder: Path) -> None:
        """Remove the record of the stage that began last, if it left nothing in its ``folder``."""
        if any(self._root.glob(f"{folder.name}*")):
            return
        self._stages = self._before
        if self._stages:
            self._write()
            return
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            for each in self._made:
                each.rmdir()

    def _write(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"stages": self._stages}, indent=2) + "\n", encoding="utf-8")
        new.replace(self._file)


def shown(name: str, value: Any, written: Sequence[Path]) -> Any:
    """Return the JSON value of an argument for the record; a fingerprint of data and models.

    Args:
        name: name of the argument.
        value: its value.
        written: folders that the stages write, whose contents are not read.
    """
    if name == "dataset":
        return data_print(value)
    if name == "dataset_path":
        return None if value is None else path_print(value)
    if name == "distill_teacher":
        return shown_model(value, written)
    return _shown(value)


def shown_model(model: Any, written: Sequence[Path]) -> Any:
    """Return the JSON value of a model for the record: its fingerprint and its path.

    Args:
        model: an object, a folder, or an id on the hub.
        written: folders that the stages themselves write.
    """
    if isinstance(model, Module):
        return model_print(model)
    if not isinstance(model, str | os.PathLike):
        return _shown(model)
    place = Path(model).expanduser()
    given = {_PATH: os.fspath(model)}
    if place.is_dir() and place.resolve() not in [each.expanduser().resolve() for each in written]:
        return {**given, **folder_print(place)}
    return given


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value] if len(value) <= _SHOWN else values_print(value)
    return kind_print(value)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _goes_on_from(folder: Path, model: Any) -> bool:
    """Return True if an interrupted training from this model left progress in the folder."""
    progress = fingerprint_of_progress(folder)
    return progress is not None and progress.get("model") == model


def _where_gone(now: Any, then: Any) -> Any:
    """Return the recorded value of a path if the path no longer exists, else the present one."""
    given = now.get(_PATH) if isinstance(now, Mapping) and set(now) == {_PATH} else now
    is_gone = isinstance(given, str) and isinstance(then, Mapping)
    return then if is_gone and then.get(_PATH) == given else now
