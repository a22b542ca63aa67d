# SPDX-License-Identifier: Apache-2.0
"""Trial creation of a training's optimizer and schedule, before the model is loaded.

transformers creates both when the training begins, and would report a missing package or an
unsupported argument only then.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers.optimization import get_scheduler
from transformers.training_args import ParallelMode

from llmcompressor.errors import ArgumentError

__all__ = ["try_optimizer"]

_WANT_THE_MODEL = ("apollo", "galore", "lomo")
"""Of these nothing but whether they are installed can be told without the model."""

_STEPS = 1000
"""As long a training, where its length is not known."""


def try_optimizer(args: transformers.TrainingArguments) -> None:
    """Refuse an optimizer or a learning rate schedule that cannot be created.

    Raises:
        ArgumentError: one of them cannot be created.
    """
    if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise ArgumentError(
            "fsdp (--fsdp) shards the model over several processes, and this is the only one.",
            "Start them with torchrun or accelerate launch, or leave fsdp out.",
        )
    parameter = torch.nn.Parameter(torch.zeros(1))
    try:
        _make_optimizer(args, parameter)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The optimizer {_name(args.optim)} (optim) cannot be used: {_line(error)}",
            "Mend its arguments, or choose another; the default is adamw_torch_fused.",
        ) from error
    try:
        _make_schedule(args, parameter)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"The learning rates {_name(args.lr_scheduler_type)} (lr_scheduler_type, "
            f"lr_scheduler_kwargs) cannot be used: {_line(error)}",
            "lr_scheduler_kwargs (--set 'lr_scheduler_kwargs={...}') are the arguments of "
            "transformers' schedule of that name.",
        ) from error


def _make_optimizer(args: transformers.TrainingArguments, parameter: torch.nn.Parameter) -> None:
    try:
        make, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    except ValueError:
        if _name(args.optim).startswith(_WANT_THE_MODEL):
            return
        raise
    if make.__module__.startswith(("torch.", "transformers.")):  # others may need an accelerator
        make([parameter], **options)


def _make_schedule(args: transformers.TrainingArguments, parameter: torch.nn.Parameter) -> None:
    steps = args.max_steps if args.max_steps > 0 else _STEPS
    optimizer = torch.optim.SGD([parameter], lr=float(args.learning_rate))
    options: Any = args.lr_scheduler_kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=options,
        )


def _name(given: Any) -> str:
    return str(getattr(given, "value", given))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith(".") else f"{text}."
