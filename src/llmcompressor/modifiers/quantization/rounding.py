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
from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.gram import add_column_squares
from llmcompressor.observers.tokens import real_tokens
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

    _squares: dict[Module, Tensor] = PrivateAttr(default_factory=dict)
    _tokens: dict[Module, int] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Also observe the inputs of weights whose observer weights errors by them."""
        super().on_calibration_start(state, event, **kwargs)

        @torch.no_grad()
        def add_squares(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if tensor is None:
                return
            tokens_TC = real_tokens(tensor, state.calibration.token_mask)
            if module not in self._squares:
                self._squares[module] = torch.zeros(tokens_TC.shape[1], device=tokens_TC.device)
            add_column_squares(self._squares[module], tokens_TC)
            self._tokens[module] += len(tokens_TC)

        for module, scheme in self._schemes.items():
            weighs = needs_input_importance(scheme.weights)
            leader = self.leader(module, state)
            watched = leader in self._tokens
            if weighs and not watched and isinstance(module, Linear):  # embeddings get row numbers
                self._tokens[leader] = 0
                self.register_hook(leader, add_squares, "forward_pre", with_kwargs=True)

    @property
    def traits(self) -> Traits:
        """Everything is measured on the original model."""
        return replace(super().traits, edits=Edits.NONE, over_ranks=Solving.OWNER)

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum the squares of inputs, and their tokens, on all ranks."""
        own = (module for module in modules if module in self._schemes)
        for leader in dict.fromkeys(self.leader(module, state) for module in own):
            if leader in self._tokens and ranks.count > 1:
                weight = weight_of(leader)
                none_C = torch.zeros(weight.shape[-1], device=weight.device)
                squares_C = self._squares.get(leader, none_C)
                what = f"squares of the inputs of {self._names[leader]}"
                self._squares[leader] = ranks.sum_all(squares_C, what=what)
                tokens = torch.tensor(self._tokens[leader])
                self._tokens[leader] = int(ranks.sum_all(tokens, what=what))
                if self._tokens[leader] == 0:
                    del self._squares[leader]

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Find the scales; the weights themselves are rounded at the end."""
        leaders = [self.leader(module, state) for module in modules]
        found: dict[Module, WeightParameters] = {}

        @torch.no_grad()
        def find(pair: tuple[Module, Module]) -> None:
            module, leader = pair
            found[module] = self.observe(module, self._importance(leader))

        _for_each(self.cache_weight_range, modules, modules)
        self.find_global_scales(modules)
        _for_each(find, list(zip(modules, leaders, strict=True)), modules)
        with one_thread(torch.device("cpu")):  # many small tensors
            for module in modules:
                self.keep(module, found[module])
        for leader in leaders:
            self._squares.pop(leader, None)

    def _importance(self, leader: Module) -> Tensor | None:
        """Mean square of each input column, float32 ``[C]``; ``None`` if not observed."""
        squares_C = self._squares.get(leader)
        if squares_C is None:
            return None
        if not is_finite(squares_C):
            raise NonFiniteError(
                f"The activations that go into {self._names[leader]} hold NaN or infinity. Look "
                "for a bad weight upstream, or load the model with precision='float32'."
            )
        return squares_C / self._tokens[leader]


def _for_each(work: Callable[[T], None], items: Sequence[T], modules: Sequence[Module]) -> None:
    """Call ``work`` on every item, one per module; in parallel on the CPU."""
    if all(weight_of(module).device.type == "cpu" for module in modules):
        # one thread per weight: threads that share one would wait for the prefetching thread
        parallel_for(work, items)
        return
    for item in items:
        work(item)
