# SPDX-License-Identifier: Apache-2.0
"""Options for transformers' training arguments: the common ones, and ``--set`` for all.

The dataclass itself is not inspected: importing it loads torch, and ``--help`` must not wait for
it. ``--set NAME=VALUE`` sets any argument; the entrypoint checks the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer

from llmcompressor.args.renamed import RENAMED
from llmcompressor.cli.options import pairs

__all__ = ["OPTIONS", "training_arguments", "training_parameters"]


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
        further = pairs(given.pop("set", None) or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    for name in further:
        if RENAMED.get(name, name) in found or given.get(name) is not None:
            raise typer.BadParameter(f"{name} is given twice.", param_hint="--set")
    return {**found, **further}
