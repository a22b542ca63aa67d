# SPDX-License-Identifier: Apache-2.0
"""The command ``model-free-ptq``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.cli.failures import report_errors
from llmcompressor.cli.options import call_arguments, option_parameters
from llmcompressor.errors import ArgumentError
from llmcompressor.runtime.registry import quick_imports

__all__ = [
    "FAULTY",
    "WOULD_FAIL",
    "model_free_command",
    "plan_command",
    "show_plan",
    "verify_command",
]


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
    with report_errors(debug=debug, resumable=True):
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


# --------------------
# The command ``plan``.

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
            *option_parameters(RecipeArguments, panel="Recipe", required=["recipe"]),
            *option_parameters(DatasetArguments, panel="Calibration data and pipeline"),
            *option_parameters(ModelArguments, panel="Model", skip=["model"]),
            *option_parameters(RunArguments, panel="Run", skip=_NOT_HERE),
        ]
    )


def plan_command(*, debug: bool, as_json: bool, no_measure: bool, **given: Any) -> None:
    """Say what compressing MODEL would match, need and take.

    No weight is read and nothing is written. The exit code is 1 if it would fail, or its output
    could not be served.
    """
    with report_errors(debug=debug):
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
        from llmcompressor.planning.result import print_plan  # noqa: PLC0415  # loads rich

        print_plan(found)
    if not found.ok:
        raise typer.Exit(WOULD_FAIL)


_built = _signature()
plan_command.__signature__ = _built  # type: ignore[attr-defined]  # functions have it, mypy not
plan_command.__annotations__ = {
    name: parameter.annotation for name, parameter in _built.parameters.items()
}


# --------------------
# The command ``verify``.

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
    with report_errors(debug=debug):
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
