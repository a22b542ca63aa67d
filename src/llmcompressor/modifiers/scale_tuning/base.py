# SPDX-License-Identifier: Apache-2.0
"""Scale tuning: train scales and gains of norms with frozen codes, end to end.

The second phase of Chen et al., *EfficientQAT: Efficient Quantization-Aware Training for Large
Language Models*, arXiv:2407.11062, with the original model's predictions as the objective; see
:mod:`llmcompressor.numerics.scale_tuning` for the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import (
    Cost,
    DataSize,
    DataUse,
    Granularity,
    RecipeRules,
    Traits,
)
from llmcompressor.core.events import Event, EventType
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import LifecycleError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.matching import (
    as_targets,
    check_targets,
    match_named_modules,
    matches_any,
)
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.offload import TensorStore, activation_budget, device_activation_budget
from llmcompressor.modeling.weights import embeddings
from llmcompressor.modifiers.scale_tuning.model import (
    Batch,
    TunedModel,
    TunedTensors,
    moved_gain,
)
from llmcompressor.modifiers.scale_tuning.training import TrainedOffsets
from llmcompressor.modifiers.scale_tuning.tune import (
    OriginalOutputs,
    TuningOptions,
    TuningResult,
    tune_scales,
    tuning_cost,
)
from llmcompressor.numerics.scales import ScaleFormat
from llmcompressor.quantization.attach import set_parameter
from llmcompressor.quantization.parameters import replace_weight
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.bridge import needs_global_scale, scale_format_of

Tuned = Literal["scales", "norms"]
_OF_CALIBRATION = frozenset({"epochs", "learning_rate", "batch_size", "seed"})
"""Fields without effect in a training."""


class ScaleTuningModifier(Modifier):
    """Train the scales of quantized weights, and the gains of norms, with frozen codes.

    It stands after the modifiers that quantize. In a training it takes a quantized model: the
    trainer's loss, rate and batches take the place of its own. Codes, zero points and static scales
    of activations stay as they are, and so do the names, shapes and dtypes of all stored tensors.

    Attributes:
        targets: quantized modules whose scales are trained: class names, module names, ``re:``
            patterns. Those that are not quantized are left out.
        ignore: modules whose scales or gains stay; takes precedence over ``targets``.
        tune: ``scales``, ``norms`` (the weights of all norms), or both.
        epochs: passes over the calibration data; 0 changes nothing.
        learning_rate: rate of the first step, as a share of a scale; it decays linearly to zero.
        batch_size: samples of a step, at least: samples that are run together are not split.
        seed: of the order of the samples.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(changes_weights=True, takes_quantized=True)

    targets: str | list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: str | list[str] = Field(default_factory=list)
    tune: list[Tuned] = Field(default_factory=lambda: list(get_args(Tuned)))
    epochs: int = Field(default=4, ge=0, le=1000)
    learning_rate: float = Field(default=2e-3, gt=0.0, le=0.1)
    batch_size: int = Field(default=8, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**32)

    _tensors: TunedTensors = PrivateAttr(default_factory=lambda: TunedTensors({}, {}))
    _original: OriginalOutputs | None = PrivateAttr(None)
    _result: TuningResult | None = PrivateAttr(None)
    _finished: set[Module] = PrivateAttr(default_factory=set)
    _trained: TrainedOffsets | None = PrivateAttr(None)

    @field_validator("tune", mode="before")
    @classmethod
    def _read_tune(cls, given: Any) -> Any:
        named = [given] if isinstance(given, str) else given
        if isinstance(named, list) and (not named or len(set(map(str, named))) < len(named)):
            raise RecipeError(f"tune is {given!r}", "Name each of scales and norms at most once.")
        return named

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """It learns from all data when its pass begins, and has seen the original model before."""
        return Traits(
            data=DataUse.LEARN_FIRST if self.epochs else DataUse.NONE,
            granularity=Granularity.LINEAR,
            begins_pass=True,
            by_block=True,
            sees_original=self.epochs > 0,
        )

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of the training, for some modules of the model."""
        trained = sum(one.numel() for one in self._tensors.starts().values())
        linears = [one for one in modules if isinstance(one, Linear)]
        is_head = len(modules) == 1 and bool(linears)
        return tuning_cost(
            sum(one.weight.numel() for one in linears),
            sum(one.in_features + one.out_features for one in linears),
            linears[0].out_features if is_head else 0,
            trained,
            self.epochs,
            data,
        )

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Steps, and divergences before and after, under the name of the model."""
        found = self._result
        if found is None or (names is not None and "" not in names):
            return {}
        return {
            "": {
                "steps": found.steps,
                "divergence_before": found.divergence_before,
                "divergence_after": found.divergence_after,
            }
        }

    # ------------------------------------------------------------------ before

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find what is trained; a failure changes nothing.

        Raises:
            TargetError: nothing is quantized, scales cannot be trained, or there is no head.
        """
        model = state.model
        check_targets(model, self.targets, self.ignore)
        trains = state.schedule.steps_per_epoch is not None or state.optimizer is not None
        every = dict(named_modules(model))
        quantized = [one for one in every.values() if _weight_arguments(one) is not None]
        if not quantized and trains:
            raise self._not_quantized_error()
        if not quantized:
            raise TargetError(
                f"{self._name} trains scales of quantized weights, and no modifier before it "
                "quantizes any.",
                "Put it after the one that does, as GPTQModifier.",
            )
        weights = {}
        if "scales" in self.tune:
            weights = self._find_weights(match_named_modules(model, self.targets, self.ignore))
        ignored = as_targets(self.ignore)
        norms = {
            one: name
            for name, one in every.items()
            if "norms" in self.tune and _is_norm(one) and not matches_any(name, one, ignored)
        }
        self._tensors = TunedTensors(weights, norms)
        written = [one for one in quantized if hasattr(one, "quantization_status")]
        if trains:
            self._begin_training(model, every, written=len(written) == len(quantized))
        elif len(written) == len(quantized):
            raise TargetError(
                f"The model is quantized already, and {self._name} compares with the original one.",
                "Use train, with OutputDistillationModifier and the original as distill_teacher; "
                "or quantize the original here.",
            )
        else:
            _head_of(model)
        return True

    def _begin_training(self, model: Module, every: Mapping[str, Module], *, written: bool) -> None:
        """Put the trained offsets on a quantized model."""
        if not written:
            raise self._not_quantized_error()
        states = [
            name
            for name, one in every.items()
            if hasattr(one, "quantization_scheme") and not isinstance(one, Linear | Embedding)
        ]
        if states:
            raise TargetError(
                f"The keys and values of {join_names(states)} are quantized, and pass no gradient.",
                "Train a model without a quantized cache.",
            )
        idle = sorted(self.model_fields_set & _OF_CALIBRATION)
        if idle:
            logger.warning(
                f"{self._name}: without effect in a training: {join_names(idle)}. The trainer has "
                "such arguments."
            )
        self._trained = TrainedOffsets(self, model, self._tensors)

    def _not_quantized_error(self) -> TargetError:
        return TargetError(
            f"{self._name} trains scales of a quantized model in a training, and this one is not "
            "quantized.",
            "Give train the folder that oneshot has written; or use oneshot, with a modifier that "
            "quantizes before this one.",
        )

    def should_start(self, event: Event) -> bool:
        """Return True at the first batch of a training: it works in the whole of it."""
        return self._trained is not None and event.type_ is EventType.BATCH_START

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Register the hooks again; offsets are parameters of the model."""
        if self._trained is not None:
            self.remove_hooks()
            self._trained.watch()

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Give modules what a training has learned, unless an error has ended it."""
        if self._trained is not None:
            self.remove_hooks()
            offsets = self._trained.remove()
            self._trained = None
            if not state.schedule.aborted:
                self._put(offsets, [*self._tensors.weights, *self._tensors.norms])
        return True

    def _find_weights(
        self, matched: Iterable[tuple[str, Module]]
    ) -> dict[Module, tuple[str, QuantizationArgs]]:
        found, refused = {}, []
        for name, module in matched:
            args = _weight_arguments(module)
            if args is None:
                continue
            found[module] = name, args
            if needs_global_scale(args) or scale_format_of(args) is not ScaleFormat.PLAIN:
                refused.append(name)
        if refused:
            raise TargetError(
                f"The scales of {join_names(refused)} are 8-bit floats or powers of two, whose "
                "steps are larger than what training changes.",
                "Put these modules on the ignore list, or train norms alone with tune: [norms].",
            )
        if not found:
            raise TargetError(
                f"Nothing that {join_names(as_targets(self.targets))} matches is quantized.",
                "Correct the targets, or leave them out.",
            )
        return found

    @torch.no_grad()
    def see_original(self, state: State, batches: Sequence[Batch]) -> None:
        """Keep what the original model predicts from."""
        source = state.run.block_source
        if source.rest_is_finished:  # by an earlier run
            return
        head = _head_of(state.model)
        dense = {name: one.detach() for name, one in head.named_parameters()}
        if _weight_arguments(head) is not None:  # else nothing changes it
            dense = {name: one.clone() for name, one in dense.items()}
        store = self._store(state)
        with source.visits() as arrive, contextlib.closing(self._store(state)) as shelf:
            model = TunedModel(state.model, TunedTensors({}, {}), head, arrive, shelf)
            logger.info(f"{self._name}: the original model runs on {len(batches)} batches.")
            tickets = model.store_hidden_states(batches, store)
        self._original = OriginalOutputs(
            batches, store, tickets, (dense["weight"], dense.get("bias"))
        )

    def _store(self, state: State) -> TensorStore:
        return TensorStore(
            activation_budget(state.run.activation_budget),
            device_activation_budget(model_device(state.model), state.run.device_memory),
        )

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Train, unless an earlier run has finished everything.

        Raises:
            LifecycleError: it has not seen the original model, as the pipeline was called directly.
        """
        source = state.run.block_source
        if not self.epochs or source.rest_is_finished:
            return
        if self._original is None:
            raise LifecycleError(
                f"{self._name} compares with the original model, which it was not shown.",
                "Run the recipe with oneshot.",
            )
        model, device = state.model, model_device(state.model)
        starts = {
            name: torch.zeros_like(one, device=device)
            for name, one in self._tensors.starts().items()
        }
        options = TuningOptions(self.epochs, self.learning_rate, self.batch_size, self.seed)
        with source.visits() as arrive, contextlib.closing(self._store(state)) as shelf:
            tuned = TunedModel(model, self._tensors, _head_of(model), arrive, shelf)
            self._result = tune_scales(tuned, starts, self._original, options, source)
        self._original.store.close()
        self._original = None

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Nothing is collected; modules are changed when they are finished."""

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Give loaded modules their trained scales and gains."""
        self._put({} if self._result is None else self._result.offsets, modules)

    @torch.no_grad()
    def _put(self, offsets: Mapping[str, Tensor], modules: Iterable[Module]) -> None:
        for module, name in self._waiting(modules):
            if name in offsets and module in self._tensors.weights:
                coded = self._tensors.coded(module).with_scale_at(offsets[name])
                set_parameter(module, "weight_scale", coded.scale)
                replace_weight(module, coded.weight)
            elif name in offsets:
                weight = module.get_parameter("weight")
                weight.copy_(moved_gain(weight, offsets[name]))
            self._finished.add(module)

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark the trained tensors of ``modules`` as written."""
        self._finished.update(one for one, _ in self._waiting(modules))

    def _waiting(self, modules: Iterable[Module]) -> Iterator[tuple[Module, str]]:
        for module in modules:
            name = self._tensors.name(module)
            if name is not None and module not in self._finished:
                yield module, name

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Finish what lies outside of blocks."""
        self.finish(state, [*self._tensors.weights, *self._tensors.norms])


def _weight_arguments(module: Module) -> QuantizationArgs | None:
    """How the weight of a module is quantized; ``None`` if it is not."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    return None if scheme is None or not isinstance(module, Linear) else scheme.weights


def _is_norm(module: Module) -> bool:
    weight = module._parameters.get("weight")
    return "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1


def _head_of(model: Any) -> Linear:
    """The Linear that computes the logits.

    Raises:
        TargetError: there is none, or the model has an encoder.
    """
    head = embeddings(model)[1]
    config = getattr(model, "config", None)
    if isinstance(head, Linear) and not getattr(config, "is_encoder_decoder", False):
        return head
    raise TargetError(
        f"{type(model).__name__} is no language model with a head that is a Linear: there are no "
        "predictions of tokens to compare.",
        "Leave ScaleTuningModifier out.",
    )
