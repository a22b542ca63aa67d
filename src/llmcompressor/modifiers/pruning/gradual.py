# SPDX-License-Identifier: Apache-2.0
r"""Gradual magnitude pruning: zero an increasing share of the smallest weights.

Between ``start`` and ``end`` the sparsity rises by a schedule; the default is the cubic one of
Zhu & Gupta, *To prune, or not to prune* (arXiv:1710.01878), eq. 1,

.. math:: s(t) = s_f + (s_i - s_f) (1 - t)^3, \qquad t = (i - start) / (end - start),

and the remaining weights are trained in the meantime to compensate for the pruned ones.

:class:`ConstantPruningModifier` keeps existing zeros, and prunes no further weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from llmcompressor.core.contract import RecipeRules
from llmcompressor.core.events import Event, has_reached
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.pruning.base import MaskingModifier
from llmcompressor.modifiers.pruning.masked_weights import Schedule, ScheduleWindow, make_schedule
from llmcompressor.numerics.masks import Structure, parse_structure
from llmcompressor.runtime.progress import join_names

_ROUNDING = 1e-9


class ConstantPruningModifier(MaskingModifier):
    """Keep weights at zero that are zero at the start, in every step until the end.

    ``update`` has no effect: the mask is chosen once.

    Example::

        ConstantPruningModifier(targets="__ALL_PRUNABLE__", start=0)
    """

    # Other modifiers keep zeros in a oneshot by themselves.
    rules: ClassVar[RecipeRules] = replace(
        MaskingModifier.rules, idle_types=frozenset({"oneshot"}), needs_time=True
    )

    def is_due(self, index: float) -> bool:
        """Return True once, before a mask was chosen."""
        return self._index is None

    def choose(self, index: float) -> None:
        """Mask the weights that are zero now."""
        self.weights.freeze()
        dense = [name for name, sparsity in self.weights.sparsities().items() if not sparsity]
        if len(dense) == len(self.weights.places):
            logger.warning(
                f"{type(self).__name__} has nothing to keep: no weight is zero in "
                f"{join_names(dense)}."
            )


class MagnitudePruningModifier(MaskingModifier):
    """Prune gradually by magnitude while the model is trained.

    Masks are chosen after the step that reaches ``start`` (at the start of the first batch if that
    is the beginning), after those that reach a multiple of ``update``, and after the one that
    reaches ``end``. So after each step the sparsity is that of the schedule at the latest index at
    which masks were due. Masks only grow.

    Attributes:
        init_sparsity: share of zeros at ``start``.
        final_sparsity: share of zeros from ``end`` on.
        update_scheduler: ``cubic``, ``linear``, ``polynomial_decay``, ``polynomial``,
            ``multi_step`` or ``calc(EXPRESSION)``.
        scheduler_args: ``exponent`` of the polynomials (2), ``steps`` of ``multi_step`` as pairs of
            index and sparsity, further variables for ``calc``.
        mask_structure: ``unstructured``, ``channel``, ``filter``, ``block_a,b`` or ``N:M``.
        leave_enabled: keep the masks after ``end`` until the training is over.
        apply_globally: one threshold for all targets instead of one for each.

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
        _ = self.schedule  # created here to be validated
        return self

    # Cached properties, not private attributes: functions would make equal modifiers unequal.

    @cached_property
    def structure(self) -> Structure:
        """The mask structure: the unit of weights that is zeroed as one."""
        return parse_structure(self.mask_structure)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, from an index to the share of zeros."""
        assert self.end is not None
        window = ScheduleWindow(
            start=self.start or 0.0,
            end=self.end,
            update=self.update,
            init=self.init_sparsity,
            final=self.final_sparsity,
            arguments=self.scheduler_args,
        )
        return make_schedule(self.update_scheduler, window)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parameters, and refuse those that the mask structure does not fit.

        Raises:
            TargetError: a target matches no parameter, or one that cannot be pruned.
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
                f"The mask structure {self.mask_structure} does not fit {join_names(unfit)}.",
                "Ignore these, or choose another structure.",
            )
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Also choose masks, from the step on that reaches ``start``.

        A modifier starts with the batch after that step; the sparsity after it follows the schedule
        already.
        """
        super().on_event(state, event, **kwargs)
        if not self.ended and has_reached(event.current_index, self.start or 0.0):
            self.choose_if_due(event)

    def sparsity_at(self, index: float) -> float:
        """The share of zeros that the schedule prescribes at ``index``."""
        return self.schedule(self.end if self.end is not None and self._is_over(index) else index)

    def is_due(self, index: float) -> bool:
        """Return True at first, after each multiple of ``update``, and after the end."""
        last = self._index
        if last is None:
            return True
        if index <= last or self._is_over(last):
            return False
        if self.update is None or self._is_over(index):
            return True
        quotients = (index / self.update, last / self.update)  # how often it was due, rounded
        now, before = (math.floor(one + _ROUNDING * max(1.0, abs(one))) for one in quotients)
        return now > before

    def _is_over(self, index: float) -> bool:
        return self.end is not None and has_reached(index, self.end)

    def choose(self, index: float) -> None:
        """Mask the share of weights that the schedule prescribes."""
        self.weights.grow(self.structure, self.sparsity_at(index), together=self.apply_globally)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Finalize; warn if the training ended before the schedule did."""
        last = None if state.schedule.aborted else self._index
        if last is not None and self.end is not None and not self._is_over(last):
            logger.warning(
                f"{type(self).__name__} did not come to its end ({self.end:g}): the training "
                f"ended before, at a sparsity of {self.sparsity_at(last):.4g} instead of "
                f"{self.final_sparsity:g}."
            )
        return super().on_finalize(state, **kwargs)

    @property
    def keeps_masks_after_end(self) -> bool:
        """Return True if the recipe keeps the masks after the end."""
        return self.leave_enabled

    @property
    def structure_name(self) -> str:
        """The mask structure of the recipe."""
        return self.mask_structure
