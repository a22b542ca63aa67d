# SPDX-License-Identifier: Apache-2.0
"""Stages of a recipe: named runs of modifiers, in order."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, did_you_mean

RunType: TypeAlias = Literal["oneshot", "train"]
DEFAULT_STAGE = "default"

_EARLIER_TYPES: Mapping[str, RunType] = {"post_train": "oneshot"}
"""What run types were called in earlier releases."""

_STAGE_KEY = re.compile(r"(?P<name>.+)_stage(?P<number>_\d+)?$")


@dataclass(frozen=True)
class Stage:
    """A named run: its modifiers in order, and its run type.

    Args:
        name: without the ``_stage`` of its key.
        modifiers: in the order in which they act.
        run_type: ``"oneshot"`` or ``"train"``; ``None`` if the name does not contain it either.
        gates: limits that its checkpoint has to keep, by name (:mod:`llmcompressor.args.gates`).
    """

    name: str
    modifiers: tuple[Modifier, ...]
    run_type: RunType | None = None
    gates: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.run_type is None:
            object.__setattr__(self, "run_type", infer_run_type(self.name))


def stage_name(key: str) -> str:
    """The name of a stage, given its name or its key.

    >>> stage_name("sparsity_stage"), stage_name("sparsity"), stage_name("default_stage_1")
    ('sparsity', 'sparsity', 'default_1')
    """
    match = _STAGE_KEY.match(key)
    return match["name"] + (match["number"] or "") if match else key


def infer_run_type(name: str) -> RunType | None:
    """The run type that a stage's name contains, or ``None``.

    >>> infer_run_type("oneshot_pruning"), infer_run_type("finetrain"), infer_run_type("first")
    ('oneshot', 'train', None)
    """
    return next((kind for kind in get_args(RunType) if kind in name.lower()), None)


def parse_run_type(value: object, name: str) -> RunType | None:
    """Validate a stage's ``run_type`` as written.

    Raises:
        RecipeError: it is neither ``oneshot`` nor ``train``.
    """
    if value is None:
        return None
    if isinstance(value, str):
        written = value.lower()
        named = _EARLIER_TYPES.get(written, written)
        if named in get_args(RunType):
            return cast("RunType", named)
    raise RecipeError(
        f"The stage {name!r} of the recipe has the run_type {value!r}.",
        did_you_mean(str(value), get_args(RunType)),
    )


def concatenate_stages(parts: Iterable[Sequence[Stage]]) -> tuple[Stage, ...]:
    """Concatenate the stages of several recipes.

    Adjacent stages with the same name and run type are merged; a name that recurs later gets a
    number, so that the order of the modifiers stays and a saved recipe has each key once.
    """
    joined: list[Stage] = []
    for stage in (stage for part in parts for stage in part):
        last = joined[-1] if joined else None
        if last and (last.name, last.run_type) == (stage.name, stage.run_type):
            gates = {**last.gates, **stage.gates}
            joined[-1] = replace(last, modifiers=last.modifiers + stage.modifiers, gates=gates)
        else:
            joined.append(stage)
    return rename_duplicates(joined)


def rename_duplicates(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The same stages with unique names; none are merged."""
    named: dict[str, Stage] = {}
    for stage in stages:
        name = unique_name(stage.name, named)
        named[name] = replace(stage, name=name)
    return tuple(named.values())


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number appended if it is taken.

    >>> unique_name("quant", {"quant", "quant_1"})
    'quant_2'
    """
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def select_stage(stages: Sequence[Stage], wanted: str) -> Stage:
    """The stage called ``wanted``, with or without ``_stage``.

    Raises:
        RecipeError: there is none; lists those there are.
    """
    for stage in stages:
        if stage.name in (wanted, stage_name(wanted)):
            return stage
    names = [stage.name for stage in stages]
    listed = f"It has: {', '.join(names)}." if names else "It has no stages."
    raise RecipeError(f"The recipe has no stage {wanted!r}.", listed)


def check_order(stages: Iterable[Stage]) -> None:
    """Check the order that modifiers declare.

    Raises:
        RecipeError: a modifier comes after one that it declares in ``must_precede``.
    """
    before: dict[str, str] = {}
    for modifier in (modifier for stage in stages for modifier in stage.modifiers):
        name = type(modifier).__name__
        late = sorted(before[other] for other in before.keys() & type(modifier).rules.must_precede)
        if late:
            raise RecipeError(
                f"In the recipe {name} stands after {late[0]}, which undoes what it prepares.",
                f"Put {name} before {late[0]}.",
            )
        before |= {parent.__name__: name for parent in type(modifier).__mro__}


def check_required_later(stages: Iterable[Stage]) -> None:
    """Check that the later modifiers that a modifier needs are there.

    Raises:
        RecipeError: none of the classes that a modifier declares in ``needs_later`` comes later.
    """
    modifiers = [modifier for stage in stages for modifier in stage.modifiers]
    for place, modifier in enumerate(modifiers):
        needed = type(modifier).rules.needs_later
        later = {parent.__name__ for one in modifiers[place + 1 :] for parent in type(one).__mro__}
        if needed and not needed & later:
            raise RecipeError(
                f"In the recipe no modifier that quantizes stands after "
                f"{type(modifier).__name__}, which only prepares weights for one.",
                "Put a QuantizationModifier with your scheme behind it.",
            )


def check_codes_stay(modifiers: Iterable[Modifier]) -> None:
    """Check the modifiers of a training: one that takes a quantized model alone changes weights.

    Raises:
        RecipeError: another one changes weights beside it.
    """
    changing = [each for each in modifiers if type(each).rules.changes_weights]
    taking = next((each for each in changing if type(each).rules.takes_quantized), None)
    if taking is None or len(changing) == 1:
        return
    name = type(taking).__name__
    others = dict.fromkeys(type(each).__name__ for each in changing if each is not taking)
    if name in others:
        raise RecipeError(
            f"{name} stands in the recipe more than once, and a training has one set of scales.",
            "Leave one of them.",
        )
    told = " and ".join(others)
    raise RecipeError(
        f"{name} trains a quantized model whose codes stay, and {told} beside it would change "
        "them.",
        f"Leave {told} out, or apply it to the original model before that is quantized.",
    )


# --------------------
# Stages as scripts for llm-compressor 0.5 know them.


@dataclass
class StageModifiers:
    """The modifiers of one stage, which can be called like one.

    Attributes:
        modifiers: in their order.
        index: position of the stage in the recipe.
        group: name of the stage.
        applied: the stage is done.
    """

    modifiers: list[Modifier] = field(default_factory=list)
    index: int | None = None
    group: str | None = None
    applied: bool = False

    @property
    def initialized(self) -> bool:
        """Return True if all of them are initialized."""
        return all(one.initialized for one in self.modifiers)

    @property
    def finalized(self) -> bool:
        """Return True if all of them are finalized."""
        return all(one.finalized for one in self.modifiers)

    @property
    def unique_id(self) -> str:
        """The name and the position of the stage."""
        return f"{self.group}_{self.index}"

    def calculate_start(self) -> float:
        """The earliest start of those that have one, else -1."""
        return min((one.start for one in self.modifiers if one.start is not None), default=-1)

    def calculate_end(self) -> float:
        """The latest end of those that have one, else -1."""
        return max((one.end for one in self.modifiers if one.end is not None), default=-1)

    def initialize(self, state: State, **kwargs: Any) -> None:
        """Initialize all of them, in order; errors as of :meth:`Modifier.initialize`."""
        for one in self.modifiers:
            one.initialize(state=state, **kwargs)

    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Send an event to all of them, in order."""
        for one in self.modifiers:
            one.update_event(state, event, **kwargs)

    def finalize(self, state: State, **kwargs: Any) -> None:
        """Finalize all of them, in order; then the stage is applied."""
        for one in self.modifiers:
            one.finalize(state=state, **kwargs)
        self.applied = True
