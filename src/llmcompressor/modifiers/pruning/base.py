# SPDX-License-Identifier: Apache-2.0
"""What pruning modifiers share: targets, and masks that hold through every optimizer step.

Gradients are masked before the step and weights after it. The first keeps what is pruned out of
the optimizer's memory and of whatever it computes of all gradients; the second makes the zeros
exact, whatever momentum and weight decay have done to them. A step that a loss scaler skips
changes nothing.

DeepSpeed takes gradients away as soon as they are there, so with it they are masked where they
arise.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch.nn import Module

from llmcompressor.core.events import Event, EventType
from llmcompressor.core.state import State
from llmcompressor.errors import LifecycleError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import as_targets
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.pruning.masked_weights import MaskedWeights
from llmcompressor.modifiers.pruning.targets import Place, find_places, means_class

__all__ = ["MaskingModifier"]

STORED = "the zeros are stored like other weights: no reader has a sparse format for them"

# Where the weights are those of a finished step, so that more of them may be masked.
_BETWEEN_STEPS = (EventType.BATCH_START, EventType.OPTIM_POST_STEP, EventType.BATCH_END)
_ROUNDING = 1e-9


class MaskingModifier(Modifier):
    """Holds weights at zero while a model is trained.

    Attributes:
        targets: class names, names of modules or parameters, ``re:`` patterns of either,
            ``__ALL_PRUNABLE__`` or ``__ALL__``.
        ignore: what is left alone; it wins.
    """

    run_types: ClassVar[frozenset[str]] = frozenset({"train"})
    changes_weights: ClassVar[bool] = True

    start: float | None = 0.0
    targets: str | list[str]
    ignore: str | list[str] = Field(default_factory=list)

    _weights: MaskedWeights | None = PrivateAttr(None)
    # The index at which a mask was last chosen.
    _index: float | None = PrivateAttr(None)
    # The share that was masked then.
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
    def _start_somewhere(cls, start: float | None) -> float:
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
        """Whether a target means it by its class; a stack's own name means the stack."""
        return means_class(name, module, self.targets, self.ignore)

    # ---- the course of a training

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parameters; nothing is masked before the first batch.

        Raises:
            TargetError: a target means no parameter, or one that cannot be pruned so.
        """
        self._weights = MaskedWeights(find_places(state.model, self.targets, self.ignore))
        if state.hardware.distributed_strategy == "deepspeed":
            self._mask_gradients_as_they_come(self._weights)
        return True

    def _mask_gradients_as_they_come(self, weights: MaskedWeights) -> None:
        for place in weights.places:
            if place.parameter.requires_grad:
                self.register_hook(place.parameter, partial(weights.masked_gradient, place), "hook")

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Hold what is masked, before and after each step of the optimizer."""
        if event.type_ is EventType.OPTIM_PRE_STEP:
            self.weights.apply_to_gradients()
        elif event.type_ is EventType.OPTIM_POST_STEP:
            self.weights.apply()

    def on_update(self, state: State, event: Event, **kwargs: Any) -> None:
        """Choose masks when it is time to; let go of them at the end."""
        self.choose_if_due(event)
        if self.ended and not self.holds_on:
            self.weights.drop()

    def choose_if_due(self, event: Event) -> None:
        """Choose masks if no step is under way and it is time to."""
        if event.type_ in _BETWEEN_STEPS and self.is_due(event.current_index):
            self.choose(event.current_index)
            self._index = event.current_index
            self._reached = self.weights.sparsity()

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Zero what is masked, note how sparse each parameter is, and let go of the masks."""
        self.remove_hooks()
        self.weights.apply()  # weights of an earlier checkpoint may have been loaded
        if state.broken_off:
            self.weights.drop()
            return True
        if self._index is None:
            logger.warning(
                f"{type(self).__name__} did nothing: the training ended before its start "
                f"({self.start:g})."
            )
            return True
        measured = self.weights.measured()
        if not self.weights.held:
            self._tell_of_growth(measured)
        self._records = {
            place.record: {"sparsity": sparsity, "structure": self.structure_name, "stored": STORED}
            for place, sparsity in measured.items()
        }
        self.weights.drop()
        return True

    # ---- what a technique decides

    @abstractmethod
    def is_due(self, index: float) -> bool:
        """Whether masks are to be chosen at ``index``."""

    @abstractmethod
    def choose(self, index: float) -> None:
        """Choose masks."""

    @property
    def holds_on(self) -> bool:
        """Whether masks are kept after the end."""
        return False

    @property
    def structure_name(self) -> str:
        """What is zeroed as one, for the report."""
        return "unstructured"

    # ---- what is told

    def figures(self, state: State) -> dict[str, float]:
        """The share that is masked: of each parameter, and of all."""
        if self._weights is None or not self._weights.held:
            return {}
        shares = self._weights.sparsities()
        each = {f"sparsity/{name}": share for name, share in shares.items()}
        return {"sparsity": self._weights.sparsity(), **each}

    def report(self) -> dict[str, Any]:
        """By module: the share of zeros that was counted in the end, and their structure."""
        return dict(self._records)

    def state_dict(self) -> dict[str, Any]:
        """The masks, and when they were chosen.

        Under FSDP all processes have to call it: each has only its part of a mask.
        """
        if self._weights is None:
            return {}
        return {
            "index": self._index,
            "sparsity": self._reached,
            "masks": self._weights.state_dict(),
        }

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Hold the masks of a checkpoint.

        Raises:
            CheckpointError: they are those of other parameters.
        """
        self._index = saved.get("index")
        self._reached = saved.get("sparsity", 0.0)
        self.weights.load_state_dict(saved.get("masks", {}))
        self.weights.apply()  # an optimizer's own copy of the weights may say otherwise

    # ---- inner workings

    def _tell_of_growth(self, measured: Mapping[Place, float]) -> None:
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
