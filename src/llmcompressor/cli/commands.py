# SPDX-License-Identifier: Apache-2.0
"""The commands ``oneshot``, ``train``, ``run`` and ``plan``: an option for each argument field."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.model_arguments import BUDGETS
from llmcompressor.args.parsing import RENAMED
from llmcompressor.cli.failures import report_errors
from llmcompressor.cli.options import (
    call_arguments,
    dashed,
    option_parameters,
    output_folder,
    parameter,
    parse_pairs,
)
from llmcompressor.runtime.registry import resolve

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", count=True, help="Show the log; -vv shows all of it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Serve = Annotated[
    str | None,
    typer.Option(help="vllm, transformers or sglang, by default all of them; or llama.cpp."),
]
Tp = Annotated[
    list[int] | None,
    typer.Option(help="Size of tensor parallelism, repeatable. (default: 1, 2, 4 and 8)"),
]
Ranks = Annotated[int | None, typer.Option(help="Number of processes to plan for. (default: 1)")]
Nodes = Annotated[int | None, typer.Option(help="Number of machines they are on. (default: 1)")]
LinkSpeed = Annotated[
    float | None,
    typer.Option(
        help="GB/s between processes of a machine. (default: 50 with CUDA, 0.5 without)",
    ),
]
NodeLinkSpeed = Annotated[
    float | None,
    typer.Option(help="GB/s of a machine to others. (default: 12.5 with CUDA, 1.25 without)"),
]
Gpu = Annotated[
    str | None, typer.Option(help="The device: its capability as sm90, or a name as h100.")
]


def entrypoint(path: str, verbose: int = 0, *, log_level: str | None = None) -> Any:
    """Set up the log and import what a command runs, which loads torch.

    Args:
        path: as ``"module:attribute"``, below ``llmcompressor``.
        verbose: how often ``-v`` was given.
        log_level: of the log without ``-v``; by default it shows progress, summaries and warnings.
    """
    from llmcompressor import logger  # noqa: PLC0415  # loads loguru

    level = ("DEBUG" if verbose > 1 else "INFO") if verbose else log_level
    if level is None:
        logger.show_runs_quietly()
    else:
        logger.configure_logger(logger.LoggerConfig(console_log_level=level))
    logging.captureWarnings(True)  # this process is ours: those of other packages go to the log
    return resolve(f"llmcompressor.{path}")


# --------------------
# Options for transformers' training arguments: the common ones, and ``--set`` for all.
#
# The dataclass itself is not inspected: importing it loads torch, and ``--help`` must not wait for
# it. ``--set NAME=VALUE`` sets any argument; the entrypoint checks the names.


class _Option(NamedTuple):
    type: Any
    help: str
    also: str | None = None


OPTIONS: Mapping[str, _Option] = {
    "data_collator": _Option(
        str,
        "How samples become a batch: padding, or truncation to the shortest. (default: padding in "
        "training, truncation in calibration)",
    ),
    "num_train_epochs": _Option(float, "Epochs to train. (default: 3)"),
    "max_steps": _Option(int, "Steps to train, instead of epochs; needed for streams."),
    "per_device_train_batch_size": _Option(int, "Samples in a batch. (default: 8)"),
    "gradient_accumulation_steps": _Option(int, "Batches in a step. (default: 1)"),
    "learning_rate": _Option(float, "The highest learning rate. (default: 5e-5)"),
    "lr_scheduler_type": _Option(
        str, "How it goes on: linear, cosine, constant … (default: linear)"
    ),
    "warmup_steps": _Option(float, "Steps until it is reached; below 1, a share of all."),
    "weight_decay": _Option(float, "Weight decay. (default: 0)"),
    "max_grad_norm": _Option(float, "Gradients are clipped to this norm. (default: 1)"),
    "optim": _Option(
        str, "The optimizer, as adamw_torch, sgd, adafactor. (default: adamw_torch_fused)"
    ),
    "seed": _Option(int, "Decides the order of the data and everything random. (default: 42)"),
    "bf16": _Option(bool, "Compute in bfloat16 beside float32."),
    "fp16": _Option(bool, "Compute in float16 beside float32."),
    "activation_checkpointing": _Option(
        bool, "Take less memory and more time.", "--gradient-checkpointing"
    ),
    "use_cpu": _Option(bool, "Train on the CPU even if there is an accelerator."),
    "logging_steps": _Option(
        float, "Steps between two logs; below 1, a share of all. (default: 500)"
    ),
    "report_to": _Option(list[str], "Also log to tensorboard, wandb, …; repeatable."),
    "run_name": _Option(str, "What the run is called there."),
    "save_strategy": _Option(str, "When to save checkpoints: steps, epoch, no. (default: steps)"),
    "save_steps": _Option(float, "Steps between two checkpoints. (default: 500)"),
    "save_total_limit": _Option(int, "How many checkpoints to keep. (default: all)"),
    "eval_strategy": _Option(str, "When to evaluate: steps, epoch, no. (default: no)"),
    "eval_steps": _Option(float, "Steps between two evaluations. (default: as logging)"),
    "per_device_eval_batch_size": _Option(int, "Samples in a batch of an evaluation. (default: 8)"),
    "load_best_model_at_end": _Option(bool, "End with the checkpoint that evaluated best."),
    "dataloader_drop_last": _Option(bool, "Leave out the last batch where it is not full."),
    "fsdp": _Option(str, "Shard over processes, as 'full_shard auto_wrap'."),
    "fsdp_config": _Option(str, "Its configuration, a JSON file."),
    "deepspeed": _Option(str, "A DeepSpeed configuration, a JSON file."),
    "resume_from_checkpoint": _Option(
        str, "A checkpoint to go on from; true for the last one of this output."
    ),
}
"""Name → type, help and what else it may be typed as; the defaults in the texts are those of
transformers. Names that it has changed are the newest: ``train`` takes them with any release."""

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


def _training_parameters(skip: Sequence[str] = ()) -> list[inspect.Parameter]:
    """Return a ``typer.Option`` parameter for each of :data:`OPTIONS`, and ``--set``."""

    def option(*names: str, text: str, metavar: str | None = None) -> Any:
        return typer.Option(
            *names, help=text, metavar=metavar, rich_help_panel="Training", show_default=False
        )

    parameters = []
    for name, (kind, text, also) in OPTIONS.items():
        if name not in skip:
            names = [dashed(name), *([also] if also else [])]
            parameters.append(parameter(name, kind | None, option(*names, text=text)))
    further = option(
        "--set",
        text="Any further argument of transformers' TrainingArguments, repeatable; a value "
        "that is JSON is read as JSON.",
        metavar="<name=value>",
    )
    return [*parameters, parameter("set", list[str] | None, further)]


def _training_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the training arguments from the command line options and return them.

    Raises:
        typer.BadParameter: ``--set`` does not have the form ``name=value``, or repeats another
            option.
    """
    named = {name: given.pop(name) for name in OPTIONS if name in given}
    found = {name: value for name, value in named.items() if value is not None and value != []}
    try:
        further = parse_pairs(given.pop("set", None) or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    for name in further:
        if RENAMED.get(name, name) in found or given.get(name) is not None:
            raise typer.BadParameter(f"{name} is given twice.", param_hint="--set")
    return {**found, **further}


# --------------------
# The commands.

_ARGUMENTS = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)


