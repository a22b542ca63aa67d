# SPDX-License-Identifier: Apache-2.0
"""Work folder of a training: ``NAME.partial`` next to its output, with the trainer's checkpoints.

::

    NAME.partial/
        lock             held while a training is at work; it dies with its process
        journal          what run it is, and one line per complete checkpoint
        training/        the trainer's own folder: checkpoint-N, logs, state, metrics
        files/           the compressed checkpoint, written at the end; renamed to NAME

The journal records when everything is written. A training that was killed after that only renames
the output when it is run again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcompressor.checkpoint.journal import BlockEntry
from llmcompressor.checkpoint.staging import flush, work_folder
from llmcompressor.checkpoint.workspace import Workspace, opened
from llmcompressor.errors import ArgumentError, OutputError
from llmcompressor.logger import logger

__all__ = ["TrainingFolder", "checkpoint_to_resume", "opened_folder"]

STATE_FILE = "trainer_state.json"
_TRAINING = "training"
_CHECKPOINT = "checkpoint-"
_BEST = "best_model_checkpoint"


class TrainingFolder:
    """The work folder of a training.

    Attributes:
        training: the trainer's output folder.
    """

    def __init__(self, training: Path, workspace: Workspace | None) -> None:
        self.training = training
        self._workspace = workspace

    @property
    def files(self) -> Path:
        """Folder for the compressed checkpoint."""
        assert self._workspace is not None, "only the main process writes the output"
        return self._workspace.files

    def note(self, step: int) -> None:
        """Flush a complete checkpoint to disk and add it to the journal."""
        if self._workspace is None:
            return
        name = f"{_CHECKPOINT}{step}"
        flush(self.training / name)
        self._workspace.journal.add(BlockEntry(block=name, digest="", source=""))

    def drop_incomplete(self) -> None:
        """Remove incomplete checkpoints of an earlier process, which are not in the journal.

        A remaining one would be taken for the newest, and new checkpoints would be rotated out
        before it.
        """
        noted = {f"{_CHECKPOINT}{step}" for step in self._noted_steps()}
        if not noted:
            shutil.rmtree(self.training, ignore_errors=True)
            return
        for path in self.training.glob(f"{_CHECKPOINT}*"):
            if path.name not in noted:
                shutil.rmtree(path)

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or ``None``."""
        for step in sorted(self._noted_steps(), reverse=True):
            checkpoint = self.training / f"{_CHECKPOINT}{step}"
            if (checkpoint / STATE_FILE).is_file():
                return checkpoint
        return None

    def _noted_steps(self) -> list[int]:
        if self._workspace is None:
            return []
        return [int(name.removeprefix(_CHECKPOINT)) for _, name in self._workspace.journal.entries]

    @property
    def is_written(self) -> bool:
        """True if the output is complete, and at most its renaming is missing."""
        return self._workspace is not None and self._workspace.journal.is_ready

    def mark_written(self) -> None:
        """Flush the complete compressed checkpoint to disk and record it in the journal."""
        assert self._workspace is not None, "only the main process writes the output"
        flush(self._workspace.files)
        self._workspace.journal.mark_ready()

    def publish(self, *, replace: bool, keep_checkpoints: bool) -> None:
        """Move the output and the trainer's other files to the final name.

        It can be repeated after an interruption.

        Args:
            replace: replace an existing checkpoint of that name.
            keep_checkpoints: move the trainer's checkpoints to the output too.
        """
        workspace = self._workspace
        assert workspace is not None, "only the main process writes the output"
        if workspace.is_published:
            workspace.remove()
            return
        for path in sorted(self.training.iterdir()):
            if keep_checkpoints or not path.name.startswith(_CHECKPOINT):
                state = path if path.name == STATE_FILE else path / STATE_FILE
                self._mend_best(state, workspace.target if keep_checkpoints else None)
                path.rename(workspace.files / path.name)
        workspace.publish(replace=replace)

    def _mend_best(self, file: Path, output: Path | None) -> None:
        """Update the path of the best checkpoint in a trainer state; ``None`` if it is dropped."""
        if not file.is_file():
            return
        state = json.loads(file.read_text(encoding="utf-8"))
        best = state.get(_BEST)
        if best is None or Path(best).parent != self.training:
            return  # there is none, or it belongs to the training that this one extends
        state[_BEST] = None if output is None else str(output / Path(best).name)
        new = file.with_suffix(".new")
        # As transformers writes it.
        new.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(file)


@contextmanager
def opened_folder(
    target: Path | None, fingerprint: Mapping[str, Any], *, resume: str, is_main: bool
) -> Iterator[TrainingFolder]:
    """Open the work folder of a training that begins or resumes.

    Args:
        target: the output directory; without one a temporary folder is used.
        fingerprint: identifies the training.
        resume: see :func:`~llmcompressor.checkpoint.workspace.opened`.
        is_main: whether this process writes the output.

    Raises:
        OutputError: the folder is in use, belongs to another run, or is empty while ``resume`` is
            ``"must"``.
    """
    if target is None:
        with tempfile.TemporaryDirectory(prefix="llmcompressor-") as temporary:
            yield TrainingFolder(Path(temporary), None)
        return
    training = work_folder(target) / _TRAINING
    if not is_main:
        yield TrainingFolder(training, None)
        return
    with opened(target, fingerprint, resume=resume) as workspace:
        folder = TrainingFolder(training, workspace)
        if folder.is_written:
            yield folder
            return
        if training.exists() and folder.last_checkpoint() is None:
            logger.info(f"No checkpoint was written to {training}: the training begins anew.")
        folder.drop_incomplete()
        if resume == "must" and folder.last_checkpoint() is None:
            raise OutputError(
                f"There is nothing to resume: {training} holds no complete checkpoint.",
                'Start with resume="auto" (the default).',
            )
        shutil.rmtree(workspace.files, ignore_errors=True)  # written at the end, at once
        workspace.files.mkdir()
        training.mkdir(exist_ok=True)
        yield folder


def checkpoint_to_resume(given: str | Path, target: Path | None) -> Path:
    """Find the checkpoint that the user named, also in the work folder of an unfinished training.

    Args:
        given: its folder; one below the output directory may still be in ``NAME.partial``.
        target: the output directory.

    Raises:
        ArgumentError: the checkpoint does not exist; lists those that do.
    """
    path = Path(given).expanduser().resolve()
    places = [path]
    if target is not None:
        training = work_folder(target) / _TRAINING
        places += [training / path.name] if path.parent == target else []
    for place in places:
        if (place / STATE_FILE).is_file():
            return place
    known = [] if target is None else sorted(training.glob(f"{_CHECKPOINT}*"))
    listed = f"There are: {', '.join(map(str, known))}." if known else "Check the path."
    raise ArgumentError(
        f"The argument 'resume_from_checkpoint' names {given}, which holds no checkpoint of a "
        "training.",
        listed,
    )
