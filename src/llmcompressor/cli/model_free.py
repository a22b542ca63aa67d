# SPDX-License-Identifier: Apache-2.0
"""The command ``model-free-ptq``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompressor.cli.failures import reporting
from llmcompressor.collecting import quick_imports
from llmcompressor.errors import ArgumentError

__all__ = ["model_free_command"]


def model_free_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")],
    *,
    save_directory: Annotated[
        str,
        typer.Option("--output", "--save-directory", "-o", help="Folder to write; must be new."),
    ],
    scheme: Annotated[
        str | None, typer.Option(help="A preset: FP8_DYNAMIC, FP8_BLOCK, W4A16, NVFP4A16, …")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Instead of a scheme, a JSON file with config_groups and ignore."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="What stays as it is: a name, a class or a re: pattern; repeatable."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to compute. (default: an accelerator if there is one)"),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="The most memory to use, as 40GiB or 0=40GiB,cpu=100GiB.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="A run that was broken off: auto, never or must continue it.")
    ] = "auto",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the written files again.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint that the output holds.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Round the weights of MODEL from its files alone.

    To nearest, without calibration data, whatever the architecture.
    """
    with reporting(debug=debug, resumable=True):
        groups = None if config is None else _read(config)
        with quick_imports():
            from llmcompressor.entrypoints.model_free import (  # noqa: PLC0415  # loads torch
                model_free_ptq,
            )
        from llmcompressor.logger import configure_logger  # noqa: PLC0415  # loads loguru

        configure_logger()
        folder = model_free_ptq(
            model,
            save_directory,
            scheme,
            ignore or (),
            device=device,
            config=groups,
            resume=resume,
            max_memory=max_memory,
            verify=not no_verify,
            overwrite=overwrite,
        )
        typer.echo(f"Written: {folder}")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"The file {file} cannot be read as JSON: {error}.", "Correct it."
        ) from error
