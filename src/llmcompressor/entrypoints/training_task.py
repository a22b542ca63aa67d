# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``train``, parsed and checked before any work."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import TrainingArguments
from llmcompressor.checkpoint.source import inspect_source
from llmcompressor.checkpoint.workspace import fingerprint_of_progress
from llmcompressor.entrypoints.data_prints import data_print, values_print
from llmcompressor.entrypoints.fingerprint import source_print
from llmcompressor.entrypoints.model_prints import model_print, was_left_by
from llmcompressor.entrypoints.task import Task
from llmcompressor.entrypoints.training_data import TrainingData
from llmcompressor.entrypoints.training_folder import checkpoint_to_resume
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.metrics import LoggerManager
from llmcompressor.recipe import Recipe

__all__ = ["NOT_OF_TRAINING", "Training"]

_OF_CALIBRATION = (
    "activation_budget",
    "min_tokens_per_module",
    "moe_calibrate_all_experts",
    "num_calibration_samples",
    "pipeline",
    "propagate_error",
    "sequential_granularity",
    "sequential_targets",
    "shuffle_calibration_samples",
    "starved_experts",
)
"""Arguments of data that say how a model is calibrated."""

NOT_OF_TRAINING = (*_OF_CALIBRATION, "batch_size", "max_memory")
"""Arguments that a training has no use for."""

_FOR_CHECKPOINTS = (
    "load_best_model_at_end",
    "save_only_model",
    "save_steps",
    "save_strategy",
    "save_total_limit",
)
"""Who gives one of these wants the trainer's checkpoints for themselves."""

_DECIDE = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "fp16",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "optim",
    "optim_args",
    "per_device_train_batch_size",
    "seed",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
    "world_size",
)
"""Training arguments that decide what is learned, and so make a training the same training."""

_LIBRARIES = ("llmcompressor", "torch", "transformers")


class Training(Task):
    """Arguments of a training, parsed and checked.

    Attributes:
        args: the training arguments of transformers.
        data: the training and evaluation data.
        loggers: for the session.
        keeps_checkpoints: whether the trainer's checkpoints are kept in the output.
        own_bar: whether to show this package's progress bar.
    """

    def __init__(
        self, output_dir: str | Path | None = "./output", loggers: Any = None, **arguments: Any
    ) -> None:
        if str(arguments.get("device") or "").startswith("cpu"):
            arguments.setdefault("use_cpu", True)
        if not torch.accelerator.is_available():  # torch would warn about pinning
            arguments.setdefault("dataloader_pin_memory", False)
        super().__init__("train", output_dir, (TrainingArguments,), arguments, ("loggers",))
        self.args: TrainingArguments = self.further_args[0]
        self.loggers = LoggerManager.of(loggers)
        self.keeps_checkpoints = any(name in arguments for name in _FOR_CHECKPOINTS)
        self.own_bar = arguments.get("disable_tqdm") is None
        self.collator_given = "data_collator" in arguments
        self._check_given(arguments)
        self.resume_from = self._read_resume()
        self.data = TrainingData(self.dataset_args, evaluates=self.args.do_eval)
        self.data.check_steps(self.args.max_steps)

    def _read_recipe(self) -> Recipe:
        recipe = super()._read_recipe()
        if not recipe.modifiers:
            logger.warning("The recipe is empty: the model is trained, and not compressed.")
        return recipe

    def _check_given(self, given: Mapping[str, Any]) -> None:
        if "batch_size" in given:
            raise ArgumentError(
                "The argument 'batch_size' is that of calibration, and train does not calibrate.",
                "Give per_device_train_batch_size (--per-device-train-batch-size).",
            )
        if self.run_args.dry_run:
            raise ArgumentError(
                "A dry run is not there for train: plan knows runs of oneshot only.",
                "Leave dry_run (--dry-run) out.",
            )
        if self.args.push_to_hub:
            raise ArgumentError(
                "train uploads nothing: what the trainer would push are its own checkpoints.",
                "Leave push_to_hub out, and call model.push_to_hub(...) on what train returns.",
            )
        without_effect = [name for name in (*_OF_CALIBRATION, "max_memory") if name in given]
        if self.model_args.distill_teacher is not None and not self.learns_from_teacher:
            without_effect.append("distill_teacher (no modifier of the recipe uses a teacher)")
        if without_effect:
            logger.warning(f"Without effect in train: {', '.join(without_effect)}.")

    @property
    def learns_from_teacher(self) -> bool:
        """True if a modifier of the recipe uses the teacher."""
        return any(each.uses_teacher for each in self.recipe.modifiers)

    def _read_resume(self) -> Path | None:
        """Return the checkpoint that the user named; ``True`` means ``resume="must"``."""
        given: Any = self.args.resume_from_checkpoint
        if given in (None, False, "false", "False"):
            return None
        if given in (True, "true", "True"):
            if self.output_dir is None:
                raise ArgumentError(
                    "The argument 'resume_from_checkpoint' is True, and there is no output_dir "
                    "that a training could have been broken off in.",
                    "Name the checkpoint's folder.",
                )
            self.run_args.resume = "must"
            return None
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ArgumentError(
                f"The argument 'resume_from_checkpoint' cannot be {given!r}.",
                "Give the folder of a checkpoint, or True for the last one.",
            )
        return checkpoint_to_resume(os.fspath(given), self.output_dir)

    def fingerprint(self, model: Module, teacher: Module | None, samples: Any) -> dict[str, Any]:
        """Return the fingerprint of the training, so that only the same training is resumed.

        If models are sharded over processes, all of these have to call it.

        Args:
            model: the model before the training. If it is an object that an interrupted training
                of this process has changed, it counts with its original fingerprint, as its
                weights are replaced by those of the checkpoint.
            teacher: the teacher model.
            samples: the training samples.
        """
        args: Mapping[str, Any] = self.args.to_dict()  # type: ignore[no-untyped-call]  # transformers'
        training = {name: args.get(name) for name in _DECIDE if name != "world_size"}
        first = next(model.parameters())
        given = self.model_args.model
        of_folder = isinstance(given, str | Path) and Path(given).expanduser().is_dir()
        return {
            "task": "train",
            "place": self.place,
            "source": source_print(inspect_source(given)) if of_folder else None,
            "model": self._print_when_begun(model_print(model)),
            "recipe": self.recipe.yaml() if self.recipe.modifiers else None,
            "teacher": None
            if teacher is None
            else {"place": _place_of(self.model_args.distill_teacher), **model_print(teacher)},
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": first.device.type,
            "machine": platform.machine(),
            "versions": {name: version(name) for name in _LIBRARIES},
            "data": self._data(samples),
            "training": {
                name: value if isinstance(value, int | float | None) else str(value)
                for name, value in {**training, "world_size": self.args.world_size}.items()
            },
        }

    def _print_when_begun(self, present: dict[str, str]) -> dict[str, str]:
        if self.output_dir is None or self.run_args.resume == "never":
            return present
        progress = fingerprint_of_progress(self.output_dir)
        begun: dict[str, str] = {} if progress is None else progress.get("model", {})
        return begun if was_left_by(self.model_args.model, begun) else present

    def _data(self, samples: Any) -> Any:
        """Fingerprint of all samples; a stream is not read."""
        if hasattr(samples, "__len__"):
            return values_print(samples)
        return data_print(self.dataset_args.dataset)


def _place_of(given: Any) -> str | None:
    return str(given) if isinstance(given, str | Path) else None
