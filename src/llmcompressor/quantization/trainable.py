# SPDX-License-Identifier: Apache-2.0
"""The training part of a quantizing modifier: fields, schedule and finalization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr
from torch.nn import Module

from llmcompressor.core.events import Event, EventType
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.flat_pieces import as_buffers, in_pieces, shapes_shown
from llmcompressor.modeling.spread import whole, write
from llmcompressor.modifiers.renamed_fields import MOVED_TO_THE_RUN
from llmcompressor.quantization.attach import attach_attention, attach_linear
from llmcompressor.quantization.aware import AwareTraining
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.parameters import weighs_inputs, weight_of
from llmcompressor.wording import listed

__all__ = ["TrainableMixin"]

_BATCH_EVENTS = frozenset(
    {
        EventType.BATCH_START,
        EventType.LOSS_CALCULATED,
        EventType.OPTIM_PRE_STEP,
        EventType.OPTIM_POST_STEP,
        EventType.BATCH_END,
    }
)


class TrainableMixin(QuantizationMixin):
    """Quantizes after calibration, or during training by fake quantization.

    The events decide which: those of calibration, or the batches of a training. Without ``start``,
    fake quantization begins with the first training step.

    Attributes:
        num_calibration_steps: optimizer steps from ``start`` on in which static activations are
            only observed, before anything is rounded.
        learned_scales: learn static scales of weights and activations with the model.
        sequential_update: no effect, with a warning: the pipeline decides.
        sequential_targets: no effect, with a warning: pass it to ``oneshot`` instead.
    """

    needs_time: ClassVar[bool] = True
    renamed: ClassVar[Mapping[str, str]] = {"disable_quantization_observer_epoch": "end"}
    moved: ClassVar[Mapping[str, str]] = MOVED_TO_THE_RUN

    num_calibration_steps: int = Field(default=1, ge=1)
    learned_scales: bool = False
    sequential_update: bool = True
    sequential_targets: str | list[str] | None = None

    _aware: AwareTraining | None = PrivateAttr(None)
    _saw_training: bool = PrivateAttr(False)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Also register the parameters of learned scales, before the optimizer is created."""
        done = super().on_initialize(state, **kwargs)
        if self.learned_scales:
            self._check_learnable()
            self._aware = self._make_aware()
            self._aware.register()
        return done

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Refuse learned scales in a calibration without training."""
        if self.learned_scales:
            raise _unlearnable("a calibration learns nothing")
        super().on_calibration_start(state, event, **kwargs)

    # ------------------------------------------------------------------ schedule

    @property
    def observing_steps(self) -> int:
        """``num_calibration_steps``, if there is a static scale."""
        return self.num_calibration_steps if self.requires_calibration_data else 0

    def should_start(self, event: Event) -> bool:
        """Return True if ``event`` is in ``[start, end)``; by default from the first batch on."""
        if self.start is not None or event.type_ is not EventType.BATCH_START:
            return super().should_start(event)
        return not self.should_end(event)

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Handle the optimizer steps and batches of a training."""
        if event.type_ not in _BATCH_EVENTS:
            return
        if not self._saw_training:
            self._check_training()
            self._saw_training = True
        if self.started and not self._is_aware:  # started before the first batch
            self._begin(state, event)
        if self._aware is None or not self._is_aware:
            return
        if event.type_ is EventType.BATCH_START:
            self._aware.batch_start(state, event)
        elif event.type_ is EventType.OPTIM_POST_STEP:
            self._aware.step_done(event)
        elif event.type_ is EventType.BATCH_END:
            self._aware.batch_end()

    def on_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Start observing, and later fake-quantizing, from this batch on."""
        if event.type_ in _BATCH_EVENTS and not self._is_aware:
            self._begin(state, event)

    def on_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Freeze static scales; fake quantization continues to the end of the training."""
        if self._aware is not None:
            self._aware.freeze()

    def _begin(self, state: State, event: Event) -> None:
        if self._aware is None:
            self._aware = self._make_aware()
        self._aware.begin(state, event)
        if event.type_ is EventType.BATCH_START:
            self._aware.batch_start(state, event)

    @property
    def _is_aware(self) -> bool:
        return self._aware is not None and self._aware.is_begun

    # ------------------------------------------------------------------ the end

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Leave the modules quantized with the parameters of the last fake quantization.

        After an error they are unchanged, so that the training can continue.
        """
        try:
            if state.broken_off:
                return True
            if self._is_aware:
                self._finish_training(state)
            elif self._saw_training:
                logger.warning(
                    f"{type(self).__name__} has not come to its start ({self.start or 0:g}): "
                    "nothing is quantized."
                )
        finally:
            if self._aware is not None:
                self.remove_hooks()
                self._aware.clear()
                self._aware.unregister()
                self._aware = None
            super().on_finalize(state, **kwargs)
        return True

    def _finish_training(self, state: State) -> None:
        aware = self._aware
        assert aware is not None
        unreached = aware.unreached()
        if unreached:
            raise TargetError(
                f"No token of the training has reached {listed(unreached)}, whose scale is static.",
                "Train on data that uses it, or put it on the recipe's ignore list.",
            )
        aware.warn_of_idle()
        # Compute all of them first, so that an error leaves the model unchanged.
        weights = {m: aware.weights.parameters(m) for m in self._schemes if m in aware.weights}
        static = {module: aware.stored(module) for module in (*self._schemes, *self._attention)}
        self.remove_hooks()
        aware.clear()
        aware.unregister()
        for module, scheme in self._schemes.items():
            parameters = weights.get(module)
            if parameters is not None:
                weight = weight_of(module)
                write(weight, parameters.round(whole(weight).detach()))
            with shapes_shown(module):
                attach_linear(module, scheme, parameters, static[module])
        for module in self._attention:
            args, queries = self._attention_args(module)
            scheme = getattr(module, "quantization_scheme", None) if queries else None
            attach_attention(module, args, static[module], scheme)
        self._shared.keep(self._attention)
        self._shared.attach(self._shared.names, lambda source: self.adopt(state, [source]))
        every = (*self._schemes, *self._attention, *self._shared.names)
        if in_pieces(state.model):
            for module in every:
                as_buffers(module)
        self._finished.update(every)
        logger.info(f"{type(self).__name__}: {len(self._schemes)} modules quantized.")

    # ------------------------------------------------------------------ checkpoints and figures

    def state_dict(self) -> dict[str, Any]:
        """The progress of fake quantization, and the observations."""
        return self._aware.state_dict() if self._aware is not None and self._is_aware else {}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore fake quantization as saved, or to its state before the start."""
        if saved:
            if self._aware is None:
                self._aware = self._make_aware()
            self._aware.load_state_dict(state, saved)
        elif self._aware is not None and self._is_aware:
            self._begin_anew(self._aware)

    def _begin_anew(self, aware: AwareTraining) -> None:
        """Reset to before the start; the parameters of learned scales stay on the model."""
        self.remove_hooks()
        aware.clear()
        self._aware = None
        if self.learned_scales:
            self._aware = self._make_aware()
            self._aware.watch()

    def figures(self, state: State) -> dict[str, float]:
        """The ranges of the activations whose scales are static."""
        return self._aware.figures() if self._aware is not None else {}

    # ------------------------------------------------------------------ helpers

    def _make_aware(self) -> AwareTraining:
        return AwareTraining(
            self,
            self._schemes,
            {module: self._attention_args(module) for module in self._attention},
            self._names,
            self._fused,
            learned=self.learned_scales,
            calibration_steps=self.num_calibration_steps,
            update=self.update,
        )

    def _check_learnable(self) -> None:
        if any(weight_of(module).is_meta for module in self._schemes):
            raise _unlearnable("the weights of this run are loaded block by block")

    def _check_training(self) -> None:
        """Refuse options that only work in calibration.

        Raises:
            RecipeError: an observer needs statistics that training does not collect.
        """
        weighing: Iterable[Module] = (
            module for module, scheme in self._schemes.items() if weighs_inputs(scheme.weights)
        )
        names = [self._names[module] for module in weighing]
        if names:
            raise RecipeError(
                f"The weight observer of {listed(names)} weighs errors by calibration data, "
                "which a training does not collect.",
                "Take another weight_observer (memoryless_minmax, memoryless_mse), or oneshot.",
            )


def _unlearnable(reason: str) -> RecipeError:
    return RecipeError(
        f"learned_scales needs a training: {reason}.",
        "Use train, or leave learned_scales out.",
    )
