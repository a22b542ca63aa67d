# SPDX-License-Identifier: Apache-2.0
r"""Gradual magnitude pruning: the weights of least magnitude are zeroed, ever more of them.

Between ``start`` and ``end`` the sparsity rises by a schedule; the default is the cubic one of
Zhu & Gupta, *To prune, or not to prune* (arXiv:1710.01878), eq. 1,

.. math:: s(t) = s_f + (s_i - s_f) (1 - t)^3, \qquad t = (i - start) / (end - start),

and the weights that remain are trained meanwhile to do without those that are gone.

:class:`ConstantPruningModifier` prunes nothing more: it holds the zeros that are there.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from llmcompressor.core.events import Event
from llmcompressor.core.events.event import reached
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.pruning.base import MaskingModifier
from llmcompressor.modifiers.pruning.schedule import Schedule, Window, make_schedule
from llmcompressor.numerics.masks import Structure, parse_structure
from llmcompressor.wording import listed

__all__ = ["ConstantPruningModifier", "MagnitudePruningModifier"]

_ROUNDING = 1e-9


class ConstantPruningModifier(MaskingModifier):
    """Keeps the weights at zero that are zero when it starts, through every step until it ends.

    ``update`` has no effect: the mask is taken once.

    Example::

        ConstantPruningModifier(targets="__ALL_PRUNABLE__", start=0)
    """

    needs_time: ClassVar[bool] = True
    # What others do in a oneshot keeps zeros by itself.
    idle_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})

    def is_due(self, index: float) -> bool:
        """Once."""
        return self._index is None

    def choose(self, index: float) -> None:
        """Take the zeros that are there."""
        self.weights.freeze()
        dense = [name for name, sparsity in self.weights.sparsities().items() if not sparsity]
        if len(dense) == len(self.weights.places):
            logger.warning(
                f"{type(self).__name__} has nothing to keep: no weight is zero in {listed(dense)}."
            )


class MagnitudePruningModifier(MaskingModifier):
    """Prunes by magnitude, by degrees, while the model is trained.

    Masks are chosen after the step that reaches ``start`` (where that is the beginning, when the
    first batch begins), after those that reach a multiple of ``update``, and after the one that
    reaches ``end``. So after a step the sparsity is that of the schedule at the last index at
    which it was due. Masks only grow.

    Attributes:
        init_sparsity: the share of zeros at ``start``.
        final_sparsity: the share of zeros from ``end`` on.
        update_scheduler: ``cubic``, ``linear``, ``polynomial_decay``, ``polynomial``,
            ``multi_step`` or ``calc(EXPRESSION)``.
        scheduler_args: ``exponent`` of the polynomials (2), ``steps`` of ``multi_step`` as pairs
            of index and sparsity, further names for ``calc``.
        mask_structure: ``unstructured``, ``channel``, ``filter``, ``block_a,b`` or ``N:M``.
        leave_enabled: hold the masks after ``end`` too, until the training is over.
        apply_globally: one threshold for all targets together instead of one for each.

    Example::

        MagnitudePruningModifier(
            targets="__ALL_PRUNABLE__", init_sparsity=0.05, final_sparsity=0.6,
            start=0, end=2, update=0.1,
        )
    """

    init_sparsity: float = Field(ge=0, le=1)
    final_sparsity: float = Field(ge=0, le=1)
    update_scheduler: str = "cubic"
    scheduler_args: dict[str, Any] = Field(default_factory=dict)
    mask_structure: str = "unstructured"
    leave_enabled: bool = True
    apply_globally: bool = False

    @field_validator("mask_structure")
    @classmethod
    def _check_structure(cls, value: str) -> str:
        parse_structure(value)
        return value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.end is None or math.isinf(self.end):
            raise RecipeError(
                "it has no end: a schedule leads from start to end",
                "Give end, in epochs where the training has them, else in steps.",
            )
        if self.final_sparsity < self.init_sparsity:
            raise RecipeError(
                f"final_sparsity ({self.final_sparsity:g}) is below init_sparsity "
                f"({self.init_sparsity:g}): weights that were pruned do not grow back",
                "Exchange them.",
            )
        full = self.structure.full_sparsity
        if full is not None and abs(self.final_sparsity - full) > _ROUNDING:
            raise RecipeError(
                f"final_sparsity is {self.final_sparsity:g}, and {self.mask_structure} has "
                f"{full:g}",
                f"Set final_sparsity: {full:g}.",
            )
        _ = self.schedule  # made once to be checked
        return self

    # Cached properties: two modifiers with equal fields are equal, private functions are not.

    @cached_property
    def structure(self) -> Structure:
        """What is zeroed as one."""
        return parse_structure(self.mask_structure)

    @cached_property
    def schedule(self) -> Schedule:
        """From an index to the share of zeros."""
        assert self.end is not None
        window = Window(
            start=self.start or 0.0,
            end=self.end,
            update=self.update,
            init=self.init_sparsity,
            final=self.final_sparsity,
            arguments=self.scheduler_args,
        )
        return make_schedule(self.update_scheduler, window)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Also see whether the structure fits the parameters.

        Raises:
            TargetError: a target means no parameter, or one that cannot be pruned so.
        """
        super().on_initialize(state, **kwargs)
        unfit = []
        for place in self.weights.places:
            shape = place.shape[::-1] if place.transposed else place.shape
            reason = self.structure.misfit(shape)
            if reason is not None:
                unfit.append(f"{place.name} ({reason})")
        if unfit:
            raise TargetError(
                f"The mask structure {self.mask_structure} does not fit {listed(unfit)}.",
                "Ignore these, or choose another structure.",
            )
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Also choose masks, from the step on that reaches ``start``.

        A modifier starts with the batch behind that step; the sparsity after it is the formula's
        already.
        """
        super().on_event(state, event, **kwargs)
        if not self.ended and reached(event.current_index, self.start or 0.0):
            self.choose_if_due(event)

    def sparsity_at(self, index: float) -> float:
        """The share of zeros that the schedule asks for at ``index``."""
        return self.schedule(self.end if self.end is not None and self._is_over(index) else index)

    def is_due(self, index: float) -> bool:
        """At first, past a multiple of ``update``, and past the end."""
        last = self._index
        if last is None:
            return True
        if index <= last or self._is_over(last):
            return False
        if self.update is None or self._is_over(index):
            return True
        return _multiples(index, self.update) > _multiples(last, self.update)

    def _is_over(self, index: float) -> bool:
        return self.end is not None and reached(index, self.end)

    def choose(self, index: float) -> None:
        """Mask as many weights as the schedule asks for."""
        self.weights.grow(self.structure, self.sparsity_at(index), together=self.apply_globally)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Also say so if the training is over before the schedule is."""
        last = None if state.broken_off else self._index
        if last is not None and self.end is not None and not self._is_over(last):
            logger.warning(
                f"{type(self).__name__} did not come to its end ({self.end:g}): the training "
                f"ended before, at a sparsity of {self.sparsity_at(last):.4g} instead of "
                f"{self.final_sparsity:g}."
            )
        return super().on_finalize(state, **kwargs)

    @property
    def holds_on(self) -> bool:
        """As the recipe says."""
        return self.leave_enabled

    @property
    def structure_name(self) -> str:
        """As the recipe says."""
        return self.mask_structure


def _multiples(index: float, update: float) -> int:
    """How many multiples of ``update`` lie at or below ``index``, to within rounding."""
    quotient = index / update
    return math.floor(quotient + _ROUNDING * max(1.0, abs(quotient)))
