# SPDX-License-Identifier: Apache-2.0
"""GPTQ: round weights column by column, and compensate each error in the remaining columns.

Frantar et al., arXiv:2210.17323. The objective for a Linear with weight W and inputs X is the error
of its output, ``‖(Q − W) Xᵀ‖²``; see :mod:`llmcompressor.numerics.gptq` for the equations and
:mod:`llmcompressor.numerics.gptq` for asymmetric calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
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
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import RecordedMixin
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import CallOrder, first_tensor
from llmcompressor.numerics.grid import Grid
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.pipelines.watchers import reference_input
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.column_solver import (
    FINE_BITS,
    Options,
    Problem,
    Solution,
    gptq_cost,
    refinement_rounds,
    solve,
)
from llmcompressor.quantization.parameters import WeightParameters, replace_weight, weight_of
from llmcompressor.schemes.bridge import grid_of, partition_of
from llmcompressor.schemes.parse import check_actorder
from llmcompressor.schemes.resolve import ResolvedSchemes

__all__ = ["GPTQModifier", "SolveRecord"]


@dataclass(frozen=True)
class SolveRecord:
    """Result of solving a module.

    Attributes:
        tokens: number of calibration tokens in its statistics.
        loss: loss of the modules solved together with it; ``None`` if no token reached it.
        dampening: the fraction with which the factorization succeeded; ``None`` if the weight was
            rounded to nearest: no token reached it, its inputs were all zero (then ``loss`` is 0),
            or the factorization always failed.
    """

    tokens: int
    loss: float | None
    dampening: float | None


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
            8-bit integers, where it measures no better.
        asymmetric_ridge: λ of that correction, as a fraction of the mean diagonal; at least C / T,
            for C columns and T tokens.
        refinements: rounds of coordinate descent after the sweep, in which every column is decided
            again, given all others (arXiv:2309.01885); below 8 bits. ``None``: one round below 4
            bits, where it pays off.
        refit_scales: fit the scales of integer groups and channels to the final codes; below 8
            bits.
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

    block_size: int = Field(default=128, ge=1)
    dampening_frac: DampeningFraction = DEFAULT_DAMPENING
    actorder: Literal["static", "weight"] | None = "static"
    asymmetric: bool | None = None
    refinements: int | None = Field(default=None, ge=0, le=100)
    refit_scales: bool = True
    asymmetric_ridge: float = Field(default=0.05, gt=0.0, le=10.0)
    offload_hessians: bool = False
    batched_quantization: (
        StrictBool | Annotated[int, Field(strict=True, ge=1)] | Literal["auto"] | None
    ) = "auto"
    sequential_update: bool = True
    sequential_targets: str | list[str] | None = None
    num_calibration_steps: int | None = None
    disable_quantization_observer_epoch: float | None = None

    _statistics: dict[Module, InputStatistics] = PrivateAttr(default_factory=dict)
    _tokens: dict[Module, int] = PrivateAttr(default_factory=dict)
    _order: CallOrder | None = PrivateAttr(None)
    _records: dict[str, SolveRecord] = PrivateAttr(default_factory=dict)

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
        )

    def _needs_data(self) -> bool:
        """Return True whatever the schemes are."""
        return True

    def _is_asymmetric(self) -> bool:
        """Return True with asymmetric calibration, which needs the original model's inputs."""
        if self.asymmetric is not None:
            return self.asymmetric
        schemes = self.resolve_quantization_config().groups.values()
        grids = [grid_of(scheme.weights) for scheme in schemes if scheme.weights is not None]
        return not all(grid.kind == "int" and grid.bits >= FINE_BITS for grid in grids)

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
        """Second moments, and one factorization and sweep for all Linears that share an input."""
        solved = [module for module in modules if self._is_solved(module)]
        schemes = [args for args in map(self._weight_args, solved) if args is not None]
        bits = [grid_of(args).bits for args in schemes]
        return super().cost(modules, data) + gptq_cost(
            [weight_of(module) for module in solved],
            data,
            twin=self._is_asymmetric(),
            refinements=max((refinement_rounds(self.refinements, one) for one in bits), default=0),
            batch=self._batch,
            answered=True,
            group=max([0, *(args.group_size or 0 for args in schemes)]),
        )

    @property
    def _batch(self) -> int | None:
        """Number of Linears that are solved in one call; ``None``: as many as are small."""
        asked = self.batched_quantization
        if asked is None or asked is False:
            return 1
        return None if asked is True or asked == "auto" else asked

    def _weight_args(self, module: Module) -> QuantizationArgs | None:
        weights: QuantizationArgs | None = self._schemes[module].weights
        return weights

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Accumulate second moments, once for all Linears that share an input."""
        super().on_calibration_start(state, event, **kwargs)
        self._order = state.calibration.call_order
        solved = filter(self._is_solved, self._schemes)
        for leader in dict.fromkeys(self._leader(module) for module in solved):
            self.register_hook(leader, self._hook(state), "forward_pre", with_kwargs=True)

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Solve Linears, those that share an input together; round embeddings to nearest."""
        solved = [module for module in modules if self._is_solved(module)]
        for module in (module for module in modules if module not in solved):
            parameters = self.observe(module)
            replace_weight(module, parameters.round(weight_of(module).data))
            self.keep(module, parameters, rounded=True)
        options = Options(
            self.block_size,
            self.dampening_frac,
            self.asymmetric_ridge if self._is_asymmetric() else None,
            refinements=self.refinements,
            refit=self.refit_scales,
            batch=self._batch,
        )
        for members, found, solution in self._solve_groups(
            solved, state.facts.error_corrected, options
        ):
            self._write(members, found, solution)

    def _solve_groups(
        self, modules: Sequence[Module], fitted: set[Module], options: Options
    ) -> list[tuple[list[Module], Sequence[WeightParameters], Solution]]:
        """Solve the groups of ``modules``; their second moments are freed before."""
        groups = list(self._groups(modules, fitted))
        for members, _ in groups:
            tokens = self._statistics[self._leader(members[0])].tokens
            self._tokens.update(dict.fromkeys(members, tokens))
        for module in modules:
            self._statistics.pop(self._leader(module), None)
        solutions = solve([problem for _, problem in groups], options)
        return [
            (members, problem.parameters, solution)
            for (members, problem), solution in zip(groups, solutions, strict=True)
        ]

    def _hook(self, state: State) -> Any:
        @torch.no_grad()
        def collect(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if tensor is None:
                return
            reference = reference_input(module, tensor, state)
            tokens_TC = real_tokens(tensor, state.calibration.token_mask)
            if reference is not None:
                reference = real_tokens(reference, state.calibration.token_mask)
            if module not in self._statistics:
                self._statistics[module] = self._begun(
                    module, tensor, state.facts.changed_later, twin=reference is not None
                )
            self._statistics[module].update(tokens_TC, reference)

        return collect

    def _begun(
        self, module: Module, tensor: Tensor, changing: set[Module], *, twin: bool
    ) -> InputStatistics:
        """Start the statistics of an input.

        They include the output residual only for weights that do not change before they are solved.
        """
        together = self._modules_with_same_input(module)
        weights = [] if changing.intersection(together) else [weight_of(one) for one in together]
        device = "cpu" if self.offload_hessians else tensor.device
        return InputStatistics(
            tensor.shape[-1], device, twin=twin, weights=weights, name=self._names[module]
        )

    def _leader(self, module: Module) -> Module:
        """The first of this modifier's modules that share ``module``'s input."""
        return next(iter(self._modules_with_same_input(module)))

    def _modules_with_same_input(self, module: Module) -> Sequence[Module]:
        """Modules of this modifier that share ``module``'s input, including itself."""
        if self._order is None:
            return [module]
        return [one for one in self._order.group_of(module) if self._is_solved(one)]

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
            key = (self._leader(module), grid_of(args), args.actorder, partition_of(args))
            alike.setdefault(key, []).append(module)
        for (leader, _, actorder, _), members in alike.items():
            statistics = self._statistics.get(leader)
            if statistics is None or statistics.tokens == 0:
                for module in members:
                    self._round_unreached(module)
                continue
            device = weight_of(members[0]).device
            importance_C = statistics.gram.diagonal() / statistics.tokens
            cross = missing = None
            if not fitted.issuperset(members):
                cross, missing = statistics.cross, statistics.missing
            together = self._modules_with_same_input(leader)
            if missing is not None and list(members) != list(together):
                missing = missing[:, self._rows_of(members, together)]
            yield (
                members,
                Problem(
                    weights=[weight_of(module).detach() for module in members],
                    parameters=[self.observe(module, importance_C) for module in members],
                    gram_CC=statistics.gram.to(device),
                    cross_CC=None if cross is None else cross.to(device),
                    tokens=statistics.tokens,
                    ordered=actorder is not None,
                    missing_CR=None if missing is None else missing.to(device),
                ),
            )

    @staticmethod
    def _rows_of(members: Sequence[Module], together: Sequence[Module]) -> Tensor:
        """Row indices of some weights within the stack of all that share an input."""
        counts = [len(weight_of(one)) for one in together]
        rows = dict(zip(together, torch.split(torch.arange(sum(counts)), counts), strict=True))
        return torch.cat([rows[member] for member in members])

    def _round_unreached(self, module: Module) -> None:
        """Round a module that no token reached to nearest, with a warning and a record."""
        name = self._names[module]
        logger.warning(f"{name} was shown no calibration token; its weight is rounded to nearest.")
        found, weight = self.observe(module), weight_of(module)
        # later modules see the rounded weight, as in a resumed run
        replace_weight(module, found.round(weight.detach()))
        self.keep(module, found, rounded=True)
        self._records[name] = SolveRecord(0, None, None)

    def _write(
        self,
        members: Sequence[Module],
        parameters: Sequence[WeightParameters],
        solution: Solution,
    ) -> None:
        for number, module in enumerate(members):
            found, weight = parameters[number], solution.weights[number]
            if solution.scales is not None:
                found = replace(found, scale=solution.scales[number])
            name = self._names[module]
            replace_weight(module, found.round(weight))
            self.keep(module, found, rounded=True)
            tokens = self._tokens.pop(module)
            self._records[name] = SolveRecord(tokens, solution.loss, solution.dampening)
            self._report(name, solution)

    def _report(self, name: str, solution: Solution) -> None:
        dampening = solution.dampening
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

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Quantize what is left, and free the statistics."""
        super().on_calibration_end(state, event, **kwargs)
        self._statistics.clear()
        self._order = None
