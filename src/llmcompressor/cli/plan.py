# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.cli.failures import reporting
from llmcompressor.cli.options import call_arguments, parameters_of
from llmcompressor.collecting import quick_imports

__all__ = ["WOULD_FAIL", "plan_command", "show_plan"]

WOULD_FAIL = 1
"""The exit code for a recipe that would fail, or whose output could not be served."""

_ARGUMENTS = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
_OWN: dict[str, tuple[Any, Any]] = {
    "serve": (
        Annotated[
            str | None, typer.Option(help="vllm, transformers or sglang. (default: all of them)")
        ],
        None,
    ),
    "tp": (
        Annotated[
            list[int] | None,
            typer.Option(help="Size of tensor parallelism, repeatable. (default: 1, 2, 4 and 8)"),
        ],
        None,
    ),
    "gpu": (
        Annotated[
            str | None,
            typer.Option(help="The device: its capability as sm90, or a name as h100."),
        ],
        None,
    ),
    "no_measure": (
        Annotated[bool, typer.Option("--no-measure", help="Leave out the time: measure no speed.")],
        False,
    ),
    "as_json": (Annotated[bool, typer.Option("--json", help="Print JSON.")], False),
    "debug": (
        Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
        False,
    ),
}
_NOT_HERE = ("dry_run", "resume", "verify")


def _signature() -> inspect.Signature:
    """Build the signature: MODEL, the plan's own options, then those of ``oneshot``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")]
    output = Annotated[
        str | None,
        typer.Option("--output", "--output-dir", "-o", help="Folder that would be written."),
    ]
    own = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _OWN.items()
    ]
    return inspect.Signature(
        [
            inspect.Parameter("model", keyword, annotation=model),
            *own,
            inspect.Parameter("output_dir", keyword, default=None, annotation=output),
            *parameters_of(RecipeArguments, panel="Recipe", required=["recipe"]),
            *parameters_of(DatasetArguments, panel="Calibration data and pipeline"),
            *parameters_of(ModelArguments, panel="Model", skip=["model"]),
            *parameters_of(RunArguments, panel="Run", skip=_NOT_HERE),
        ]
    )


def plan_command(*, debug: bool, as_json: bool, no_measure: bool, **given: Any) -> None:
    """Say what compressing MODEL would match, need and take.

    No weight is read and nothing is written. The exit code is 1 if it would fail, or its output
    could not be served.
    """
    with reporting(debug=debug):
        deployment = {name: given.pop(name) or None for name in ("serve", "tp", "gpu")}
        call = call_arguments(given, *_ARGUMENTS)
        show_plan({**call, **deployment}, as_json=as_json, measure=not no_measure)


def show_plan(call: Mapping[str, Any], *, as_json: bool = False, measure: bool = True) -> None:
    """Print the plan of a call; the exit code tells if it would work."""
    with quick_imports():
        from llmcompressor.entrypoints.plan import plan  # noqa: PLC0415  # loads torch
    from llmcompressor.logger import LoggerConfig, configure_logger  # noqa: PLC0415

    configure_logger(LoggerConfig(console_log_level="ERROR"))  # the plan reports everything
    found = plan(**call, measure=measure)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        from llmcompressor.planning.tables import print_plan  # noqa: PLC0415  # loads rich

        print_plan(found)
    if not found.ok:
        raise typer.Exit(WOULD_FAIL)


_built = _signature()
plan_command.__signature__ = _built  # type: ignore[attr-defined]  # functions have it, mypy not
plan_command.__annotations__ = {
    name: parameter.annotation for name, parameter in _built.parameters.items()
}
