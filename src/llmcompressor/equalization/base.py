# SPDX-License-Identifier: Apache-2.0
"""Base of the smoothing modifiers: sets of modules, input statistics, and scales applied.

One forward of the original model serves all sets, because smoothing one changes neither the model's
output nor the statistics of another set. The scales of a set are found when its readers have seen
all batches, and applied when all batches have left its block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from compressed_tensors.transform import HadamardTransform
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.contract import (
    ELEMENTWISE,
    Cost,
    DataSize,
    DataUse,
    Edits,
    Granularity,
    RecipeRules,
    Selection,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier, select_records
from llmcompressor.core.state import State
from llmcompressor.equalization.mappings import (
    find_smooth_sets,
    matching_names,
    resolve_mappings,
)
from llmcompressor.equalization.probe import Names, SmoothSet
from llmcompressor.equalization.rescale import divide_outputs, multiply_inputs
from llmcompressor.errors import NonFiniteError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import CallOrder, first_tensor
from llmcompressor.modeling.fused import is_expert
from llmcompressor.modeling.matching import check_targets
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.observers.tokens import real_tokens

__all__ = ["InputStatistics", "SmoothingMixin", "drop_quantized_sets", "quantized_modules"]


# --------------------
# Conflicts of smoothing with quantization: sets with modules whose scales are already final.
#
# The scales of a weight depend on its values, those of inputs, outputs, keys and values on the
# activations: once an earlier modifier has computed them, neither may be changed. Modules that are
# not quantized yet may be smoothed.


def quantized_modules(state: State) -> set[Module]:
    """The modules that have a quantization scheme now.

    It comes from a modifier that was initialized before, and so stands before in the recipe, or
    from an earlier run.
    """
    marked = (module for _, module in named_modules(state.model))
    return {one for one in marked if getattr(one, "quantization_scheme", None) is not None}


def drop_quantized_sets(
    sets: Iterable[SmoothSet], state: State, *, name: str, are_named: bool
) -> list[SmoothSet]:
    """The sets that a modifier may smooth.

    A set that was found in the model, and whose readers are all quantized, is left out silently.

    Args:
        sets: all of them.
        state: of the session, as :func:`quantized_modules` takes it.
        name: the modifier's name.
        are_named: the recipe names the sets.

    Raises:
        TargetError: a set joins what is quantized with what is not, or is one of the recipe's; or
            none is left.
    """
    quantized = quantized_modules(state)
    cached = {  # Linear → the attention whose quantized keys and values it helps to compute
        inner: module
        for module in state.facts.kv_cache
        for inner in module.modules()
        if isinstance(inner, Linear)
    }
    kept, why, by = [], "", ""
    for one in sets:
        members = {**one.balance, one.name: one.smooth}
        taken = {each: module for each, module in members.items() if module in quantized}
        if not taken and one.smooth in cached:
            taken = {one.name: cached[one.smooth]}
        if not taken:
            kept.append(one)
            continue
        first, module = next(iter(taken.items()))
        owner = state.facts.quantizer.get(module)
        by = "an earlier run" if owner is None else type(owner).__name__
        why = f"{by} quantizes {first}, and smoothing would change what was found for it"
        if are_named or not taken.keys() >= one.balance.keys():
            raise TargetError(
                f"{name} cannot smooth {one}: {why}.",
                f"Put {name} before {by}, or leave {first} to one of them, by an ignore list or by "
                "mappings without it.",
            )
    if why and not kept:
        raise TargetError(f"{name} has nothing to smooth: {why}.", f"Put {name} before {by}.")
    return kept


# --------------------
# Base of the smoothing modifiers: sets of modules, input statistics, and scales applied.

_WATCHED = 3
"""Looks at an input for its column's extremes or sizes."""
_VISITS = 6
"""Of a weight of a reader: its column's range, the scale, the check."""


class InputStatistics(Protocol):
    """Statistics of one input tensor, which several Linears may share."""

    @property
    def tokens(self) -> int:
        """Number of tokens counted."""

    def update(self, input_TC: Tensor) -> None:
        """Add the tokens of one batch, ``[T, C]``, without padding."""


