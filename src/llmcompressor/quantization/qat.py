# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: fake quantization of the modules of a model during training.

Every module of the modifier has two hooks. The one before its forward rounds the input and puts the
rounded weight into the module's ``__dict__``, where ``module.weight`` finds it before the
parameter. The one after the forward removes it again and rounds the output. So any module that
reads ``self.weight`` is supported, gradients go to the parameter, and no name changes.

::

    learned scales    step 0       start            + num_calibration_steps     end
    registered        plain        observers watch  everything is rounded       static scales frozen
    |-----------------|------------|----------------|---------------------------|-------------->
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import MOVED_TO_THE_RUN, RecipeRules, Traits
from llmcompressor.core.events import Event, EventType
from llmcompressor.core.state import State
from llmcompressor.errors import InputError, LifecycleError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.modeling.patches import exclude_from_compile, reset_compiled
from llmcompressor.modeling.sharded import (
    convert_to_buffers,
    full_shapes_reported,
    gather_full,
    has_partitioned_parameters,
    write_sharded,
    zero_sharded,
)
from llmcompressor.numerics.straight_through import with_zero_gradients
from llmcompressor.observers.tokens import token_mask
from llmcompressor.quantization.attach import (
    attach_linear,
    enable_attention_hooks,
)
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.fake_quantize import (
    WEIGHT_STEP,
    ActivationFakeQuantizer,
    WeightFakeQuantizer,
)
from llmcompressor.quantization.parameters import needs_input_importance, weight_of
from llmcompressor.runtime.progress import join_names

# --------------------
# All-gather of observed statistics over the processes of a distributed training.


def all_gather_statistics(values: list[Any]) -> list[list[Any]]:
    """``values`` of every process in rank order; those of this process alone without a group.

    They are tuples of small tensors, or ``None``; equally many on every process.
    """
    distributed = torch.distributed
    alone = not (distributed.is_available() and distributed.is_initialized())
    if alone or distributed.get_world_size() == 1:
        return [values]
    devices = [None if value is None else value[0].device for value in values]
    ranks: list[Any] = [None] * distributed.get_world_size()

    def moved(given: list[Any], to: Sequence[Any]) -> list[Any]:
        pairs = zip(given, to, strict=True)
        return [one and tuple(part.to(device) for part in one) for one, device in pairs]

    distributed.all_gather_object(ranks, moved(values, ["cpu"] * len(values)))
    return [moved(one, devices) for one in ranks]


# --------------------
# Quantization-aware training: fake quantization of the modules of a model during training.

_SEARCH_EVERY = 50
_LOOK_AFTER = 50  # steps, or an epoch if that is shorter: branches may wait for their data
_NOT_CALLED = (
    "A head is not called by trainers that compute the loss from its weight, as TRL's SFTTrainer "
    "does: derive from it a class with compute_loss = transformers.Trainer.compute_loss, or put "
    "the head on the recipe's ignore list."
)
_MISSING = object()
_KINDS = {"q": "query", "k": "key", "v": "value"}


