# SPDX-License-Identifier: Apache-2.0
"""The session's file in a trainer's checkpoint, and checkpoints that are whole.

The trainer writes ``trainer_state.json`` last. Before the first file of a checkpoint is written, an
existing ``trainer_state.json`` is removed and the session's file is written. So a folder whose
``trainer_state.json`` can be read is complete: all files are of the same step. After that
``checksums.json`` is written, with a hash of each file. Checkpoints of earlier releases have none.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.runtime import durable
from llmcompressor.runtime.limits import parse_json

SESSION_FILE = "session_state.pt"
CHECKSUMS = "checksums.json"
_STATE_FILE = "trainer_state.json"
# transformers' own mark of a checkpoint that it writes on a signal and has not finished.
_UNFINISHED_MARK = "checkpoint-is-incomplete.txt"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_FORMAT = 1


def write_session(folder: Path, saved: Mapping[str, Any]) -> None:
    """Start a checkpoint with the session's file; call it before the trainer writes its own.

    Args:
        folder: the checkpoint's folder; created if it does not exist.
        saved: the result of ``CompressionLifecycle.state_dict``.
    """
    durable.make_folder(folder)
    for name in (_STATE_FILE, CHECKSUMS):
        (folder / name).unlink(missing_ok=True)
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    content = {"format": _FORMAT, "versions": versions, **saved}
    durable.replace(folder / SESSION_FILE, lambda new: torch.save(content, new))


def write_checksums(folder: Path) -> None:
    """End a checkpoint with the checksums of its files; all of them outlast a loss of power."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    durable.sync_tree(folder)
    found = durable.checksums(folder, files)
    durable.replace(folder / CHECKSUMS, json.dumps(found, indent=2).encode())


class _WrittenAsItIs(GenerationConfig):
    """Settings of generation that are written without being judged."""

    def save_pretrained(
        self, save_directory: Any, config_file_name: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Override to write the file only."""
        self.to_json_file(Path(save_directory) / (config_file_name or "generation_config.json"))


@contextmanager
def invalid_generation_written(model: Any) -> Iterator[None]:
    """Let checkpoints keep settings of generation that transformers loads and refuses to write.

    They are told now, before any step.
    """
    settings = getattr(model, "generation_config", None)
    if type(settings) is not GenerationConfig:
        yield
        return
    try:
        settings.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        logger.warning(
            "The generation_config.json of the model is not valid, and is written as it is: "
            f"{reason}"
        )
        settings.__class__ = _WrittenAsItIs
    try:
        yield
    finally:
        settings.__class__ = GenerationConfig


def read_session(folder: Path) -> dict[str, Any] | None:
    """Load the file of :func:`write_session`; ``None`` if the checkpoint has none.

    Raises:
        CheckpointError: the file is damaged, or has an unknown format.
    """
    path = folder / SESSION_FILE
    if not path.is_file():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        known = saved["format"] == _FORMAT
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}.", "Resume from another checkpoint."
        ) from error
    if not known:
        raise CheckpointError(
            f"{path} is of format {saved['format']}, and this version reads {_FORMAT}.",
            "Resume with the version that wrote it.",
        )
    return saved


def checkpoint_to_resume(asked: str | os.PathLike[str] | bool | None, runs: Path) -> Path | None:
    """Return the folder to resume from, or ``None``.

    Args:
        asked: a folder; true for the last complete one in ``runs``; false or ``None`` for none.
        runs: the folder of the run's checkpoints.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    if asked is None or asked is False:
        return None
    if asked is True:
        return _last_complete(runs)
    folder = Path(asked)
    lack = find_fault(folder)
    if lack:
        raise CheckpointError(
            f"Training cannot be resumed from {folder}: {lack}.",
            "Give the folder of another checkpoint, or resume_from_checkpoint=True for the last "
            f"whole one. Files that you have changed yourself are taken without {CHECKSUMS}.",
        )
    return folder


def step_of(folder: Path) -> int:
    """Return the optimizer step of a complete checkpoint."""
    step: int = parse_json((folder / _STATE_FILE).read_text(encoding="utf-8"))["global_step"]
    return step


def _last_complete(runs: Path) -> Path:
    found = [path for path in (runs.iterdir() if runs.is_dir() else ()) if path.is_dir()]
    steps = {int(match[1]): path for path in found if (match := _FOLDER.fullmatch(path.name))}
    unfinished: list[str] = []
    for step in sorted(steps, reverse=True):
        lack = find_fault(steps[step])
        if lack is None:
            if unfinished:
                logger.warning(f"Resuming from {steps[step]}, not from {'; '.join(unfinished)}.")
            return steps[step]
        unfinished.append(f"{steps[step].name}: {lack}")
    raise CheckpointError(
        f"{runs} has no complete checkpoint to resume from"
        f"{' (' + '; '.join(unfinished) + ')' if unfinished else ''}.",
        "Leave resume_from_checkpoint out to train from the beginning.",
    )


def find_fault(folder: Path) -> str | None:
    """Return the reason why a folder is no whole checkpoint, or ``None`` if it is."""
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / _UNFINISHED_MARK).exists():
        return f"it was not finished, {_UNFINISHED_MARK} says so"
    try:
        step_of(folder)
    except FileNotFoundError:
        return f"it was not finished, {_STATE_FILE} is missing"
    except (ValueError, KeyError, TypeError):
        return f"it was not finished, {_STATE_FILE} breaks off"
    file = folder / CHECKSUMS
    if not file.is_file():
        return None
    try:
        damage = durable.find_damage(folder, parse_json(file.read_bytes()))
    except (ValueError, AttributeError):
        damage = f"{CHECKSUMS} cannot be read"
    return None if damage is None else f"it is damaged, {damage}"


# --------------------
# Position of a training in its data.
#
# transformers computes the position by dividing the steps by those of an epoch. A stream has no
# known number of steps in an epoch: once it has started again, its position has to be counted.

_KEY = "data_place"


class DataPosition:
    """Counts the passes over the data and the micro-batches of the current pass.

    Args:
        passes: completed passes.
        batches: micro-batches of the current pass in this process.

    Attributes:
        resumed: the passes and batches at the time of the resumed checkpoint, if it has them.
    """

    def __init__(self, passes: int = 0, batches: int = 0) -> None:
        self._passes, self._batches = passes, batches
        self._begun = False
        self.resumed: tuple[int, int] | None = None

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataPosition:
        """Restore the position from the result of :meth:`record`."""
        found = saved.get(_KEY)
        place = cls() if found is None else cls(*found)
        place.resumed = None if found is None else (place._passes, place._batches)
        return place

    def record(self) -> dict[str, list[int]]:
        """Return the position for a checkpoint."""
        return {_KEY: [self._passes, self._batches]}

    def begin_pass(self) -> None:
        """Start the next pass; the first one starts at the restored position."""
        if self._begun:
            self._passes, self._batches = self._passes + 1, 0
        self._begun = True

    def take_batch(self) -> None:
        """Count a micro-batch."""
        self._batches += 1
