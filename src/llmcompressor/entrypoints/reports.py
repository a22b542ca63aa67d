# SPDX-License-Identifier: Apache-2.0
"""``report`` and ``compare``: pages that show a checkpoint, or two side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmcompressor.args.checks import path
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.source import local_directory
from llmcompressor.entrypoints.evaluate import evaluate
from llmcompressor.errors import CheckpointError, OutputError
from llmcompressor.logger import show_runs_quietly
from llmcompressor.reporting.compare import Comparison, compare_folders, comparison_page
from llmcompressor.reporting.contents import contents_of
from llmcompressor.reporting.report import evaluations_not_shown, write_page
from llmcompressor.runtime.durable import replace
from llmcompressor.verification.check import verify_files

COMPARISON_FILE = "comparison.html"


@told_by_name
def report(
    checkpoint: str | os.PathLike[str], reference: str | os.PathLike[str] | None = None
) -> Path:
    """Write ``report.html`` of a checkpoint anew, beside its weights.

    The page shows sizes by kind of layer, the error of every quantized weight, the tokens of
    experts, time and memory of the run, its warnings and what ``verify`` found. What only the run
    knew is taken from the page that is there.

    Args:
        checkpoint: its folder.
        reference: the original model: sizes and errors are measured anew against it.

    Returns:
        The page.

    Raises:
        CheckpointError: a folder holds no checkpoint, or half of one.
        OutputError: the page cannot be written there.
    """
    show_runs_quietly()
    folder = _folder("checkpoint", checkpoint)
    if reference is None:
        return _written(folder)
    original = _folder("reference", reference)
    contents_of(folder)  # half a checkpoint is told before it is compared
    found = verify_files(folder, original).errors
    return _written(folder, original, errors={one.module: one.relative for one in found})


def _written(folder: Path, *args: Any, **kwargs: Any) -> Path:
    try:
        return write_page(folder, *args, **kwargs)
    except OSError as error:
        raise OutputError(
            f"The page of {folder} cannot be written: {error}.", "Make the folder writable."
        ) from error


@told_by_name
def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] = COMPARISON_FILE,
    dataset: Any = None,
    max_seq_length: int | None = None,
    num_samples: int | None = None,
    trust_remote_code_model: bool = False,
) -> Comparison:
    """Put two checkpoints of one model side by side, on a page.

    Args:
        first: a folder, of any format that ``verify`` reads.
        second: another.
        reference: the model that both were made of: the errors of their weights are measured, and
            their distance from it on the text.
        output: the page to write.
        dataset: a text to measure them on, as for ``evaluate``; without a reference the second is
            measured against the first. Not measured if ``None``.
        max_seq_length: tokens of a window of the text.
        num_samples: number of windows.
        trust_remote_code_model: run code that comes with the checkpoints.

    Returns:
        The comparison.

    Raises:
        ArgumentError: they are different models.
        CheckpointError: a folder holds no checkpoint, or half of one.
        OutputError: the page cannot be written.
    """
    show_runs_quietly()
    folders = _folder("first", first), _folder("second", second)
    original = None if reference is None else _folder("reference", reference)
    place = _page(output)
    found = compare_folders(*folders, original)
    if dataset is not None:
        with evaluations_not_shown():  # a checkpoint's own page is of no comparison
            measured = [
                evaluate(
                    folder,
                    reference=original or (folders[0] if folder is folders[1] else None),
                    dataset=dataset,
                    max_seq_length=max_seq_length,
                    num_samples=num_samples,
                    trust_remote_code_model=trust_remote_code_model,
                ).as_dict()
                for folder in folders
            ]
        found = found.with_evaluations(measured)
    try:
        replace(place, comparison_page(found, original).encode())
    except OSError as error:
        raise OutputError(
            f"The page {place} cannot be written: {error}.", "Give another output."
        ) from error
    return found


def _page(given: str | os.PathLike[str]) -> Path:
    """Return the place of a page, which is checked before any work."""
    place = Path(path("output", given)).expanduser()
    if place.is_dir():
        raise OutputError(
            f"The output {place} is a folder.", f"Name the page, such as {place / COMPARISON_FILE}."
        )
    if not place.parent.is_dir():
        raise OutputError(
            f"The page {place} cannot be written: there is no folder {place.parent}.",
            "Make that folder, or give another output.",
        )
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"The page {place} cannot be written: the folder {place.parent} is not writable.",
            "Give another output.",
        )
    return place


def _folder(argument: str, given: str | os.PathLike[str]) -> Path:
    place = path(argument, given)
    folder = local_directory(place) or Path(place).expanduser()
    if not folder.is_dir():
        problem = f"There is no checkpoint folder {str(given)!r}."
        if folder.exists():
            problem = f"{str(given)!r} is a file."
        raise CheckpointError(
            problem, "Give the folder of a checkpoint, with config.json and weights."
        )
    return folder