def _output(text: str, *, required: bool = True) -> inspect.Parameter:
    option = typer.Option("--output", "--output-dir", "-o", help=text)
    if required:
        return parameter("output_dir", str, option, default=inspect.Parameter.empty)
    return parameter("output_dir", str | None, option)


_MODEL = parameter("model", Model, default=inspect.Parameter.empty)
_VERBOSE = parameter("verbose", Verbose, default=0)
_DEBUG = parameter("debug", Debug, default=False)
_MODEL_OPTIONS = option_parameters(ModelArguments, panel="Model", skip=["model"])
_RECIPE_OPTIONS = option_parameters(RecipeArguments, panel="Recipe")
_BUDGET = (*BUDGETS, "candidates")
"""Fields that stand for a recipe of oneshot."""
_OF_ENGINES = ("verify_with", "verify_python", "verify_timeout")
"""Fields of what is asked at the end of a run."""
_RECIPES = frozenset({"recipe", *BUDGETS})
"""Fields one of which says what to do; without any statistics may be kept."""
_STATISTICS = ("save_statistics", "statistics")


def _signed(
    *parameters: inspect.Parameter,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command its options."""

    def sign(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions have it, mypy not
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return sign


@_signed(
    _MODEL,
    _output("Folder to write; must be new.", required=False),
    *_RECIPE_OPTIONS,
    *option_parameters(DatasetArguments, panel="Calibration data and pipeline"),
    *_MODEL_OPTIONS,
    *option_parameters(RunArguments, panel="Run"),
    parameter("log_dir", str | None, typer.Option(help="Folder for a file of the log.")),
    _VERBOSE,
    _DEBUG,
)
def oneshot_command(*, debug: bool, verbose: int, **given: Any) -> None:
    """Compress MODEL by a recipe and write the result."""
    with report_errors(debug=debug, resumable=True):
        call = _with_recipe(call_arguments(given, *_ARGUMENTS))
        if call.pop("dry_run", False):
            _show_plan(call, verbose)
            return
        collects = not _RECIPES & call.keys() and "output_dir" not in call
        if "output_dir" not in call and not collects:
            raise typer.BadParameter("give a folder to write.", param_hint="--output")
        folder = call["save_statistics"] if collects else output_folder(given)
        _run("entrypoints.oneshot:oneshot", call, folder, verbose)


@_signed(
    _MODEL,
    _output("Folder to write; must be new."),
    *option_parameters(RecipeArguments, panel="Recipe", skip=_BUDGET),
    *option_parameters(DatasetArguments, panel="Training data", skip=[*OF_CALIBRATION, *OPTIONS]),
    *_training_parameters(),
    *_MODEL_OPTIONS,
    *option_parameters(
        RunArguments,
        panel="Run",
        skip=["dry_run", "keep_rejected", "max_memory", *_STATISTICS],
    ),
    _VERBOSE,
    _DEBUG,
)
def train_command(*, debug: bool, verbose: int, **given: Any) -> None:
    """Train MODEL while a recipe compresses it.

    The result is written when it is complete; the same command continues after an interruption.
    """
    with report_errors(debug=debug, resumable=True):
        training = _training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        _run("entrypoints.train:train", call, output_folder(given), verbose)


@_signed(
    _MODEL,
    _output("Folder for the stages' folders; new, or that of the same run."),
    *option_parameters(
        RecipeArguments, panel="Recipe", required=["recipe"], skip=["stage", *_BUDGET]
    ),
    *option_parameters(DatasetArguments, panel="Data and pipeline", skip=[*OPTIONS]),
    *_training_parameters(skip=["resume_from_checkpoint"]),
    *_MODEL_OPTIONS,
    *option_parameters(RunArguments, panel="Run", skip=["dry_run", *_STATISTICS]),
    parameter("log_dir", str | None, typer.Option(help="Folder for a file of the oneshot's log.")),
    _VERBOSE,
    _DEBUG,
)
def run_command(*, debug: bool, verbose: int, **given: Any) -> None:
    """Run all stages of a recipe on MODEL.

    Each as oneshot or train, each into a folder of its own; finished stages are skipped.
    """
    with report_errors(debug=debug, resumable=True):
        training = _training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        _run("entrypoints.stages:run_stages", call, given["output_dir"], verbose)


@_signed(
    _MODEL,
    parameter("serve", Serve),
    parameter("tp", Tp),
    parameter("gpu", Gpu),
    parameter("ranks", Ranks),
    parameter("nodes", Nodes),
    parameter("link_speed", LinkSpeed),
    parameter("node_link_speed", NodeLinkSpeed),
    parameter(
        "no_measure",
        bool,
        typer.Option("--no-measure", help="Leave out the time: measure no speed."),
        default=False,
    ),
    parameter("as_json", AsJson, default=False),
    _VERBOSE,
    _DEBUG,
    _output("Folder that would be written.", required=False),
    *_RECIPE_OPTIONS,
    *option_parameters(DatasetArguments, panel="Calibration data and pipeline"),
    *_MODEL_OPTIONS,
    *option_parameters(
        RunArguments,
        panel="Run",
        skip=["dry_run", "keep_rejected", "resume", "verify", *_OF_ENGINES],
    ),
)
def plan_command(
    *, debug: bool, verbose: int, as_json: bool, no_measure: bool, **given: Any
) -> None:
    """Say what compressing MODEL would match, need and take.

    No weight is read and nothing is written. The exit code is 1 if it would fail, or its output
    could not be served.
    """
    with report_errors(debug=debug):
        deployment = {name: given.pop(name) or None for name in ("serve", "tp", "gpu")}
        call = _with_recipe(call_arguments(given, *_ARGUMENTS))
        _show_plan({**call, **deployment}, verbose, as_json=as_json, measure=not no_measure)


def _show_plan(
    call: Mapping[str, Any], verbose: int, *, as_json: bool = False, measure: bool = True
) -> None:
    """Print the plan of a call; the exit code is 1 if it would not work."""
    # the plan reports everything
    plan = entrypoint("entrypoints.plan:plan", verbose, log_level="ERROR")
    found = plan(**call, measure=measure)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        resolve("llmcompressor.planning.result:print_plan")(found)
    if not found.ok:
        raise typer.Exit(1)


def _with_recipe(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call, which has a recipe or what stands for one.

    Raises:
        typer.BadParameter: it has neither.
    """
    if not {*_RECIPES, "save_statistics"} & call.keys():
        raise typer.BadParameter(
            "give a recipe, or --bits, --size or --max-kl.", param_hint="--recipe"
        )
    return call


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


def _run(path: str, call: Mapping[str, Any], folder: str, verbose: int) -> None:
    """Run an entrypoint that writes a checkpoint, and say where."""
    entrypoint(path, verbose)(**call)
    typer.echo(f"Written: {folder}")
