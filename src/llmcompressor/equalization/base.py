# SPDX-License-Identifier: Apache-2.0
"""Base of the smoothing modifiers: sets of modules, input statistics, and scales applied.

One forward of the original model serves all sets, because smoothing one changes neither the model's
output nor the statistics of another set. The scales of a set are found when its readers have seen
all batches, and applied when all batches have left its block.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

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
    Solving,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier, select_records
from llmcompressor.core.state import State
from llmcompressor.equalization.mappings import (
    Names,
    SmoothSet,
    find_smooth_sets,
    resolve_mappings,
)
from llmcompressor.equalization.rescale import divide_outputs, multiply_inputs
from llmcompressor.errors import NonFiniteError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.fused import is_expert
from llmcompressor.modeling.matching import check_targets, match_named_modules
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.observers.input_statistics import InputCollector
from llmcompressor.runtime.collectives import Ranks


def quantized_modules(state: State) -> set[Module]:
    """The modules that have a quantization scheme now.

    It comes from a modifier that was initialized before, and so stands before in the recipe, or
    from an earlier run.
    """
    marked = (module for _, module in named_modules(state.model))
    return {one for one in marked if getattr(one, "quantization_scheme", None) is not None}


# --------------------
# Base of the smoothing modifiers: sets of modules, input statistics, and scales applied.

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number."""
_WATCHED = 3
"""Looks at an input for its column's extremes or sizes."""
_VISITS = 6
"""Of a weight of a reader: its column's range, the scale, the check."""


