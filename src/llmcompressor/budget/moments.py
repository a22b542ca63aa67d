# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens of what Linears read, and of the gradients of what they return.

They are what :mod:`llmcompressor.numerics.sensitivity` makes an estimate of. Linears that read the
same input, such as q, k and v, have its squares computed once, when the gradients of all of them
are known; its second moments are kept at the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
from llmcompressor.modeling.fused import fused_sets
from llmcompressor.numerics.gram import (
    add_upper_product,
    mirror_upper_,
    packed_upper,
    unpacked_upper,
)
from llmcompressor.numerics.sensitivity import add_squares, weighted_squares
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.collectives import Ranks

_TOKENS_PER_COLUMN = 4
"""Tokens of which second moments are taken: what compensation leaves is known well enough then."""


@dataclass
class Moments:
    """Sums over the tokens of a Linear that the loss depends on, through it or a partner.

    Attributes:
        gradient_R: squares of the output's gradients, float32.
        input_C: squares of the inputs, float32.
        felt_C: the same, of each token times the squares of its gradient, float32.
        gram_CC: products of the inputs of some of the tokens, if asked for, of the first of the
            Linears that share an input; the upper triangle.
        tokens: number of tokens.
    """

    gradient_R: Tensor
    input_C: Tensor
    felt_C: Tensor
    gram_CC: Tensor | None = None
    tokens: int = 0

    @property
    def felt_mean(self) -> Tensor:
        """The mean square of each input, of tokens weighted by the squares of their gradients."""
        return self.felt_C / self.gradient_R.sum().clamp(min=torch.finfo(torch.float32).tiny)


@dataclass
class _Shared:
    """An input that waits for the gradients of all Linears that read it.

    Attributes:
        input_TC: the input.
        energy_T: of each Linear, by its name: the squares of its gradient, by token, float32.
    """

    input_TC: Tensor
    energy_T: dict[str, Tensor] = field(default_factory=dict)

    def is_of(self, input_TC: Tensor) -> bool:
        """Return True if this is the same tensor."""
        own = self.input_TC
        return own.data_ptr() == input_TC.data_ptr() and own.shape == input_TC.shape


