# SPDX-License-Identifier: Apache-2.0
"""Rotated and fake-quantized weights as differentiable functions of the learned rotations.

A weight is computed when it is used, and recomputed in float32 for its gradient: intermediate
results are held for one weight at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.modifiers.rotation.norms import gain_of
from llmcompressor.modifiers.rotation.plan import Fusion, Plan
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.numerics.straight_through import fake_quantize_matrix
from llmcompressor.quantization.parameters import extreme_parameters
from llmcompressor.schemes.bridge import grid_of, partition_of

__all__ = ["PIECE", "Turned"]

PIECE = 1 << 22
"""Elements of a weight that are made at once where its rows stand for themselves: 16 MiB."""
_NORM = "weight"


class Turned:
    """The parameters of a model under the rotations that are being learned.

    Args:
        plan: the rotations that are fused into weights.
        learned: name → a learned rotation of the plan.
    """

    def __init__(self, plan: Plan, learned: Mapping[str, Rotation]) -> None:
        self._plan = plan
        self._gains = plan.gains()  # before norms are replaced by ones
        self._names = {id(rotation): name for name, rotation in learned.items()}
        self._offsets = {norm.module: norm.offset for norm in plan.norms}

    def sources(self, modules: Iterable[Module]) -> list[str]:
        """Names of the learned rotations that affect parameters of ``modules``."""
        found: dict[str, None] = {}
        for module in modules:
            fusion = self._plan.fusions.get(module)
            if fusion is not None:
                found |= dict.fromkeys(self._learned_in(fusion))
        return list(found)

    @contextlib.contextmanager
    def inside(self, modules: Iterable[Module], leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Give ``modules`` their rotated parameters while the body runs; none is trained.

        Args:
            modules: their own parameters are loaded.
            leaves: name → the current rotation, float32.
        """
        changes = [(module, self._values(module, leaves)) for module in modules]
        before = [(module, dict(module._parameters)) for module, _ in changes]
        try:
            for module, values in changes:
                for name, value in values.items():
                    module._parameters[name] = value  # type: ignore[assignment]  # in the graph
            yield
        finally:
            for module, own in before:
                module._parameters.update(own)

    def _learned_in(self, fusion: Fusion) -> list[str]:
        return self._learned_of((*fusion.inputs, *fusion.outputs))

    def _learned_of(self, rotations: Iterable[Rotation]) -> list[str]:
        names = (self._names.get(id(one)) for one in rotations)
        return list(dict.fromkeys(name for name in names if name is not None))

    def _values(self, module: Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: one for name, one in module._parameters.items() if one is not None}
        found = {name: one.detach() for name, one in own.items()}
        if module in self._offsets and _NORM in own:
            found[_NORM] = torch.full_like(found[_NORM], 1.0 - self._offsets[module])
        fusion = self._plan.fusions.get(module)
        if fusion is None:
            return found
        names = self._learned_in(fusion)
        scheme: Any = getattr(module, "quantization_scheme", None)
        args = None if scheme is None else scheme.weights
        makers: dict[str, _Maker] = {
            "weight": _Weight(found["weight"], fusion, self._names, names, self._gain(fusion), args)
        }
        if "bias" in own and isinstance(module, Linear) and fusion.outputs:
            turning = self._learned_of(fusion.outputs)  # input rotations do not affect it
            makers["bias"] = _Bias(found["bias"], fusion, self._names, turning)
        for name, maker in makers.items():
            found[name] = _Made.apply(maker, *(leaves[one] for one in maker.names))  # type: ignore[no-untyped-call]
        return found

    def _gain(self, fusion: Fusion) -> Tensor | None:
        return None if fusion.norm is None else gain_of(fusion.norm, self._gains)


@dataclass(frozen=True)
class _Maker:
    """Computation of one rotated parameter.

    Attributes:
        own: the original parameter.
        fusion: its factors.
        names_of: rotation's id → the name that it is learned by.
        names: names of the learned rotations that are passed as leaves.
    """

    own: Tensor
    fusion: Fusion
    names_of: Mapping[int, str]
    names: Sequence[str]

    @property
    def pieces(self) -> list[slice]:
        """Slices of rows that can be computed independently, in order."""
        return [slice(None)]

    def make(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute some rows, in the parameter's dtype."""
        raise NotImplementedError

    def turn(self, x: Tensor, rotation: Rotation, leaves: Sequence[Tensor]) -> Tensor:
        """Rotate ``x``, by the learned matrix if the rotation is learned."""
        name = self.names_of.get(id(rotation))
        if name is None:
            return rotation(x)
        leaf = leaves[self.names.index(name)]
        return (x.reshape(*x.shape[:-1], -1, rotation.order) @ leaf).flatten(-2)


@dataclass(frozen=True)
class _Bias(_Maker):
    """A bias under rotations of the output."""

    def make(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute the bias, in its dtype."""
        value = self.own.float()
        for rotation in self.fusion.outputs:
            value = self.turn(value, rotation, leaves)
        return value.to(self.own.dtype)


@dataclass(frozen=True)
class _Weight(_Maker):
    """A weight under its norm's gain, rotations and fake quantization.

    Attributes:
        gain: fused factor of the norm before it, ``[C]``.
        args: its quantization arguments; ``None`` if it is not quantized.
    """

    gain: Tensor | None
    args: Any

    @property
    def pieces(self) -> list[slice]:
        """All rows together if outputs are rotated, or scales span several rows; else chunks."""
        rows, columns = self.own.shape
        if self.fusion.outputs or self.args is not None:
            return [slice(None)]
        step = max(1, PIECE // columns)
        return [slice(low, min(low + step, rows)) for low in range(0, rows, step)]

    def make(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute some rows of the weight, rotated and fake-quantized."""
        weight = self.own[rows].float()
        if self.gain is not None:
            weight = weight * self.gain.to(weight)
        for rotation in self.fusion.inputs:
            weight = self.turn(weight, rotation, leaves)
        for rotation in self.fusion.outputs:
            weight = self.turn(weight.T, rotation, leaves).T
        return self._rounded(weight).to(self.own.dtype)

    def _rounded(self, weight: Tensor) -> Tensor:
        if self.args is None:
            return weight
        parameters = extreme_parameters(weight, self.args)
        return fake_quantize_matrix(
            weight,
            parameters.effective_scale,
            None if self.args.symmetric else parameters.zero_point,
            grid_of(self.args),
            partition_of(self.args),
            through=parameters.through,
        )


class _Made(torch.autograd.Function):
    """Autograd function that computes a parameter in chunks, and recomputes it for its gradient."""

    @staticmethod
    def forward(ctx: Any, maker: _Maker, *leaves: Tensor) -> Tensor:
        ctx.maker, ctx.leaves = maker, leaves
        pieces = maker.pieces
        if len(pieces) == 1:
            return maker.make(pieces[0], leaves)
        made = torch.empty_like(maker.own)
        for piece in pieces:
            made[piece] = maker.make(piece, leaves)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums: list[Tensor] = []
        for piece in ctx.maker.pieces:
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in ctx.leaves]
                made = ctx.maker.make(piece, leaves)
                found = torch.autograd.grad(made, leaves, gradient[piece])
            if not sums:
                sums = list(found)
                continue
            for total, one in zip(sums, found, strict=True):
                total.add_(one)
        return None, *sums
