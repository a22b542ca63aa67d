# SPDX-License-Identifier: Apache-2.0
"""Commands of earlier releases that are no longer needed."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["reindex", "trace"]


def reindex(arguments: Sequence[str] | None = None) -> None:
    """Copy the checkpoint into the folder that the next step of a script reads."""
    parser = argparse.ArgumentParser(
        prog="llmcompressor.reindex_fused_weights",
        description="Not needed: model_free_ptq takes a checkpoint however its weights lie in "
        "files. For scripts that go on from the folder SAVE_DIRECTORY it is made, as a copy.",
    )
    parser.add_argument("model_stub", help="folder or name of the model")
    parser.add_argument("save_directory", help="folder to write; must be new")
    parser.add_argument("--num_workers", type=int, default=5, help="without effect")
    given = parser.parse_args(arguments)
    from llmcompressor.errors import InputError  # noqa: PLC0415  # --help is quick

    try:
        _copy(given.model_stub, Path(given.save_directory))
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")
    sys.stdout.write(
        "This step is not needed: model_free_ptq takes the checkpoint however its weights lie in "
        f"files.\nWritten: {given.save_directory}, a copy.\n"
    )


def trace(arguments: Sequence[str] | None = None) -> None:
    """Report that nothing is traced."""
    del arguments
    sys.stderr.write(
        "Error: nothing is traced here, since a run pauses the model's own forward. "
        "`llmcompressor plan` says what a run would do.\n"
    )
    raise SystemExit(2)


def _copy(model: str, target: Path) -> None:
    """Copy a checkpoint; the folder appears under its name when it is complete."""
    from llmcompressor.checkpoint.hub import fetch  # noqa: PLC0415  # loads torch
    from llmcompressor.checkpoint.source import is_hub_id  # noqa: PLC0415
    from llmcompressor.errors import CheckpointError, OutputError  # noqa: PLC0415

    source = fetch(model) if is_hub_id(model) else Path(model)
    if not source.is_dir():
        raise CheckpointError(f"There is no folder {model}.", "Give a model's folder or name.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} already holds files.", "Give a new folder.")
    if target.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{target} lies within the model's folder.", "Give another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
        made = Path(place) / "copy"
        shutil.copytree(source, made)  # links of the hub's cache are resolved
        made.rename(target)
