# SPDX-License-Identifier: Apache-2.0
"""Base class of pruning during a training: masks that hold through every optimizer step.

Gradients are masked before the step and weights after it. The first keeps pruned weights out of the
optimizer's state and of statistics over all gradients; the second makes the zeros exact, despite
momentum and weight decay. A step that a loss scaler skips changes nothing.

DeepSpeed frees gradients as soon as they are reduced, so with it they are masked by hooks.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Container, Mapping
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch.nn import Module

from llmcompressor.core.contract import RecipeRules
from llmcompressor.core.events import Event, EventType
from llmcompressor.core.modifier import Modifier, select_records
from llmcompressor.core.state import State
from llmcompressor.errors import LifecycleError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import as_targets
from llmcompressor.modifiers.pruning.masked_weights import MaskedWeights
from llmcompressor.modifiers.pruning.targets import (
    ParameterLocation,
    find_parameters,
    matches_by_class,
)

STORED = "the zeros are stored like other weights: no reader has a sparse format for them"

# Events between two optimizer steps, at which masks may change.
_BETWEEN_STEPS = (EventType.BATCH_START, EventType.OPTIM_POST_STEP, EventType.BATCH_END)
_ROUNDING = 1e-9


class MaskingModifier(Modifier):
    """Hold weights at zero while a model is trained.

    Attributes:
        targets: class names, names of modules or parameters, ``re:`` patterns of either,
            ``__ALL_PRUNABLE__`` or ``__ALL__``.
        ignore: modules or parameters that are left out; takes precedence over ``targets``.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(run_types=frozenset({"train"}), changes_weights=True)

    start: float | None = 0.0
    targets: str | list[str]
    ignore: str | list[str] = Field(default_factory=list)

    _weights: MaskedWeights | None = PrivateAttr(None)
    # Index at which a mask was last chosen.
    _index: float | None = PrivateAttr(None)
    # Share of weights that was masked then.
    _reached: float = PrivateAttr(0.0)
    _records: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: str | list[str]) -> str | list[str]:
        if not as_targets(targets):
            raise RecipeError("there is no target", "Give one, as in targets: Linear.")
        return targets

    @field_validator("start")
    @classmethod
    def _check_start(cls, start: float | None) -> float:
        if start is not None and start < 0:
            raise RecipeError(
                f"start is {start:g}: a training begins at 0",
                "Leave it out to start with the first batch.",
            )
        return start or 0.0

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.start is not None and self.end is not None and self.end < self.start:
            raise RecipeError(
                f"end ({self.end:g}) lies before start ({self.start:g})",
                "Give an end that does not, in epochs where the training has them, else in steps.",
            )
        if self.update is not None and self.update <= 0:
            raise RecipeError(
                f"update is {self.update:g}: the distance between two updates is above 0",
                "Leave it out to update at every step.",
            )
        return self

    @property
    def weights(self) -> MaskedWeights:
        """The parameters and their masks.

        Raises:
            LifecycleError: it was not initialized.
        """
        if self._weights is None:
            raise LifecycleError(f"{type(self).__name__} has no weights: it is not initialized.")
        return self._weights

    def means(self, name: str, module: Module, holders: Mapping[str, Module]) -> bool:
        """Return True if a target matches it by class; a stack's own name means the whole stack."""
        return matches_by_class(name, module, self.targets, self.ignore)

    # ---- the course of a training

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parameters; nothing is masked before the first batch.

        Raises:
            TargetError: a target matches no parameter, or one that cannot be pruned.
        """
        weights = MaskedWeights(find_parameters(state.model, self.targets, self.ignore))
        self._weights = weights
        for place in weights.places if state.hardware.distributed_strategy == "deepspeed" else ():
            if place.parameter.requires_grad:
                self.register_hook(place.parameter, partial(weights.masked_gradient, place), "hook")
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Apply the masks before and after each optimizer step."""
        if event.type_ is EventType.OPTIM_PRE_STEP:
            self.weights.apply_to_gradients()
        elif event.type_ is EventType.OPTIM_POST_STEP:
            self.weights.apply()

    def on_update(self, state: State, event: Event, **kwargs: Any) -> None:
        """Choose masks when they are due; drop them at the end."""
        self.choose_if_due(event)
        if self.ended and not self.keeps_masks_after_end:
            self.weights.drop()

    def choose_if_due(self, event: Event) -> None:
        """Choose masks if they are due and no optimizer step is in progress."""
        if event.type_ in _BETWEEN_STEPS and self.is_due(event.current_index):
            self.choose(event.current_index)
            self._index = event.current_index
            self._reached = self.weights.sparsity()

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Apply the masks, record each parameter's sparsity, and drop the masks."""
        self.remove_hooks()
        self.weights.apply()  # weights of an earlier checkpoint may have been loaded
        if state.schedule.aborted:
            self.weights.drop()
            return True
        if self._index is None:
            logger.warning(
                f"{type(self).__name__} did nothing: the training ended before its start "
                f"({self.start:g})."
            )
            return True
        measured = self.weights.measure_sparsity()
        if not self.weights.held:
            self._warn_of_regrown_weights(measured)
        self._records = {
            place.record: {"sparsity": sparsity, "structure": self.structure_name, "stored": STORED}
            for place, sparsity in measured.items()
        }
        self.weights.drop()
        return True

    # ---- implemented by techniques

    @abstractmethod
    def is_due(self, index: float) -> bool:
        """Return True if masks have to be chosen at ``index``."""

    @abstractmethod
    def choose(self, index: float) -> None:
        """Choose the masks at ``index``."""

    @property
    def keeps_masks_after_end(self) -> bool:
        """Return True if masks are kept after the end."""
        return False

    @property
    def structure_name(self) -> str:
        """The mask structure, for the report."""
        return "unstructured"

    # ---- metrics, report and state

    def figures(self, state: State) -> dict[str, float]:
        """Sparsity of each parameter, and of all."""
        if self._weights is None or not self._weights.held:
            return {}
        shares = self._weights.sparsities()
        each = {f"sparsity/{name}": share for name, share in shares.items()}
        return {"sparsity": self._weights.sparsity(), **each}

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Measured sparsity and mask structure, by module."""
        return select_records(self._records, names)

    def state_dict(self) -> dict[str, Any]:
        """The masks, and the index and sparsity at which they were chosen.

        Under FSDP all processes have to call it, because each has only its shard of a mask.
        """
        if self._weights is None:
            return {}
        return {
            "index": self._index,
            "sparsity": self._reached,
            "masks": self._weights.state_dict(),
        }

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore the masks of a checkpoint.

        Raises:
            CheckpointError: they are those of other parameters.
        """
        self._index = saved.get("index")
        self._reached = saved.get("sparsity", 0.0)
        self.weights.load_state_dict(saved.get("masks", {}))
        self.weights.apply()  # an optimizer's own copy of the weights may differ

    # ---- inner workings

    def _warn_of_regrown_weights(self, measured: Mapping[ParameterLocation, float]) -> None:
        weights = [math.prod(place.shape) for place in measured]
        zeros = sum(map(operator.mul, weights, measured.values()))
        left = zeros / sum(weights)
        if left < self._reached - _ROUNDING:
            logger.warning(
                f"{type(self).__name__} let go of its masks at its end, and weights have grown "
                f"back since: of a sparsity of {self._reached:.4g}, {left:.4g} is left. Hold the "
                "masks longer (leave_enabled: true, or a ConstantPruningModifier that starts "
                "there) if the zeros are wanted."
            )
