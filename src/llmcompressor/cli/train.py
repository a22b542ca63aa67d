# SPDX-License-Identifier: Apache-2.0
"""The commands ``train`` and ``run``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.parsing import RENAMED
from llmcompressor.cli.failures import report_errors
from llmcompressor.cli.options import call_arguments, option_parameters, output_folder, parse_pairs
from llmcompressor.runtime.registry import quick_imports

__all__ = [
    "OF_CALIBRATION",
    "OPTIONS",
    "run_command",
    "train_command",
    "training_arguments",
    "training_parameters",
]


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


def training_parameters() -> list[inspect.Parameter]:
    """Return a ``typer.Option`` parameter for each of :data:`OPTIONS`, and ``--set``."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                option.type | None,
                typer.Option(
                    *(f"--{name.replace('_', '-')}", *([option.also] if option.also else [])),
                    help=option.help,
                    rich_help_panel="Training",
                    show_default=False,
                ),
            ],
        )
        for name, option in OPTIONS.items()
    ]
    further = Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any further argument of transformers' TrainingArguments, repeatable; a value "
            "that is JSON is read as JSON.",
            metavar="<name=value>",
            rich_help_panel="Training",
            show_default=False,
        ),
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [*parameters, inspect.Parameter("set", keyword, default=None, annotation=further)]


def training_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the training arguments from the command line options and return them.

    Args:
        given: the options; returned ones are removed from it.

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
# The commands ``train`` and ``run``.

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


def _common_parameters(output_help: str) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
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
    before, after = _common_parameters("Folder to write; must be new.")
    not_here = [*OF_CALIBRATION, *OPTIONS]
    return inspect.Signature(
        [
            *before,
            *option_parameters(RecipeArguments, panel="Recipe"),
            *option_parameters(DatasetArguments, panel="Training data", skip=not_here),
            *training_parameters(),
            *option_parameters(ModelArguments, panel="Model", skip=["model"]),
            *option_parameters(RunArguments, panel="Run", skip=["dry_run", "max_memory"]),
            *after,
        ]
    )


def _run_signature() -> inspect.Signature:
    before, after = _common_parameters(
        "Folder for the stages' folders; new, or that of the same run."
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    log_dir = Annotated[str | None, typer.Option(help="Folder for a file of the oneshot's log.")]
    skip = ["resume_from_checkpoint"]
    return inspect.Signature(
        [
            *before,
            *option_parameters(
                RecipeArguments, panel="Recipe", required=["recipe"], skip=["stage"]
            ),
            *option_parameters(DatasetArguments, panel="Data and pipeline", skip=[*OPTIONS]),
            *(one for one in training_parameters() if one.name not in skip),
            *option_parameters(ModelArguments, panel="Model", skip=["model"]),
            *option_parameters(RunArguments, panel="Run", skip=["dry_run"]),
            inspect.Parameter("log_dir", keyword, default=None, annotation=log_dir),
            *after,
        ]
    )


def train_command(*, debug: bool, **given: Any) -> None:
    """Train MODEL while a recipe compresses it.

    The result is written when it is complete; the same command continues after an interruption.
    """
    with report_errors(debug=debug, resumable=True):
        training = training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        with quick_imports():
            from llmcompressor.entrypoints.train import train  # noqa: PLC0415  # loads torch

        _run_without_bars(train, call)
        typer.echo(f"Written: {output_folder(given)}")


def run_command(*, debug: bool, **given: Any) -> None:
    """Run all stages of a recipe on MODEL.

    Each as oneshot or train, each into a folder of its own; finished stages are skipped.
    """
    with report_errors(debug=debug, resumable=True):
        training = training_arguments(given)
        call = {**_with_roles(call_arguments(given, *_ARGUMENTS)), **training}
        with quick_imports():
            from llmcompressor.entrypoints.stages import run_stages  # noqa: PLC0415  # loads torch

        _run_without_bars(run_stages, call)
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


def _run_without_bars(entrypoint: Callable[..., Any], call: dict[str, Any]) -> None:
    from llmcompressor.logger import configure_logger  # noqa: PLC0415
    from llmcompressor.runtime.progress import hide_tqdm_bars  # noqa: PLC0415

    configure_logger()
    with hide_tqdm_bars():
        entrypoint(**call)


def _sign(command: Callable[..., None], signature: inspect.Signature) -> None:
    command.__signature__ = signature  # type: ignore[attr-defined]  # functions have it, mypy not
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }


_sign(train_command, _train_signature())
_sign(run_command, _run_signature())
