# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens of what Linears read, and of the gradients of what they return.

They are what :mod:`llmcompressor.numerics.sensitivity` makes an estimate of. Linears that read the
same input, such as q, k and v, have its squares computed once, when the gradients of all of them
are known; some of its tokens are kept for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
from llmcompressor.modeling.fused import fused_sets
from llmcompressor.numerics.gram import add_column_squares, limit_massive_tokens, massive_tokens
from llmcompressor.numerics.sensitivity import add_squares, compensated_shares, weighted_squares
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.collectives import Ranks

_TOKENS_PER_COLUMN = 4
"""Tokens that are kept: what compensation leaves is known well enough then."""
_SHARES = {True: "left-ordered", False: "left"}
"""Whether columns are ordered → what the shares are called in a file."""


@dataclass
class Moments:
    """Sums over the tokens of a Linear that the loss depends on, through it or a partner.

    Attributes:
        gradient_R: squares of the output's gradients, float32.
        input_C: squares of the inputs, float32.
        felt_C: the same, of each token times the squares of its gradient, float32.
        curvature: mean squares of the inputs as a solver counts them, but for a factor, float32
            ``[C]``; nothing before it is known.
        shares: order of the columns in a sweep → what compensation leaves of each, float32;
            nothing before it is known.
        tokens: number of tokens.
    """

    gradient_R: Tensor
    input_C: Tensor
    felt_C: Tensor
    curvature: Tensor | None = None
    shares: dict[bool, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def to(self, device: torch.device) -> Moments:
        """The same on a device."""
        return Moments(
            self.gradient_R.to(device),
            self.input_C.to(device),
            self.felt_C.to(device),
            None if self.curvature is None else self.curvature.to(device),
            {ordered: share_C.to(device) for ordered, share_C in self.shares.items()},
            self.tokens,
        )

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


@dataclass
class _Tokens:
    """Some tokens of an input.

    Attributes:
        inputs: pieces ``[T, C]``.
        energies: the squares of their gradients through each of K Linears, ``[K, T]``, float32.
    """

    inputs: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)

    def gather(self, like_TC: Tensor, felt: int, ranks: Ranks, *, what: str) -> None:
        """Add the tokens of all ranks, on each of them.

        Args:
            like_TC: a tensor with the device, dtype and columns of the inputs.
            felt: number of Linears that read them.
            ranks: the ranks.
            what: the name of the input, for errors.
        """
        columns, device = like_TC.shape[1], like_TC.device
        none_TC = torch.empty(0, columns, dtype=like_TC.dtype, device=device)
        none_KT = torch.empty(felt, 0, dtype=torch.float32, device=device)
        own_TC = torch.cat([none_TC, *self.inputs]).to(like_TC.dtype)
        own_KT = torch.cat([none_KT, *self.energies], dim=1)
        counts = ranks.exchange(len(own_TC), what=what)
        inputs = ranks.all_gather(own_TC, [(count, columns) for count in counts], what=what)
        energies = ranks.all_gather(own_KT, [(felt, count) for count in counts], what=what)
        self.inputs, self.energies = list(inputs), list(energies)

    def shares(self, *, ordered: bool) -> Tensor:
        """What compensation leaves of each column, ``[K, C]``."""
        joined_KT = torch.cat(self.energies, dim=1)
        return compensated_shares(torch.cat(self.inputs), joined_KT, ordered=ordered)

    @property
    def curvature(self) -> Tensor:
        """The diagonal of the Hessian of a solver, but for a factor."""
        (limited_TC,) = limit_massive_tokens(torch.cat(self.inputs))
        squares_C = limited_TC.new_zeros(limited_TC.shape[1], dtype=torch.float32)
        add_column_squares(squares_C, limited_TC)
        return squares_C


