# SPDX-License-Identifier: Apache-2.0
"""Where a training works: ``NAME.partial`` beside its output, with the trainer's checkpoints.

::

    NAME.partial/
        lock             held while a training is at work; it dies with its process
        journal          what run it is, and one line per complete checkpoint
        training/        the trainer's own folder: checkpoint-N, logs, state, metrics
        files/           the compressed checkpoint, written at the end; renamed to NAME

When all is written the journal says so. A training that was killed after that only gives the
output its name.
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
    """The folder of one training.

    Attributes:
        training: where the trainer writes.
    """

    def __init__(self, training: Path, workspace: Workspace | None) -> None:
        self.training = training
        self._workspace = workspace

    @property
    def files(self) -> Path:
        """Where the compressed checkpoint is written."""
        assert self._workspace is not None, "only the main process writes the output"
        return self._workspace.files

    def note(self, step: int) -> None:
        """A checkpoint is complete: make it durable, and write it to the journal."""
        if self._workspace is None:
            return
        name = f"{_CHECKPOINT}{step}"
        flush(self.training / name)
        self._workspace.journal.add(BlockEntry(block=name, digest="", source=""))

    def drop_incomplete(self) -> None:
        """Remove what an earlier process had begun: what is not in the journal is not complete.

        A checkpoint that is left would be taken for a newer one, and those that are written from
        now on would make room for it.
        """
        noted = {f"{_CHECKPOINT}{step}" for step in self._noted_steps()}
        if not noted:
            shutil.rmtree(self.training, ignore_errors=True)
            return
        for path in self.training.glob(f"{_CHECKPOINT}*"):
            if path.name not in noted:
                shutil.rmtree(path)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is complete."""
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
        """Whether all is there, and only the name of the output is missing, if anything."""
        return self._workspace is not None and self._workspace.journal.is_ready

    def mark_written(self) -> None:
        """The compressed checkpoint is complete: make it durable, and say so in the journal."""
        assert self._workspace is not None, "only the main process writes the output"
        flush(self._workspace.files)
        self._workspace.journal.mark_ready()

    def publish(self, *, replace: bool, keep_checkpoints: bool) -> None:
        """Give the output its name, with what the trainer wrote beside the checkpoints.

        It may be done again where it was broken off.

        Args:
            replace: a checkpoint that has the name goes.
            keep_checkpoints: they become part of the output.
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
        """Have a trainer's state name the best checkpoint where it will be; nowhere if it goes."""
        if not file.is_file():
            return
        state = json.loads(file.read_text(encoding="utf-8"))
        best = state.get(_BEST)
        if best is None or Path(best).parent != self.training:
            return  # there is none, or it is one of the training that this one extends
        state[_BEST] = None if output is None else str(output / Path(best).name)
        new = file.with_suffix(".new")
        # As transformers writes it.
        new.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(file)


@contextmanager
def opened_folder(
    target: Path | None, fingerprint: Mapping[str, Any], *, resume: str, is_main: bool
) -> Iterator[TrainingFolder]:
    """The folder of a training, whether it begins or goes on.

    Args:
        target: the output directory; without one nothing that is written stays.
        fingerprint: what makes a training the same training.
        resume: see :func:`~llmcompressor.checkpoint.workspace.opened`.
        is_main: whether this process is the one of several that writes.

    Raises:
        OutputError: another run is at work there, what is there is of another run, or nothing is
            there and ``resume`` is ``"must"``.
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
        shutil.rmtree(workspace.files, ignore_errors=True)  # written at the end, in one go
        workspace.files.mkdir()
        training.mkdir(exist_ok=True)
        yield folder


def checkpoint_to_resume(given: str | Path, target: Path | None) -> Path:
    """The checkpoint that the user named, where it is while its training is not done, too.

    Args:
        given: its folder; one below the output directory may still be in ``NAME.partial``.
        target: the output directory.

    Raises:
        ArgumentError: there is no such checkpoint; lists those there are.
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