class SmoothingMixin(Modifier):
    """Finds smoothing sets, collects statistics of their inputs, and applies their scales."""

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"oneshot"}), changes_weights=True
    )

    mappings: Any = Field(default=None)

    _sets: list[SmoothSet] = PrivateAttr(default_factory=list)
    _names: dict[Module, str] = PrivateAttr(default_factory=dict)
    _inputs: InputCollector[Any] = PrivateAttr()
    _seen: set[Module] = PrivateAttr(default_factory=set)
    _by_reader: dict[Module, list[SmoothSet]] = PrivateAttr(default_factory=dict)
    _scales: dict[SmoothSet, Tensor] = PrivateAttr(default_factory=dict)
    _records: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
    _ranks: Ranks = PrivateAttr(default_factory=Ranks)

    # ------------------------------------------------------------------ overridden by a technique

    @abstractmethod
    def named(self, model: Module) -> Sequence[Names] | None:
        """The mappings as targets; ``None`` if they are to be found from the model.

        Those of the recipe, or those registered for the class of ``model``.
        """

    @abstractmethod
    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> Any:
        """New statistics of one input, with ``tokens`` and ``update(input_TC)``."""

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

        A pass that has run the norm must meet Linears that are not scaled yet. All ranks scale
        the modules of a set, which may have several owners.
        """
        return Traits(
            data=DataUse.STREAM,
            granularity=Granularity.LINEAR,
            edits=Edits.INPUTS,
            by_block=True,
            over_ranks=Solving.ALL,
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
        matched = match_named_modules(model, list(self.ignored()))
        left_out = {name for name, _ in matched}
        wanted = [one for one in self._sets if not left_out & {one.name, *one.balance}]
        self._sets = self._without_conflicts(state, wanted, are_named=names is not None)
        if not self._sets:
            what = f"finds nothing to smooth in {type(model).__name__}"
            if names is not None:
                what = "was given mappings that leave nothing to smooth"
            rotated = ((_existing_rotation(one), name) for one, name in self._names.items())
            if found := next((one for one in rotated if one[0]), None):
                what = "has nothing to smooth: {} rotates what goes into or comes out of {}".format(
                    *found
                )
            raise TargetError(
                f"{self._name} {what}.",
                "Name what is to be smoothed in its mappings, put it before a rotation, or leave "
                "it out of the recipe.",
            )
        state.facts.smoothed.update(one.smooth for one in self._sets if one.is_norm)
        state.facts.outputs_changed_by.add(self._name)
        self._tell(model)
        return True

    def _without_conflicts(
        self, state: State, sets: Sequence[SmoothSet], *, are_named: bool
    ) -> list[SmoothSet]:
        """The sets with which no earlier modifier, or earlier run, conflicts.

        Scales of weights and activations that are final already would not fit after smoothing. The
        columns of a weight after an online rotation are not the channels of the module before it.
        A set that was found in the model, and whose readers are all quantized, is left out
        silently.

        Raises:
            TargetError: a set of the recipe conflicts, or joins what is quantized with what is not;
                or none is left.
        """
        quantized = {module: module for module in quantized_modules(state)}
        for attention in state.facts.kv_cache:  # whose keys and values these help to compute
            inner = (one for one in attention.modules() if isinstance(one, Linear))
            cached = dict.fromkeys(inner, attention)
            quantized |= {one.smooth: cached[one.smooth] for one in sets if one.smooth in cached}
        kept, why, by, rotated = [], "", "", 0
        for one in sets:
            members = {**one.balance, one.name: one.smooth}
            taken = {name: quantized[each] for name, each in members.items() if each in quantized}
            turned = {
                name: owner
                for name, each in members.items()
                if (owner := state.facts.rotated_by.get(each) or _existing_rotation(each))
            }
            if taken:
                first, module = next(iter(taken.items()))
                quantizer = state.facts.quantizer.get(module)
                by = "an earlier run" if quantizer is None else type(quantizer).__name__
                why = f"{by} quantizes {first}, and smoothing would change what was found for it"
            elif turned:
                first, by = next(iter(turned.items()))
                why = f"{by} rotates what goes into or comes out of {first}"
                rotated += 1
            else:
                kept.append(one)
                continue
            if are_named or (taken and not taken.keys() >= one.balance.keys()):
                raise TargetError(
                    f"The mapping {one} of {self._name} cannot be smoothed: {why}.",
                    f"Put {self._name} before {by}, or leave {first} to one of them, by an ignore "
                    "list or by mappings without it.",
                )
        if why and not kept:
            raise TargetError(
                f"{self._name} has nothing to smooth: {why}.", f"Put {self._name} before {by}."
            )
        if rotated:
            logger.warning(
                f"{self._name} leaves out {rotated} mappings: {why}. Put it before the rotation to "
                "smooth them, too."
            )
        return kept

    def _tell(self, model: Module) -> None:
        """Log the sets that were found, grouped by place, with their number."""
        alike = Counter(
            _NUMBER.sub("*", f"{one.name} -> ")
            + ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in one.balance))
            for one in self._sets
        )
        shown = "; ".join(f"{text} ({number})" for text, number in alike.items())
        origin = "of the recipe"
        if self.mappings is None:
            origin = "found in the model"
            if self.named(model) is not None:
                origin = f"registered for {type(model).__name__}"
        logger.info(f"{self._name}, mappings {origin}: {shown}.")

    # ------------------------------------------------------------------ calibration

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Hook the inputs, once for all Linears that share a tensor."""
        self._ranks = state.run.ranks or Ranks()
        observed = set(self.observed_modules())
        order = state.calibration.call_order
        kept = state.run.kept_inputs
        self._inputs = InputCollector(self.new_statistics, observed.__contains__, order, kept=kept)
        self._by_reader = {}
        for one in self.sets_to_smooth():
            for module in one.balance.values():
                self._by_reader.setdefault(module, []).append(one)
        if not state.run.block_source.holds_all:
            self._check_blocks(state)
        hook = self._hook(state)
        for leader in self._inputs.leaders(self.observed_modules()):
            self.register_hook(leader, hook, "forward_pre", with_kwargs=True)

    def _check_blocks(self, state: State) -> None:
        blocks = state.run.block_source.names
        places = {inner: name for block, name in blocks.items() for inner in block.modules()}
        for one in self.sets_to_smooth():
            members = (one.smooth, *one.balance.values())
            if len({places.get(module) for module in members}) > 1:
                raise TargetError(
                    f"The mapping {one} joins modules of several blocks, and blocks are in memory "
                    "one at a time.",
                    "Leave it out, or load the model and pass it instead of its path.",
                )

    def _hook(self, state: State) -> Any:
        return self._inputs.hook(state)

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum the statistics of inputs, on all ranks."""
        self._inputs.sum_over(ranks, modules, self._names)

    def sets_read_by(self, module: Module) -> Sequence[SmoothSet]:
        """The sets to smooth that have ``module`` among their readers."""
        return self._by_reader.get(module, ())

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
        self._free_statistics(came)
        if state.calibration.call_order is None and not state.run.block_source.names:
            self.finish(state, self._seen)

    @torch.no_grad()
    def _find_scale(self, one: SmoothSet) -> None:
        found = {module: self._inputs.of(module) for module in one.linears.values()}
        tallies = {module: each for module, each in found.items() if each and each.tokens}
        if len(tallies) < len(found):
            logger.warning(f"{one}: not smoothed, since no calibration token reached all of them.")
            self._records[one.name] = {"tokens": 0}
            return
        scale_C = self.compute_scale(one, tallies)
        if scale_C is None:
            return
        if not bool((torch.isfinite(scale_C) & (scale_C > 0)).all()):
            raise NonFiniteError(f"The scales found for {one} are not positive numbers.")
        # whatever a processor rounds otherwise, all ranks take one scale
        sent = {"scale": scale_C} if self._ranks.rank == 0 else {}
        got = self._ranks.broadcast_from(0, sent, what=f"scale of {one.name}")
        self._scales[one] = got["scale"].to(scale_C.device)

    def _free_statistics(self, came: Iterable[Module]) -> None:
        """Free the statistics of ``came``, and of what is smoothed with it, if that is all done."""
        sets = (one for module in came for one in self.sets_read_by(module))
        readers = (each for one in sets for each in one.linears.values())
        for leader in self._inputs.leaders((*came, *readers)):
            sharing = self._inputs.sharing(leader)
            waiting = (one for module in sharing for one in self.sets_read_by(module))
            if all(self._seen.issuperset(one.linears.values()) for one in waiting):
                self._inputs.drop([leader])

    # ------------------------------------------------------------------ scaling

    @torch.no_grad()
    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Scale the sets whose smooth module is among ``modules``."""
        wanted = set(modules)
        ready = [one for one in self._scales if one.smooth in wanted]
        for one in ready:
            for module in one.balance.values():
                multiply_inputs(module, self._scales[one])
            _divide_kept(state.run.kept_inputs, one.balance.values(), self._scales[one])
        self.before_division(wanted)
        for one in ready:
            divide_outputs(one.smooth, self._scales.pop(one), one.offset)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Scale the sets that were not scaled with their block."""
        self.remove_hooks()
        self.finish(state, state.model.modules())
        smoothed = sum(1 for record in self._records.values() if record.get("tokens"))
        logger.info(f"{self._name}: {smoothed} modules smoothed.")


def _divide_kept(
    kept: dict[Module, InputSums] | None, readers: Iterable[Module], scale_C: Tensor
) -> None:
    """Divide the kept sums of the inputs of ``readers`` for the modifiers behind this one."""
    divided: dict[int, InputSums] = {}  # readers of one tensor share its sums
    for module in readers:
        if kept and (sums := kept.get(module)) is not None:
            if id(sums) not in divided:
                divided[id(sums)] = sums.divided_by(scale_C)
            kept[module] = divided[id(sums)]


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
