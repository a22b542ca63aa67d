# SPDX-License-Identifier: Apache-2.0
"""The command ``verify``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from llmcompressor.cli.failures import reporting
from llmcompressor.collecting import quick_imports

__all__ = ["FAULTY", "verify_command"]

FAULTY = 1
"""The exit code for a checkpoint with an error."""


def verify_command(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of the model to check.")
    ],
    *,
    reference: Annotated[
        str | None, typer.Option(help="The original model, to compare every tensor with.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(help="vllm, transformers or sglang. (default: all of them)")
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(help="Size of tensor parallelism, repeatable. (default: 1, 2, 4 and 8)"),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The device: its capability as sm90, or a name as h100.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The dtype of activations, if not the model's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Check a written CHECKPOINT.

    The exit code is 1 if it has an error.
    """
    with reporting(debug=debug):
        with quick_imports():
            from llmcompressor.entrypoints.verify import verify  # noqa: PLC0415  # loads torch
        from llmcompressor.logger import configure_logger  # noqa: PLC0415  # loads loguru

        configure_logger()
        report = verify(checkpoint, reference, serve=serve, tp=tp or None, gpu=gpu, dtype=dtype)
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            from llmcompressor.cli.tables import print_verification  # noqa: PLC0415  # loads rich

            print_verification(report)
        if not report.ok:
            raise typer.Exit(FAULTY)
