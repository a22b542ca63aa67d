# SPDX-License-Identifier: Apache-2.0
"""The base of all quantizing modifiers: fields, schemes, observers, finishing of modules."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn import Embedding, Module

from llmcompressor.core.contract import (
    ELEMENTWISE,
    Cost,
    DataSize,
    DataUse,
    Granularity,
    PlannedModule,
    Prediction,
    RecipeRules,
    Selection,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier, select_records
from llmcompressor.core.state import State
from llmcompressor.errors import LifecycleError, NonFiniteError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.fused import expert_sets, fused_partners, fused_sets, is_expert
from llmcompressor.modeling.matching import check_targets
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.patches import mark_quantized
from llmcompressor.modeling.weights import nonfinite_names
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.scales import global_scale_from_amax
from llmcompressor.observers.canonical import Range
from llmcompressor.quantization.activations import ActivationObservers, works_from_extremes
from llmcompressor.quantization.attach import (
    attach_attention,
    attach_linear,
    cache_scheme,
    cached_attention_modules,
    check_kv_shape_attributes,
    check_replaceable_attention,
    detach,
    disable_attention_hooks,
    enable_attention_hooks,
    quantized_attention_tensors,
    quantized_linear_tensors,
)
from llmcompressor.quantization.ownership import (
    Quantizer,
    have_same_values,
    previous_quantizer,
    untie_quantized_embeddings,
)
from llmcompressor.quantization.parameters import (
    WeightParameters,
    WeightRounding,
    check_observers,
    needs_input_importance,
    observe_weight,
    replace_weight,
    weight_amax_with_headroom,
    weight_of,
    weight_range,
)
from llmcompressor.quantization.shared_caches import SharedKVCaches
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names, progress
from llmcompressor.schemes.assign import is_empty
from llmcompressor.schemes.attention import CACHED_ATTENTION
from llmcompressor.schemes.bridge import default_observer, needs_global_scale
from llmcompressor.schemes.budget import Candidate, parse_budget, parse_candidates
from llmcompressor.schemes.checks import check_schemes, warn_mixed_fused_sets
from llmcompressor.schemes.presets import format_of
from llmcompressor.schemes.resolve import ResolvedSchemes, resolve_schemes

_FLOAT = 4
_EXTREMES = 3
_SEARCHED = 12
"""Looks at an input, for its extremes, and for a histogram or the like."""


SAYING_HOW = ("scheme", "config_groups", "kv_cache_scheme", "budget")
"""The fields one of which says how to quantize."""


_ASKING = (
    "config_groups",
    "targets",
    "ignore",
    "scheme",
    "kv_cache_scheme",
    "weight_observer",
    "input_observer",
    "output_observer",
    "observer",
    "bypass_divisibility_checks",
    "allow_unmatched",
)
"""The fields that schemes are resolved from."""
_OF_BUDGET = ("budget", "candidates")


class QuantizationMixin(Modifier):
    """The fields and the lifecycle that all quantizing modifiers share.

    Attributes:
        config_groups: group name → scheme (a mapping of ``targets``, ``weights``,
            ``input_activations``, ``output_activations``), or preset name → targets.
        targets: targets of ``scheme``: class names, module names, ``re:`` patterns.
        ignore: modules to exclude; it overrides every target.
        scheme: a preset (``"W4A16"``), or presets with their targets.
        kv_cache_scheme: how keys and values are stored during generation.
        budget: in place of a scheme, the ``bits`` for each weight or the ``size`` of the weight
            files; before the run each module gets one of the candidates, so that the expected
            loss is least. ``samples`` is the number of samples whose gradients are used.
        candidates: the schemes to choose from: presets, or fields of schemes. By default W4A16 and
            W8A16.
        weight_observer: the observer that finds the ranges of weights.
        input_observer: the same for inputs with static scales.
        output_observer: the same for outputs.
        observer: the three as one mapping with the keys ``weights``, ``input``, ``output``; or the
            name of the first alone.
        bypass_divisibility_checks: accept group sizes that do not divide a weight's columns: the
            model runs in memory, and a custom runtime may load what is packed.
        allow_unmatched: accept targets that match nothing.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(changes_weights=True)
    leaves_modules: ClassVar[bool] = False
    compensates: ClassVar[bool] = False
    """Later columns of a weight make up for the rounding of earlier ones."""
    _also_asking: ClassVar[tuple[str, ...]] = ()
    """Further fields that a technique's schemes depend on."""

    # Read by llmcompressor.schemes, whose errors say more than a union's would.
    config_groups: dict[str, Any] | None = None
    targets: str | list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: str | list[str] = Field(default_factory=list)
    scheme: Any = None
    kv_cache_scheme: Any = None
    budget: Any = None
    candidates: Any = None
    weight_observer: str | None = None
    input_observer: str | None = None
    output_observer: str | None = None
    observer: Any = None
    bypass_divisibility_checks: bool = False
    allow_unmatched: bool = False

    _resolved: ResolvedSchemes | None = PrivateAttr(None)
    _resolved_from: dict[str, Any] = PrivateAttr(default_factory=dict)
    _schemes: dict[Module, QuantizationScheme] = PrivateAttr(default_factory=dict)
    _names: dict[Module, str] = PrivateAttr(default_factory=dict)
    _was_left: bool = PrivateAttr(False)
    _parameters: dict[Module, WeightParameters] = PrivateAttr(default_factory=dict)
    _rounded: set[Module] = PrivateAttr(default_factory=set)
    _roundings: dict[str, WeightRounding] = PrivateAttr(default_factory=dict)
    _finished: set[Module] = PrivateAttr(default_factory=set)
    _fused: dict[Module, tuple[Module, ...]] = PrivateAttr(default_factory=dict)
    _global_scales: dict[Module, Tensor] = PrivateAttr(default_factory=dict)
    _ranges: dict[Module, Range] = PrivateAttr(default_factory=dict)
    _attention: dict[Module, str] = PrivateAttr(default_factory=dict)
    _shared: SharedKVCaches = PrivateAttr(default_factory=SharedKVCaches)
    _observers_known: bool = PrivateAttr(False)
    _observers: ActivationObservers | None = PrivateAttr(None)

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """Only inputs are observed, so a forward may be paused at every Linear.

        Raises:
            RecipeError: a field names an unknown observer.
        """
        return Traits(
            data=DataUse.STREAM if self._needs_data() else DataUse.NONE,
            granularity=Granularity.LINEAR,
            by_block=True,
            unservable=self.bypass_divisibility_checks,
        )

    def searches_scales(self, args: QuantizationArgs) -> bool:
        """Return True if scales of a weight are searched for, where no observer is named."""
        return False

    def corrects_errors(self, schemes: Iterable[QuantizationScheme]) -> bool:
        """Return True if Linears make up for errors of those before them, with these schemes."""
        return False

    def resolve_quantization_config(self) -> ResolvedSchemes:
        """The schemes that the fields define, resolved again if fields have changed.

        Raises:
            RecipeError: the fields contradict each other, or one of them is wrong.
        """
        asked = {name: getattr(self, name) for name in (*_ASKING, *_OF_BUDGET, *self._also_asking)}
        if self._resolved is None or asked != self._resolved_from:
            self._resolved = self._resolve()
            self._resolved_from = copy.deepcopy(asked)
            self._observers_known = False
        return self._resolved

    @property
    def resolved_config(self) -> ResolvedSchemes:
        """The result of :meth:`resolve_quantization_config`."""
        return self.resolve_quantization_config()

    @property
    def resolved_targets(self) -> set[str]:
        """The targets of the schemes; with groups this is not the field ``targets``."""
        return set(self.resolved_config.targets)

    def _resolve(self) -> ResolvedSchemes:
        if self.budget is None and self.candidates is None:
            return resolve_schemes(**{name: getattr(self, name) for name in _ASKING})
        if self.budget is None:
            raise RecipeError(
                "candidates are given without a budget to choose from them by.",
                "Give budget: {bits: 4.25}, or one of them as scheme.",
            )
        parse_budget(self.budget)
        for name in ("scheme", "config_groups"):
            if getattr(self, name) is not None:
                raise RecipeError(
                    f"{name} and budget are both set.",
                    "Keep one: with a budget the schemes are chosen from candidates.",
                )
        return next(iter(self.resolve_candidates().values()))  # the first stands for all

    def resolve_candidates(self) -> dict[Candidate, ResolvedSchemes]:
        """The schemes of each candidate of the budget, as if it were the only one.

        Raises:
            RecipeError: a candidate is wrong, or contradicts another field.
        """
        fields = {name: getattr(self, name) for name in _ASKING if name != "scheme"}
        every = parse_candidates(self.candidates)
        return {one: resolve_schemes(scheme=one.given, **fields) for one in every}

    def with_choice(self, groups: Mapping[Candidate, Sequence[str]]) -> Self:
        """A new modifier with the schemes that were chosen in the place of the budget.

        Args:
            groups: candidate → the targets that get it.
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        kept = {name: one for name, one in fields.items() if name not in (*_OF_BUDGET, "targets")}
        chosen = {
            one.given if isinstance(one.given, str) else f"group_{place}": one.group(targets)
            for place, (one, targets) in enumerate(groups.items())
            if targets
        }
        return type(self)(**{**kept, "config_groups": chosen})

    def _with_observers(self) -> ResolvedSchemes:
        """The resolved schemes, after a check of their observers, which may be registered late."""
        resolved = self.resolve_quantization_config()
        if not self._observers_known:
            check_observers(resolved, type(self).__name__)
            self._observers_known = True
        return resolved

    def model_post_init(self, context: Any, /) -> None:
        """Refuse contradicting fields when the recipe is read, before any model is loaded."""
        super().model_post_init(context)
        self.resolve_quantization_config()

    def _needs_data(self) -> bool:
        """Return True if a static activation scale, a cache scale or an observer needs data.

        False once all modules were left to a later modifier.
        """
        if self.budget is not None:
            return True
        if self._was_left and not self._schemes and not self._attention:
            return False
        resolved = self._with_observers()
        weighs = any(needs_input_importance(scheme.weights) for scheme in resolved.groups.values())
        return weighs or resolved.requires_calibration_data

    def _beyond_statistics(self) -> str:
        """See :attr:`.Traits.beyond_statistics`; for techniques that need sums of inputs only."""
        resolved = self._with_observers()
        cache, schemes = resolved.kv_cache_scheme, resolved.groups.values()
        outputs = [scheme.output_activations for scheme in schemes]
        if any(one is not None and one.dynamic is not True for one in (cache, *outputs)):
            return "finds static scales of outputs or of a cache"
        if not all(works_from_extremes(scheme.input_activations) for scheme in schemes):
            return "finds static scales from values of activations; static_minmax needs extremes"
        return ""

    def select(self, state: State) -> Selection:
        """The Linears and Embeddings to be quantized.

        Attention states and static outputs are observed up to the last layer. Experts without
        tokens are rounded to nearest; other modules need data.
        """
        outputs = (scheme.output_activations for scheme in self._schemes.values())
        to_end = bool(self._attention) or any(
            args is not None and args.dynamic is not True for args in outputs
        )
        return Selection(modules=list(self._schemes), to_end=to_end, accepts_unreached=is_expert)

    def means(self, name: str, module: Module, holders: Mapping[str, Module]) -> bool:
        """Return True if a scheme that quantizes something matches the module."""
        # called for every module: fields that a run has resolved are not resolved again
        resolved = self._resolved or self.resolve_quantization_config()
        found = resolved.lookup.of(name, module)
        return found is not None and not is_empty(found)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of observing the ranges of inputs with a static scale."""
        weighing = [
            weight_of(one).shape[-1]
            for one in modules
            if one in self._schemes and needs_input_importance(self._schemes[one].weights)
        ]
        squares = _FLOAT * max(weighing, default=0)  # of the inputs' columns
        return Cost(
            flops=ELEMENTWISE * data.tokens * self.watched_values(modules),
            held_bytes=squares,
            summed_bytes=squares,
        )

    def watched_values(self, modules: Sequence[Module]) -> int:
        """Number of values observed per token of the inputs of ``modules``, for static scales."""
        most = 0
        for module in (one for one in modules if one in self._schemes):
            scheme, columns = self._schemes[module], int(weight_of(module).shape[-1])
            args = scheme.input_activations
            observer = None if args is None else default_observer(args, "input")
            is_searched = observer is not None and not observer.endswith("minmax")
            if observer is not None or needs_input_importance(scheme.weights):
                most = max(most, columns * (_SEARCHED if is_searched else _EXTREMES))
        return most

    # ------------------------------------------------------------------ before

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Match modules, run all checks, and attach the schemes to the modules."""
        if self.budget is not None:
            raise RecipeError(
                f"The budget of {type(self).__name__} says nothing yet: oneshot finds the schemes "
                "for it before it begins, and nothing else does.",
                "Use oneshot, or the config_groups of the recipe.yaml that it has written.",
            )
        model, resolved = state.model, self._with_observers()
        check_targets(
            model, resolved.targets, resolved.ignore, allow_unmatched=self.allow_unmatched
        )
        self._warn_unused_targets(resolved.targets)
        untie_quantized_embeddings(state, resolved)
        schemes = resolved.schemes_by_module(model)
        check_schemes(model, schemes, bypass_divisibility=self.bypass_divisibility_checks)
        modules = dict(named_modules(model))
        attention = cached_attention_modules(model)
        taken: dict[Module, Quantizer | None] = {}
        own, names = self._schemes, self._names  # access to pydantic's private fields is slow
        for name, scheme in schemes.items():
            module = modules[name]
            taken[module] = previous_quantizer(state, module, name, scheme, self)
            if isinstance(module, Embedding) and scheme.input_activations is not None:
                raise TargetError(
                    f"{name} is an Embedding: its inputs are row numbers, not activations.",
                    "Give embeddings a group of their own without input_activations, or ignore "
                    "them.",
                )
            if module in attention:
                self._attention[module] = name
            else:
                own[module] = scheme
            names[module] = name
        self._check_queries(model, attention)
        if resolved.kv_cache_scheme is not None:
            self._add_caches(state, attention, schemes, resolved.kv_cache_scheme)
        self._check_caches(state)
        self._check_finite()
        self._find_fused(modules)
        for name, scheme in schemes.items():  # last: an error above leaves the model untouched
            modules[name].quantization_scheme = scheme
        states = {module: self._attention_args(module) for module in self._attention}
        state.facts.kv_cache |= states
        self._shared = SharedKVCaches(model, {one: args for one, (args, _) in states.items()})
        names |= self._shared.names
        self._take(taken)
        state.facts.quantizer.update(dict.fromkeys((*own, *self._attention), self))
        return True

    def _take(self, taken: Mapping[Module, Quantizer | None]) -> None:
        """Make the earlier modifiers of these modules leave them to this one."""
        counts: Counter[str] = Counter()
        for module, owner in taken.items():
            if owner is not None:
                owner.leave(module)
                counts[type(owner).__name__] += 1
        for owner_name, count in counts.items():
            logger.info(
                f"{type(self).__name__} quantizes {count} modules that {owner_name}, which stands "
                "before it and has the same scheme for them, would only round."
            )

    def leave(self, module: Module) -> None:
        """Leave a module to a later modifier (:mod:`llmcompressor.quantization.ownership`)."""
        for each in (self._schemes, self._names, self._fused):
            each.pop(module, None)
        self._was_left = True

    def on_all_initialized(self, state: State) -> None:
        """Warn about sets of modules that are served as one but have different schemes.

        Members may belong to several modifiers. Each set is reported once, by the modifier of its
        first quantized member.
        """
        schemes = {
            name: module.quantization_scheme
            for name, module in named_modules(state.model)
            if hasattr(module, "quantization_scheme")
        }
        own = {self._names[module] for module in self._schemes}
        joined = [*fused_sets(state.model), *expert_sets(state.model)]
        firsts = ((names, next(filter(schemes.__contains__, names), None)) for names in joined)
        warn_mixed_fused_sets(schemes, [names for names, first in firsts if first in own])

    def _check_queries(self, model: Module, attention: Mapping[Module, str]) -> None:
        """Refuse quantized queries that readers cannot replace, or in some layers only."""
        if not self._attention:
            return
        left = [
            name
            for module, name in attention.items()
            if module not in self._attention and not hasattr(module, "quantization_scheme")
        ]
        if left:
            raise TargetError(
                "The attention of some layers is to be quantized, but not that of "
                f"{join_names(left)}, and readers run all layers with one attention function.",
                "Target all of them, or quantize keys and values alone with kv_cache_scheme.",
            )
        check_replaceable_attention(model)

    def _add_caches(
        self,
        state: State,
        attention: Mapping[Module, str],
        schemes: Mapping[str, QuantizationScheme],
        cache: QuantizationArgs,
    ) -> None:
        if not attention:
            raise TargetError(
                "kv_cache_scheme is set, but this model has no attention module of the form that "
                f"readers know: {CACHED_ATTENTION}.",
                "Leave kv_cache_scheme out. A server may quantize the cache by itself, without "
                "calibrated scales, as vLLM does with --kv-cache-dtype fp8.",
            )
        for module, name in attention.items():
            if module not in self._attention:
                previous_quantizer(state, module, name, cache_scheme(cache), self)
            elif not have_same_values(schemes[name].input_activations, cache):
                raise TargetError(
                    f"The scheme of {name} and kv_cache_scheme quantize its keys and values "
                    "differently.",
                    "Leave kv_cache_scheme out, since the scheme has them quantized with the "
                    "queries, or give both the same arguments.",
                )
            self._attention.setdefault(module, name)
            self._names[module] = name

    def _check_caches(self, state: State) -> None:
        for module, name in self._attention.items():
            if module in state.facts.kv_cache:
                raise TargetError(
                    f"The keys and values of {name} are quantized by another modifier of the "
                    "recipe.",
                    "Leave kv_cache_scheme, or the attention modules, to one of them. A "
                    "kv_cache_scheme holds for all layers, whatever is ignored "
                    f"({type(self).__name__} is the later).",
                )
        if self._attention:
            check_kv_shape_attributes(state.model)

    def _check_finite(self) -> None:
        weights = {
            name: weight
            for module, name in self._names.items()
            if isinstance(weight := getattr(module, "weight", None), Tensor)
        }
        bad = nonfinite_names(weights)
        if bad:
            raise NonFiniteError(
                f"The weight of {bad[0]} holds NaN or infinity. Nothing can be made of it: "
                "check the checkpoint, or put the module on the ignore list."
            )

    def _find_fused(self, modules: Mapping[str, Module]) -> None:
        """Find the modules that servers fuse (q, k, v; gate, up) and that need one global scale."""
        schemes = {id(scheme): scheme for scheme in self._schemes.values()}
        shared = {key for key, scheme in schemes.items() if _has_global_scale(scheme)}
        own = {module for module, scheme in self._schemes.items() if id(scheme) in shared}
        for module in (one for one in self._schemes if one in own):
            name = self._names[module]
            names = [name, *(one for one in fused_partners(name, modules) if one in modules)]
            self._fused[module] = tuple(modules[one] for one in names if modules[one] in own)
            others = [one for one in names if modules[one] not in self._schemes]
            taken = [
                one
                for one in others
                if _has_global_scale(getattr(modules[one], "quantization_scheme", None))
            ]
            if taken:
                raise RecipeError(
                    f"{name} is served as one with {join_names(taken)}, which another modifier of "
                    "the recipe quantizes, and all of them need one global scale.",
                    "Let one modifier quantize them; it can have a group of config_groups for "
                    "each.",
                )

    def _warn_unused_targets(self, used: Iterable[str]) -> None:
        """Warn that ``targets`` has no effect because each group has targets of its own."""
        given = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        if self.scheme is None and self.config_groups is None:
            return  # only the KV cache is quantized
        if "targets" in self.model_fields_set and given != ["Linear"] and {*given} != {*used}:
            what = "scheme" if self.config_groups is None else "config_groups"
            logger.warning(
                f"{type(self).__name__}: targets ({join_names(given)}) has no effect beside "
                f"{what}, which has targets of its own ({join_names(used)})."
            )

    def find_global_scales(self, modules: Iterable[Module]) -> None:
        """Compute the global scales of ``modules`` and of all modules fused with them."""
        for module in modules:
            self._global_scale(module)

    def _global_scale(self, module: Module) -> Tensor | None:
        """The global scale shared by ``module`` and all modules fused with it.

        It is computed when the first of them is quantized: an earlier modifier of the recipe may
        have changed their weights since initialization.
        """
        if module in self._fused and module not in self._global_scales:
            members, spans = self._fused[module], []
            for one in members:
                args, found = self._schemes[one].weights, self._ranges.get(one)
                assert args is not None
                spans.append(
                    weight_amax_with_headroom(weight_of(one).detach(), args).cpu()
                    if found is None
                    else found.maximum.amax().float().reshape(1).cpu()
                )
            amax = torch.stack(spans).max()
            for member in members:
                self._global_scales[member] = global_scale_from_amax(amax).to(
                    weight_of(member).device
                )
        return self._global_scales.get(module)

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Register observers of activations with static scales."""
        self._observers = ActivationObservers(self, state)
        for module, scheme in self._schemes.items():
            self._observers.watch_linear(
                module, self._names[module], scheme, source=self.leader(module, state)
            )
        for module, name in self._attention.items():
            args, queries = self._attention_args(module)
            enable_attention_hooks(state.model, module, queries=queries)
            bases = ("q", "k", "v") if queries else ("k", "v")
            self._observers.watch_attention(module, name, args, bases)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Quantize the weights of those of ``modules`` that belong to this modifier.

        A modifier without data of its own shares the block's pass with others, which may change
        weights until all batches have passed: then :meth:`finish` quantizes them.
        """
        if not self._needs_data():
            return
        mine = [
            module
            for module in modules
            if self._has_weight_scheme(module)
            and module not in self._finished
            and module not in self._parameters
        ]
        if mine:
            self.quantize_weights(state, mine)

    @abstractmethod
    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Find the parameters of the weights of ``modules`` and :meth:`keep` them."""

    def leader(self, module: Module, state: State) -> Module:
        """The first of this modifier's modules with the same input as ``module``.

        Passes are paused there: its input hooks run before the modules that share its input are
        compressed together with it.
        """
        if state.calibration.call_order is None:
            return module
        group: tuple[Module, ...] = state.calibration.call_order.group_of(module)
        return next(one for one in group if one in self._schemes)

    def cache_weight_range(self, module: Module) -> None:
        """Compute the extremes of a weight with a shared global scale, for :meth:`observe`.

        Each weight is then read only once. None of them may change in between.
        """
        weights = self._schemes[module].weights
        if module in self._fused and weights is not None:
            found = weight_range(weight_of(module).detach(), weights)
            if found is not None:
                self._ranges[module] = found

    def observe(self, module: Module, importance_C: Tensor | None = None) -> WeightParameters:
        """The quantization parameters that the module's observer finds for its present weight."""
        scheme = self._schemes[module]
        assert scheme.weights is not None
        return observe_weight(
            weight_of(module).detach(),
            scheme.weights,
            global_scale=self._global_scale(module),
            importance_C=importance_C,
            found=self._ranges.pop(module, None),
        )

    @torch.no_grad()
    def keep(
        self, module: Module, parameters: WeightParameters, values_RC: Tensor | None = None
    ) -> None:
        """Keep the parameters of a weight until calibration ends.

        Args:
            module: one of the selected modules.
            parameters: the parameters of its weight.
            values_RC: what replaces its weight at once, rounded; the weight itself is rounded at
                the end if ``None``.
        """
        name = self._names[module]
        if not is_finite(parameters.scale):
            raise NonFiniteError(f"The scales found for {name} are not finite.")
        self._parameters[module] = parameters
        self._roundings[name] = parameters.rounding(weight_of(module).detach(), values_RC)
        if values_RC is not None:
            replace_weight(module, parameters.round(values_RC))
            self._rounded.add(module)

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """What rounding lost of each weight (:class:`WeightRounding`), and the technique's own."""
        found = super().report(names)
        for name, one in select_records(self._roundings, names).items():
            found[name] = {**found.get(name, {}), **asdict(one)}
        return found

    # ------------------------------------------------------------------ after

    def predict(self, state: State) -> Prediction:
        """The quantized modules with the parameters that they will have."""
        plans, names = [], self._names
        alike: dict[Any, dict[str, Tensor]] = {}  # a model has few distinct module shapes
        for module, scheme in self._schemes.items():
            form = tuple(
                (key, one.shape, one.dtype)
                for key, one in module._parameters.items()
                if one is not None
            )
            key = (type(module), form, id(scheme))
            if key not in alike:
                alike[key] = quantized_linear_tensors(module, scheme)
            tensors = alike[key]
            plans.append(PlannedModule(names[module], module, scheme, tensors))
        of_attention = {}
        for module, name in self._attention.items():
            args, queries = self._attention_args(module)
            own: Any = module.quantization_scheme if queries else cache_scheme(args)
            tensors = quantized_attention_tensors(state.model, module, own, queries=queries)
            of_attention[module] = tensors
            plans.append(
                PlannedModule(name, module, own, tensors, is_attention=True, has_group=queries)
            )
        return Prediction(modules=[*plans, *self._shared.planned(of_attention)])

    def sum_observed(self, state: State, ranks: Ranks, modules: Sequence[Module]) -> None:
        """Merge what all ranks have observed of the activations of ``modules``."""
        if self._observers is not None:
            own = {*self._schemes, *self._attention}
            waiting = (one for one in modules if one in own and one not in self._finished)
            self._observers.merge_over(ranks, waiting)

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Round remaining weights and mark the modules of this modifier as quantized."""
        if self._observers is None:
            raise LifecycleError(
                f"{type(self).__name__} is to finish its modules, and their calibration did not "
                "begin. Call callbacks.calibration_epoch_start() first."
            )
        wanted = set(modules) - self._finished
        linears = [module for module in self._schemes if module in wanted]
        missed = [
            module
            for module in linears
            if self._has_weight_scheme(module) and module not in self._parameters
        ]
        if missed:
            self.quantize_weights(state, missed)
        for module in linears:
            parameters = self._parameters.pop(module, None)
            scheme = self._schemes[module]
            is_raw = parameters is not None and module not in self._rounded
            is_left = written and format_of(scheme) != "dense"  # dense: the writer does not round
            if parameters is not None and is_raw and not is_left:
                replace_weight(module, parameters.round(weight_of(module).data))
            static = self._observers.parameters(module)
            attach_linear(module, scheme, parameters, static, is_raw=is_raw and is_left)
        for module in (module for module in self._attention if module in wanted):
            self._attach_attention(module, self._observers.parameters(module))
        self._shared.keep(wanted)
        self._shared.attach(
            wanted, lambda source: self.adopt(state, [source]), state.run.block_source
        )
        self._observers.forget(wanted)
        self._finished |= wanted

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark this modifier's modules as quantized; their values are already on disk."""
        wanted = set(modules) - self._finished
        for module in (module for module in self._schemes if module in wanted):
            attach_linear(module, self._schemes[module], None, {})
        for module in (module for module in self._attention if module in wanted):
            self._attach_attention(module, {})
        self._finished |= wanted
        self._shared.mark(wanted, lambda source: self.adopt(state, [source]))

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Finish every module that was not finished with its block."""
        self.remove_hooks()
        every = (*self._schemes, *self._attention, *self._shared.names)
        left = [module for module in every if module not in self._finished]
        with progress(len(left), "Quantizing") as advance:
            for module in left:
                advance(0, note=self._names[module])
                self.finish(state, [module])
                advance(1)
        self._observers = None
        logger.info(f"{type(self).__name__}: {len(self._schemes)} modules quantized.")

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Remove the schemes of unfinished modules, and after an error those of all.

        A model with finished modules is run as a quantized model from here on.
        """
        attention, aborted = self._attention, state.schedule.aborted
        for module in (*self._schemes, *attention, *self._shared.names):
            if aborted or getattr(module, "quantization_status", None) is None:
                detach(module)
                if module in attention:
                    disable_attention_hooks(state.model, module)
        if self._finished and not aborted:
            mark_quantized(state.model)
        return True

    # ------------------------------------------------------------------ helpers

    def _has_weight_scheme(self, module: Module) -> bool:
        scheme = self._schemes.get(module)
        return scheme is not None and scheme.weights is not None

    def _attention_args(self, module: Module) -> tuple[QuantizationArgs, bool]:
        """The quantization arguments of attention states, and whether queries are quantized too."""
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.input_activations is not None:
            return scheme.input_activations, True
        cache = self.resolve_quantization_config().kv_cache_scheme
        assert cache is not None
        return cache, False

    def _attach_attention(self, module: Module, states: Mapping[str, Tensor]) -> None:
        args, queries = self._attention_args(module)
        scheme: Any = module.quantization_scheme if queries else None
        attach_attention(module, args, states, scheme)


def _has_global_scale(scheme: QuantizationScheme | None) -> bool:
    weights = None if scheme is None else scheme.weights
    return weights is not None and needs_global_scale(weights)
