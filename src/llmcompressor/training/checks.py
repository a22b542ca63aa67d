# SPDX-License-Identifier: Apache-2.0
"""Checks before a training with a recipe begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.events import has_reached
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import ArgumentError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.pipelines.moe_selection import ignore_suggestion, targeted_moes
from llmcompressor.recipe.stages import check_codes_stay
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import has_peft_adapters

if TYPE_CHECKING:
    from transformers import Trainer

# Settings of ZeRO stage 3, and the greatest value that changes nothing.
_NOT_THE_WEIGHT = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": 0,
    "zero_quantized_nontrainable_weights": 0,
    "mics_shard_size": 0,
}


_PER_TOKEN = ("labels", "input_ids")


def check_can_train(modifiers: Iterable[Modifier]) -> None:
    """Refuse modifiers that cannot train or have an impossible schedule.

    Raises:
        RecipeError: there are such modifiers.
    """
    modifiers = list(modifiers)
    check_codes_stay(modifiers)
    useless = [type(each).__name__ for each in modifiers if "train" not in each.rules.run_types]
    if useless:
        raise RecipeError(
            f"{', '.join(dict.fromkeys(useless))} cannot be applied while training.",
            "Apply it with oneshot, or give it a stage with run_type: oneshot.",
        )
    for each in modifiers:
        if each.update is not None and each.update <= 0:
            raise RecipeError(
                f"update of {type(each).__name__} is {each.update:g}: the distance between two "
                "updates is above 0.",
                "Leave it out to update at every step.",
            )
        if each.rules.needs_time and each.end is not None and each.end <= (each.start or 0):
            raise RecipeError(
                f"{type(each).__name__} ends where it starts, at {each.end:g}: no time to act.",
                "Give a later end, or leave it out for the end of the training.",
            )


def check_experts(model: Module, modifiers: Sequence[Modifier]) -> None:
    """Refuse recipes that target experts: in a training they are stacked, not Linears.

    Raises:
        TargetError: the targets match experts.
    """
    mixtures = targeted_moes(model, modifiers)
    if mixtures:
        names = join_names(one.name for one in mixtures)
        raise TargetError(
            f"The experts of {names} lie in stacks while the model is trained. The recipe's "
            "targets mean them, and they would stay as they are.",
            f"Ignore them: {ignore_suggestion(mixtures)}; oneshot compresses experts.",
        )


def check_trainer(trainer: Trainer, modifiers: Sequence[Modifier]) -> None:
    """Refuse trainer settings that a recipe's modifiers do not support.

    Args:
        trainer: the trainer.
        modifiers: the recipe's modifiers.

    Raises:
        ArgumentError: an argument is not supported.
    """
    args = trainer.args
    _check_sharding(trainer, modifiers)
    _check_adapters(trainer.model)
    _check_labels(trainer)
    if args.auto_find_batch_size:
        raise ArgumentError(
            "auto_find_batch_size starts the training over, and a recipe's modifiers cannot.",
            "Set per_device_train_batch_size.",
        )
    if args.n_gpu > 1:
        raise ArgumentError(
            f"One process would train on {args.n_gpu} devices by torch.nn.DataParallel, whose "
            "copies of the model modifiers do not see.",
            "Start one process per device with torchrun, or show one device with "
            "CUDA_VISIBLE_DEVICES=0.",
        )


def _check_sharding(trainer: Trainer, modifiers: Sequence[Modifier]) -> None:
    """Refuse flattened parameter shards, and warn of an ignored distributed configuration."""
    for name, asked, on in (
        ("deepspeed", trainer.args.deepspeed, trainer.is_deepspeed_enabled),
        ("fsdp", trainer.args.fsdp, trainer.is_fsdp_enabled),
    ):
        if asked and not on:
            logger.warning(
                f"{name} has no effect: accelerate does without it where it computes on the CPU."
            )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1:
        raise ArgumentError(
            "FSDP version 1 flattens the parameters before there is an optimizer.",
            'Use version 2: fsdp_config={"version": 2, ...}.',
        )
    if trainer.is_deepspeed_enabled:
        _check_zero3_settings(trainer, modifiers)


def check_trainable(model: Module) -> None:
    """Refuse a model without trainable parameters, once the modifiers have added theirs.

    Raises:
        ArgumentError: no parameter takes a gradient.
    """
    if not any(one.requires_grad for one in model.parameters()):
        raise ArgumentError(
            "No parameter of the model takes a gradient (requires_grad): nothing can be trained.",
            "Unfreeze what is to be trained (model.requires_grad_(True)), or use oneshot.",
        )


def _check_labels(trainer: Any) -> None:
    """Refuse to train a sequence classifier on one label per token."""
    if getattr(trainer.model, "loss_type", None) != "ForSequenceClassification":
        return
    data = trainer.train_dataset
    row: Any = {}
    if hasattr(data, "__len__"):  # the rows of a stream can be read only once
        with suppress(LookupError, TypeError):
            row = data[0]
    labels, tokens = (row.get(name) if isinstance(row, Mapping) else None for name in _PER_TOKEN)
    if isinstance(labels, Sequence) and isinstance(tokens, Sequence) and len(labels) == len(tokens):
        raise ArgumentError(
            f"{type(trainer.model).__name__} takes one label for each text, and the labels of the "
            "data are its tokens.",
            "Give rows with one label each to a Trainer with SessionManagerMixIn; train makes a "
            "label of each token, for language models.",
        )


def _check_adapters(model: Any) -> None:
    """Refuse adapters loaded by transformers that it would be unable to save.

    PEFT's own wrapper saves its adapters itself.
    """
    if not has_peft_adapters(model):
        return
    from transformers.integrations import peft as integration  # noqa: PLC0415  # few have adapters

    peft: Any = integration
    try:
        peft.check_peft_version(peft.MIN_PEFT_VERSION)
    except ValueError as error:
        raise ArgumentError(
            f"The adapters of the model could be trained and not saved. transformers: {error}.",
            "Install that, or have PEFT hold the adapters: get_peft_model(...), "
            "PeftModel.from_pretrained(...).",
        ) from error


def _check_zero3_settings(trainer: Trainer, modifiers: Sequence[Modifier]) -> None:
    """Refuse settings of ZeRO stage 3 in which a process's shard is not a part of the weight."""
    changing = [type(one).__name__ for one in modifiers if one.rules.changes_weights]
    state = trainer.accelerator.state
    if not changing or zero_stage(state) != 3:
        return
    zero = state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    settings = [name for name, least in _NOT_THE_WEIGHT.items() if _number(zero.get(name)) > least]
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        settings.append("offload_param to nvme")
    if settings:
        raise ArgumentError(
            f"DeepSpeed's {settings[0]} keeps or sends weights in another form, and "
            f"{', '.join(dict.fromkeys(changing))} works on the weights.",
            f"Leave {settings[0]} out of DeepSpeed's configuration.",
        )


