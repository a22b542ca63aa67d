# SPDX-License-Identifier: Apache-2.0
"""HQQ: scales and zero points of integer weights by minimizing a robust error, without data.

Badri and Shaji, *Half-Quadratic Quantization of Large Machine Learning Models*, 2023; see
:mod:`llmcompressor.numerics.hqq` for the equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import (
    ELEMENTWISE,
    Cost,
    DataSize,
    Edits,
    RecipeRules,
    Solving,
    Traits,
)
from llmcompressor.core.modifier import RecordedMixin
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError
from llmcompressor.numerics.hqq import CHUNK_ELEMENTS, HalfQuadratic, lp_error, refine_cells
from llmcompressor.numerics.scales import ScaleFormat
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.parameters import (
    WeightParameters,
    check_observers,
    needs_input_importance,
    weight_of,
)
from llmcompressor.runtime.threads import parallel_for
from llmcompressor.schemes.bridge import grid_of, partition_of, scale_format_of

_ROUND_BYTES = 40
"""Of a weight in one round: ten tensors of float32."""
_ERROR_BYTES = 8
"""Of a weight when its error is summed: it and what it was rounded to in float32."""
_VISITS = 32
"""Of a weight in one round: rounded, compared, and its logarithm taken twice."""


@dataclass(frozen=True)
class RefineRecord:
    """Result of refining the scales of a weight.

    Attributes:
        error: mean of abs(w - w')^lp_norm over the weight.
        error_before: the same with the observer's scales.
    """

    error: float
    error_before: float


class HQQModifier(RecordedMixin, QuantizationMixin):
    """Quantize weights to integers with scales and zero points from half-quadratic splitting.

    Needs no data, unless the scheme has static activation scales or a cache scale.

    Attributes:
        iters: rounds of the alternation.
        lp_norm: exponent p of the error; the smaller it is, the less outliers count.
        beta: weight of the quadratic term in the first round.
        kappa: factor of beta after each round.
    """

    rules: ClassVar[RecipeRules] = replace(
        QuantizationMixin.rules, run_types=frozenset({"oneshot"})
    )

    iters: int = Field(default=20, ge=1, le=10_000)
    lp_norm: float = Field(default=0.7, gt=0.0, le=1.0)
    beta: float = Field(default=1.0, gt=0.0, le=1e6)
    kappa: float = Field(default=1.01, ge=1.0, le=10.0)

    _records: dict[str, RefineRecord] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse schemes that half-quadratic quantization does not support."""
        super().model_post_init(context)
        resolved = self.resolve_quantization_config()
        check_observers(resolved)
        for name, scheme in resolved.groups.items():
            if scheme.weights is not None:
                _check_weights(name, scheme.weights)

    @property
    def traits(self) -> Traits:
        """Weights are rounded when their block is finished."""
        return replace(super().traits, edits=Edits.NONE, over_ranks=Solving.OWNER)

    @property
    def records(self) -> dict[str, RefineRecord]:
        """Refinement records by module name."""
        return dict(self._records)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Passes of the rounds over every weight, and what a round or a weight's error takes."""
        weights = [weight_of(one) for one in modules if self._has_weight_scheme(one)]
        rounds = (_ROUND_BYTES * min(one.numel(), CHUNK_ELEMENTS) for one in weights)
        errors = ((_ERROR_BYTES + one.element_size()) * one.numel() for one in weights)
        elements = sum(one.numel() for one in weights)
        return super().cost(modules, data) + Cost(
            flops=ELEMENTWISE * _VISITS * self.iters * elements,
            peak_bytes=max([0, *rounds, *errors]),
        )

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Find scales and zero points; the weights themselves are rounded at the end."""
        found: dict[Module, tuple[WeightParameters, RefineRecord]] = {}

        @torch.no_grad()
        def find(module: Module) -> None:
            found[module] = self._refine(weight_of(module).detach(), self.observe(module))

        if all(weight_of(module).device.type == "cpu" for module in modules):
            parallel_for(find, modules)
        else:
            for module in modules:
                find(module)
        for module in modules:
            parameters, record = found[module]
            self.keep(module, parameters)
            self._records[self._names[module]] = record

    def _refine(
        self, weight_RC: Tensor, start: WeightParameters
    ) -> tuple[WeightParameters, RefineRecord]:
        grid, partition = grid_of(start.args), partition_of(start.args)
        values_SN = partition.cells(weight_RC).flatten(0, -2)
        scale_S = start.scale.flatten()
        zero_S = None if grid.symmetric else start.zero_point.flatten()
        search = HalfQuadratic(self.lp_norm, self.beta, self.kappa, self.iters)
        new_S, new_zero_S = refine_cells(values_SN, scale_S, zero_S, grid, search)
        before = lp_error(values_SN, scale_S, zero_S, grid, self.lp_norm).sum()
        after = lp_error(values_SN, new_S, new_zero_S, grid, self.lp_norm).sum()
        count = weight_RC.numel()
        zero_point = start.zero_point
        if new_zero_S is not None:
            zero_point = new_zero_S.reshape(zero_point.shape)
        refined = WeightParameters(start.args, new_S.reshape(start.scale.shape), zero_point)
        return refined, RefineRecord(float(after) / count, float(before) / count)


def _check_weights(name: str, args: QuantizationArgs) -> None:
    """Refuse weight arguments that half-quadratic quantization does not support.

    Raises:
        RecipeError: floats, scales that are not plain numbers, or an observer that needs data.
    """
    if grid_of(args).kind != "int" or scale_format_of(args) is not ScaleFormat.PLAIN:
        raise RecipeError(
            f"the weights of {name} are {args.num_bits}-bit floats, and half-quadratic "
            "quantization is for integers",
            "Take an integer scheme (W4A16_ASYM), or QuantizationModifier.",
        )
    if needs_input_importance(args):
        raise RecipeError(
            f"the observer {args.observer} of {name} weighs errors by calibration data, and "
            "half-quadratic quantization uses none",
            "Leave the observer out, or take QuantizationModifier.",
        )
