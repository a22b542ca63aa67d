# SPDX-License-Identifier: Apache-2.0
"""Sparsity schedules of a recipe, checked before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.numerics import schedules
from llmcompressor.recipe.expressions import evaluate

__all__ = ["Window", "make_schedule"]

_ARGUMENTS: dict[str, set[str]] = {
    "cubic": set(),
    "linear": set(),
    "multi_step": {"steps"},
    "polynomial": {"exponent"},
    "polynomial_decay": {"exponent"},
}
_DEFAULT_EXPONENT = 2.0
_MOST_CHECKED = 1_000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Window:
    """Parameters of a sparsity schedule.

    Attributes:
        start: index of the first sparsity, in epochs or steps.
        end: index of the final sparsity.
        update: distance between two updates, ``None`` for every step.
        init: first sparsity.
        final: final sparsity.
        arguments: further arguments, by name.
    """

    start: float
    end: float
    update: float | None
    init: float
    final: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


Schedule = Callable[[float], float]


def make_schedule(name: str, window: Window) -> Schedule:
    """Create the function from an index, clamped to the window, to a sparsity.

    Raises:
        RecipeError: there is no such schedule, an argument is wrong, or sparsities are outside of
            [0, 1], decrease, or do not end at the final one.
    """
    text = name.strip()
    if text.startswith("calc(") and text.endswith(")"):
        schedule = _calculated(text.removeprefix("calc(")[:-1], window)
    else:
        schedule = _named(text, window)

    def clamped(index: float) -> float:
        return schedule(min(max(index, window.start), window.end))

    _check(name, clamped, window)
    return lambda index: min(1.0, max(0.0, clamped(index)))


def _named(name: str, window: Window) -> Schedule:
    if name not in _ARGUMENTS:
        raise RecipeError(
            f"There is no schedule named {name!r}.",
            f"{did_you_mean(name, _ARGUMENTS)} Or give an expression, as in "
            "calc(final_sparsity * (index - start) / (end - start)).",
        )
    unknown = sorted(set(window.arguments) - _ARGUMENTS[name])
    if unknown:
        takes = ", ".join(sorted(_ARGUMENTS[name])) or "none"
        raise RecipeError(
            f"The schedule {name!r} has no argument {unknown[0]!r}.", f"It takes: {takes}."
        )
    if name == "multi_step":
        return _stair(window)
    init, final = window.init, window.final
    if name == "linear":
        return lambda index: schedules.linear(_t(index, window), init, final)
    if name == "cubic":
        return lambda index: schedules.polynomial_decay(_t(index, window), init, final, 3.0)
    form = schedules.polynomial if name == "polynomial" else schedules.polynomial_decay
    exponent = _exponent(window.arguments.get("exponent", _DEFAULT_EXPONENT))
    return lambda index: form(_t(index, window), init, final, exponent)


def _t(index: float, window: Window) -> float:
    return schedules.progress(index, window.start, window.end)


def _exponent(given: Any) -> float:
    if not _is_number(given) or given <= 0:
        raise RecipeError(f"The exponent is {given!r}.", "Give a number above 0.")
    return float(given)


def _stair(window: Window) -> Schedule:
    given = window.arguments.get("steps")
    if not isinstance(given, list | tuple) or not given:
        raise RecipeError(
            "The schedule 'multi_step' has no steps.",
            "Give scheduler_args: {steps: [[INDEX, SPARSITY], ...]}.",
        )
    steps = []
    for step in given:
        if not (isinstance(step, list | tuple) and len(step) == 2 and all(map(_is_number, step))):
            raise RecipeError(f"The step {step!r} is no [INDEX, SPARSITY].", "Give two numbers.")
        if not window.start <= step[0] <= window.end:
            raise RecipeError(
                f"The step at {step[0]:g} lies outside of start ({window.start:g}) to end "
                f"({window.end:g}).",
                "Move it or the window.",
            )
        steps.append((float(step[0]), float(step[1])))
    # The window ends at the final sparsity, with or without a step for it.
    steps.sort()
    steps.append((window.end, max(window.final, steps[-1][1])))
    return lambda index: schedules.multi_step(index, reversed(steps), window.init)


def _calculated(expression: str, window: Window) -> Schedule:
    names: dict[str, object] = {
        **window.arguments,
        "start": window.start,
        "end": window.end,
        "init_sparsity": window.init,
        "final_sparsity": window.final,
    }
    if window.update is not None:
        names["update"] = window.update

    def schedule(index: float) -> float:
        value = evaluate(expression, {**names, "index": index})
        if not _is_number(value) or not math.isfinite(value):
            raise RecipeError(
                f"The expression {expression!r} gives {value!r} at index {index:g}.",
                "A sparsity is a number from 0 to 1.",
            )
        return float(value)

    return schedule


def _check(name: str, schedule: Schedule, window: Window) -> None:
    before = 0.0
    for index in _indices(window):
        sparsity = schedule(index)
        if not -_ROUNDING <= sparsity <= 1.0 + _ROUNDING:
            raise RecipeError(
                f"The schedule {name!r} gives a sparsity of {sparsity:g} at index {index:g}.",
                "Sparsities lie between 0 and 1.",
            )
        if sparsity < before - _ROUNDING:
            raise RecipeError(
                f"The schedule {name!r} falls from {before:g} to {sparsity:g} at index {index:g}: "
                "weights that were pruned do not grow back.",
                "Give one that does not fall.",
            )
        before = sparsity
    if abs(before - window.final) > _ROUNDING:
        raise RecipeError(
            f"The schedule {name!r} ends at {before:g}, and final_sparsity is {window.final:g}.",
            "Make them agree.",
        )


def _indices(window: Window) -> Iterator[float]:
    """Indices at which masks will be chosen, or a thousand evenly spaced ones if there are more."""
    length = window.end - window.start
    count = length / window.update if window.update else _MOST_CHECKED
    count = min(_MOST_CHECKED, math.ceil(count)) if length else 0
    yield from (window.start + length * number / count for number in range(count))
    yield window.end


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
