# SPDX-License-Identifier: Apache-2.0
"""A session: a run of a recipe on a model."""

from __future__ import annotations

import threading
from typing import Any

from llmcompressor.core.events import Event, EventType
from llmcompressor.core.state import ModifiedState, State
from llmcompressor.errors import InputError
from llmcompressor.metrics import LoggerManager
from llmcompressor.recipe.arguments import RecipeArgs
from llmcompressor.recipe.recipe import RecipeInput
from llmcompressor.session.lifecycle import CompressionLifecycle


class CompressionSession:
    """Manages a run: owns its lifecycle, and through it its state.

    Attributes:
        taken: held by the run, of any thread, that uses this session.
    """

    def __init__(self) -> None:
        self._lifecycle = CompressionLifecycle()
        self.taken = threading.Lock()

    @property
    def lifecycle(self) -> CompressionLifecycle:
        """The lifecycle, which tracks the order and progress of this run."""
        return self._lifecycle

    @property
    def state(self) -> State:
        """The workspace shared with the modifiers."""
        return self._lifecycle.state

    def initialize(
        self,
        recipe: RecipeInput = None,
        recipe_stage: str | None = None,
        recipe_args: RecipeArgs = None,
        model: Any = None,
        teacher_model: Any = None,
        optimizer: Any = None,
        attach_optim_callbacks: bool = True,
        train_data: Any = None,
        val_data: Any = None,
        test_data: Any = None,
        calib_data: Any = None,
        copy_data: bool = True,
        start: float | None = None,
        steps_per_epoch: int | None = None,
        batches_per_step: int | None = None,
        loggers: Any = None,
        resumes: bool = False,
        invocations_per_step: int | None = None,
        **kwargs: Any,
    ) -> ModifiedState:
        """Start the run; once started, only update its state.

        Args:
            recipe: a recipe in any form: modifiers, text, a path or a ``Recipe``.
            recipe_stage: the stage of the recipe to apply.
            recipe_args: values for the recipe's arguments.
            model: the model to compress.
            teacher_model: the model to learn from, in distillation.
            optimizer: the optimizer of a training run.
            attach_optim_callbacks: whether the caller fires the optimizer's events.
            train_data: training data.
            val_data: validation data.
            test_data: test data.
            calib_data: calibration data.
            copy_data: keep a deep copy of the data rather than the objects themselves.
            start: where a resumed run begins, in epochs where the run has them, else in steps.
            steps_per_epoch: optimizer steps in an epoch.
            batches_per_step: batches that make up one optimizer step.
            loggers: a ``LoggerManager``, or loggers to make one of.
            resumes: the run continues from a checkpoint: no modifier starts before
                ``session.lifecycle.load_state_dict`` has restored it.
            invocations_per_step: calls of whatever steps the optimizer, for one step of it; part
                of every event.
            **kwargs: goes to the ``on_initialize`` of every modifier.

        Returns:
            The model, the optimizer and the loss to go on with.

        Raises:
            InputError: the session was finalized.
            RecipeError: the recipe cannot be used.
        """
        loggers = LoggerManager.of(loggers)
        return self._modified(
            self._lifecycle.initialize(
                recipe=recipe,
                recipe_stage=recipe_stage,
                recipe_args=recipe_args,
                model=model,
                teacher_model=teacher_model,
                optimizer=optimizer,
                attach_optim_callbacks=attach_optim_callbacks,
                train_data=train_data,
                val_data=val_data,
                test_data=test_data,
                calib_data=calib_data,
                copy_data=copy_data,
                start=start,
                steps_per_epoch=steps_per_epoch,
                batches_per_step=batches_per_step,
                loggers=loggers,
                resumes=resumes or None,  # an update does not take it back
                invocations_per_step=invocations_per_step,
                **kwargs,
            )
        )

    def event(
        self, event_type: EventType, batch_data: Any = None, loss: Any = None, **kwargs: Any
    ) -> ModifiedState:
        """Send an event to the modifiers.

        Args:
            event_type: the kind of event.
            batch_data: the batch that begins.
            loss: the loss that was calculated.
            **kwargs: ``global_step`` is taken as the progress; the rest goes to the modifiers.

        Returns:
            The model, the optimizer and the loss to go on with.

        Raises:
            InputError: the event may not come now.
        """
        given = {"batch_data": batch_data, "loss": loss}
        kwargs.update({name: value for name, value in given.items() if value is not None})
        results = self._lifecycle.event(event_type, **kwargs)
        if event_type is EventType.OPTIM_POST_STEP and self.state.loggers is not None:
            self.state.loggers.model_updated()
        return self._modified(results)

    def finalize(self, **kwargs: Any) -> ModifiedState:
        """End the run.

        Args:
            **kwargs: goes to the ``on_finalize`` of every modifier.

        Returns:
            The model, the optimizer and the loss to go on with.

        Raises:
            InputError: the session was not initialized, or was finalized before.
        """
        return self._modified(self._lifecycle.finalize(**kwargs))

    def log(self, event_type: EventType, loss: Any = None) -> None:
        """Log progress, loss and the modifiers' metrics, as often as the loggers are due.

        In a distributed run every process calls this and only the first one writes: modifiers may
        have to gather their metrics.

        Args:
            event_type: what has just happened; its name is the tag.
            loss: one loss, or several by name, or a function that gives these and is called only
                if they are logged; the last one calculated if not given.
        """
        loggers = self.state.loggers
        if loggers is None:
            return
        if not isinstance(event_type, EventType):
            raise InputError(
                f"{event_type!r} is no EventType.", "Give one, such as EventType.BATCH_END."
            )
        here = Event(
            steps_per_epoch=self.state.schedule.steps_per_epoch,
            global_step=self._lifecycle.global_step,
        )
        epoch = here.epoch_full if here.epoch_based else None
        if not loggers.log_ready(here.global_step, epoch):
            return
        told = loss() if callable(loss) else loss
        values = _scalars(self.state.loss if told is None else told)
        values |= {} if epoch is None else {"epoch": epoch}
        values["step"] = float(here.global_step)
        groups = getattr(self.state.optimizer, "param_groups", None)
        if groups and "lr" in groups[0]:
            values["learning_rate"] = float(groups[0]["lr"])
        values |= self.figures()
        if not self.state.hardware.rank:
            loggers.metric.log_scalars(event_type.value, values, step=here.global_step)
        loggers.log_written(here.global_step, epoch)

    def figures(self) -> dict[str, float]:
        """Metrics of the active modifiers to log now, by tag.

        A repeated tag gets the position of the later modifier in the recipe as a suffix.
        """
        found: dict[str, float] = {}
        for place, modifier in enumerate(self._lifecycle.recipe.modifiers, 1):
            if modifier.initialized and not modifier.finalized:
                for tag, value in modifier.figures(self.state).items():
                    found[f"{tag}_{place}" if tag in found else tag] = float(value)
        return found

    def reset(self) -> None:
        """Finalize all active modifiers and return to the initial state."""
        self._lifecycle.reset()

    def abort(self) -> None:
        """Reset after an error: modifiers undo what they have begun, and do not complete it.

        A training that is aborted leaves the weights as they are, with the zeros of pruning, and
        nothing of quantization: what was learned is kept, and training can continue.
        """
        self.state.schedule.aborted = True
        self.reset()

    def reset_stage(self) -> None:
        """Prepare for another stage; the recipe and the model stay."""
        self._lifecycle.reset_stage()

    def get_serialized_recipe(self) -> str | None:
        """The recipe that was applied, as YAML; ``None`` if there was none."""
        recipe = self._lifecycle.recipe
        return recipe.yaml() if recipe.modifiers else None

    def _modified(self, modifier_data: list[Any]) -> ModifiedState:
        state = self.state
        return ModifiedState(state.model, state.optimizer, state.loss, modifier_data)


def _scalars(loss: Any) -> dict[str, float]:
    """Losses by name, as plain numbers."""
    if loss is None:
        return {}
    named = loss if isinstance(loss, dict) else {"loss": loss}
    try:
        # A loss that is still part of a graph has to be detached to become a number.
        return {
            name: float(value.detach() if hasattr(value, "detach") else value)
            for name, value in named.items()
        }
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"A loss that is to be logged is no number: {str(error).rstrip('.')}.",
            "Give one number, or a mapping from names to numbers.",
        ) from error
