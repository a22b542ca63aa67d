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

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.events import Event
from llmcompressor.core.state import State
from llmcompressor.errors import InputError, LifecycleError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.compiled import compile_anew, never_traced
from llmcompressor.modeling.spread import zero
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.numerics.straight_through import touch
from llmcompressor.observers.tokens import token_mask
from llmcompressor.quantization.attach import tap_attention
from llmcompressor.quantization.fake_activations import FakeActivation
from llmcompressor.quantization.fake_weights import WEIGHT_STEP, FakeWeights
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.quantization.together import gathered
from llmcompressor.wording import listed

__all__ = ["AwareTraining"]

_SEARCH_EVERY = 50
_LOOK_AFTER = 50  # steps, or an epoch if that is shorter: branches may wait for their data
_NOT_CALLED = (
    "A head is not called by trainers that compute the loss from its weight, as TRL's SFTTrainer "
    "does: derive from it a class with compute_loss = transformers.Trainer.compute_loss, or put "
    "the head on the recipe's ignore list."
)
_MISSING = object()
_KINDS = {"q": "query", "k": "key", "v": "value"}


class AwareTraining:
    """The fake quantization of one modifier during training.

    Args:
        modifier: the modifier that registers the hooks.
        schemes: Linear or Embedding → its scheme.
        attention: attention module → the arguments of its states, and whether queries are included.
        names: the names of all of them.
        fused: module → the modules that share a global scale with it, including itself.
        learned: whether static scales are learned.
        calibration_steps: optimizer steps in which static activations are only observed.
        update: interval between searches for weight scales, as in the modifier's field.
    """

    def __init__(
        self,
        modifier: Modifier,
        schemes: Mapping[Module, QuantizationScheme],
        attention: Mapping[Module, tuple[QuantizationArgs, bool]],
        names: Mapping[Module, str],
        fused: Mapping[Module, tuple[Module, ...]],
        *,
        learned: bool,
        calibration_steps: int,
        update: float | None,
    ) -> None:
        self._modifier = modifier
        self._schemes, self._attention, self._names = schemes, attention, names
        self._update = update
        weights = {
            module: scheme.weights
            for module, scheme in schemes.items()
            if scheme.weights is not None
        }
        self.weights = FakeWeights(weights, names, fused, learned=learned, follow=update is None)
        self._activations: dict[Module, dict[str, FakeActivation]] = {}
        for module, base, args in self._wanted():
            one = FakeActivation(module, names[module], base, args, learned=learned)
            self._activations.setdefault(module, {})[base] = one
        self._steps_left = calibration_steps if self._static else 0
        self._learned, self._learning = learned, self._learning_modules() if learned else set()
        self._is_begun = self._is_frozen = self._in_batch = False
        self._last_step = self._steps = 0
        self._mask: Tensor | None = None
        self._shadowed: dict[Module, Any] = {}
        self._last_input: tuple[Any, Any, Tensor] | None = None
        self._hooked: set[Module] = set()
        self._rounded: dict[Module, bool] = {}
        self._rounding_steps, self._looked = 0, False

    @property
    def is_begun(self) -> bool:
        """True once the schedule has reached its start."""
        return self._is_begun

    @property
    def is_rounding(self) -> bool:
        """True if forwards are fake-quantized: training has started and scales are known."""
        return self._is_begun and self._steps_left <= 0

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
                zero(getattr(module, name))
        self.put_hooks(state)
        if not self._steps_left:
            logger.info(f"{len(self._names)} modules are fake-quantized from here on.")

    def put_hooks(self, state: State) -> None:
        """Register the forward hooks of all modules."""
        self._is_begun = True
        compile_anew()
        for module in self._schemes:
            self._hook(module)
        for module, (_, queries) in self._attention.items():
            tap_attention(state.model, module, queries=queries)
            module.quantization_enabled = False  # type: ignore[assignment]  # our hooks round
            for base in self._activations[module]:
                hook = never_traced(self._states_hook(base))
                self._modifier.register_hook(module, hook, _KINDS[base])

    def _hook(self, module: Module) -> None:
        if module in self._hooked:
            return
        self._hooked.add(module)
        register = self._modifier.register_hook
        register(module, never_traced(self._before), "forward_pre", with_kwargs=True)
        register(module, never_traced(self._after), "forward", always_call=True)

    # ------------------------------------------------------------------ events

    def batch_start(self, state: State, event: Event) -> None:
        """Handle the start of a batch: set its padding mask and invalidate the weight scales."""
        if event.global_step > self._last_step:
            self.step_done(event)
        self._in_batch, self._mask = True, _mask_of(state.batch_data)
        self._weights_changed()

    def step_done(self, event: Event) -> None:
        """Handle an optimizer step: commit the observations of the step."""
        self._weights_changed()
        if event.global_step <= self._last_step:
            return
        self._last_step = event.global_step
        self._steps += 1
        due = self._steps % _SEARCH_EVERY == 0
        if self._update is not None:
            due = event.should_update(self._modifier.start, None, self._update)
        if self._static and not self._is_frozen:
            self._commit()
        if due:
            self._renew()
        if self.is_rounding:
            self._look_for_idle(event)
        if self._steps_left > 0:
            self._steps_left -= 1
            if not self._steps_left:
                self._now_rounding()

    def batch_end(self) -> None:
        """Handle the end of a batch: later forwards, such as an evaluation, are not observed."""
        self._in_batch, self._mask, self._last_input = False, None, None

    def freeze(self) -> None:
        """Freeze static scales; learned ones are still trained."""
        self._is_frozen = True

    def _weights_changed(self) -> None:
        self.weights.invalidate()
        self.weights.share()

    def _look_for_idle(self, event: Event) -> None:
        """Check after the first step, and once more later, that all modules are being rounded.

        Raises:
            InputError: no hook of any module was called.
        """
        self._rounding_steps += 1
        if self._rounding_steps == 1 and len(self.weights) and not self._rounded:
            raise InputError(
                f"Nothing was fake-quantized in step {event.global_step}: no forward came by "
                f"{listed(self._names[module] for module in self._schemes)}.",
                f"Train the model that the recipe was applied to. {_NOT_CALLED}",
            )
        if self._rounding_steps == min(event.steps_per_epoch or _LOOK_AFTER, _LOOK_AFTER):
            self.warn_of_idle()

    def warn_of_idle(self) -> None:
        """Warn once about modules whose weights should be rounded but never were."""
        idle = [self._names[one] for one in self.weights if one not in self._rounded]
        if idle and self._rounding_steps and not self._looked:
            logger.warning(
                f"{listed(idle)} was not called in the {self._rounding_steps} steps since fake "
                "quantization began: the model does not learn with its rounded weight. "
                f"{_NOT_CALLED}"
            )
        self._looked = True

    def _renew(self) -> None:
        self.weights.renew()
        if not self._is_frozen:
            for one in self._static:
                one.renew()

    def _commit(self) -> None:
        ranks = gathered([one.collected() for one in self._static])
        for one, seen in zip(self._static, zip(*ranks, strict=True), strict=True):
            one.commit(seen)

    def _now_rounding(self) -> None:
        compile_anew()
        left = [f"{one.name} ({one.base})" for one in self._static if not one.is_known]
        if left:
            logger.warning(
                f"No token has reached {listed(left)} yet: they are fake-quantized once one has."
            )
        logger.info(f"{len(self._names)} modules are fake-quantized from here on.")

    # ------------------------------------------------------------------ hooks

    def _before(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._unshadow(module)  # left after a BaseException such as an interrupt
        if module not in self._schemes:  # a copy of one of our modules shares its hooks
            return None
        if not self.is_rounding:
            if module in self._learning and torch.is_grad_enabled():
                steps = [getattr(module, name) for name in self._step_names(module)]
                self._shadow(module, touch(weight_of(module), *steps))
            if self._is_begun:
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
        return _replaced(args, kwargs, x, self._rounded_input(one, x))

    def _after(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        self._unshadow(module)
        one = self._activations.get(module, {}).get("output")
        if one is None or not isinstance(output, Tensor) or not self._is_begun:
            return None
        self._observe(module, "output", output)
        return one(output) if self.is_rounding else None

    def _states_hook(self, base: str) -> Callable[[Module, Tensor], Tensor | None]:
        def on_states(module: Module, states: Tensor) -> Tensor | None:
            if module not in self._activations:
                return None
            self._observe(module, base, states)
            return self._activations[module][base](states) if self.is_rounding else None

        return on_states

    def _observe(self, module: Module, base: str, x: Tensor | None) -> None:
        if x is None or not self._in_batch or self._is_frozen:
            return
        one = self._activations.get(module, {}).get(base)
        if one is not None:
            # detached: recomputation under gradient checkpointing must save the same tensors
            one.collect(x.detach(), self._mask)

    def _rounded_input(self, one: FakeActivation, x: Tensor) -> Tensor:
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
        self.put_hooks(state)

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

    def _each(self) -> list[FakeActivation]:
        return [one for bases in self._activations.values() for one in bases.values()]

    @property
    def _static(self) -> list[FakeActivation]:
        return [one for one in self._each() if one.observer is not None]

    def _learning_modules(self) -> set[Module]:
        own = {one.module for one in self._each() if one.learned}
        return own | {module for module in self._schemes if module in self.weights}

    def _step_names(self, module: Module) -> list[str]:
        names = [WEIGHT_STEP] if module in self.weights else []
        activations = self._activations.get(module, {}).values()
        return names + [one.step_name for one in activations if one.learned]


def _mask_of(batch: Any) -> Tensor | None:
    """Bool ``[batch, tokens]``, true at real tokens; ``None`` if the batch has no padding mask."""
    return token_mask(batch) if isinstance(batch, Mapping) else None


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with ``old`` replaced by ``new``."""
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )
