# SPDX-License-Identifier: Apache-2.0
"""SparseGPT: prune weights, and update the remaining ones to preserve outputs (arXiv:2301.00774).

The objective for a Linear with weight W and inputs X is the error of its output, ``‖(Q − W) Xᵀ‖²``,
over sparse Q. See :mod:`llmcompressor.numerics.sparse_fit` for the solver,
:mod:`llmcompressor.numerics.sparsegpt` for the sweep of the paper, and
:mod:`llmcompressor.numerics.gptq` for asymmetric calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import (
    DEFAULT_DAMPENING,
    EARLIER_DAMPENING,
    Cost,
    DampeningFraction,
    DataSize,
    RecipeRules,
    Traits,
)
from llmcompressor.core.state import State
from llmcompressor.logger import logger
from llmcompressor.modifiers.sparsity.base import OneShotPruningModifier
from llmcompressor.modifiers.sparsity.solve import Options, Problem, solve, sparsegpt_cost
from llmcompressor.modifiers.sparsity.targets import matrix_of
from llmcompressor.numerics.masks import Share, Sparsity
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.pipelines.watchers import reference_input


class SparseGPTModifier(OneShotPruningModifier):
    """Prune weights, and update the remaining ones to compensate.

    Attributes:
        block_size: columns within which the sweep compares weights (``refinements: 0``).
        dampening_frac: dampening added to the Hessian's diagonal, as a fraction of its mean;
            ``None`` is the default. If a factorization fails it is raised tenfold, up to three
            times.
        preserve_sparsity_mask: weights that are zero stay zero, and count towards the sparsity.
        offload_hessians: keep second moments in main memory while they are accumulated.
        refinements: rounds in which the mask is improved; 0 is the sweep of the paper.
        asymmetric: match the original Linear's outputs on the original inputs, given the inputs of
            the pruned model. Costs a second forward, and helps at 2:4. Default: on if GPTQ, in the
            same pass, needs that forward anyway.
        asymmetric_ridge: λ of that correction, as a fraction of the mean diagonal; at least C / T,
            for C columns and T tokens.

    Example::

        SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"])
    """

    rules: ClassVar[RecipeRules] = replace(OneShotPruningModifier.rules, renamed=EARLIER_DAMPENING)

    block_size: int = Field(default=128, ge=1)
    dampening_frac: DampeningFraction = DEFAULT_DAMPENING
    preserve_sparsity_mask: bool = False
    offload_hessians: bool = False
    refinements: int = Field(default=3, ge=0, le=1000)
    asymmetric: bool | None = None
    asymmetric_ridge: float = Field(default=0.05, gt=0.0, le=10.0)

    @property
    def traits(self) -> Traits:
        """Asymmetric calibration needs the original model's inputs."""
        found = super().traits
        if not self.asymmetric:
            return found
        return replace(
            found,
            twin=not self._is_surveying,
            beyond_statistics="compares the inputs of two models (asymmetric: true)",
        )

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Second moments, and the factorizations and solves for modules that share an input."""
        return sparsegpt_cost(
            [matrix_of(module) for module in modules],
            data,
            twin=bool(self.asymmetric),
            refinements=self.refinements,
            grouped=self._group is not None,
        )

    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> InputStatistics:
        """Second moments of the inputs."""
        place = "cpu" if self.offload_hessians else input_TC.device
        name = self._layers.names[module]
        return InputStatistics(input_TC.shape[-1], place, twin=twin, name=name)

    def mean_square(self, statistics: InputStatistics) -> Tensor:
        """The diagonal of the second moments, per token."""
        return statistics.gram.diagonal() / statistics.tokens

    def reference_input(self, module: Module, tensor: Tensor, state: State) -> Tensor | None:
        """The original model's input of ``module``, if that model is run."""
        if self._is_surveying or self.asymmetric is False:
            return None
        return reference_input(module, tensor, state)

    def fits_original(self, module: Module) -> bool:
        """Return True if the inputs of both models were observed."""
        found = self._inputs.of(module)
        return found is not None and found.cross is not None

    def prune(self, modules: Sequence[Module]) -> None:
        """Solve modules that share an input together, and equal shapes in one batch."""
        groups: dict[Module, list[Module]] = {}
        for module in modules:
            groups.setdefault(self._inputs.leader(module), []).append(module)
        options = Options(
            self.block_size,
            self.dampening_frac,
            self.asymmetric_ridge,
            refinements=self.refinements,
            preserve=self.preserve_sparsity_mask,
        )
        problems = [self._problem(members) for members in groups.values()]
        solutions = solve(problems, options)
        for members, problem, found in zip(groups.values(), problems, solutions, strict=True):
            for module, weight_RC, loss in zip(members, found.weights, found.losses, strict=True):
                self.put(
                    module, weight_RC, tokens=problem.tokens, loss=loss, dampening=found.dampening
                )
                name = self._layers.names[module]
                if found.dampening is None:
                    logger.warning(
                        f"{name}: the Hessian could not be factorized at any dampening; it is "
                        "pruned by magnitude times input norm, and what is left is not changed."
                    )
                elif found.dampening > self.dampening_frac:
                    logger.warning(
                        f"{name}: the Hessian needed a dampening of {found.dampening:g}."
                    )

    def _problem(self, members: Sequence[Module]) -> Problem:
        statistics: InputStatistics | None = self._inputs.of(members[0])
        assert statistics is not None
        weights = [matrix_of(module) for module in members]
        shares = tuple(
            Share(len(weight), self.sparsity_of(module))
            for weight, module in zip(weights, members, strict=True)
        )
        device, cross = weights[0].device, statistics.cross
        return Problem(
            weights,
            Sparsity(shares, self._group),
            gram_CC=statistics.gram.to(device),
            cross_CC=None if cross is None else cross.to(device),
            tokens=statistics.tokens,
        )
