# SPDX-License-Identifier: Apache-2.0
r"""Round-to-nearest quantization: every weight takes the closest value of its grid.

With the scale s and zero point z that an observer finds for each cell of the weight,

.. math:: q = \operatorname{clamp}(\operatorname{round}(w / s + z)), \qquad w' = (q - z)\, s .

No data is needed unless the scheme has static activation scales, a cache scale, or an observer
that weighs errors by the inputs (``imatrix_mse``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.contract import Edits, RecipeRules, Solving, Traits
from llmcompressor.core.events import Event
from llmcompressor.core.state import State
from llmcompressor.observers.column_statistics import ColumnSquares
from llmcompressor.observers.input_statistics import InputCollector
from llmcompressor.quantization.parameters import (
    WeightParameters,
    needs_input_importance,
    weight_of,
)
from llmcompressor.quantization.qat import TrainableMixin
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.threads import one_thread, parallel_for

T = TypeVar("T")


class QuantizationModifier(TrainableMixin):
    """Quantize weights by rounding to nearest, and activations as the scheme specifies.

    The weights are rounded when calibration ends: activation scales and other statistics are
    measured on the original model. In a training, weights and activations are fake-quantized in
    every forward instead, with straight-through gradients
    (:class:`~llmcompressor.quantization.qat.QuantizationAwareTraining`).

    Example::

        QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])

    Attributes:
        dampening_frac: without effect, with a warning: it is a field of ``GPTQModifier``.
    """

    leaves_modules: ClassVar[bool] = True
    rules: ClassVar[RecipeRules] = replace(
        TrainableMixin.rules,
        moved={
            **TrainableMixin.rules.moved,
            "dampening_frac": "rounding to nearest damps nothing; GPTQModifier does.",
        },
    )

    dampening_frac: float | None = None

    _inputs: InputCollector[ColumnSquares] = PrivateAttr()

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Also observe the inputs of weights whose observer weights errors by them."""
        super().on_calibration_start(state, event, **kwargs)

        def create(module: Module, input_TC: Tensor, twin: bool) -> ColumnSquares:
            return ColumnSquares(input_TC.shape[-1], input_TC.device, self._names[module])

        order, kept = state.calibration.call_order, state.run.kept_inputs
        self._inputs = InputCollector(create, self._weighs, order, kept=kept)
        hook = self._inputs.hook(state)
        for leader in self._inputs.leaders(filter(self._weighs, self._schemes)):
            self.register_hook(leader, hook, "forward_pre", with_kwargs=True)

    def _weighs(self, module: Module) -> bool:
        """Return True for Linears whose observer weights errors; embeddings get row numbers."""
        scheme = self._schemes.get(module)
        weights = None if scheme is None else scheme.weights
        return isinstance(module, Linear) and needs_input_importance(weights)

    @property
    def traits(self) -> Traits:
        """Everything is measured on the original model."""
        return replace(
            super().traits,
            edits=Edits.NONE,
            over_ranks=Solving.OWNER,
            beyond_statistics=self._beyond_statistics(),
        )

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum the squares of inputs, and their tokens, on all ranks."""
        self._inputs.sum_over(ranks, modules, self._names)

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Find the scales; the weights themselves are rounded at the end."""
        squares = {one: self._inputs.of(one) for one in filter(self._weighs, modules)}
        importance = {k: one.mean_square() for k, one in squares.items() if one and one.tokens}
        found: dict[Module, WeightParameters] = {}

        @torch.no_grad()
        def find(module: Module) -> None:
            found[module] = self.observe(module, importance.get(module))

        _for_each(self.cache_weight_range, modules, modules)
        self.find_global_scales(modules)
        _for_each(find, modules, modules)
        with one_thread(torch.device("cpu")):  # many small tensors
            for module in modules:
                self.keep(module, found[module])
        self._inputs.drop(modules)


def _for_each(work: Callable[[T], None], items: Sequence[T], modules: Sequence[Module]) -> None:
    """Call ``work`` on every item, one per module; in parallel on the CPU."""
    if all(weight_of(module).device.type == "cpu" for module in modules):
        # one thread per weight: threads that share one would wait for the prefetching thread
        parallel_for(work, items)
        return
    for item in items:
        work(item)