def zero_stage(holder: Any) -> int:
    """Return the stage of DeepSpeed's ZeRO; 0 without it.

    Args:
        holder: an object with the attribute ``deepspeed_plugin``.
    """
    return getattr(getattr(holder, "deepspeed_plugin", None), "zero_stage", 0)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def warn_if_epoch_changed(saved: Mapping[str, Any], steps_per_epoch: int | None) -> None:
    """Warn if the length of an epoch has changed since the checkpoint."""
    if saved["steps_per_epoch"] != steps_per_epoch:
        logger.warning(
            f"An epoch had {saved['steps_per_epoch']} steps when the checkpoint was written and "
            f"has {steps_per_epoch} now: the data, the batch size or the number of processes "
            "changed. Schedules in epochs go on with the new length."
        )


def warn_of_schedules(
    modifiers: Iterable[Modifier], max_steps: int, steps_per_epoch: int | None
) -> None:
    """Warn of modifiers that do not start, act or end within the training."""
    length = max_steps / (steps_per_epoch or 1)
    unit = "steps" if steps_per_epoch is None else "epochs"
    for modifier in modifiers:
        name = type(modifier).__name__
        if modifier.start is not None and has_reached(modifier.start, length):
            logger.warning(
                f"{name} never starts: its start is {modifier.start:g} and the training has "
                f"{length:g} {unit}."
            )
            continue
        begins = _first_step(modifier.start or 0, steps_per_epoch or 1)
        observing = modifier.traits.observing_steps
        acts = begins + observing
        if observing and acts >= max_steps:
            logger.warning(
                f"{name} only observes, to step {acts}, and the training ends at step {max_steps}: "
                "nothing is trained with what it computes. Lower num_calibration_steps."
            )
        elif modifier.end is not None and not has_reached(length, modifier.end):
            logger.warning(
                f"{name} does not come to its end at {modifier.end:g}: the training has "
                f"{length:g} {unit}."
            )


def _first_step(start: float, steps_per_unit: int) -> int:
    """Return the first optimizer step at which a schedule has reached ``start``.

    >>> _first_step(0.1 * 3, 10), _first_step(0.31, 10)
    (3, 4)
    """
    step = math.ceil(start * steps_per_unit)
    return step - 1 if step and has_reached((step - 1) / steps_per_unit, start) else step
