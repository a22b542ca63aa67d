# SPDX-License-Identifier: Apache-2.0
"""The commands ``train`` and ``run``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.cli.failures import reporting
from llmcompressor.cli.options import call_arguments, output_place, parameters_of
from llmcompressor.cli.training_options import OPTIONS, training_arguments, training_parameters
from llmcompressor.collecting import quick_imports

__all__ = ["OF_CALIBRATION", "run_command", "train_command"]

_ARGUMENTS = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
OF_CALIBRATION = (
    "activation_budget",
    "batch_size",
    "min_tokens_per_module",
    "moe_calibrate_all_experts",
    "num_calibration_samples",
    "overwrite_cache",
    "pipeline",
    "propagate_error",
    "quantization_aware_calibration",
    "sequential_granularity",
    "sequential_offload_device",
    "sequential_prefetch",
    "sequential_targets",
    "sequential_targets_per_subgraph",
    "shuffle_calibration_samples",
    "starved_experts",
    "tracing_ignore",
)
"""Fields that ``train`` has no option for."""


def _own(output_help: str) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return the parameters before and after those of the dataclasses."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")]
    output = Annotated[str, typer.Option("--output", "--output-dir", "-o", help=output_help)]
    debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
    return (
        [
            inspect.Parameter("model", keyword, annotation=model),
            inspect.Parameter("output_dir", keyword, annotation=output),
        ],
        [inspect.Parameter("debug", keyword, default=False, annotation=debug)],
    )


def _train_signature() -> inspect.Signature:
    before, after = _own("Folder to write; must be new.")
    not_here = [*OF_CALIBRATION, *OPTIONS]
    return inspect.Signature(
        [
            *before,
            *parameters_of(RecipeArguments, panel="Recipe"),
            *parameters_of(DatasetArguments, panel="Training data", skip=not_here),
            *training_parameters(),
            *parameters_of(ModelArguments, panel="Model", skip=["model"]),
            *parameters_of(RunArguments, panel="Run", skip=["dry_run", "max_memory"]),
            *after,
        ]
    )


def _run_signature() -> inspect.Signature:
    before, after = _own("Folder for the stages' folders; new, or that of the same run.")
    keyword = inspect.Parameter.KEYWORD_ONLY
    log_dir = Annotated[str | None, typer.Option(help="Folder for a file of the oneshot's log.")]
    skip = ["resume_from_checkpoint"]
    return inspect.Signature(
        [
            *before,
            *parameters_of(RecipeArguments, panel="Recipe", required=["recipe"], skip=["stage"]),
            *parameters_of(DatasetArguments, panel="Data and pipeline", skip=[*OPTIONS]),
            *(one for one in training_parameters() if one.name not in skip),
            *parameters_of(ModelArguments, panel="Model", skip=["model"]),
            *parameters_of(RunArguments, panel="Run", skip=["dry_run"]),
            inspect.Parameter("log_dir", keyword, default=None, annotation=log_dir),
            *after,
        ]
    )


def train_command(*, debug: bool, **given: Any) -> None:
    """Train MODEL while a recipe compresses it.

    The result is written when it is complete; the same command continues after an interruption.
    """
    with reporting(debug=debug, resumable=True):
        training = training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        with quick_imports():
            from llmcompressor.entrypoints.train import train  # noqa: PLC0415  # loads torch

        _quietly(train, call)
        typer.echo(f"Written: {output_place(given)}")


def run_command(*, debug: bool, **given: Any) -> None:
    """Run all stages of a recipe on MODEL.

    Each as oneshot or train, each into a folder of its own; finished stages are skipped.
    """
    with reporting(debug=debug, resumable=True):
        training = training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        with quick_imports():
            from llmcompressor.entrypoints.stages import run_stages  # noqa: PLC0415  # loads torch

        _quietly(run_stages, call)
        typer.echo(f"Written: {given['output_dir']}")


def _with_roles(call: dict[str, Any]) -> dict[str, Any]:
    """Parse repeated ``--splits role=split`` into a dict; other splits are unchanged."""
    given = call.get("splits")
    splits = [given] if isinstance(given, str) else given or []
    named = ["=" in one for one in splits]
    if not any(named):
        return call
    if not all(named):
        raise typer.BadParameter(
            "some name their role and some do not; give all as role=split.", param_hint="--splits"
        )
    parts = [one.partition("=") for one in splits]
    found = {role.strip(): split.strip() for role, _, split in parts}
    if len(found) < len(parts):
        raise typer.BadParameter("a role is named twice.", param_hint="--splits")
    return {**call, "splits": found}


def _quietly(entrypoint: Callable[..., Any], call: dict[str, Any]) -> None:
    from llmcompressor.logger import configure_logger  # noqa: PLC0415
    from llmcompressor.progress import other_bars_hidden  # noqa: PLC0415

    configure_logger()
    with other_bars_hidden():
        entrypoint(**call)


def _sign(command: Callable[..., None], signature: inspect.Signature) -> None:
    command.__signature__ = signature  # type: ignore[attr-defined]  # functions have it, mypy not
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }


_sign(train_command, _train_signature())
_sign(run_command, _run_signature())
