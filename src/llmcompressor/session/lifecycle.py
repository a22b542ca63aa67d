# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of a run: the valid order of calls, and the run's progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from llmcompressor.core.contract import Edits
from llmcompressor.core.events import Event, EventType
from llmcompressor.core.modifier import Modifier, StructureChanges
from llmcompressor.core.state import Hardware, State
from llmcompressor.errors import InputError
from llmcompressor.logger import logger
from llmcompressor.recipe.arguments import RecipeArgs
from llmcompressor.recipe.recipe import Recipe, RecipeContainer, RecipeInput, renew_recipe
from llmcompressor.recipe.stages import StageModifiers, check_codes_stay
from llmcompressor.runtime.run_record import phase
from llmcompressor.session.resuming import check_same_recipe, recipe_record

_BATCH_ORDER = (
    EventType.BATCH_START,
    EventType.LOSS_CALCULATED,
    EventType.OPTIM_PRE_STEP,
    EventType.OPTIM_POST_STEP,
    EventType.BATCH_END,
)

_PLACES = ("device", "distributed_strategy")
_METHOD_FOR = {EventType.INITIALIZE: "initialize", EventType.FINALIZE: "finalize"}


@dataclass
class CompressionLifecycle:
    """Takes a recipe's modifiers through one run.

    Attributes:
        state: the workspace shared with the modifiers.
        recipe: the recipe being applied.
        initialized_: whether :meth:`initialize` was called.
        finalized: whether :meth:`finalize` was called.
        global_step: optimizer steps taken since the run began.
        global_batch: batches seen since the run began.
    """

    state: State = field(default_factory=State)
    recipe: Recipe = field(default_factory=Recipe)
    initialized_: bool = False
    finalized: bool = False
    global_step: int = 0
    global_batch: int = 0

    _last: EventType = field(default=EventType.BATCH_END, init=False, repr=False)
    _seen_event: bool = field(default=False, init=False, repr=False)
    _seen_batch: bool = field(default=False, init=False, repr=False)
    _told_step: bool = field(default=False, init=False, repr=False)
    _calibrates: bool = field(default=False, init=False, repr=False)
    # the caller's own settings of the hardware; the rest is detected with every update
    _places: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _container: RecipeContainer = field(default_factory=RecipeContainer, init=False, repr=False)
    # the source of the recipe, for the next stage of the same recipe
    _source: tuple[RecipeInput, RecipeArgs] | None = field(default=None, init=False, repr=False)

    @property
    def recipe_container(self) -> RecipeContainer:
        """The recipe as scripts for llm-compressor 0.5 know it."""
        return self._container

    @property
    def modifiers(self) -> list[StageModifiers]:
        """The modifiers, stage by stage."""
        return [
            StageModifiers(list(stage.modifiers), index, stage.name, applied=self.finalized)
            for index, stage in enumerate(self.recipe.stages)
        ]

    def _counted(self) -> str:
        count = len(list(self.recipe.modifiers))
        return f"{count} modifier{'' if count == 1 else 's'}"

    def initialize(
        self,
        recipe: RecipeInput = None,
        recipe_stage: str | None = None,
        recipe_args: RecipeArgs = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Fill the state, read the recipe and initialize its modifiers.

        While initialized, a further call only updates the state.

        Args:
            recipe: a recipe in any form; ``None`` for an empty one, or after a reset for
                another stage for the recipe that stayed.
            recipe_stage: the stage to take.
            recipe_args: values for the recipe's arguments.
            **kwargs: fields of the state; unknown ones are passed to the modifiers.

        Returns:
            What the modifiers returned, without ``None``.

        Raises:
            InputError: the lifecycle was finalized, or an epoch is to have no step.
            RecipeError: the recipe cannot be used.
        """
        self._expect("initialize", after_initialize=False)
        _check_counts(kwargs)
        self._places |= {name: kwargs[name] for name in _PLACES if kwargs.get(name) is not None}
        self.state.hardware = Hardware.detect(kwargs.get("model", self.state.model))
        unknown = self.state.update(**{**kwargs, **self._places})
        if not self._seen_event:
            self._set_start_progress()
        if self.initialized_:
            return []
        self._read_recipe(recipe, recipe_stage, recipe_args)
        if self.state.optimizer is not None or self.state.schedule.steps_per_epoch is not None:
            check_codes_stay(self.recipe.modifiers)
        logger.debug("Initializing the compression lifecycle.")
        results = self._initialize_modifiers(unknown)
        self.initialized_ = True
        logger.info(f"Compression lifecycle initialized for {self._counted()}.")
        return results

    def event(
        self, event_type: EventType, global_step: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Send an event to every modifier, in recipe order.

        Args:
            event_type: the kind of event.
            global_step: optimizer steps taken; counted by the lifecycle if not given.
            **kwargs: goes to the modifiers; ``batch_data`` and ``loss`` also to the state.

        Returns:
            What the modifiers returned, without ``None``.

        Raises:
            InputError: the event may not come now; nothing has changed then.
        """
        self._validate(event_type, kwargs)
        if global_step is not None:
            Event(global_step=global_step)  # raises for an invalid number of steps
        self._advance(event_type, global_step)
        logger.debug(f"Handling event: {event_type.value}.")
        if event_type is EventType.BATCH_START or kwargs.get("batch_data") is not None:
            self.state.batch_data = kwargs.get("batch_data")
        if kwargs.get("loss") is not None:
            self.state.loss = kwargs["loss"]
        event = Event(
            type_=event_type,
            steps_per_epoch=self.state.schedule.steps_per_epoch,
            batches_per_step=self.state.schedule.batches_per_step,
            invocations_per_step=self.state.schedule.invocations_per_step or 1,
            global_step=self.global_step,
            global_batch=self.global_batch,
        )
        results = self._call(lambda each: each.update_event(self.state, event, **kwargs))
        if event_type in (EventType.BATCH_END, EventType.CALIBRATION_EPOCH_END):
            self.state.batch_data = None
        return results

    def finalize(self, **kwargs: Any) -> list[Any]:
        """Finalize every modifier, once. If one fails, a further call resumes with that one.

        Args:
            **kwargs: goes to the modifiers.

        Returns:
            What the modifiers returned, without ``None``.

        Raises:
            InputError: the lifecycle was not initialized, or was finalized before.
        """
        self._expect("finalize")
        logger.debug("Finalizing the compression lifecycle.")
        for modifier in self._active():
            _warn_of_lost_calibration(modifier, began=self._calibrates)
        self._warn_of_lost_steps()
        with self._hooks_removed_on_error():
            results = self._call(
                lambda each: None if each.finalized else each.finalize(state=self.state, **kwargs)
            )
        self.finalized = True
        self._container.update_applied_stages(stage.name for stage in self.recipe.stages)
        logger.info(f"Compression lifecycle finalized for {self._counted()}.")
        return results

    def reset(self) -> None:
        """Finalize all active modifiers and return to the initial state.

        An error in one modifier is logged, and the others are finalized all the same.
        """
        tell = logger.info if self.initialized_ else logger.debug
        for modifier in self._active():
            try:
                modifier.finalize(state=self.state)
            except Exception as error:
                logger.warning(f"{type(modifier).__name__} failed to finalize: {error}")
        for each in fields(self):
            fresh = each.default if each.default_factory is MISSING else each.default_factory()
            setattr(self, each.name, fresh)
        tell("Compression lifecycle reset.")

    def reset_stage(self) -> None:
        """Prepare for another stage: reset everything but the state and the recipe."""
        state, recipe, source, container = self.state, self.recipe, self._source, self._container
        self.reset()
        self.state, self.recipe, self._source, self._container = state, recipe, source, container
        self.state.schedule.start = self.state.loss = self.state.batch_data = None
        self.state.schedule.resumes = False

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, taken between two batches.

        It holds the progress, the recipe, and each modifier's class, fields, phases and own state,
        in types that ``torch.load(weights_only=True)`` reads. In a distributed run every process
        calls this, as modifiers may gather sharded state. The result is the same on each.

        Raises:
            InputError: the lifecycle was not initialized, or was finalized.
            LifecycleError: the state of a modifier cannot be saved.
        """
        self._expect("save the state of the run")
        return {
            "global_step": self.global_step,
            "global_batch": self.global_batch,
            "seen_batch": self._seen_batch,
            "steps_per_epoch": self.state.schedule.steps_per_epoch,
            **recipe_record(self.recipe),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume where :meth:`state_dict` was taken; the model has the checkpoint's weights by now.

        The phases are restored, and ``on_start`` is not called again for them.

        Args:
            saved: what :meth:`state_dict` returned.

        Raises:
            InputError: the lifecycle was not initialized with ``resumes=True``.
            RecipeError: the checkpoint is of another recipe.
        """
        self._expect("load the state of a run")
        if not self.state.schedule.resumes:
            raise InputError(
                "The state of a run is loaded into one that does not resume: its modifiers may "
                "have started already.",
                "Call session.initialize(..., resumes=True) first.",
            )
        check_same_recipe(saved["modifiers"], self.recipe.modifiers)
        self.global_step, self.global_batch = saved["global_step"], saved["global_batch"]
        self._seen_batch, self._seen_event = saved["seen_batch"], True
        self._told_step = True  # or a run with nothing left to do would be warned of lost steps
        self._last = EventType.BATCH_END
        for modifier, record in zip(self.recipe.modifiers, saved["modifiers"], strict=True):
            modifier.resume(self.state, record["phases"], record["state"])
            _warn_of_lost_start(modifier)
        self.state.schedule.resumes = False

    # ---- the recipe

    def _read_recipe(self, recipe: RecipeInput, stage: str | None, arguments: RecipeArgs) -> None:
        is_next_stage = recipe is None
        if recipe is None and self._source is None and self._container.recipes:
            recipe = self._container.recipes
        if recipe is None and self._source is not None:
            recipe, before = self._source
            arguments = before if arguments is None else arguments
        if recipe is None and stage is not None:
            raise InputError(
                f"recipe_stage is {stage!r}, and there is no recipe.", "Give the recipe too."
            )
        if recipe is None:
            self.recipe = Recipe()
            return
        if isinstance(recipe, Iterator):  # it is read again for the next stage
            recipe = list(recipe)
        created = Recipe.create_instance(recipe, target_stage=stage, recipe_args=arguments)
        self.recipe = renew_recipe(created) if is_next_stage else created
        self._source = (recipe, arguments)
        applied = self._container.applied_stages if is_next_stage else []
        self._container = RecipeContainer(self.recipe, [self.recipe], applied)

    def _initialize_modifiers(self, given: Mapping[str, Any]) -> list[Any]:
        """Initialize each modifier on the structure that the ones before it will leave."""
        outline = StructureChanges(self.state)

        def initialize(modifier: Any) -> Any:
            result = modifier.initialize(state=self.state, **given)
            outline.add(modifier)
            return result

        try:
            with self._hooks_removed_on_error():
                results = self._call(initialize)
                for modifier in list(self.recipe.modifiers):
                    modifier.on_all_initialized(self.state)
                return results
        finally:
            outline.undo()

    def _call(self, call: Callable[[Modifier], Any]) -> list[Any]:
        results = []
        for modifier in list(self.recipe.modifiers):
            with phase(type(modifier).__name__):
                results.append(call(modifier))
        return [result for result in results if result is not None]

    @contextmanager
    def _hooks_removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for modifier in list(self.recipe.modifiers):
                modifier.remove_hooks()
            raise

    def _active(self) -> Iterator[Modifier]:
        for modifier in list(self.recipe.modifiers):
            if modifier.initialized and not modifier.finalized:
                yield modifier

    # ---- valid order

    def _validate(self, event_type: EventType, kwargs: dict[str, Any]) -> None:
        if not isinstance(event_type, EventType):
            names = [each.name for each in EventType if each not in _METHOD_FOR]
            raise InputError(
                f"{event_type!r} is no EventType.",
                f"Send one of EventType.{', EventType.'.join(names)}.",
            )
        if event_type in _METHOD_FOR:
            method = _METHOD_FOR[event_type]
            raise InputError(
                f"{event_type.name} is not an event that can be sent.",
                f"Call session.{method}() instead.",
            )
        self._expect(f"send {event_type.name}")
        if event_type is EventType.LOSS_CALCULATED and kwargs.get("loss") is None:
            raise InputError(
                "LOSS_CALCULATED came without a loss.",
                "Call callbacks.loss_calculated(loss=...) with the loss of this batch.",
            )
        if event_type is EventType.CALIBRATION_EPOCH_START:
            self._refuse_rewritten_statistics()
        if event_type is EventType.BATCH_START:
            in_order = self._last is not EventType.BATCH_START
        else:
            place = _BATCH_ORDER.index
            in_order = event_type not in _BATCH_ORDER or place(self._last) <= place(event_type)
        if not in_order:
            order = " -> ".join(each.name for each in _BATCH_ORDER)
            raise InputError(
                f"{event_type.name} cannot come after {self._last.name}.",
                f"Call the events of a batch in this order: {order}.",
            )

    def _refuse_rewritten_statistics(self) -> None:
        """Raise if one calibration serves a modifier and another that changes its statistics."""
        rewriting = None
        for modifier in self.recipe.modifiers:
            if rewriting is not None and modifier.traits.data.collects:
                raise InputError(
                    f"{type(rewriting).__name__} changes what {type(modifier).__name__}, behind "
                    "it, collects, and both would collect it in one calibration.",
                    "Calibrate for one after the other: in a session for each, or with oneshot, "
                    "whose pipelines do so.",
                )
            if Edits.INPUTS in modifier.traits.edits and modifier.traits.data.collects:
                rewriting = modifier

    def _expect(self, what: str, *, after_initialize: bool = True) -> None:
        if after_initialize and not self.initialized_:
            raise InputError(
                f"Cannot {what} before the session is initialized.",
                "Call session.initialize(recipe=..., model=...) first.",
            )
        if self.finalized:
            raise InputError(
                f"Cannot {what} after the session was finalized.",
                "Call session.reset() for a new run, or session.reset_stage() for another stage.",
            )

    # ---- progress

    def _set_start_progress(self) -> None:
        """Set the progress to the start of a resumed run, until the first event."""
        schedule = self.state.schedule
        here = Event(
            steps_per_epoch=schedule.steps_per_epoch, batches_per_step=schedule.batches_per_step
        )
        # A negative start marks a run that is not resumed.
        here.current_index = max(schedule.start or 0, 0)
        self.global_step, self.global_batch = here.global_step, here.global_batch

    def _advance(self, event_type: EventType, global_step: int | None) -> None:
        if event_type in _BATCH_ORDER:
            self._last = event_type
        self._seen_event = True
        if event_type is EventType.CALIBRATION_EPOCH_START:
            self._calibrates = True
        elif event_type is EventType.CALIBRATION_EPOCH_END:
            self._calibrates = False
        if event_type is EventType.BATCH_START:
            self.global_batch += self._seen_batch
            self._seen_batch = True
        if global_step is not None:
            self.global_step = global_step
        elif event_type is EventType.OPTIM_POST_STEP:
            self.global_step += 1
        self._told_step |= global_step is not None or event_type is EventType.OPTIM_POST_STEP

    def _warn_of_lost_steps(self) -> None:
        """Warn of schedules that never advanced because no optimizer step was reported."""
        scheduled = [type(one).__name__ for one in self.recipe.modifiers if one.start is not None]
        if scheduled and self.global_batch and not self._told_step:
            logger.warning(
                f"{self.global_batch + 1} batches were told of and no step of the optimizer, so "
                f"the schedule of {', '.join(scheduled)} stayed at step {self.global_step}. Call "
                "callbacks.optim_post_step() after optimizer.step(), or give global_step with an "
                "event."
            )


def _check_counts(given: Mapping[str, Any]) -> None:
    """Raise for invalid counts, before anything is changed."""
    counts = ("steps_per_epoch", "batches_per_step", "invocations_per_step")
    Event(**{name: given[name] for name in counts if given.get(name) is not None})
    start = given.get("start")
    if start is not None and not (isinstance(start, int | float) and math.isfinite(start)):
        raise InputError(
            f"start is {start!r}, and is where a run begins.",
            "Give a number of epochs where the run has them, else of steps; or leave it out.",
        )


def _warn_of_lost_calibration(modifier: Modifier, *, began: bool) -> None:
    """Warn of a calibration that was not begun, or not completed."""
    name, kind = type(modifier).__name__, type(modifier)
    if modifier.start is not None:
        return
    ends = kind.on_calibration_end is not Modifier.on_calibration_end
    remedy = (
        "Use oneshot, or run the data between callbacks.calibration_epoch_start() and "
        "callbacks.calibration_epoch_end()."
    )
    if not modifier.started and modifier.traits.needs_data:
        logger.warning(f"{name} did nothing: it needs calibration, and none has begun. {remedy}")
    elif began and ends and not modifier.ended:
        logger.warning(f"{name} is not complete: its calibration came to no end. {remedy}")


def _warn_of_lost_start(modifier: Modifier) -> None:
    """Warn that the setup of ``on_start`` is missing in the resumed run."""
    kind = type(modifier)
    sets_up = kind.on_start is not Modifier.on_start
    knows_how_to_resume = kind.load_state_dict is not Modifier.load_state_dict
    if modifier.started and not modifier.ended and sets_up and not knows_how_to_resume:
        logger.warning(
            f"{kind.__name__} had started before the checkpoint, and on_start is not called again: "
            f"what it had set up, such as hooks, is missing. Put it in {kind.__name__}."
            "load_state_dict too."
        )
