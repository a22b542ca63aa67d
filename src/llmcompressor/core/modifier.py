# SPDX-License-Identifier: Apache-2.0
"""Base class of all compression techniques."""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from llmcompressor.core.contract import (
    Cost,
    DataSize,
    DataUse,
    Edits,
    Prediction,
    RecipeRules,
    Selection,
    Solving,
    Traits,
)
from llmcompressor.core.earlier_declarations import (
    EARLIER_NAMES,
    adapt_earlier_declarations,
    readable_on_instances,
)
from llmcompressor.core.events import Event, EventType, has_reached
from llmcompressor.core.state import State
from llmcompressor.errors import InputError, LifecycleError, RecipeError, TargetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.patches import (
    ANEW,
    MERGE,
    modules_with_adapters,
    quantized_by_hand,
)
from llmcompressor.runtime.limits import MAX_FIELD_VALUES, copy_values
from llmcompressor.runtime.progress import join_names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from llmcompressor.runtime.collectives import Ranks

# --------------------
# Field types of modifiers, and error messages for invalid fields.


def types_in_annotation(annotation: Any) -> set[Any]:
    """The set of types that an annotation is made of.

    >>> types_in_annotation(float | list[int] | None) == {float, list, int, type(None)}
    True
    """
    if annotation is Any:
        return {bool, int, float}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    annotation = getattr(annotation, "__value__", annotation)  # of a type alias
    parts = get_args(annotation)
    outer = getattr(annotation, "__origin__", None) if parts else annotation
    kinds = {kind for part in parts for kind in types_in_annotation(part)}
    return kinds | {outer} if isinstance(outer, type) else kinds


def to_recipe_error(cls: type[BaseModel], error: ValidationError) -> RecipeError:
    """Turn a pydantic error into a ``RecipeError`` that lists the problems of each field."""
    problems: dict[str, list[str]] = {}
    remedies: list[str] = []
    unknown: list[str] = []
    for detail in error.errors(include_url=False):
        field = str(detail["loc"][0]) if detail["loc"] else ""
        cause = detail.get("ctx", {}).get("error")
        if detail["type"] == "extra_forbidden":
            reason = "it has no such field"
            unknown.append(field)
        elif detail["type"] == "missing":
            reason = "it is required"
            remedies.append(f"Give {field}.")
        elif isinstance(cause, InputError):
            reason = cause.problem.rstrip(".")
            remedies.append(cause.remedy)
        else:
            reason = str(cause or detail["msg"]).rstrip(".")
            if field:
                reason += f" (given: {detail['input']!r})"
                known = cls.model_fields.get(field)
                default = ""
                if known is not None and not known.is_required():
                    usual = known.get_default(call_default_factory=True, validated_data={})
                    default = f", or leave it out for its default, {usual!r}"
                remedies.append(f"Correct {field}{default}.")
        problems.setdefault(field, []).append(reason)
    told = [
        (f"field {field!r}: " if field else "") + ", or ".join(dict.fromkeys(reasons))
        for field, reasons in problems.items()
    ]
    said = " ".join(dict.fromkeys(filter(None, [_nearest_fields(cls, unknown), *remedies])))
    return RecipeError(f"{cls.__name__}: {'; '.join(told)}.", said)


def _nearest_fields(cls: type[BaseModel], unknown: Sequence[str]) -> str:
    """Suggest close matches for each unknown field, then list all fields once."""
    if not unknown:
        return ""
    fields = sorted(cls.model_fields)
    hints = {field: did_you_mean(field, fields) for field in unknown}
    near = {field: hint for field, hint in hints.items() if not hint.startswith("Choose")}
    if not near:
        return hints[unknown[0]]
    if len(unknown) > 1:  # name the field that each hint is for
        near = {field: f"For {field!r}, d{hint[1:]}" for field, hint in near.items()}
    return f"{' '.join(near.values())} The fields are: {', '.join(fields)}."


# --------------------
# Base class of all compression techniques.


class Phase(Enum):
    """Lifecycle phases of a modifier, in order."""

    CREATED = "created"
    INITIALIZED = "initialized"
    STARTED = "started"
    ENDED = "ended"
    FINALIZED = "finalized"


