# SPDX-License-Identifier: Apache-2.0
"""The driver of a session through one training run of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.core.events import EventType
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import Hardware
from llmcompressor.errors import CheckpointError, InputError, LifecycleError
from llmcompressor.logger import logger
from llmcompressor.modeling.patches import reset_compiled
from llmcompressor.modeling.sharded import full_shapes_reported, has_partitioned_parameters
from llmcompressor.recipe import Recipe
from llmcompressor.session.resuming import check_same_recipe
from llmcompressor.session.session import CompressionSession
from llmcompressor.training.checkpoints import SESSION_FILE, DataPosition, read_session, step_of
from llmcompressor.training.checks import (
    check_can_train,
    check_experts,
    check_trainable,
    warn_if_epoch_changed,
    warn_of_schedules,
)
from llmcompressor.training.loss import RunLoss, StepLoss, micro_batch_mean, scale_to_share

_OF_A_TRAINING = ("optimizer", "scheduler", "gradient_clipping")
"""Settings of DeepSpeed that a model without a training of its own has no use for."""


class SessionDriver:
    """Drives a session through one call of a trainer's ``train``.

    Args:
        session: the active session.
        checkpoint: the checkpoint to resume from.
        recipe: the recipe to apply; ``None`` for that of the session.
        strategy: the strategy of distributing the model over processes.
        **inputs: further arguments of the session's ``initialize``.

    Raises:
        CheckpointError: the checkpoint has no session, and the recipe needs one.
        RecipeError: the checkpoint has another recipe, or a modifier cannot train.
    """

    def __init__(
        self,
        session: CompressionSession,
        checkpoint: Path | None,
        *,
        recipe: Recipe | None,
        strategy: str,
        **inputs: Any,
    ) -> None:
        self.session = session
        self.begun = False
        self.awaits_loss = False
        """A training micro-batch has begun and its loss is not known yet."""
        self.place = DataPosition()
        self.run_loss = RunLoss()
        self._recipe, self._strategy, self._inputs = recipe, strategy, inputs
        self._warned_of_loss = False
        self._hooks: frozenset[int] = frozenset()
        self._step, self._first_step, self._step_done = StepLoss(), True, True
        self._engine: Any = None
        self._steps_per_epoch: int | None = None
        self._max_steps: int | None = None
        check_can_train(self._modifiers())
        self._saved = None if checkpoint is None else self._read(checkpoint)
        if self._saved is not None:
            self.place = DataPosition.read(self._saved)

    # ---- beginning and end

    def measure(self, *, steps_per_epoch: int | None, max_steps: int) -> None:
        """Set the length of the run, before :meth:`begin`.

        Args:
            steps_per_epoch: optimizer steps in an epoch; ``None`` for a stream.
            max_steps: optimizer steps in the whole run.
        """
        self._steps_per_epoch, self._max_steps = steps_per_epoch, max_steps

    def begin(self, model: Module, optimizer: Any) -> None:
        """Initialize the session: the modifiers match their targets and add their parameters."""
        session, inputs = self.session, self._inputs
        check_experts(model, self._modifiers())
        if inputs["loggers"] is None:
            inputs["loggers"] = session.state.loggers
        if self._recipe is not None or session.lifecycle.finalized:
            session.reset()  # the state of an earlier run
        self.begun = True
        if self._saved is not None:
            warn_if_epoch_changed(self._saved, self._steps_per_epoch)
        with full_shapes_reported(model):
            going_on = session.initialize(
                recipe=self._recipe,
                model=model,
                optimizer=optimizer,
                copy_data=False,
                steps_per_epoch=self._steps_per_epoch,
                distributed_strategy=self._strategy,
                resumes=self._saved is not None,
                **inputs,
            )
        is_other = optimizer is not None and going_on.optimizer is not optimizer
        if going_on.model is not model or is_other:
            what = "optimizer" if going_on.model is model else "model"
            raise LifecycleError(
                f"A modifier has replaced state.{what}, and the trainer goes on with its own.",
                f"Change the {what} in place, or give train the other one.",
            )
        check_trainable(model)
        if self._max_steps is not None:
            modifiers = session.lifecycle.recipe.modifiers
            warn_of_schedules(modifiers, self._max_steps, self._steps_per_epoch)

    def ready(self, wrapped: Module, optimizer: Any, global_step: int) -> None:
        """Register the wrapped model and optimizer and resume, before the first batch.

        Args:
            wrapped: the model in its distributed wrapper.
            optimizer: the optimizer that steps.
            global_step: optimizer steps taken before the resumed checkpoint.
        """
        session = self.session
        session.state.optimizer = optimizer
        session.state.hardware = Hardware.detect(wrapped)
        session.state.hardware.distributed_strategy = self._strategy
        if self._strategy in ("deepspeed", "zero3"):
            self._join_engine(wrapped)
        if self._saved is not None:
            session.lifecycle.load_state_dict(self._saved)
            self._saved = None
        elif global_step:
            session.state.schedule.start = global_step / (self._steps_per_epoch or 1)
            session.lifecycle.global_step = global_step

    def restore_checkpoint(self, checkpoint: Path) -> None:
        """Restore the modifiers to a checkpoint whose weights were loaded into the model again.

        No batch may follow: hooks that ``on_initialize`` registered are removed.
        """
        saved = read_session(checkpoint)
        modifiers = self.session.lifecycle.recipe.modifiers
        if saved is None or not modifiers:
            return
        at, now = saved["global_step"], self.session.lifecycle.global_step
        if at != now:
            logger.warning(
                f"The best checkpoint is that of step {at}: what the recipe did from there to step "
                f"{now} is not part of the model."
            )
        for modifier in modifiers:
            modifier.remove_hooks()
        with full_shapes_reported(self.session.state.model):
            self.session.initialize(resumes=True)
        self.session.lifecycle.load_state_dict(saved)

    def finish(self) -> None:
        """Finalize the session, once."""
        self._leave_engine()
        lifecycle = self.session.lifecycle
        if self.begun and lifecycle.initialized_ and not lifecycle.finalized:
            self.session.finalize()

    def abandon(self) -> None:
        """Reset the session after an error, removing all hooks and scales."""
        self._leave_engine()
        if self.begun:
            self.session.abort()

    # ---- events

    def batch_start(self, inputs: Any) -> None:
        """Send the start of a micro-batch."""
        if self._step_done:
            self._step, self._step_done = StepLoss(), False
        self.session.event(EventType.BATCH_START, batch_data=inputs)
        self._recompile_if_hooks_changed()
        self.awaits_loss = True

    def batch_on_device(self, inputs: Any) -> None:
        """Store the micro-batch on the model's device, before its forward pass."""
        # A copy: trainers take the labels out of theirs.
        self.session.state.batch_data = dict(inputs) if isinstance(inputs, Mapping) else inputs

    def loss(
        self,
        loss: Tensor,
        share: Tensor | None,
        token_weight: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Pass the loss of a micro-batch to the modifiers.

        Args:
            loss: the trainer's loss.
            share: the result of ``micro_batch_share``.
            token_weight: the result of the function of that name; sent with the event.
            targets: the result of ``targets_of``.

        Returns:
            The loss to differentiate, on the same scale; ``loss`` itself if no modifier replaced
            it.
        """
        self.awaits_loss = False
        # The loss of a model on several devices may be on another device than the batch.
        share, token_weight, targets = (
            None if one is None else one.to(loss.device) for one in (share, token_weight, targets)
        )
        shown = micro_batch_mean(loss, share, targets)
        given = {} if token_weight is None else {"token_weight": token_weight}
        final: Tensor = self.session.event(EventType.LOSS_CALCULATED, loss=shown, **given).loss
        self._step.add(shown, final, share, targets)
        return loss if final is shown else scale_to_share(final, share)

    def backward_done(self) -> None:
        """Free the graph of the loss.

        Raises:
            InputError: modifiers never saw the loss, and there is a teacher to learn from.
        """
        if self.awaits_loss:
            self._report_hidden_loss()
        self.awaits_loss = False
        if isinstance(self.session.state.loss, Tensor):
            self.session.state.loss = self.session.state.loss.detach()

    def _report_hidden_loss(self) -> None:
        what = (
            "The trainer's own compute_loss hides that of SessionManagerMixIn: no modifier sees "
            "the loss"
        )
        remedy = (
            "Define it in a class that comes after the mixin (class Mine(SessionManagerMixIn, "
            "MyTrainer)), or have it call super().compute_loss."
        )
        if self.session.state.teacher_model is not None:
            raise InputError(f"{what}, so that nothing would be learned from the teacher.", remedy)
        if not self._warned_of_loss:
            logger.warning(f"{what}. {remedy}")
            self._warned_of_loss = True

    def send(self, event_type: EventType) -> None:
        """Send an event without data."""
        if self.begun:
            self.session.event(event_type)
            self._recompile_if_hooks_changed()

    def before_step(self) -> None:
        """Send that the optimizer is about to step, unless an engine has sent it."""
        if self._engine is None:
            self.send(EventType.OPTIM_PRE_STEP)

    def step_done(self) -> None:
        """Send that the optimizer has stepped; its learning rate is still that of the step."""
        self.send(EventType.OPTIM_POST_STEP)
        self._step_done = True
        self.run_loss.add(self._step)
        if self._first_step and self._step.has_no_loss:
            logger.warning(
                "No token of the first step has a label (all are -100): there is no loss, and "
                "nothing is learned from it."
            )
        self._first_step = False
        if self.begun and self.session.state.loggers is not None:
            self.session.log(EventType.OPTIM_POST_STEP, self._step.figures)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last step besides its loss."""
        step = self._step.figures()
        step.pop("loss", None)
        return {**step, **self.session.figures()}

    # ---- inner workings

    def _join_engine(self, engine: Any) -> None:
        """Send the event before a step of DeepSpeed's engine, which steps by itself."""
        step = engine.step

        def told(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self.send(EventType.OPTIM_PRE_STEP)
            return step(*args, **kwargs)

        self._engine, engine.step = engine, told
        # Without ZeRO (stage 0) nothing links the 16-bit weights to their float32 masters.
        lows, highs = (
            getattr(engine.optimizer, name, ()) for name in ("fp16_groups", "fp32_groups")
        )
        for low, high in zip(lows, highs, strict=False):
            for parameter, copy in zip(low, high, strict=True):
                parameter.fp32_copy = copy
        teacher = self.session.state.teacher_model
        is_sharded = teacher is not None and has_partitioned_parameters(teacher)
        if is_sharded and not hasattr(teacher, "ds_inflight_param_registry"):
            import deepspeed  # noqa: PLC0415  # an optional companion

            # a teacher that was loaded with ZeRO stage 3: only an engine gathers its pieces
            config = {key: one for key, one in engine.config.items() if key not in _OF_A_TRAINING}
            deepspeed.initialize(model=teacher, config=config)
        for modifier in self.session.lifecycle.recipe.modifiers:
            modifier.move_pre_hooks_last()  # the engine's hooks gather the weights

    def _leave_engine(self) -> None:
        if self._engine is not None:
            del self._engine.step
            self._engine = None

    def _recompile_if_hooks_changed(self) -> None:
        """Recompile a compiled model if hooks were added or removed, as it would not notice."""
        modifiers = self.session.lifecycle.recipe.modifiers
        hooks = frozenset[int]().union(*(one.hook_ids for one in modifiers))
        if hooks != self._hooks:
            reset_compiled()
        self._hooks = hooks

    def _modifiers(self) -> list[Modifier]:
        return modifiers_to_apply(self.session, self._recipe)

    def _read(self, checkpoint: Path) -> dict[str, Any] | None:
        saved = read_session(checkpoint)
        modifiers = self._modifiers()
        if saved is None:
            if modifiers:
                raise CheckpointError(
                    f"Training with a recipe cannot be resumed from {checkpoint}: it has no "
                    f"{SESSION_FILE}, so it was written without one.",
                    "Resume from a checkpoint of this recipe, or give the folder as the model to "
                    "begin anew with its weights.",
                )
            return None
        check_same_recipe(saved["modifiers"], modifiers)
        step = step_of(checkpoint)
        if saved["global_step"] != step:
            raise CheckpointError(
                f"The files of {checkpoint} do not belong together: {SESSION_FILE} is of step "
                f"{saved['global_step']}, the rest of step {step}.",
                "Resume from another checkpoint.",
            )
        return saved


def modifiers_to_apply(session: CompressionSession, recipe: Recipe | None) -> list[Modifier]:
    """Return the modifiers of a recipe, or without one those of the session in progress."""
    if recipe is not None:
        return recipe.modifiers
    lifecycle = session.lifecycle
    return [] if lifecycle.finalized else lifecycle.recipe.modifiers


# --------------------
# Wrappers that accelerate puts around modules of a distributed model.

_INNER = "_checkpoint_wrapped_module"


def remove_checkpoint_wrappers(model: Module) -> None:
    """Remove FSDP's activation checkpointing wrappers from a model.

    The wrapper removes its name from the names of parameters but not from those of modules, so in a
    checkpoint the two would not match.

    Args:
        model: the trained model; no backward pass may follow.
    """
    for module in list(model.modules()):
        for name, child in module._modules.items():
            while child is not None and _INNER in child._modules:  # one within another
                child = module._modules[name] = child._modules[_INNER]  # noqa: PLW2901