class SmoothingMixin(Modifier):
    """Finds smoothing sets, collects statistics of their inputs, and applies their scales."""

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"oneshot"}), changes_weights=True
    )

    mappings: Any = Field(default=None)

    _sets: list[SmoothSet] = PrivateAttr(default_factory=list)
    _names: dict[Module, str] = PrivateAttr(default_factory=dict)
    _tallies: dict[Module, Any] = PrivateAttr(default_factory=dict)
    _order: CallOrder | None = PrivateAttr(None)
    _seen: set[Module] = PrivateAttr(default_factory=set)
    _by_reader: dict[Module, list[SmoothSet]] = PrivateAttr(default_factory=dict)
    _scales: dict[SmoothSet, Tensor] = PrivateAttr(default_factory=dict)
    _records: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    # ------------------------------------------------------------------ overridden by a technique

    @abstractmethod
    def named(self, model: Module) -> Sequence[Names] | None:
        """The mappings as targets; ``None`` if they are to be found from the model.

        Those of the recipe, or those registered for the class of ``model``.
        """

    @abstractmethod
    def new_statistics(self, columns: int, device: torch.device, name: str) -> InputStatistics:
        """New statistics of one input tensor."""

    @abstractmethod
    def compute_scale(self, one: SmoothSet, tallies: Mapping[Module, Any]) -> Tensor | None:
        """Compute the scale of a set, float32 ``[C]``, and record it.

        Args:
            one: a set whose readers have seen all batches.
            tallies: statistics of each reader.

        Returns:
            The scale; ``None`` to leave the set as it is.
        """

    @property
    def norms_only(self) -> bool:
        """Return True to search only for sets that begin with a norm."""
        return False

    @property
    def includes_moe(self) -> bool:
        """Return True to search also for sets that end in the router and experts of an MoE."""
        return True

    def ignored(self) -> Sequence[str]:
        """Targets to leave out."""
        return ()

    def sets_to_smooth(self) -> list[SmoothSet]:
        """The sets to smooth."""
        return self._sets

    def after_scales(self) -> None:
        """Called once scales are found for all sets whose statistics are complete."""

    def before_division(self, modules: set[Module]) -> None:
        """Called after the readers among ``modules`` are scaled, before their smooth modules."""

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """It observes the inputs of single Linears, and scales sets when their block is left.

        A pass that has run the norm must meet Linears that are not scaled yet.
        """
        return Traits(
            data=DataUse.STREAM,
            granularity=Granularity.LINEAR,
            edits=Edits.INPUTS,
            by_block=True,
        )

    def select(self, state: State) -> Selection:
        """The Linears that read a smooth module; routers only take its scales.

        A set whose expert gets no token is left unsmoothed.
        """
        return Selection(modules=self.observed_modules(), accepts_unreached=is_expert)

    def observed_modules(self) -> list[Module]:
        """The modules whose inputs are observed."""
        readers = (module for one in self.sets_to_smooth() for module in one.linears.values())
        return list(dict.fromkeys(readers))

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of observing each column's extremes or the like, and of scaling weights."""
        columns = sum(one.shape[-1] for module in modules[:1] for one in _matrices(module))
        readers = {each for one in self.sets_to_smooth() for each in one.balance.values()}
        scaled = [one.numel() for m in modules if m in readers for one in _matrices(m)]
        return Cost(flops=ELEMENTWISE * (data.tokens * _WATCHED * columns + _VISITS * sum(scaled)))

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The records of each set, by the name of its smooth module."""
        return select_records(self._records, names)

    # ------------------------------------------------------------------ initialization

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the sets, and validate those that the recipe names."""
        model: Module = state.model
        self._names = {module: name for name, module in named_modules(model)}
        names, samples = self.named(model), _sample_batches(state)
        if names is None:
            self._sets = find_smooth_sets(
                model, samples, norms_only=self.norms_only, mixtures=self.includes_moe
            )
        else:
            self._sets = resolve_mappings(model, names, self.ignored(), samples)
        check_targets(model, (), ignore=self.ignored())
        left_out = matching_names(model, self.ignored())
        self._sets = [
            one
            for one in self._sets
            if one.name not in left_out and not left_out & one.balance.keys()
        ]
        self._sets = drop_quantized_sets(
            self._sets, state, name=type(self).__name__, are_named=names is not None
        )
        self._sets = self._without_rotated(state, are_named=names is not None)
        if not self._sets:
            self._refuse_rotated()
            what = (
                f"finds nothing to smooth in {type(model).__name__}"
                if names is None
                else "was given mappings that leave nothing to smooth"
            )
            raise TargetError(
                f"{type(self).__name__} {what}.",
                "Name what is to be smoothed in its mappings, or leave it out of the recipe.",
            )
        state.facts.smoothed.update(one.smooth for one in self._sets if one.is_norm)
        self._tell(model)
        return True

    def _without_rotated(self, state: State, *, are_named: bool) -> list[SmoothSet]:
        """The sets that no online rotation passes through.

        The columns of a weight after such a rotation are not the channels of the module before it.

        Raises:
            TargetError: for a set that the recipe names, and where nothing is left.
        """
        kept, why = [], ""
        for one in self._sets:
            by = [
                f"{owner} rotates what goes into or comes out of {self._names[module]}"
                for module in (one.smooth, *one.balance.values())
                if (owner := state.facts.rotated_by.get(module) or _existing_rotation(module))
            ]
            why = why or "".join(by[:1])
            if not by:
                kept.append(one)
            elif are_named:
                raise TargetError(
                    f"The mapping {one} of {type(self).__name__} cannot be smoothed: {by[0]}.",
                    f"Put {type(self).__name__} before the rotation, or leave the mapping out.",
                )
        if self._sets and not kept:
            raise TargetError(
                f"{type(self).__name__} has nothing to smooth: {why}, and so on.",
                f"Put {type(self).__name__} before the rotation.",
            )
        if len(kept) < len(self._sets):
            logger.warning(
                f"{type(self).__name__} leaves out {len(self._sets) - len(kept)} mappings: {why}. "
                "Put it before the rotation to smooth them, too."
            )
        return kept

    def _refuse_rotated(self) -> None:
        """Raise if nothing can be smoothed because of an earlier run's rotations."""
        for module, name in self._names.items():
            if by := _existing_rotation(module):
                raise TargetError(
                    f"{type(self).__name__} has nothing to smooth: {by} rotates what goes into or "
                    f"comes out of {name}, and so on.",
                    f"Put {type(self).__name__} before the rotation.",
                )

    def _tell(self, model: Module) -> None:
        """Log the sets that were found, grouped by place, with their number."""
        alike: dict[str, int] = {}
        for one in self._sets:
            readers = dict.fromkeys(map(_without_numbers, one.balance))
            text = f"{_without_numbers(one.name)} -> {', '.join(readers)}"
            alike[text] = alike.get(text, 0) + 1
        shown = "; ".join(f"{text} ({number})" for text, number in alike.items())
        origin = "of the recipe"
        if self.mappings is None:
            origin = "found in the model"
            if self.named(model) is not None:
                origin = f"registered for {type(model).__name__}"
        logger.info(f"{type(self).__name__}, mappings {origin}: {shown}.")

    # ------------------------------------------------------------------ calibration

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Hook the inputs, once for all Linears that share a tensor."""
        self._order = state.calibration.call_order
        self._by_reader = {}
        for one in self.sets_to_smooth():
            for module in one.balance.values():
                self._by_reader.setdefault(module, []).append(one)
        if state.run.block_source is not None:
            self._check_blocks(state)
        for leader in dict.fromkeys(map(self.leader, self.observed_modules())):
            self.register_hook(leader, self._hook(state), "forward_pre", with_kwargs=True)

    def _check_blocks(self, state: State) -> None:
        source = state.run.block_source
        assert source is not None
        places = {inner: name for block, name in source.names.items() for inner in block.modules()}
        for one in self.sets_to_smooth():
            members = (one.smooth, *one.balance.values())
            if len({places.get(module) for module in members}) > 1:
                raise TargetError(
                    f"The mapping {one} joins modules of several blocks, and blocks are in memory "
                    "one at a time.",
                    "Leave it out, or load the model and pass it instead of its path.",
                )

    def _hook(self, state: State) -> Any:
        @torch.no_grad()
        def collect(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if tensor is not None:
                self.count(module, tensor, state.calibration.token_mask)

        return collect

    def count(self, module: Module, tensor: Tensor, token_mask: Tensor | None) -> None:
        """Add the input of ``module`` (see :func:`real_tokens`) to its statistics."""
        if module not in self._tallies:
            self._tallies[module] = self.new_statistics(
                tensor.shape[-1], tensor.device, self._names[module]
            )
        self._tallies[module].update(real_tokens(tensor, token_mask))

    def sets_read_by(self, module: Module) -> Sequence[SmoothSet]:
        """The sets to smooth that have ``module`` among their readers."""
        return self._by_reader.get(module, ())

    def leader(self, module: Module) -> Module:
        """The first of the hooked modules that share ``module``'s input."""
        return module if self._order is None else self._order.group_of(module)[0]

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Find the scales of sets with complete statistics, and free the statistics.

        Where no pipeline reports that passes have left a block, the weights change at once, so that
        modifiers after this one see the final weights.
        """
        came = dict.fromkeys(modules)
        self._seen.update(came)
        for one in dict.fromkeys(one for each in came for one in self.sets_read_by(each)):
            if one.name not in self._records and self._seen.issuperset(one.linears.values()):
                self._find_scale(one)
        self.after_scales()
        self._free_statistics()
        if state.calibration.call_order is None and state.run.block_source is None:
            self.finish(state, self._seen)

    @torch.no_grad()
    def _find_scale(self, one: SmoothSet) -> None:
        tallies = {
            module: self._tallies[self.leader(module)]
            for module in one.linears.values()
            if self.leader(module) in self._tallies
        }
        if len(tallies) < len(one.linears) or not all(t.tokens for t in tallies.values()):
            logger.warning(f"{one}: not smoothed, since no calibration token reached all of them.")
            self._records[one.name] = {"tokens": 0}
            return
        scale_C = self.compute_scale(one, tallies)
        if scale_C is None:
            return
        if not bool((torch.isfinite(scale_C) & (scale_C > 0)).all()):
            raise NonFiniteError(f"The scales found for {one} are not positive numbers.")
        self._scales[one] = scale_C

    def _free_statistics(self) -> None:
        """Free the statistics whose readers are all done."""
        for leader in [one for one in self._tallies if one in self._seen]:
            alike = (leader,) if self._order is None else self._order.group_of(leader)
            sets = (one for module in alike for one in self.sets_read_by(module))
            if all(self._seen.issuperset(one.linears.values()) for one in sets):
                del self._tallies[leader]

    # ------------------------------------------------------------------ scaling

    @torch.no_grad()
    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Scale the sets whose smooth module is among ``modules``."""
        wanted = set(modules)
        ready = [one for one in self._scales if one.smooth in wanted]
        for one in ready:
            for module in one.balance.values():
                multiply_inputs(module, self._scales[one])
        self.before_division(wanted)
        for one in ready:
            divide_outputs(one.smooth, self._scales.pop(one), one.offset)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Scale the sets that were not scaled with their block."""
        self.remove_hooks()
        self.finish(state, state.model.modules())
        self._tallies.clear()
        self._order = None
        smoothed = sum(1 for record in self._records.values() if record.get("tokens"))
        logger.info(f"{type(self).__name__}: {smoothed} modules smoothed.")


def _sample_batches(state: State) -> Iterator[Mapping[str, Any]]:
    """The first calibration batch of each set of keys; drawn only on demand."""
    seen: set[frozenset[str]] = set()
    for batch in () if state.data.calib is None else state.data.calib:
        if isinstance(batch, Mapping) and (kind := frozenset(batch)) not in seen:
            seen.add(kind)
            yield batch


def _matrices(module: Module) -> list[Tensor]:
    return [one for one in own_parameters(module) if one.ndim > 1]


def _existing_rotation(module: Module) -> str | None:
    """Name of an earlier run's rotation of the inputs or outputs of ``module``, if any."""
    children = module._modules.items()
    return next((name for name, child in children if isinstance(child, HadamardTransform)), None)


def _without_numbers(text: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in text.split("."))