class QuantizationAwareTraining:
    """The fake quantization of the modules of one modifier during training."""

    def __init__(self, modifier: TrainableMixin) -> None:
        self._modifier = modifier
        self._schemes, self._names = modifier._schemes, modifier._names
        self._attention = {one: modifier._attention_args(one) for one in modifier._attention}
        weights = {
            module: scheme.weights
            for module, scheme in self._schemes.items()
            if scheme.weights is not None
        }
        learned, follow = modifier.learned_scales, modifier.update is None
        self.weights = WeightFakeQuantizer(
            weights, self._names, modifier._fused, learned=learned, follow=follow
        )
        self._activations: dict[Module, dict[str, ActivationFakeQuantizer]] = {}
        for module, base, args in self._wanted():
            one = ActivationFakeQuantizer(module, self._names[module], base, args, learned=learned)
            self._activations.setdefault(module, {})[base] = one
        self._steps_left = modifier.num_calibration_steps if self._static else 0
        self._learning: set[Module] = set()
        if learned:
            self._learning.update(one.module for one in self._each() if one.learned)
            self._learning.update(self.weights)
        self.is_begun = self._is_frozen = self._in_batch = False
        self._last_step = self._steps = 0
        self._mask: Tensor | None = None
        self._shadowed: dict[Module, Any] = {}
        self._last_input: tuple[Any, Any, Tensor] | None = None
        self._hooked: set[Module] = set()
        self._rounded: dict[Module, bool] = {}
        self._rounding_steps, self._looked = 0, False

    @property
    def is_rounding(self) -> bool:
        """True if forwards are fake-quantized: training has started and scales are known."""
        return self.is_begun and self._steps_left <= 0

    # ------------------------------------------------------------------ set-up

    def register(self) -> None:
        """Register the parameters of learned scales, before the optimizer is created."""
        self.weights.register()
        for one in self._each():
            one.register()
        self.watch()

    def watch(self) -> None:
        """Register forward hooks on the modules with learned scales."""
        for module in self._learning:
            self._hook(module)

    def unregister(self) -> None:
        """Remove the parameters of learned scales."""
        for module in self._learning:
            for name in self._step_names(module):
                module._parameters.pop(name, None)
        self._learning = set()

    def begin(self, state: State, event: Event) -> None:
        """Start fake quantization at the schedule's start."""
        self._last_step = event.global_step
        for module in self._learning:  # weight decay may have changed them; reset them to zero
            for name in self._step_names(module):
                zero_sharded(getattr(module, name))
        self.hook_modules(state)
        if not self._steps_left:
            logger.info(f"{len(self._names)} modules are fake-quantized from here on.")

    def hook_modules(self, state: State) -> None:
        """Register the forward hooks of all modules."""
        self.is_begun = True
        reset_compiled()
        for module in self._schemes:
            self._hook(module)
        for module, (_, queries) in self._attention.items():
            enable_attention_hooks(state.model, module, queries=queries)
            module.quantization_enabled = False  # type: ignore[assignment]  # our hooks round
            for base in self._activations[module]:
                hook = exclude_from_compile(partial(self._on_states, base))
                self._modifier.register_hook(module, hook, _KINDS[base])

    def _hook(self, module: Module) -> None:
        if module in self._hooked:
            return
        self._hooked.add(module)
        register = self._modifier.register_hook
        register(module, exclude_from_compile(self._before), "forward_pre", with_kwargs=True)
        register(module, exclude_from_compile(self._after), "forward", always_call=True)

    # ------------------------------------------------------------------ events

    def batch_start(self, state: State, event: Event) -> None:
        """Handle the start of a batch: set its padding mask and invalidate the weight scales."""
        if event.global_step > self._last_step:
            self.step_done(event)
        batch = state.batch_data
        # bool [batch, tokens], true at real tokens; None if the batch has no padding mask
        mask = token_mask(batch) if isinstance(batch, Mapping) else None
        self._in_batch, self._mask = True, mask
        self._weights_changed()

    def step_done(self, event: Event) -> None:
        """Handle an optimizer step: commit the observations of the step."""
        self._weights_changed()
        if event.global_step <= self._last_step:
            return
        self._last_step = event.global_step
        self._steps += 1
        due = self._steps % _SEARCH_EVERY == 0
        if self._modifier.update is not None:
            due = event.should_update(self._modifier.start, None, self._modifier.update)
        if self._static and not self._is_frozen:
            self._commit()
        if due:
            self.weights.renew()
            for one in () if self._is_frozen else self._static:
                one.renew()
        if self.is_rounding:
            self._check_unused_modules(event)
        if self._steps_left > 0:
            self._steps_left -= 1
            if self._steps_left:
                return
            reset_compiled()
            if left := self.unreached():
                logger.warning(
                    f"No token has reached {join_names(left)} yet: they are fake-quantized once "
                    "one has."
                )
            logger.info(f"{len(self._names)} modules are fake-quantized from here on.")

    def _commit(self) -> None:
        ranks = all_gather_statistics([one.collected() for one in self._static])
        for one, seen in zip(self._static, zip(*ranks, strict=True), strict=True):
            one.commit(seen)

    def batch_end(self) -> None:
        """Handle the end of a batch: later forwards, such as an evaluation, are not observed."""
        self._in_batch, self._mask, self._last_input = False, None, None

    def freeze(self) -> None:
        """Freeze static scales; learned ones are still trained."""
        self._is_frozen = True

    def _weights_changed(self) -> None:
        self.weights.invalidate()
        self.weights.share()

    def _check_unused_modules(self, event: Event) -> None:
        """Check after the first step, and once more later, that all modules are being rounded."""
        self._rounding_steps += 1
        if self._rounding_steps == 1 and len(self.weights) and not self._rounded:
            raise InputError(
                f"Nothing was fake-quantized in step {event.global_step}: no forward came by "
                f"{join_names(self._names[module] for module in self._schemes)}.",
                f"Train the model that the recipe was applied to. {_NOT_CALLED}",
            )
        if self._rounding_steps == min(event.steps_per_epoch or _LOOK_AFTER, _LOOK_AFTER):
            self.warn_unused_modules()

    def warn_unused_modules(self) -> None:
        """Warn once about modules whose weights should be rounded but never were."""
        idle = [self._names[one] for one in self.weights if one not in self._rounded]
        if idle and self._rounding_steps and not self._looked:
            logger.warning(
                f"{join_names(idle)} was not called in the {self._rounding_steps} steps since fake "
                "quantization began: the model does not learn with its rounded weight. "
                f"{_NOT_CALLED}"
            )
        self._looked = True

    # ------------------------------------------------------------------ hooks

    def _before(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._unshadow(module)  # left after a BaseException such as an interrupt
        if module not in self._schemes:  # a copy of one of our modules shares its hooks
            return None
        if not self.is_rounding:
            if module in self._learning and torch.is_grad_enabled():
                steps = [getattr(module, name) for name in self._step_names(module)]
                self._shadow(module, with_zero_gradients(weight_of(module), *steps))
            if self.is_begun:
                self._observe(module, "input", first_tensor(args, kwargs))
            return None
        if module in self.weights:
            if self._in_batch:
                self._rounded[module] = True
            self._shadow(module, self.weights(module, weight_of(module)))
        one = self._activations.get(module, {}).get("input")
        x = None if one is None else first_tensor(args, kwargs)
        if one is None or x is None:
            return None
        self._observe(module, "input", x)
        rounded = self._rounded_input(one, x)
        return (
            tuple(rounded if value is x else value for value in args),
            {name: rounded if value is x else value for name, value in kwargs.items()},
        )

    def _after(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        self._unshadow(module)
        one = self._activations.get(module, {}).get("output")
        if one is None or not isinstance(output, Tensor) or not self.is_begun:
            return None
        self._observe(module, "output", output)
        return one(output) if self.is_rounding else None

    def _on_states(self, base: str, module: Module, states: Tensor) -> Tensor | None:
        if module not in self._activations:
            return None
        self._observe(module, base, states)
        return self._activations[module][base](states) if self.is_rounding else None

    def _observe(self, module: Module, base: str, x: Tensor | None) -> None:
        if x is None or not self._in_batch or self._is_frozen:
            return
        one = self._activations.get(module, {}).get(base)
        if one is not None:
            # detached: recomputation under gradient checkpointing must save the same tensors
            one.collect(x.detach(), self._mask)

    def _rounded_input(self, one: ActivationFakeQuantizer, x: Tensor) -> Tensor:
        """``x`` rounded; computed once for all modules with this input and dynamic scales."""
        if one.args.dynamic is not True:
            return one(x)
        how = (one.args, x._version, torch.is_grad_enabled())
        if self._last_input is not None:
            last, last_how, rounded = self._last_input
            if last() is x and last_how == how:
                return rounded
        rounded = one(x)
        self._last_input = (ref(x), how, rounded)
        return rounded

    def _shadow(self, module: Module, weight: Tensor) -> None:
        # Keep the previous entry: wrappers that shard parameters use ``__dict__`` too.
        self._shadowed[module] = module.__dict__.get("weight", _MISSING)
        module.__dict__["weight"] = weight

    def _unshadow(self, module: Module) -> None:
        before = self._shadowed.pop(module, None)
        if before is _MISSING:
            module.__dict__.pop("weight", None)
        elif before is not None:
            module.__dict__["weight"] = before

    # ------------------------------------------------------------------ the end

    def stored(self, module: Module) -> dict[str, Tensor]:
        """The static activation parameters of a module, by their names in the checkpoint."""
        found: dict[str, Tensor] = {}
        for one in self._activations.get(module, {}).values():
            found |= one.stored()
        return found

    def unreached(self) -> list[str]:
        """Descriptions of the static activations without any observation."""
        return [f"{one.name} ({one.base})" for one in self._static if not one.is_known]

    def clear(self) -> None:
        """Remove all training-only state, including a weight left by a failed forward."""
        for module in list(self._shadowed):
            self._unshadow(module)
        for module in self._attention:
            module.__dict__.pop("quantization_enabled", None)
        self._last_input = None

    def figures(self) -> dict[str, float]:
        """The ranges of static activations, by logging tag."""
        found: dict[str, float] = {}
        for one in self._static:
            if one.observer is not None and one.observer.observations:
                low, high = one.observer.range()
                tag = f"quantization/{one.name}.{one.base}"
                found[f"{tag}.min"], found[f"{tag}.max"] = float(low.min()), float(high.max())
        return found

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The progress of the schedule, the observations, and the scales that are kept."""
        return {
            "steps": self._steps,
            "steps_left": self._steps_left,
            "last_step": self._last_step,
            "frozen": self._is_frozen,
            "weights": self.weights.state_dict(),
            "activations": {f"{one.name}.{one.base}": one.state_dict() for one in self._static},
        }

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore the state saved by :meth:`state_dict` and register the hooks."""
        self._steps, self._steps_left = saved["steps"], saved["steps_left"]
        self._last_step, self._is_frozen = saved["last_step"], saved["frozen"]
        self.weights.load_state_dict(saved["weights"])
        for one in self._static:
            key = f"{one.name}.{one.base}"
            if key not in saved["activations"]:
                raise LifecycleError(
                    f"What was saved of this training has nothing of the {one.base} of {one.name}.",
                    "Begin anew, or go on from an earlier checkpoint.",
                )
            one.load_state_dict(saved["activations"][key])
        self.hook_modules(state)

    # ------------------------------------------------------------------ helpers

    def _wanted(self) -> Iterable[tuple[Module, str, QuantizationArgs]]:
        """Every activation to be quantized: module, kind and arguments."""
        for module, scheme in self._schemes.items():
            if scheme.input_activations is not None:
                yield module, "input", scheme.input_activations
            if scheme.output_activations is not None:
                yield module, "output", scheme.output_activations
        for module, (args, queries) in self._attention.items():
            for base in ("q", "k", "v") if queries else ("k", "v"):
                yield module, base, args

    def _each(self) -> list[ActivationFakeQuantizer]:
        return [one for bases in self._activations.values() for one in bases.values()]

    @property
    def _static(self) -> list[ActivationFakeQuantizer]:
        return [one for one in self._each() if one.observer is not None]

    def _step_names(self, module: Module) -> list[str]:
        names = [WEIGHT_STEP] if module in self.weights else []
        activations = self._activations.get(module, {}).values()
        return names + [one.step_name for one in activations if one.learned]


# --------------------
# The training part of a quantizing modifier: fields, schedule and finalization.

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

    rules: ClassVar[RecipeRules] = replace(
        QuantizationMixin.rules,
        needs_time=True,
        renamed={"disable_quantization_observer_epoch": "end"},
        moved=MOVED_TO_THE_RUN,
    )

    num_calibration_steps: int = Field(default=1, ge=1)
    learned_scales: bool = False
    sequential_update: bool = True
    sequential_targets: str | list[str] | None = None

    _aware: QuantizationAwareTraining | None = PrivateAttr(None)
    _saw_training: bool = PrivateAttr(False)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Also register the parameters of learned scales, before the optimizer is created."""
        done = super().on_initialize(state, **kwargs)
        if self.learned_scales:
            if any(weight_of(module).is_meta for module in self._schemes):
                raise _unlearnable_error("the weights of this run are loaded block by block")
            self._aware = QuantizationAwareTraining(self)
            self._aware.register()
        return done

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Refuse learned scales in a calibration without training."""
        if self.learned_scales:
            raise _unlearnable_error("a calibration learns nothing")
        super().on_calibration_start(state, event, **kwargs)

    # ------------------------------------------------------------------ schedule

    @property
    def traits(self) -> Traits:
        """A training observes ``num_calibration_steps``, if there is a static scale."""
        found = super().traits
        steps = self.num_calibration_steps if found.needs_data else 0
        return replace(found, observing_steps=steps)

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
        if self.started and not self._is_training_active:  # started before the first batch
            self._begin(state, event)
        if self._aware is None or not self._is_training_active:
            return
        if event.type_ is EventType.BATCH_START:
            self._aware.batch_start(state, event)
        elif event.type_ is EventType.OPTIM_POST_STEP:
            self._aware.step_done(event)
        elif event.type_ is EventType.BATCH_END:
            self._aware.batch_end()

    def on_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Start observing, and later fake-quantizing, from this batch on."""
        if event.type_ in _BATCH_EVENTS and not self._is_training_active:
            self._begin(state, event)

    def on_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Freeze static scales; fake quantization continues to the end of the training."""
        if self._aware is not None:
            self._aware.freeze()

    def _begin(self, state: State, event: Event) -> None:
        if self._aware is None:
            self._aware = QuantizationAwareTraining(self)
        self._aware.begin(state, event)
        if event.type_ is EventType.BATCH_START:
            self._aware.batch_start(state, event)

    @property
    def _is_training_active(self) -> bool:
        return self._aware is not None and self._aware.is_begun

    # ------------------------------------------------------------------ the end

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Leave the modules quantized with the parameters of the last fake quantization.

        After an error they are unchanged, so that the training can continue.
        """
        try:
            if state.schedule.aborted:
                return True
            if self._is_training_active:
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
                f"No token of the training has reached {join_names(unreached)}, whose scale is "
                "static.",
                "Train on data that uses it, or put it on the recipe's ignore list.",
            )
        aware.warn_unused_modules()
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
                write_sharded(weight, parameters.round(gather_full(weight).detach()))
            with full_shapes_reported(module):
                attach_linear(module, scheme, parameters, static[module])
        for module in self._attention:
            self._attach_attention(module, static[module])
        self._shared.keep(self._attention)
        blocks = state.run.block_source
        self._shared.attach(self._shared.names, lambda source: self.adopt(state, [source]), blocks)
        every = (*self._schemes, *self._attention, *self._shared.names)
        if has_partitioned_parameters(state.model):
            for module in every:
                convert_to_buffers(module)
        self._finished.update(every)
        logger.info(f"{type(self).__name__}: {len(self._schemes)} modules quantized.")

    # ------------------------------------------------------------------ checkpoints and figures

    def state_dict(self) -> dict[str, Any]:
        """The progress of fake quantization, and the observations."""
        return (
            self._aware.state_dict() if self._aware is not None and self._is_training_active else {}
        )

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore fake quantization as saved, or to its state before the start."""
        if saved:
            if self._aware is None:
                self._aware = QuantizationAwareTraining(self)
            self._aware.load_state_dict(state, saved)
        elif self._aware is not None and self._is_training_active:
            self.remove_hooks()
            self._aware.clear()
            self._aware = None
            if self.learned_scales:  # their parameters stay on the model
                self._aware = QuantizationAwareTraining(self)
                self._aware.watch()

    def figures(self, state: State) -> dict[str, float]:
        """The ranges of the activations whose scales are static."""
        return self._aware.figures() if self._aware is not None else {}

    # ------------------------------------------------------------------ helpers

    def _check_training(self) -> None:
        """Refuse observers that need statistics that training does not collect."""
        names = [
            self._names[module]
            for module, scheme in self._schemes.items()
            if needs_input_importance(scheme.weights)
        ]
        if names:
            raise RecipeError(
                f"The weight observer of {join_names(names)} weighs errors by calibration data, "
                "which a training does not collect.",
                "Take another weight_observer (memoryless_minmax, memoryless_mse), or oneshot.",
            )


def _unlearnable_error(reason: str) -> RecipeError:
    return RecipeError(
        f"learned_scales needs a training: {reason}.",
        "Use train, or leave learned_scales out.",
    )