class MomentCollector:
    """Collects the moments of Linears.

    Args:
        model: the model.
        names: of the Linears.
        batches: how many batches there are, of all ranks.
        orders: orders of columns in sweeps (true: ordered) whose compensation is wanted: for that
            a few tokens are kept for each column.
        skips_massive: massive tokens are not felt (:func:`~.numerics.gram.massive_tokens`): where
            later Linears make up for errors, they undo those of tokens that are all alike.

    Attributes:
        leaders: Linear → the first of those that read the same input.
        joined: leader → all Linears with the same input, wanted or not.
        moments: of each Linear that was called.
    """

    def __init__(
        self,
        model: Module,
        names: Iterable[str],
        *,
        batches: int,
        orders: Collection[bool] = (),
        skips_massive: bool = False,
    ) -> None:
        self.leaders = {name: name for name in names}
        self.joined: dict[str, Sequence[str]] = {name: (name,) for name in self.leaders}
        for joined in fused_sets(model):  # they read one input
            own = [name for name in joined if name in self.leaders]
            self.leaders |= dict.fromkeys(own, own[0] if own else "")
            self.joined |= {name: joined for name in own[:1]}
        self._orders, self._batches, self._skips_massive = orders, batches, skips_massive
        self.moments: dict[str, Moments] = {}
        self._waiting: dict[str, _Shared] = {}
        self._tokens: dict[str, _Tokens] = {}

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
        felt = [name for name, tokens in zip(modules, totals, strict=True) if tokens]
        for leader in dict.fromkeys(self.leaders[name] for name in felt) if self._orders else ():
            kept, wanted = self._tokens.setdefault(leader, _Tokens()), len(self._wanted(leader))
            kept.gather(weight_of(modules[leader]), wanted, ranks, what=f"tokens of {leader}")
        for (name, module), tokens in zip(modules.items(), totals, strict=True):
            if tokens == 0:
                continue
            moments = self.begun(name, weight_of(module))
            sums = torch.cat((moments.gradient_R, moments.input_C, moments.felt_C))
            sums = ranks.sum_all(sums, what=f"moments of {name}")
            sizes = [len(one) for one in (moments.gradient_R, moments.input_C, moments.felt_C)]
            moments.gradient_R, moments.input_C, moments.felt_C = torch.split(sums, sizes)
            moments.tokens = tokens

    def begun(self, name: str, weight_RC: Tensor) -> Moments:
        """The moments of a Linear, of zeros if it was not called."""
        rows, columns = weight_RC.shape
        return self.moments.get(name) or self._begin(name, columns, rows, weight_RC.device)

    def _begin(self, name: str, columns: int, rows: int, device: torch.device) -> Moments:
        empty = torch.zeros(rows + 2 * columns, dtype=torch.float32, device=device)
        gradient_R, input_C, felt_C = torch.split(empty, [rows, columns, columns])
        self.moments[name] = Moments(gradient_R, input_C, felt_C)
        return self.moments[name]

    def _finish(self, leader: str) -> None:
        """Add the squares of an input to what each of its Linears weighs its tokens by."""
        waiting = self._waiting.pop(leader, None)
        if waiting is None:
            return
        input_TC, energy_KT = waiting.input_TC, torch.stack(list(waiting.energy_T.values()))
        seen_T = (energy_KT > 0).any(dim=0)  # the others are padding, or what nothing is made of
        if self._skips_massive:
            energy_KT[:, massive_tokens(input_TC)] = 0
            waiting.energy_T = dict(zip(waiting.energy_T, energy_KT, strict=True))
        weight_LT = torch.cat((energy_KT, seen_T.unsqueeze(0)))
        *felt_KC, plain_C = weighted_squares(input_TC, weight_LT)
        seen = int(seen_T.sum())
        for name, felt_C in zip(waiting.energy_T, felt_KC, strict=True):
            moments = self.moments[name]
            moments.felt_C += felt_C
            moments.input_C += plain_C
            moments.tokens += seen
        if self._orders and seen:
            self._keep(leader, waiting, seen_T.nonzero().flatten())

    def _keep(self, leader: str, waiting: _Shared, seen_S: Tensor) -> None:
        """Keep some of the tokens that are seen, as many of each batch, spread over it."""
        input_TC, energy_T = waiting.input_TC, waiting.energy_T
        wanted = -(-_TOKENS_PER_COLUMN * input_TC.shape[1] // self._batches)
        taken_S = seen_S[:: max(1, len(seen_S) // wanted)]
        unfelt_T = torch.zeros(len(input_TC), dtype=torch.float32, device=input_TC.device)
        energies = [energy_T.get(name, unfelt_T)[taken_S] for name in self._wanted(leader)]
        kept = self._tokens.setdefault(leader, _Tokens())
        kept.inputs.append(input_TC[taken_S])
        kept.energies.append(torch.stack(energies))

    def _wanted(self, leader: str) -> list[str]:
        """The Linears that read the input of the first of them."""
        return [name for name in self.joined[leader] if name in self.leaders]

    def compensate(self, leader: str) -> None:
        """Find what compensation leaves of each column of an input, and free its tokens."""
        kept = self._tokens.pop(leader, None)
        if kept is None or not kept.inputs:
            return
        own = [self.moments.get(name) for name in self._wanted(leader)]
        curvature_C = kept.curvature
        shares = {ordered: kept.shares(ordered=ordered) for ordered in self._orders}
        for place, moments in enumerate(own):
            if moments is not None:
                moments.curvature = curvature_C
                moments.shares = {ordered: own_KC[place] for ordered, own_KC in shares.items()}

    def free(self, names: Iterable[str]) -> None:
        """Free all that is known of some Linears."""
        for name in names:
            self.moments.pop(name, None)
            self._tokens.pop(name, None)


# --------------------
# Moments that are kept for other candidates.


def write_moments(writer: StatisticsWriter, block: str, moments: Mapping[str, Moments]) -> None:
    """Keep the moments of a block."""
    tensors: dict[str, Tensor] = {}
    for name, one in moments.items():
        tensors[f"{name}.gradient"], tensors[f"{name}.input"] = one.gradient_R, one.input_C
        tensors[f"{name}.felt"] = one.felt_C
        if one.curvature is not None:
            tensors[f"{name}.curvature"] = one.curvature.clone()  # partners share it
        for ordered, share_C in one.shares.items():
            tensors[f"{name}.{_SHARES[ordered]}"] = share_C.clone()
    if moments:
        writer.write_loss(block, tensors, {name: one.tokens for name, one in moments.items()})


def read_moments(statistics: KeptStatistics, block: str) -> dict[str, Moments]:
    """The moments of a block."""
    tensors, tokens = statistics.loss(block)
    return {
        name: Moments(
            tensors[f"{name}.gradient"],
            tensors[f"{name}.input"],
            tensors[f"{name}.felt"],
            tensors.get(f"{name}.curvature"),
            {
                ordered: share_C
                for ordered, kind in _SHARES.items()
                if (share_C := tensors.get(f"{name}.{kind}")) is not None
            },
            tokens=count,
        )
        for name, count in tokens.items()
    }
