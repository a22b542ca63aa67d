# SPDX-License-Identifier: Apache-2.0
"""GPTQ: round weights column by column, and compensate each error in the remaining columns.

Frantar et al., arXiv:2210.17323. The objective for a Linear with weight W and inputs X is the error
of its output, ``‖(Q − W) Xᵀ‖²``; see :mod:`llmcompressor.numerics.gptq` for the equations, also of
asymmetric calibration, and :mod:`llmcompressor.numerics.weighted_scales` for the scales that it
begins with where no observer of weights is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import Field, PrivateAttr, StrictBool, field_validator
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.contract import (
    DEFAULT_DAMPENING,
    EARLIER_DAMPENING,
    MOVED_TO_THE_RUN,
    Cost,
    DampeningFraction,
    DataSize,
    RecipeRules,
    Solving,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import RecordedMixin
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.gptq.output_gradients import OutputGradients
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.output_hessian import BLOCK, packed_bytes
from llmcompressor.observers.input_statistics import (
    InputCollector,
    InputStatistics,
    warn_of_dead_columns,
)
from llmcompressor.pipelines.watchers import reference_input
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.column_solver import (
    COARSE_BITS,
    FINE_BITS,
    Options,
    Problem,
    Solution,
    gptq_cost,
    has_searchable_scales,
    refinement_rounds,
    solve,
    solve_divided,
)
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.bridge import grid_of, partition_of
from llmcompressor.schemes.parse import check_actorder
from llmcompressor.schemes.resolve import ResolvedSchemes

_GRADIENT_SAMPLES = 32
"""As many as blocks of 128 rows need: the embedded model has 8192 tokens in them."""


@dataclass(frozen=True)
class SolveRecord:
    """Result of solving a module.

    Attributes:
        tokens: number of calibration tokens in its statistics.
        loss: loss of the modules solved together with it; ``None`` if no token reached it.
        dampening: the fraction with which the factorization succeeded; ``None`` if the weight was
            rounded to nearest: no token reached it, its inputs were all zero (then ``loss`` is 0),
            or the factorization always failed.
        dead_columns: number of columns whose inputs were zero in every token; these are rounded to
            nearest.
    """

    tokens: int
    loss: float | None
    dampening: float | None
    dead_columns: int = 0


class GPTQModifier(RecordedMixin, QuantizationMixin):
    """Quantize weights with GPTQ.

    Attributes:
        block_size: columns whose compensations are applied in one product.
        dampening_frac: dampening added to the Hessian's diagonal, as a fraction of its mean;
            ``None`` is the default. If a factorization fails it is raised tenfold, up to three
            times.
        actorder: ``"static"`` (or ``"weight"``): columns are processed by decreasing activation;
            the format does not change. ``None``: from left to right.
        asymmetric: match the original Linear's outputs on the original inputs, given the inputs of
            the compressed model. Costs a second forward. ``None``: on unless all weights become
            8-bit integers, where it measures no better, or statistics take the place of data.
        asymmetric_ridge: λ of that correction, as a fraction of the mean diagonal; at least C / T,
            for C columns and T tokens.
        refinements: rounds of coordinate descent after the sweep, in which every column is decided
            again, given all others (arXiv:2309.01885); below 8 bits. ``None``: two rounds below 4
            bits, where they pay off.
        gradient_samples: number of calibration samples of which the gradients at the outputs are
            taken, before the run: an error of one output is then made up for in others that the
            loss feels alike (arXiv:2505.22988). 0: all outputs count alike. ``None``: 32 for
            weights below 4 bits, unless statistics take the place of data, or a modifier before it
            scales or rotates outputs.
        refit_scales: fit the scales of integer groups and channels to the codes; below 8 bits.
            ``None``: below 4 bits, and where an observer chose the scales.
        offload_hessians: keep second moments in main memory while they are accumulated.
        batched_quantization: solve Linears of equal shape in one batch: ``"auto"`` (or ``True``) if
            their matrices are small, a number for batches of that size, ``None`` (or ``False``) to
            solve each alone.
        sequential_update: without effect, with a warning: the pipeline decides.
        sequential_targets: without effect, with a warning: give it to ``oneshot`` instead.
        num_calibration_steps: without effect, with a warning: give ``oneshot`` the number of
            samples.
        disable_quantization_observer_epoch: without effect, with a warning: nothing is trained.
    """

    rules: ClassVar[RecipeRules] = replace(
        QuantizationMixin.rules,
        run_types=frozenset({"oneshot"}),
        renamed={**EARLIER_DAMPENING, "sequential": "sequential_update"},
        moved={
            **MOVED_TO_THE_RUN,
            "num_calibration_steps": "give num_calibration_samples to oneshot.",
            "disable_quantization_observer_epoch": "nothing is trained with GPTQModifier.",
        },
    )
    _also_asking: ClassVar[tuple[str, ...]] = ("actorder",)
    compensates: ClassVar[bool] = True

    block_size: int = Field(default=128, ge=1)
    dampening_frac: DampeningFraction = DEFAULT_DAMPENING
    actorder: Literal["static", "weight"] | None = "static"
    asymmetric: bool | None = None
    refinements: int | None = Field(default=None, ge=0, le=100)
    gradient_samples: int | None = Field(default=None, ge=0, le=100_000)
    refit_scales: bool | None = None
    asymmetric_ridge: float = Field(default=0.05, gt=0.0, le=10.0)
    offload_hessians: bool = False
    batched_quantization: (
        StrictBool | Annotated[int, Field(strict=True, ge=1)] | Literal["auto"] | None
    ) = "auto"
    sequential_update: bool = True
    sequential_targets: str | list[str] | None = None
    num_calibration_steps: int | None = None
    disable_quantization_observer_epoch: float | None = None

    _inputs: InputCollector[InputStatistics] = PrivateAttr()
    _records: dict[str, SolveRecord] = PrivateAttr(default_factory=dict)
    _gradients: OutputGradients | None = PrivateAttr(None)
    _sees_outputs: bool = PrivateAttr(True)

    @field_validator("actorder", mode="before")
    @classmethod
    def _refuse_removed_actorders(cls, value: Any) -> Any:
        check_actorder(value, "actorder")
        return None if value is False else value

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """It minimizes an error over the inputs, right after a modifier that prunes."""
        return replace(
            super().traits,
            joins=frozenset({"OneShotPruningModifier"}),
            twin=self._is_asymmetric(),
            over_ranks=Solving.OWNER,
            divides_rows=True,
            sees_original=self._gradient_samples > 0,
            beyond_statistics=self._beyond_sums(),
        )

    def _beyond_sums(self) -> str | None:
        """What it was asked to do that sums of inputs do not suffice for."""
        if self.asymmetric:
            return "compares the inputs of two models (asymmetric: true)"
        if self.gradient_samples:
            return f"takes gradients of samples (gradient_samples: {self.gradient_samples})"
        return self._beyond_statistics()

    @property
    def _gradient_samples(self) -> int:
        """How many samples gradients are taken of, before it is known whether that can be done."""
        if self.gradient_samples is not None:
            return self.gradient_samples
        schemes = self.resolve_quantization_config().groups.values()
        return _GRADIENT_SAMPLES * any(self._is_coarse(scheme.weights) for scheme in schemes)

    @staticmethod
    def _is_coarse(args: QuantizationArgs | None) -> bool:
        return args is not None and grid_of(args).bits < COARSE_BITS

    def _needs_data(self) -> bool:
        """Return True whatever the schemes are."""
        return True

    def _is_asymmetric(self) -> bool:
        """Return True with asymmetric calibration, which needs the original model's inputs."""
        return self.corrects_errors(self.resolve_quantization_config().groups.values())

    @property
    def records(self) -> dict[str, SolveRecord]:
        """Solver records by module name."""
        return dict(self._records)

    def _resolve(self) -> ResolvedSchemes:
        """The schemes, with the resolved activation order in their arguments.

        Raises:
            RecipeError: the recipe and a scheme request different orders.
        """
        resolved = super()._resolve()
        for scheme in resolved.groups.values():
            if scheme.weights is not None:
                scheme.weights.actorder = self._resolve_actorder(scheme.weights.actorder)
        return resolved

    def _resolve_actorder(self, asked: Any) -> Any:
        """The activation order of a scheme; it may override the default, not the recipe."""
        if asked is None:
            return self.actorder
        same = {"static": "weight", "weight": "weight", None: None}
        given = "actorder" in self.model_fields_set
        if given and same[self.actorder] != same[str(getattr(asked, "value", asked))]:
            raise RecipeError(
                f"GPTQModifier has actorder {self.actorder!r} and a scheme has {asked!r}.",
                "Keep one of them.",
            )
        return asked

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Second moments, and one factorization and sweep for all Linears that share an input.

        Without any module: what is recorded of gradients before the run.
        """
        if not modules:
            return Cost(held_bytes=sum(packed_bytes(len(weight_of(one))) for one in self._felt()))
        solved = [module for module in modules if self._is_solved(module)]
        every: list[QuantizationArgs | None] = [self._schemes[module].weights for module in solved]
        schemes = [args for args in every if args is not None]
        bits = [grid_of(args).bits for args in schemes]
        own = super().cost(modules, data) + self._gradient_cost(modules, data)
        return own + gptq_cost(
            [weight_of(module) for module in solved],
            data,
            twin=self._is_asymmetric(),
            refinements=max((refinement_rounds(self.refinements, one) for one in bits), default=0),
            batch=self._batch,
            answered=True,
            group=max([0, *(args.group_size or 0 for args in schemes)]),
        )

    def _gradient_cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """A forward of some samples, another one with a graph, and the way back."""
        felt = [weight_of(module) for module in modules if self._is_felt(module)]
        if not felt:
            return Cost()
        samples = min(self._gradient_samples, data.samples)
        tokens = data.tokens * samples // max(data.samples, 1)
        each = sum(3 * weight.numel() + len(weight) * BLOCK for weight in felt)
        return Cost(flops=tokens * each)

    def _felt(self) -> dict[Module, str]:
        """The Linears at whose outputs gradients are taken, and their names."""
        return {one: self._names[one] for one in self._schemes if self._is_felt(one)}

    def searches_scales(self, args: QuantizationArgs) -> bool:
        """Return True for integers below 8 bits."""
        return has_searchable_scales(args)

    def corrects_errors(self, schemes: Iterable[QuantizationScheme]) -> bool:
        """Return True with asymmetric calibration."""
        if self.asymmetric is not None:
            return self.asymmetric
        grids = [grid_of(scheme.weights) for scheme in schemes if scheme.weights is not None]
        return not all(grid.kind == "int" and grid.bits >= FINE_BITS for grid in grids)

    def _is_felt(self, module: Module) -> bool:
        if self.gradient_samples is not None:
            return self.gradient_samples > 0 and self._is_solved(module)
        return self._is_solved(module) and self._is_coarse(self._schemes[module].weights)

    @property
    def _batch(self) -> int | None:
        """Number of Linears that are solved in one call; ``None``: as many as are small."""
        asked = self.batched_quantization
        if asked is None or asked is False:
            return 1
        return None if asked is True or asked == "auto" else asked

    # ------------------------------------------------------------------ before

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """As for all that quantize; gradients need outputs that no modifier before it changes.

        Raises:
            RecipeError: the recipe asks for gradients, and one does.
        """
        if before := sorted(state.facts.outputs_changed_by):
            self._sees_outputs = False
            told = f"of the original model's outputs, which {join_names(before)} changes before it"
            if self.gradient_samples:
                raise RecipeError(
                    f"GPTQModifier takes gradients {told}.",
                    "Leave gradient_samples out, or set it to 0.",
                )
            logger.info(f"GPTQModifier takes no gradients {told}.")
        return super().on_initialize(state, **kwargs)

    def see_original(
        self, state: State, batches: Sequence[tuple[Mapping[str, Any], Tensor | None]]
    ) -> None:
        """Collect gradients at the outputs, unless a modifier before it changes these."""
        felt = self._felt()
        if not felt or not self._sees_outputs or state.run.block_source.rest_is_finished:
            return
        found = OutputGradients(state, felt)
        try:
            found.measure(self._gradient_samples)
        except torch.OutOfMemoryError:  # else results would depend on what else is in memory
            raise
        except (TargetError, NonFiniteError, RuntimeError) as error:
            # what calibration finds too, it names; on ranks all have to agree
            is_alike = isinstance(error, TargetError) or state.run.ranks is None
            if self.gradient_samples or not is_alike:
                raise
            logger.warning(f"No gradients are taken, and all outputs count alike: {error}")
            return
        self._gradients = found

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Accumulate second moments, once for all Linears that share an input."""
        super().on_calibration_start(state, event, **kwargs)
        changing = state.facts.changed_later

        def create(module: Module, input_TC: Tensor, twin: bool) -> InputStatistics:
            """They include the output residual only if no weight changes before it is solved."""
            sharing = self._inputs.sharing(module)
            weights = [] if changing.intersection(sharing) else [weight_of(one) for one in sharing]
            device = "cpu" if self.offload_hessians else input_TC.device
            name = self._names[module]
            return InputStatistics(
                input_TC.shape[-1], device, twin=twin, weights=weights, name=name
            )

        order, kept = state.calibration.call_order, state.run.kept_inputs
        self._inputs = InputCollector(create, self._is_solved, order, kept=kept)
        for leader in self._inputs.leaders(filter(self._is_solved, self._schemes)):
            hook = self._inputs.hook(state, reference_input)
            self.register_hook(leader, hook, "forward_pre", with_kwargs=True)

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum second moments at the owners."""
        self._inputs.sum_over(ranks, modules, self._names, owner_of)

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Solve Linears, those that share an input together; round embeddings to nearest."""
        solved = [module for module in modules if self._is_solved(module)]
        for module in (module for module in modules if module not in solved):
            self._round_to_nearest(module)
        options = Options(
            self.block_size,
            self.dampening_frac,
            self.asymmetric_ridge if self._is_asymmetric() else None,
            refinements=self.refinements,
            refit=self.refit_scales,
            batch=self._batch,
        )
        groups = list(self._groups(solved, state.facts.error_corrected))
        self._inputs.drop(solved)
        problems = [problem for _, problem in groups]
        ranks = state.run.ranks
        if ranks is not None and solved and state.run.divided.issuperset(solved):
            what = f"rows of {self._names[solved[0]]}"
            solutions = solve_divided(problems, options, ranks, what)
        else:
            solutions = solve(problems, options)
        for (members, problem), solution in zip(groups, solutions, strict=True):
            for number, module in enumerate(members):
                found = problem.parameters[number]
                if solution.scales is not None:
                    found = replace(found, scale=solution.scales[number])
                if solution.zero_points is not None:
                    found = replace(found, zero_point=solution.zero_points[number])
                self.keep(module, found, solution.weights[number])
                name = self._names[module]
                self._records[name] = SolveRecord(
                    problem.tokens, solution.loss, solution.dampening, solution.dead
                )
                self._report(name, solution, problem.shape[1])

    def _round_to_nearest(self, module: Module) -> None:
        """Round a weight before later modules see it, as in a resumed run."""
        self.keep(module, self.observe(module), weight_of(module).detach())

    def _is_solved(self, module: Module) -> bool:
        """Return True for quantized Linears; embeddings have no inputs to solve for."""
        return self._has_weight_scheme(module) and isinstance(module, Linear)

    def _groups(
        self, modules: Sequence[Module], fitted: set[Module]
    ) -> Iterator[tuple[list[Module], Problem]]:
        """Groups of modules with the same input, grid, order and partition, with their problems.

        Weights that another modifier has fitted to the original model are not corrected again.
        """
        alike: dict[tuple[Module, Grid, Any, Any], list[Module]] = {}
        for module in modules:
            args = self._schemes[module].weights
            assert args is not None
            key = (self._inputs.leader(module), grid_of(args), args.actorder, partition_of(args))
            alike.setdefault(key, []).append(module)
        for (leader, _, actorder, _), members in alike.items():
            statistics = self._inputs.of(leader)
            if statistics is None or statistics.tokens == 0:
                for module in members:
                    name = self._names[module]
                    logger.warning(
                        f"{name} was shown no calibration token; its weight is rounded to nearest."
                    )
                    self._round_to_nearest(module)
                    self._records[name] = SolveRecord(0, None, None)
                continue
            device = weight_of(members[0]).device
            importance_C = statistics.gram.diagonal() / statistics.tokens
            cross = missing = None
            if not fitted.issuperset(members):
                cross, missing = statistics.cross, statistics.missing
            together = self._inputs.sharing(leader)
            if missing is not None and list(members) != list(together):
                counts = [len(weight_of(one)) for one in together]
                rows = torch.split(torch.arange(sum(counts)), counts)
                place = dict(zip(together, rows, strict=True))
                missing = missing[:, torch.cat([place[member] for member in members])]
            yield (
                members,
                Problem(
                    weights=[weight_of(module).detach() for module in members],
                    parameters=[self.observe(module, importance_C) for module in members],
                    gram_CC=statistics.gram.to(device),
                    cross_CC=None if cross is None else cross.to(device),
                    tokens=statistics.tokens,
                    ordered=actorder is not None,
                    searches=not self.resolved_config.names_weight_observer,
                    missing_CR=None if missing is None else missing.to(device),
                    output_NBB=()
                    if self._gradients is None
                    else self._gradients.of([self._names[one] for one in members], device),
                ),
            )

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Finish all that was not finished with its block; gradients are not needed any more."""
        super().on_calibration_end(state, event, **kwargs)
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def _report(self, name: str, solution: Solution, columns: int) -> None:
        dampening = solution.dampening
        if not solution.is_idle:
            told = "these are rounded to nearest"
            warn_of_dead_columns(name, solution.dead, columns, told)
        if solution.is_idle:
            logger.warning(
                f"{name}: its inputs were zero in every calibration token; its weight is rounded "
                "to nearest."
            )
        elif dampening is None:
            logger.warning(
                f"{name}: the Hessian could not be factorized at any dampening; its weight is "
                "rounded to nearest."
            )
        elif dampening > self.dampening_frac:
            logger.warning(f"{name}: the Hessian needed a dampening of {dampening:g}.")
