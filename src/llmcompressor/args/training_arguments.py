# SPDX-License-Identifier: Apache-2.0
"""transformers' training arguments with the three that ``train`` adds.

Import it as ``llmcompressor.args.TrainingArguments``; this module loads transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
import transformers
from transformers.optimization import get_scheduler
from transformers.training_args import ParallelMode

from llmcompressor.args.checks import Check, integer, invalid_value, number, optional
from llmcompressor.errors import ArgumentError, did_you_mean

# --------------------
# Trial creation of a training's optimizer and schedule, before the model is loaded.
#
# transformers creates both when the training begins, and would report a missing package or an
# unsupported argument only then.

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


# --------------------
# transformers' training arguments with the three that ``train`` adds.


def _positive(name: str, value: Any) -> Any:
    """Check for a number above zero, given as a number or a string."""
    found = _number(name, value)
    if not 0 < float(found) < inf:
        raise invalid_value(name, value, "a number above 0")
    return found


def _number(name: str, value: Any) -> Any:
    """Check for a number of at least zero, also as a string such as YAML's ``"1e-4"``."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise invalid_value(name, value, "a number") from None
    number(0, inf)(name, value)
    return value


def _finite(name: str, value: Any) -> Any:
    """Check for a finite number of at least zero."""
    if float(found := _number(name, value)) == inf:
        raise invalid_value(name, value, "a finite number")
    return found


def _max_steps(name: str, value: Any) -> Any:
    """Check for a number of steps, or -1 for the steps of all epochs."""
    return value if value == -1 and not isinstance(value, bool) else integer(1)(name, value)


_CHECKS: Mapping[str, Check] = {
    "gradient_accumulation_steps": integer(1),
    "label_smoothing_factor": number(0, 1),
    "learning_rate": _finite,
    "logging_steps": _positive,
    "max_grad_norm": optional(_number),
    "max_steps": _max_steps,
    "neftune_noise_alpha": optional(_finite),
    "num_train_epochs": _positive,
    "per_device_eval_batch_size": integer(1),
    "per_device_train_batch_size": integer(1),
    "save_steps": _positive,
    "save_total_limit": optional(integer(1)),
    "seed": integer(0, 2**32 - 1),
    "warmup_steps": _finite,
    "weight_decay": _finite,
}
"""What transformers itself would find out late, or not at all."""

_FOUND_OTHERWISE = ("azure_ml", "flyte", "kubeflow")
"""Of these transformers does not list whether they are installed, or not always."""


def _check_kind(name: str, value: Any, default: Any, hint: Any) -> None:
    """Refuse a string for a number, and a non-boolean value for a boolean field.

    transformers takes any string for true, ``"false"`` too.
    """
    is_switch = isinstance(default, bool) or {*get_args(hint)} == {bool, NoneType}
    if is_switch and not (isinstance(value, bool) or value is None):
        raise invalid_value(name, value, "True or False")
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if is_number and isinstance(value, str):
        raise invalid_value(name, value, "a number")


def _check_reports(names: Any) -> None:
    """Refuse unknown or missing trackers, which the trainer would report after loading.

    Raises:
        ArgumentError: a tracker is unknown or not installed.
    """
    if not names:
        return
    from transformers.integrations import integration_utils  # noqa: PLC0415  # seldom wanted

    known = integration_utils.INTEGRATION_TO_CALLBACK
    find: Callable[[], list[str]] = integration_utils.get_available_reporting_integrations
    there = find()
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ArgumentError(
                f"There is nothing called {name!r} to report to.", did_you_mean(str(name), known)
            )
        if name not in there and name not in _FOUND_OTHERWISE:
            package = name.replace("_", "-")
            raise ArgumentError(
                f"report_to (--report-to) names {name}, which is not installed.",
                f"Run: pip install {package}; or leave it out.",
            )


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """All arguments of transformers' trainer, and the settings for running a recipe's stages.

    Later assignments are not checked, as the trainer writes to the fields.
    """

    output_dir: str | None = field(
        default="./output", metadata={"help": "Where the trained model is saved."}
    )
    do_oneshot: bool = field(
        default=False, metadata={"help": "Also run the one-shot stages of the recipe."}
    )
    run_stages: bool = field(
        default=False, metadata={"help": "Run the recipe's stages one after another."}
    )

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            setattr(self, name, check(name, getattr(self, name)))
        hints = get_type_hints(type(self))
        for each in fields(self):
            if each.name not in _CHECKS:
                value = getattr(self, each.name)
                _check_kind(each.name, value, each.default, hints[each.name])
        try:
            super().__post_init__()  # type: ignore[no-untyped-call]  # transformers'
        except ArgumentError:
            raise
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"The training arguments cannot be used: {' '.join(str(error).split())}",
                "They are those of transformers' TrainingArguments.",
            ) from error
        _check_reports(self.report_to)
        try_optimizer(self)

    @property
    def device(self) -> torch.device:
        """The device of this process.

        With several processes on CPUs transformers returns ``cpu:0``, and torch cannot load the
        optimizer of a checkpoint onto a device of that name.
        """
        found: torch.device = super().device
        return torch.device("cpu") if found.type == "cpu" else found

    @property
    def place_model_on_device(self) -> bool:
        """Always False: the model's device is decided when it is loaded."""
        return False