_LIKE_A_METHOD = 0.8
"""How much like one of the lifecycle a name must be: the share of letters in common."""


def _phase_property(phase: Phase, *, settable: bool = False) -> property:
    """Property that tells if a modifier has entered a phase; it may enter or clear it as well."""

    def read(modifier: Modifier) -> bool:
        return phase in modifier._passed

    def write(modifier: Modifier, entered: bool) -> None:
        left = tuple(one for one in modifier._passed if one is not phase)
        modifier._passed = (*left, phase) if entered else left

    return property(read, write if settable else None, doc=f"Whether it was {phase.value}.")


class Modifier(HooksMixin):
    """A technique that changes a model; its fields are its arguments in a recipe.

    A subclass implements :meth:`on_initialize` and whichever of the other ``on_…`` methods it
    needs. The lifecycle calls :meth:`initialize`, :meth:`update_event` and :meth:`finalize`; these
    track the phase and call the ``on_…`` methods.

    Everything that recipes and pipelines have to know about a modifier is declared by values:
    :attr:`rules`, :attr:`traits`, and the results of :meth:`select`, :meth:`predict` and
    :meth:`cost`. Declarations of earlier releases are accepted in their place
    (:mod:`llmcompressor.core.earlier_declarations`).

    Attributes:
        rules: rules of the class for recipes and runs.
        index: position in the recipe, if it is given there.
        group: recipe group that the modifier belongs to.
        start: when to start, in epochs if the run has them, else in optimizer steps.
        end: when to end, in the same unit.
        update: interval between updates, in the same unit.
    """

    model_config = ConfigDict(extra="forbid", ignored_types=(readable_on_instances,))

    rules: ClassVar[RecipeRules] = RecipeRules()

    index: int | None = None
    group: str | None = None
    start: float | None = None
    end: float | None = None
    update: float | None = None

    # All phases entered, so that a finalized modifier still knows if it has started.
    _passed: tuple[Phase, ...] = PrivateAttr((Phase.CREATED,))
    _latest: Event | None = PrivateAttr(None)
    _is_given_data: bool = PrivateAttr(False)

    if not TYPE_CHECKING:  # type checkers see the constructor that pydantic derives

        def __init__(self, **fields: Any) -> None:
            copy_values(fields, f"What is given to {type(self).__name__}", MAX_FIELD_VALUES)
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise to_recipe_error(type(self), error) from error

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Adapt declarations of earlier releases; warn of names almost like those of hooks."""
        super().__pydantic_init_subclass__(**kwargs)
        adapt_earlier_declarations(cls)
        known = [name for name in vars(Modifier) if name.startswith("on_")]
        for name in (name for name in vars(cls) if name.startswith("on")):
            near = difflib.get_close_matches(name, known, n=1, cutoff=_LIKE_A_METHOD)
            if near and not hasattr(Modifier, name):
                logger.warning(
                    f"The lifecycle calls no {cls.__name__}.{name}. Did you mean {near[0]}?"
                )

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """Validate as pydantic does, but raise a ``RecipeError`` for a wrong field."""
        copy_values(obj, f"What is given to {cls.__name__}", MAX_FIELD_VALUES)
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise to_recipe_error(cls, error) from error

    @model_validator(mode="before")
    @classmethod
    def _rename_legacy_fields(cls, given: Any) -> Any:
        """Map field names of earlier releases to their current names."""
        if not isinstance(given, Mapping) or not given.keys() & cls.rules.renamed.keys():
            return given
        for old in given.keys() & cls.rules.renamed.keys():
            if (new := cls.rules.renamed[old]) in given:
                raise ValueError(f"{old} is the earlier name of {new}, and both are given")
        return {cls.rules.renamed.get(name, name): value for name, value in given.items()}

    @classmethod
    def from_fields(cls, **fields: Any) -> list[Modifier]:
        """The modifiers that a recipe entry with these fields expands to: usually one."""
        return [cls(**fields)]

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number: pydantic would convert it."""
        kinds = types_in_annotation(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(given, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("it is a number, not true or false")
        return given

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Refuse empty names and patterns, which would match the whole model, and odd schedules."""
        for field in ("targets", "ignore"):
            given = getattr(self, field, None)
            if given == "" and field == "ignore":
                continue  # an empty string ignores nothing
            named = [given] if isinstance(given, str) else given
            if isinstance(named, list | tuple) and any(one in ("", "re:") for one in named):
                raise RecipeError(
                    f"{field} is {given!r}: an empty name or pattern stands for the whole model",
                    "Give a name, a class name such as Linear, or a 're:' pattern; 're:.*' means "
                    "all.",
                )
        for name in ("start", "end", "update"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise RecipeError(f"{name} is not a number (nan).", f"Give {name} as one.")
        if self.start is not None and self.end is not None and self.end < self.start:
            raise RecipeError(
                f"end ({self.end:g}) lies before start ({self.start:g})",
                "Leave out the end for a modifier that never ends by itself.",
            )
        return self

    def be_given_data(self) -> None:
        """Request that calibration data run through the model for this modifier.

        It has no effect on a class that declares how it uses data.
        """
        self._is_given_data = True

    # ---- what recipes and pipelines read

    @property
    def traits(self) -> Traits:
        """Properties that pipelines read, computed from its fields."""
        removes = type(self).outline is not Modifier.outline
        return Traits(
            data=DataUse.STREAM if self._is_given_data else DataUse.NONE,
            edits=Edits.AT_ONCE | (Edits.STRUCTURE if removes else Edits.NONE),
        )

    def select(self, state: State) -> Selection:
        """The modules that it works on; it is initialized."""
        return Selection()

    def means(self, name: str, module: Module, holders: Mapping[str, Module]) -> bool:
        """Return True if its targets would match a Linear called ``name``.

        This decides whether experts that are stored as stacks are unfused. A modifier without
        targets of its own returns False and takes the layout that the others need.

        Args:
            name: name of an expert's Linear.
            module: a placeholder for it.
            holders: the modules that would contain it, by name, for targets that match containers.
        """
        return False

    def check(self, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool) -> None:
        """Refuse calibration data that is unusable for this modifier, before any work is done.

        It need not be initialized.

        Args:
            batches: all of them.
            use_loss_mask: only tokens whose ``loss_mask`` in a batch is 1 count.

        Raises:
            DatasetError: names what is missing.
        """

    def outline(self, state: State) -> None:
        """Change a model's structure as the run will, independently of the weights' values.

        Called after :meth:`initialize` and undone later: subsequent modifiers are initialized, and
        the output is predicted, on that structure. Parameters may be on the meta device, and have
        to be replaced, not written to; the configuration is changed with them.
        """

    def predict(self, state: State) -> Prediction:
        """The planned output; it is initialized."""
        return Prediction()

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """What its work on ``modules`` needs; it is initialized.

        Args:
            modules: if it collects data, selected modules that share an input, or with
                :attr:`~.Traits.whole_blocks` all of a stop; otherwise all modules of a block, or
                one that lies outside of blocks. Their weights may be on the meta device.
            data: size of the calibration data.
        """
        return Cost()

    def see_original(
        self, state: State, batches: Sequence[tuple[Mapping[str, Any], Tensor | None]]
    ) -> None:
        """Look at the original model, before the first pass of a run.

        Called if it declares :attr:`~.Traits.sees_original`. Blocks are loaded by
        :meth:`.BlockSource.visits`, and nothing may be changed.

        Args:
            state: state of the run; the model is in evaluation mode.
            batches: the model's arguments with the bool mask ``[batch, tokens]`` of the real
                tokens, ``None`` if all are.
        """

    # ---- several ranks, each with a part of the samples

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Add what all ranks have collected of the inputs of ``modules``, which wait for it.

        All ranks call it with the same modules in the same order, before the owners compress them.

        Args:
            state: state of the run.
            ranks: the ranks of the run.
            modules: those of a stop.
            owner_of: the rank that compresses a module, and alone needs the sums, unless all do.
        """

    def sum_observed(self, state: State, ranks: Ranks, modules: Sequence[Module]) -> None:
        """Add what all ranks have observed of ``modules``, which all samples have left.

        All ranks call it with the same modules in the same order, before :meth:`finish`.

        Args:
            state: state of the run.
            ranks: the ranks of the run; all of them need what was observed.
            modules: those of a block, or all outside of blocks.
        """

    # ---- block by block

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Bring ``modules``, which have seen all data, into the form in which they are stored.

        Called for the modules of a block before it is freed, if it works :attr:`~.Traits.by_block`.

        Args:
            state: state of the run.
            modules: the modules to finish.
            written: they are packed right away by the writer, which rounds what is not rounded.
        """

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark ``modules`` as finished: an earlier run has written them."""

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The report of the work done, by module name; empty for nothing.

        Args:
            names: only of these modules, requested when a block is done; of all if ``None``.
        """
        return {}

    def figures(self, state: State) -> dict[str, float]:
        """Metrics of this training step to log, by tag: a sparsity, a loss."""
        return {}

    # ---- state in a training checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed training cannot recompute.

        It may hold tensors, numbers, strings, and dictionaries and lists of these; phases are saved
        separately.
        """
        return {}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Called after :meth:`initialize`, with the phases restored. ``on_start`` is not called again,
        so hooks that it registered have to be registered here.

        Args:
            state: state of the run; its model has the weights of the checkpoint.
            saved: what :meth:`state_dict` returned, on the CPU.
        """

    # ---- phases

    @property
    def phase(self) -> Phase:
        """The current phase of this modifier."""
        return self._passed[-1]

    @property
    def passed_phases(self) -> tuple[str, ...]:
        """Names of all phases that were entered, for a checkpoint."""
        return tuple(phase.value for phase in self._passed)

    initialized = _phase_property(Phase.INITIALIZED)  # type: ignore[pydantic-field]
    started = _phase_property(Phase.STARTED)  # type: ignore[pydantic-field]
    ended = _phase_property(Phase.ENDED)  # type: ignore[pydantic-field]
    finalized = _phase_property(Phase.FINALIZED)  # type: ignore[pydantic-field]
    # Modifiers written for earlier releases set these. Properties, not fields.
    initialized_ = _phase_property(Phase.INITIALIZED, settable=True)  # type: ignore[pydantic-field]
    started_ = _phase_property(Phase.STARTED, settable=True)  # type: ignore[pydantic-field]
    ended_ = _phase_property(Phase.ENDED, settable=True)  # type: ignore[pydantic-field]
    finalized_ = _phase_property(Phase.FINALIZED, settable=True)  # type: ignore[pydantic-field]

    # ---- called by the lifecycle

    def initialize(self, state: State, **kwargs: Any) -> None:
        """Prepare for a run; start at once if the schedule starts at the first step.

        Raises:
            TargetError: it changes weights, and the model has adapters.
            LifecycleError: it was initialized or finalized before, or reports a failure.
        """
        self._expect_not(Phase.FINALIZED, "initialized")
        self._expect_not(Phase.INITIALIZED, "initialized")
        for field, instead in self.rules.moved.items():
            if field in self.model_fields_set and getattr(self, field) is not None:
                logger.warning(f"The field {field!r} of {self._name} has no effect: {instead}")
        if self.rules.changes_weights:
            self._check_adapters(state.model)
        try:
            if not self.on_initialize(state, **kwargs):
                raise LifecycleError(
                    f"{self._name}.on_initialize did not return true: it reports a failure, or "
                    "lacks a `return True`."
                )
            self._enter(Phase.INITIALIZED)
            event = _first_event(EventType.INITIALIZE, state)
            if self.should_start(event) and not state.schedule.resumes:
                self._start(state, event, kwargs)
        except BaseException:
            self.remove_hooks()
            raise

    def _check_adapters(self, model: Any) -> None:
        adapted = [] if model is None else modules_with_adapters(model)
        if adapted:
            raise TargetError(
                f"{self._name} changes weights, and the model has adapters (PEFT) at "
                f"{join_names(adapted)}: only these would be trained and saved.",
                f"{MERGE} Distillation works beside them.",
            )
        found = None if model is None else quantized_by_hand(model)
        if found is not None:
            raise TargetError(
                f"{self._name} changes weights, and {found[1]} has quantized those of the model, "
                f"at {found[0]}.",
                ANEW,
            )

    def resume(self, state: State, phases: Iterable[str], saved: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, with its phases and state.

        Args:
            state: state of the run.
            phases: :attr:`passed_phases` of the checkpoint.
            saved: what :meth:`state_dict` returned.

        Raises:
            LifecycleError: it was not initialized, or was finalized.
        """
        self._expect_initialized("resumed")
        self._expect_not(Phase.FINALIZED, "resumed")
        self._passed = tuple(Phase(name) for name in phases)
        self.load_state_dict(state, saved)

    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Handle an event of the run.

        Raises:
            LifecycleError: it was not initialized, or was finalized.
        """
        self._expect_initialized("updated")
        self._expect_not(Phase.FINALIZED, "updated")
        self._latest = event
        self.on_event(state, event, **kwargs)
        if not self._calibrate(state, event, kwargs):
            self._follow_schedule(state, event, kwargs)

    def finalize(self, state: State, **kwargs: Any) -> None:
        """End if it has not ended yet, clean up, and remove every hook.

        Raises:
            LifecycleError: it was not initialized, was finalized before, or reports a failure.
        """
        self._expect_not(Phase.FINALIZED, "finalized")
        self._expect_initialized("finalized")
        try:
            if self.started and not self.ended:
                latest = self._latest or _first_event(EventType.FINALIZE, state)
                self._end(state, latest.new_instance(type_=EventType.FINALIZE), kwargs)
            # None is accepted: a long run is not lost for a forgotten `return`.
            if self.on_finalize(state, **kwargs) is False:
                raise LifecycleError(f"{self._name}.on_finalize reports a failure.")
        finally:
            self.remove_hooks()
        self._enter(Phase.FINALIZED)

    def should_start(self, event: Event) -> bool:
        """Return True if the index of ``event`` lies in ``[start, end)``; never without a start."""
        if self.start is None:
            return False
        return has_reached(event.current_index, self.start) and not self.should_end(event)

    def should_end(self, event: Event) -> bool:
        """Return True if the index of ``event`` has reached ``end``; never without an end."""
        return self.end is not None and has_reached(event.current_index, self.end)

    # ---- implemented by techniques

    @abstractmethod
    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Prepare for the run.

        Returns:
            True when the modifier is ready.
        """

    def on_all_initialized(self, state: State) -> None:
        """Called when every modifier of the recipe is initialized, so their targets are known."""

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Clean up at the end of the run.

        Returns:
            False only if that failed.
        """
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called with every event, before any other hook."""

    def on_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called once, when the schedule reaches ``start``."""

    def on_update(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called with every training event from start to end."""

    def on_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called once, when the schedule reaches ``end``, or at finalization at the latest."""

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called before the first calibration batch."""

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Called when ``modules`` have seen all calibration batches."""

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Called after the last calibration batch."""

    # ---- inner workings

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _enter(self, phase: Phase) -> None:
        if phase not in self._passed:
            self._passed = (*self._passed, phase)

    def _expect_initialized(self, what: str) -> None:
        if not self.initialized:
            raise LifecycleError(
                f"{self._name} cannot be {what}: it is not initialized. Call initialize first."
            )

    def _expect_not(self, phase: Phase, what: str) -> None:
        if phase in self._passed:
            raise LifecycleError(
                f"{self._name} cannot be {what}: it was {phase.value} before. "
                "Create a new one for another run."
            )

    def _calibrate(self, state: State, event: Event, kwargs: Mapping[str, Any]) -> bool:
        """Dispatch a calibration event; return False for any other event."""
        if event.type_ is EventType.CALIBRATION_EPOCH_START:
            self.on_calibration_start(state, event, **kwargs)
            self._enter(Phase.STARTED)
        elif event.type_ is EventType.SEQUENTIAL_EPOCH_END:
            given = {"modules": [], **kwargs}
            own = given.pop("own", given["modules"])
            if self.traits.over_ranks is Solving.OWNER:
                given["modules"] = own
            self.on_sequential_epoch_end(state, event, **given)
        elif event.type_ is EventType.CALIBRATION_EPOCH_END:
            self.on_calibration_end(state, event, **kwargs)
            self._enter(Phase.ENDED)
        else:
            return False
        return True

    def _follow_schedule(self, state: State, event: Event, kwargs: Mapping[str, Any]) -> None:
        at_start = event.type_ is EventType.BATCH_START
        at_end = event.type_ is EventType.BATCH_END
        if at_start and not self.started and self.should_start(event):
            self._start(state, event, kwargs)
        elif at_end and self._is_running and self.should_end(event):
            self._end(state, event, kwargs)
        elif (
            (at_start or at_end)
            and not self.started
            and not self.ended
            and self.start is not None
            and self.should_end(event)
        ):  # the whole window has passed without a batch that began inside it
            self._start(state, event, kwargs)
            self._end(state, event, kwargs)
        elif not self._is_running:
            return
        self.on_update(state, event, **kwargs)

    @property
    def _is_running(self) -> bool:
        return self.started and not self.ended

    def _start(self, state: State, event: Event, kwargs: Mapping[str, Any]) -> None:
        self.on_start(state, event, **kwargs)
        self._enter(Phase.STARTED)

    def _end(self, state: State, event: Event, kwargs: Mapping[str, Any]) -> None:
        self.on_end(state, event, **kwargs)
        self._enter(Phase.ENDED)


adapt_earlier_declarations(Modifier)
# Class data of earlier releases need no annotation in a subclass: pydantic takes them for no field.
Modifier.__class_vars__.update(EARLIER_NAMES)


def _first_event(kind: EventType, state: State) -> Event:
    """An event at index 0, before any step."""
    return Event(
        type_=kind,
        steps_per_epoch=state.schedule.steps_per_epoch,
        batches_per_step=state.schedule.batches_per_step,
    )


# --------------------
# The structure that a run will leave a model in, given to it for a while.

_ABSENT = object()


@contextmanager
def planned_structure(modifiers: Sequence[Modifier], state: State) -> Iterator[None]:
    """Apply the structure changes of ``modifiers`` to the model while the body runs.

    Unchanged parameters are not copied, only the dictionaries that hold them.

    Args:
        modifiers: initialized modifiers.
        state: their state; changed parameters of its model may be on the meta device.
    """
    outline = StructureChanges(state)
    try:
        for modifier in modifiers:
            outline.add(modifier)
        yield
    finally:
        outline.undo()


class StructureChanges:
    """Reversible changes of a model's structure.

    Changes that others make to the model in the meantime are kept on :meth:`undo`.

    Args:
        state: state of the modifiers.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._changed: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def add(self, modifier: Modifier) -> None:
        """Apply the structure changes of an initialized modifier to the model."""
        if Edits.STRUCTURE not in modifier.traits.edits:
            return
        before = [(place, dict(place)) for place in self._places()]
        try:
            modifier.outline(self._state)
        finally:
            self._changed += [
                (place, content, dict(place))
                for place, content in before
                if any(_is_different(key, place, content) for key in {*place, *content})
            ]

    def undo(self) -> None:
        """Restore the model, latest change first."""
        while self._changed:
            place, before, after = self._changed.pop()
            restored = {
                key: before[key] if _is_different(key, before, after) else place[key]
                for key in before
                if _is_different(key, before, after) or key in place
            }
            restored |= {key: place[key] for key in place if key not in before | after}
            place.clear()
            place.update(restored)

    def _places(self) -> Iterator[dict[str, Any]]:
        """Dictionaries that hold the state of the model's modules and of its configuration."""
        config = getattr(self._state.model, "config", None)
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        yield from (vars(one) for one in (config, *parts) if one is not None)
        for module in list(self._state.model.modules()):
            yield from (vars(module), module._modules, module._parameters, module._buffers)


def _is_different(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.get(key, _ABSENT) is not other.get(key, _ABSENT)


# --------------------
# Mixin for modifiers that keep one record per module.


def select_records(
    records: Mapping[str, Any], names: Container[str] | None = None
) -> dict[str, Any]:
    """The records of ``names``; all of them if ``None``."""
    return {name: one for name, one in records.items() if names is None or name in names}


class RecordedMixin:
    """Report dataclass records as plain dictionaries; has to precede ``Modifier`` in the bases."""

    @property
    def records(self) -> Mapping[str, Any]:
        """Records by module name."""
        raise NotImplementedError

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The fields of the records, by module name; only of ``names`` if they are given."""
        found: dict[str, Any] = super().report(names)  # type: ignore[misc]  # Modifier's
        for name, record in select_records(self.records, names).items():
            found[name] = {**asdict(record), **found.get(name, {})}
        return found
