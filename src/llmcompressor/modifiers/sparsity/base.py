# SPDX-License-Identifier: Apache-2.0
"""Base class of one-shot pruning: fields, targets, statistics, records and profiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import (
    MOVED_TO_THE_RUN,
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
from llmcompressor.core.modifier import Modifier, RecordedMixin
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError
from llmcompressor.logger import logger
from llmcompressor.modeling.fused import is_expert
from llmcompressor.modifiers.sparsity.targets import (
    OutlierProfile,
    PruningLayers,
    find_pruning_layers,
    has_row_tokens,
    matches_linear,
    matrix_inputs,
    matrix_of,
    write_matrix,
)
from llmcompressor.numerics.masks import NofM, parse_structure
from llmcompressor.numerics.wanda import wanda_prune
from llmcompressor.observers.column_statistics import ColumnSquares
from llmcompressor.observers.input_statistics import InputCollector, warn_of_dead_columns
from llmcompressor.runtime.collectives import Ranks

_STORED = "the zeros are stored like other weights: no reader has a sparse format for them"
_ANYWHERE = ("0:0", "unstructured")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SparsityRecord:
    """Result of pruning a module.

    Attributes:
        sparsity: counted share of zeros.
        structure: ``"unstructured"`` or N:M.
        tokens: number of calibration tokens in its statistics.
        loss: ½ tr(D H Dᵀ), D the change of the weight; ``None`` if no token reached it.
        dampening: the fraction with which the factorization succeeded; ``None`` if there was none.
        stored: the form of the zeros in the checkpoint.
    """

    sparsity: float
    structure: str
    tokens: int
    loss: float | None
    dampening: float | None
    stored: str = _STORED


class OneShotPruningModifier(RecordedMixin, Modifier):
    """Zero weights once, based on calibration statistics of their inputs.

    Attributes:
        sparsity: share of weights to zero; or one per target, or one per layer that the targets
            match, in model order.
        sparsity_profile: ``"owl"``: layers with more outliers keep more weights, with ``sparsity``
            on average. Takes a forward of the whole model before the calibration.
        mask_structure: ``"0:0"`` for unstructured zeros, or ``"N:M"`` for N zeros in each M
            consecutive weights of a row.
        owl_m: a score is an outlier if it is above this multiple of the mean of its layer.
        owl_lmbda: maximum distance of a layer's sparsity from ``sparsity``.
        targets: layers: Linears or modules that contain them, by class, name or ``re:`` pattern.
        ignore: modules or weights that are left out; takes precedence over ``targets``.
        sequential_update: without effect, with a warning: the pipeline decides.
        sequential_targets: without effect, with a warning: give it to ``oneshot`` instead.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"oneshot"}),
        changes_weights=True,
        must_precede=frozenset({"QuantizationMixin"}),
        moved=MOVED_TO_THE_RUN,
    )

    sparsity: float | list[float]
    sparsity_profile: Literal["owl"] | None = None
    mask_structure: str = "0:0"
    owl_m: float | None = Field(default=None, gt=0)
    owl_lmbda: float | None = Field(default=None, ge=0, le=1)
    targets: str | list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: str | list[str] = Field(default_factory=list)
    sequential_update: bool = True
    sequential_targets: str | list[str] | None = None

    _group: NofM | None = PrivateAttr(None)
    _layers: PruningLayers = PrivateAttr(default_factory=lambda: PruningLayers({}, {}, {}))
    _inputs: InputCollector[Any] = PrivateAttr()
    _records: dict[str, SparsityRecord] = PrivateAttr(default_factory=dict)
    _finished: set[Module] = PrivateAttr(default_factory=set)
    _profile: OutlierProfile | None = PrivateAttr(None)

    # ------------------------------------------------------------------ fields

    @field_validator("sparsity", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any) -> Any:
        each = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) for one in each):  # otherwise true would mean 1: every weight
            raise RecipeError(
                f"a sparsity is a share of weights, not true or false (given: {value})",
                "Give 0.5 for half of the weights.",
            )
        return value

    @field_validator("sparsity")
    @classmethod
    def _check_range(cls, value: float | list[float]) -> float | list[float]:
        each = value if isinstance(value, list) else [value]
        wrong = [one for one in each if not 0 <= one <= 1]
        if wrong or not each:
            raise RecipeError(
                f"a sparsity is a share of weights, between 0 and 1 (given: {value})",
                "Give 0.5 for half of the weights.",
            )
        return value

    @field_validator("mask_structure")
    @classmethod
    def _check_structure(cls, value: str) -> str:
        _parse_group(value)
        return value

    @model_validator(mode="after")
    def _check_profile_fields(self) -> Self:
        self._group = _parse_group(self.mask_structure)
        if self._group is not None:
            self._check_group(self._group)
        given = (self.sparsity_profile, self.owl_m, self.owl_lmbda)
        if any(one is not None for one in given) and None in given:
            raise RecipeError(
                "sparsity_profile, owl_m and owl_lmbda belong together",
                "Give all three (sparsity_profile: owl, owl_m: 5, owl_lmbda: 0.08) or none.",
            )
        if self.sparsity_profile is not None and isinstance(self.sparsity, list):
            raise RecipeError(
                "the profile finds the sparsity of each layer, and a list gives them",
                "Give one sparsity, or leave the profile out.",
            )
        return self

    def _check_group(self, group: NofM) -> None:
        full = group.zeros / group.group
        each = self.sparsity if isinstance(self.sparsity, list) else [self.sparsity]
        if any(abs(one - full) > _ROUNDING for one in each):
            raise RecipeError(
                f"sparsity is {self.sparsity}, and {self.mask_structure} has {full:g}",
                f"Set sparsity: {full:g}.",
            )
        if self.sparsity_profile is not None:
            raise RecipeError(
                f"a profile gives layers different sparsities, and {self.mask_structure} gives "
                f"each {full:g}",
                "Leave out one of the two.",
            )

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """The importance of a weight depends on its inputs, which are complete with its block.

        A profile needs all layers before the first is pruned, and all ranks have it.
        """
        surveys = self.sparsity_profile is not None
        return Traits(
            data=DataUse.SURVEY_FIRST if surveys else DataUse.STREAM,
            granularity=Granularity.LINEAR,
            edits=Edits.OPEN if self._is_surveying else Edits.OPEN | Edits.AT_ONCE,
            by_block=True,
            over_ranks=Solving.ALL if self._is_surveying else Solving.OWNER,
            beyond_statistics="",
        )

    def select(self, state: State) -> Selection:
        """The modules that are pruned; experts without tokens are pruned by magnitude."""
        return Selection(modules=list(self._layers.names), accepts_unreached=is_expert)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of the statistics of modules that share one input, and of pruning them."""
        return Cost()

    def means(self, name: str, module: Module, holders: Mapping[str, Module]) -> bool:
        """Return True if a target matches it, its weight or a module that contains it."""
        return matches_linear(name, {**holders, name: module}, self.targets, self.ignore)

    @property
    def records(self) -> dict[str, SparsityRecord]:
        """Pruning records by module name."""
        return dict(self._records)

    # ------------------------------------------------------------------ before

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the modules, and check all that can be checked before the run.

        Raises:
            TargetError: a target matches nothing, or a module cannot be pruned.
        """
        self._layers = find_pruning_layers(
            state.model, self.targets, self.ignore, self.sparsity, self._group
        )
        if self.sparsity_profile is not None:
            assert self.owl_m is not None
            assert self.owl_lmbda is not None
            assert isinstance(self.sparsity, float)
            self._profile = OutlierProfile(self._layers, self.sparsity, self.owl_m, self.owl_lmbda)
        return True

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Collect statistics, once for all modules that share an input."""
        self._inputs = InputCollector(
            self._new_column_squares if self._is_surveying else self.new_statistics,
            lambda module: module in self._layers.names and has_row_tokens(module),
            state.calibration.call_order,
            matrix_inputs,
            kept=state.run.kept_inputs,
        )
        solved = [module for module in self._layers.names if module not in self._finished]
        state.facts.changed_later.update(solved)
        hook = self._inputs.hook(state, self.reference_input)
        for leader in self._inputs.leaders(solved):
            self.register_hook(leader, hook, "forward_pre", with_kwargs=True)

    def _new_column_squares(self, module: Module, input_TC: Tensor, twin: bool) -> ColumnSquares:
        return ColumnSquares(input_TC.shape[-1], input_TC.device, self._layers.names[module])

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum the statistics of inputs at the owners; those of a profile at all ranks."""
        if self._is_surveying:
            self._inputs.sum_over(ranks, modules, self._layers.names)
        else:
            self._inputs.sum_over(ranks, modules, self._layers.names, owner_of)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Prune this modifier's modules among ``modules``, or note their input statistics."""
        mine = self._mine(modules)
        if not self._is_surveying:
            state.facts.error_corrected.update(filter(self.fits_original, mine))
        self._take(mine)

    @torch.no_grad()
    def _take(self, mine: Sequence[Module]) -> None:
        if not mine:
            return
        if self._is_surveying:
            assert self._profile is not None
            for module in mine:
                found = self._inputs.of(module)
                if found is not None and found.tokens:
                    self._profile.note(module, found.mean_square())
        else:
            self._prune_all(mine)
        self._inputs.drop(mine)

    def _prune_all(self, mine: Sequence[Module]) -> None:
        wanted = []
        for module in mine:
            found = self._inputs.of(module)
            tokens = 0 if found is None else int(found.tokens)
            if self._group is None and self.sparsity_of(module) == 0:  # nothing to prune
                self._record(module, tokens=tokens, loss=0.0, dampening=None)
            elif tokens == 0:
                self._prune_by_magnitude(
                    module, "was shown no calibration token", tokens=0, loss=None
                )
            elif bool((dead_C := self.mean_square(found) == 0).all()):
                why = "got inputs that were zero in every calibration token"
                self._prune_by_magnitude(module, why, tokens=tokens, loss=0.0)
            else:
                name, told = self._layers.names[module], "their weights are removed before others"
                warn_of_dead_columns(name, int(dead_C.sum()), len(dead_C), told)
                wanted.append(module)
        self.prune(wanted)
        self._finished.update(mine)

    # ------------------------------------------------------------------ implemented by techniques

    @abstractmethod
    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> Any:
        """Create statistics of an input, with ``tokens`` and ``update(tokens, reference)``."""

    @abstractmethod
    def mean_square(self, statistics: Any) -> Tensor:
        """Mean square of each input column, float32 ``[C]``."""

    @abstractmethod
    def prune(self, modules: Sequence[Module]) -> None:
        """Prune modules that have calibration tokens."""

    def reference_input(self, module: Module, tensor: Tensor, state: State) -> Tensor | None:
        """The original model's input of ``module``, ``None`` if it is not needed."""
        return None

    def fits_original(self, module: Module) -> bool:
        """Return True if its outputs are fitted to those of the original model."""
        return False

    # ------------------------------------------------------------------ after

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Prune this modifier's modules that are not pruned yet, or survey their outliers."""
        mine = self._mine(modules)
        if self._is_surveying:
            assert self._profile is not None
            every = [module for module in modules if module in self._layers.names]
            self._profile.survey(every, state.run.block_source)
        else:
            self._take(mine)

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark this modifier's modules among ``modules`` as pruned, or as surveyed."""
        mine = [module for module in modules if module in self._layers.names]
        if self._is_surveying:
            assert self._profile is not None
            self._profile.adopt(mine, state.run.block_source)
        else:
            self._finished.update(mine)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Finish modules that were not finished with their block, and free the statistics."""
        self.remove_hooks()
        self.finish(state, list(self._layers.names))
        state.facts.error_corrected.difference_update(self._layers.names)
        if self._is_surveying:
            assert self._profile is not None
            self._layers.sparsity.update(self._profile.decide())
            return
        logger.info(f"{self._name}: {len(self._layers.names)} modules pruned.")

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Warn if nothing was pruned because no pass followed the survey."""
        if self._profile is not None and self._layers.names and not self._finished:
            logger.warning(
                f"{self._name} pruned nothing: no calibration followed the one in which it looked "
                "at all layers."
            )
        return True

    # ------------------------------------------------------------------ helpers

    @property
    def _is_surveying(self) -> bool:
        return self._profile is not None and not self._profile.is_decided

    def _mine(self, modules: Iterable[Module]) -> list[Module]:
        return [
            module
            for module in modules
            if module in self._layers.names and module not in self._finished
        ]

    def sparsity_of(self, module: Module) -> float:
        """The target sparsity of ``module``."""
        return self._layers.sparsity[self._layers.layer[module]]

    def _prune_by_magnitude(
        self, module: Module, why: str, *, tokens: int, loss: float | None
    ) -> None:
        """Prune a module without useful statistics by magnitude, with a warning and a record."""
        name = self._layers.names[module]
        logger.warning(f"{name} {why}; it is pruned by magnitude.")
        weight_RC = matrix_of(module)
        one_C = weight_RC.new_ones(weight_RC.shape[1]).float()
        pruned_RC, _ = wanda_prune(weight_RC, one_C, self.sparsity_of(module), self._group)
        self.put(module, pruned_RC, tokens=tokens, loss=loss, dampening=None)

    def put(
        self,
        module: Module,
        weight_RC: Tensor,
        *,
        tokens: int,
        loss: float | None,
        dampening: float | None,
    ) -> None:
        """Write a pruned matrix to the module, and record it."""
        write_matrix(module, weight_RC)
        self._record(module, tokens=tokens, loss=loss, dampening=dampening)

    def _record(
        self, module: Module, *, tokens: int, loss: float | None, dampening: float | None
    ) -> None:
        written = matrix_of(module)
        self._records[self._layers.names[module]] = SparsityRecord(
            sparsity=1 - int(written.ne(0).sum()) / max(written.numel(), 1),
            structure="unstructured" if self._group is None else self.mask_structure,
            tokens=tokens,
            loss=loss,
            dampening=dampening,
        )


def _parse_group(structure: str) -> NofM | None:
    """The N:M groups of a mask structure; ``None`` for unstructured zeros."""
    if structure.strip().lower() in _ANYWHERE:
        return None
    found = parse_structure(structure)
    if not isinstance(found, NofM):
        raise RecipeError(
            f"{structure!r} is for pruning in a training",
            "Choose 0:0 for zeros anywhere, or N:M, as 2:4.",
        )
    return found