class MomentCollector:
    """Collects the moments of Linears.

    Args:
        model: the model.
        names: of the Linears.
        batches: how many batches there are, of all ranks.
        with_products: second moments are collected too, of a few tokens for each column.

    Attributes:
        leaders: Linear → the first of those that read the same input.
        joined: leader → all Linears with the same input, wanted or not.
        moments: of each Linear that was called.
    """

    def __init__(
        self, model: Module, names: Iterable[str], *, batches: int, with_products: bool
    ) -> None:
        self.leaders = {name: name for name in names}
        self.joined: dict[str, Sequence[str]] = {name: (name,) for name in self.leaders}
        for joined in fused_sets(model):  # they read one input
            own = [name for name in joined if name in self.leaders]
            self.leaders |= dict.fromkeys(own, own[0] if own else "")
            self.joined |= {name: joined for name in own[:1]}
        self._with_products, self._batches = with_products, batches
        self.moments: dict[str, Moments] = {}
        self._waiting: dict[str, _Shared] = {}

    @torch.no_grad()
    def add(self, name: str, given: Tensor, gradient: Tensor) -> None:
        """Add the tokens of a call.

        Args:
            name: of the Linear.
            given: its input ``[..., C]``.
            gradient: of its output, ``[..., R]``.
        """
        input_TC, gradient_TR = given.flatten(0, -2), gradient.flatten(0, -2)
        leader = self.leaders[name]
        waiting = self._waiting.get(leader)
        if waiting is None or name in waiting.energy_T or not waiting.is_of(input_TC):
            self._finish(leader)
            waiting = self._waiting[leader] = _Shared(input_TC)
        moments = self.moments.get(name) or self._begin(
            name, input_TC.shape[-1], gradient_TR.shape[-1], input_TC.device
        )
        waiting.energy_T[name] = add_squares(moments.gradient_R, gradient_TR)
        if all(one in waiting.energy_T for one in self.joined[leader] if one in self.leaders):
            self._finish(leader)

    def finish(self) -> None:
        """Add the inputs that still wait, of Linears that are not all felt."""
        for leader in list(self._waiting):
            self._finish(leader)

    def add_up(self, modules: Mapping[str, Module], ranks: Ranks) -> None:
        """Add up what all ranks have found of some Linears, on each of them.

        Args:
            modules: the Linears of one block, by their names.
            ranks: the ranks, each of which has seen other batches.
        """
        if ranks.count == 1:
            return
        empty = Moments(torch.empty(0), torch.empty(0), torch.empty(0))
        own = [self.moments.get(name, empty).tokens for name in modules]
        totals = ranks.sum_all(torch.tensor(own), what="tokens of a budget's modules").tolist()
        for (name, module), tokens in zip(modules.items(), totals, strict=True):
            if tokens == 0:
                continue
            weight_RC = weight_of(module)
            rows, columns = weight_RC.shape
            moments = self.moments.get(name) or self._begin(name, columns, rows, weight_RC.device)
            sums = torch.cat((moments.gradient_R, moments.input_C, moments.felt_C))
            sums = ranks.sum_all(sums, what=f"moments of {name}")
            sizes = [len(one) for one in (moments.gradient_R, moments.input_C, moments.felt_C)]
            moments.gradient_R, moments.input_C, moments.felt_C = torch.split(sums, sizes)
            moments.tokens = tokens
            if moments.gram_CC is not None:
                gram_CC = mirror_upper_(moments.gram_CC)
                moments.gram_CC = ranks.sum_all(gram_CC, what=f"products of {name}", symmetric=True)

    def _begin(self, name: str, columns: int, rows: int, device: torch.device) -> Moments:
        empty = torch.zeros(rows + 2 * columns, dtype=torch.float32, device=device)
        gradient_R, input_C, felt_C = torch.split(empty, [rows, columns, columns])
        moments = self.moments[name] = Moments(gradient_R, input_C, felt_C)
        if self._with_products and self.leaders[name] == name:
            moments.gram_CC = empty.new_zeros(columns, columns)
        return moments

    def _finish(self, leader: str) -> None:
        """Add the squares of an input to what each of its Linears weighs its tokens by."""
        waiting = self._waiting.pop(leader, None)
        if waiting is None:
            return
        input_TC, energy_KT = waiting.input_TC, torch.stack(list(waiting.energy_T.values()))
        seen_T = (energy_KT > 0).any(dim=0)  # the others are padding, or what nothing is made of
        weight_LT = torch.cat((energy_KT, seen_T.unsqueeze(0)))
        *felt_KC, plain_C = weighted_squares(input_TC, weight_LT)
        seen = int(seen_T.sum())
        for name, felt_C in zip(waiting.energy_T, felt_KC, strict=True):
            moments = self.moments[name]
            moments.felt_C += felt_C
            moments.input_C += plain_C
            moments.tokens += seen
            if moments.gram_CC is not None:
                self._multiply(moments.gram_CC, input_TC, seen_T, seen)

    def _multiply(self, gram_CC: Tensor, input_TC: Tensor, seen_T: Tensor, seen: int) -> None:
        """Add second moments of some of the tokens, as many of each batch, spread over it."""
        wanted = -(-_TOKENS_PER_COLUMN * len(gram_CC) // self._batches)
        taken_TC = input_TC if seen == len(input_TC) else input_TC[seen_T]
        taken_TC = taken_TC[:: max(1, seen // wanted)]
        add_upper_product(gram_CC, taken_TC)


# --------------------
# Moments that are kept for other candidates.


def write_moments(writer: StatisticsWriter, block: str, moments: Mapping[str, Moments]) -> None:
    """Keep the moments of a block."""
    tensors: dict[str, Tensor] = {}
    for name, one in moments.items():
        tensors[f"{name}.gradient"], tensors[f"{name}.input"] = one.gradient_R, one.input_C
        tensors[f"{name}.felt"] = one.felt_C
        if one.gram_CC is not None:
            tensors[f"{name}.gram"] = packed_upper(one.gram_CC)
    if moments:
        writer.write_loss(block, tensors, {name: one.tokens for name, one in moments.items()})


def read_moments(
    statistics: KeptStatistics, block: str, joined: Mapping[str, Sequence[str]]
) -> dict[str, Moments]:
    """The moments of a block; ``joined`` has the Linears with the same input, by the first."""
    tensors, tokens = statistics.loss(block)
    found = {
        name: Moments(
            tensors[f"{name}.gradient"],
            tensors[f"{name}.input"],
            tensors[f"{name}.felt"],
            tokens=count,
        )
        for name, count in tokens.items()
    }
    for first, names in joined.items():
        packed = next((p for name in names if (p := tensors.get(f"{name}.gram")) is not None), None)
        if packed is not None and first in found:
            found[first].gram_CC = unpacked_upper(packed, len(found[first].input_C))
    return found
