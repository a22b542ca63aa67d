# SPDX-License-Identifier: Apache-2.0
"""MoE experts as Linears: the replacement for a module with stacked expert weights.

:class:`LinearExperts` has one child per expert, ``0``, ``1``, …, with a Linear for each of its
matrices, and computes what the original computes. During calibration each expert is also *shown*
tokens: those that are routed to it, or others too. Tokens that are shown but not routed do not
contribute to the output.

The order of calibration is defined in :mod:`llmcompressor.modeling.expert_stages`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from llmcompressor.modeling.expert_forms import (
    DOWN,
    GATE,
    UP,
    Mixture,
    Part,
    StackForm,
    matrices_of,
    matrix_of,
)
from llmcompressor.modeling.input_rotations import product

__all__ = ["Expert", "LinearExperts", "Routes", "Shown", "put_together", "take_apart"]

_M = TypeVar("_M", bound=Module)

Shown = Literal["routed", "all_tokens", "neighbours", "nothing"]
"""Which of its layer's tokens an expert's statistics are made of."""


class Expert(Module):
    """The Linears of one expert; they are called by :class:`LinearExperts`."""


class Routes(NamedTuple):
    """The routing of a batch: the rows, weights and inputs of each expert."""

    tokens_TH: Tensor
    """Every token of the layer."""
    rows: list[Tensor]
    """Expert → its rows of ``tokens_TH``."""
    weights: list[Tensor] | None
    """Expert → their weights, ``[rows]``; ``None`` where nothing is weighted."""
    inputs: list[Tensor] | None
    """Expert → what it gets, where that is not a selection of ``tokens_TH``."""
    real: list[Tensor] | None
    """Expert → which of its rows are no padding, bool; ``None`` where all are."""

    def input_of(self, expert: int) -> Tensor:
        """The input of an expert, ``[rows, hidden]``."""
        if self.inputs is not None:
            return self.inputs[expert]
        return self.tokens_TH[self.rows[expert]]

    def without_padding(self, expert: int, values: Tensor) -> Tensor:
        """The rows of an expert's values that are not padding."""
        if self.real is None or bool(self.real[expert].all()):
            return values
        return values[self.real[expert]]


class LinearExperts(Module):
    """An MoE whose experts have Linears of their own.

    Args:
        original: the module that it replaces; its activation and gating are kept.
        form: the layout of the original's stacks.
        names: :data:`GATE`, :data:`UP`, :data:`DOWN` → what the Linears are called.

    Attributes:
        tokens: how many real tokens were routed to each expert in the last calibration.
        starved: experts that got too few tokens → the policy applied to them.
        shown: the tokens that each expert is shown during calibration.
        stages: the first and the last stage of each wave, while the model is calibrated.
        real_T: which tokens of the present batch are no padding; ``None``: all.
        calls_all: experts without tokens are called too, so that their calls are recorded.
        calibrating: whether stages are called, and tokens shown.
    """

    def __init__(self, original: Module, form: StackForm, names: Mapping[str, str]) -> None:
        super().__init__()
        self.form = form
        self.names = dict(names)
        self.num_experts = form.experts
        self.training = original.training
        for number, expert in enumerate(_experts(original, form, names)):
            self._modules[str(number)] = expert
        for name, module in original._modules.items():
            self.add_module(name, module)
        self._gating = (_hollow(original),)  # in a tuple it is no child
        self.stages: list[tuple[Module, Module]] = []
        self.tokens = [0] * form.experts
        self.starved: dict[int, str] = {}
        self.shown: list[Shown] = ["routed"] * form.experts
        self.real_T: Tensor | None = None
        self.calls_all = False
        self.calibrating = False

    # ------------------------------------------------------------------ parts

    def linear(self, expert: int, role: str) -> Linear:
        """The Linear of an expert with the given role."""
        found = self._modules[str(expert)]
        assert found is not None
        linear = found._modules[self.names[role]]
        assert isinstance(linear, Linear)
        return linear

    @property
    def hollow(self) -> Module:
        """The original module without its stacked weights."""
        return self._gating[0]

    @property
    def entrances(self) -> tuple[str, ...]:
        """Roles of the Linears that take tokens."""
        return (GATE, UP) if self.form.gated else (UP,)

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all experts but ``kept``.

        The weights move into the first Linears, which stay: references to these modules, by name or
        object, remain valid.

        Args:
            kept: their indices, in ascending order.
        """
        for place, number in enumerate(kept):
            for part in self.form.parts:
                target, source = self.linear(place, part.role), self.linear(number, part.role)
                for kind in ("weight", "bias") if self.form.biased else ("weight",):
                    target._parameters[kind] = source._parameters[kind]
        for number in range(len(kept), self.num_experts):
            del self._modules[str(number)]
        self.num_experts = len(kept)
        self.form = replace(self.form, experts=len(kept))
        self.tokens, self.starved = [0] * len(kept), {}
        self.shown = ["routed"] * len(kept)
        self._gating = (copy.copy(self.hollow),)

    def end(self) -> None:
        """Remove the stages; the token counts stay."""
        for place in range(len(self.stages)):
            del self._modules[f"enter_{place}"], self._modules[f"leave_{place}"]
        self.stages = []
        self.calibrating = self.calls_all = False
        self.real_T = None
        self.shown = ["routed"] * self.num_experts

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the original's output; see :mod:`llmcompressor.modeling.expert_forms`."""
        if not self.calibrating:
            return self.mixed(hidden_states, top_k_index, top_k_weights)
        routes = self._routes(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for enter, leave in self.stages:
            enter(routes.tokens_TH, routes)
            result = leave(routes.tokens_TH, routes, result)
        return result

    def mixed(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """The output of :meth:`forward`, computed without showing further tokens."""
        routes = self._routes(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            if len(routes.rows[expert]):
                self.add(result, routes, {expert: self._run(expert, routes)})
        return result

    def counts(self, *arguments: Any, **named: Any) -> list[int]:
        """Number of real tokens routed to each expert, given the arguments of :meth:`forward`."""
        routes = self._routes(*arguments, **named)
        if routes.real is None:
            return [len(rows) for rows in routes.rows]
        return [int(count) for count in torch.stack([one.sum() for one in routes.real]).tolist()]

    def _routes(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Routes:
        weights = inputs = None
        if top_k_index is not None and top_k_weights is not None:
            tokens_TH = hidden_states
            places = top_k_index.flatten()
            order = places.argsort(stable=True)
            # an index beyond the experts belongs to another process
            sizes = places.bincount(minlength=self.num_experts).tolist()[: self.num_experts]
            chosen = order[: sum(sizes)]
            rows = list(torch.split(chosen // top_k_index.shape[-1], sizes))
            weights = list(torch.split(top_k_weights.flatten()[chosen], sizes))
        else:
            each_ETH = hidden_states.view(self.num_experts, -1, self.form.hidden)
            tokens_TH = each_ETH.sum(0)
            rows = [one_TH.any(-1).nonzero().flatten() for one_TH in each_ETH]
            inputs = [one_TH[row] for one_TH, row in zip(each_ETH, rows, strict=True)]
        real_T, real = self.real_T, None
        if real_T is not None and len(real_T) == len(tokens_TH):
            real_T = real_T.to(rows[0].device)
            real = [real_T[row] for row in rows]
        return Routes(tokens_TH, rows, weights, inputs, real)

    def _run(self, expert: int, routes: Routes) -> Tensor:
        """The output of an expert for its tokens."""
        given = routes.input_of(expert)
        between = self._gated(*(self.linear(expert, role)(given) for role in self.entrances))
        result: Tensor = self.linear(expert, DOWN)(between)
        return result

    def add(self, result: Tensor, routes: Routes, made: Mapping[int, Tensor]) -> Tensor:
        """Add the weighted outputs of experts to ``result``, in place."""
        for expert, product_TH in made.items():
            rows, output = routes.rows[expert], self.normed(product_TH)
            if routes.weights is not None:
                weighted = output * routes.weights[expert].unsqueeze(-1)
                result.index_add_(0, rows, weighted.to(result.dtype))
            else:
                place = expert * (len(result) // self.num_experts)
                result[place + rows] = output.to(result.dtype)
        return result

    def normed(self, output: Tensor) -> Tensor:
        """Apply the norm that some MoEs have after an expert, before outputs are weighted."""
        original: Any = self.hollow
        if not getattr(original, "has_post_expert_norm", False):
            return output
        normed: Tensor = original.post_expert_norm(output)
        return normed

    def _gated(self, *values: Tensor) -> Tensor:
        """Apply the original's activation and gating."""
        original: Any = self.hollow
        if not self.form.gated:
            activated: Tensor = original.act_fn(values[0])
            return activated
        gate, up = values
        if not hasattr(original, "_apply_gate"):
            product: Tensor = original.act_fn(gate) * up
            return product
        joined = (
            torch.stack(values, -1).flatten(-2) if self.form.interleaved else torch.cat(values, -1)
        )
        gated: Tensor = original._apply_gate(joined)
        return gated

    # ------------------------------------------------------------------ calibration

    def between(self, expert: int, given: Tensor) -> Tensor:
        """The activations between an expert's matrices, computed without calling hooks."""
        return self._gated(*(product(self.linear(expert, role), given) for role in self.entrances))


def take_apart(mixture: Mixture, names: Mapping[str, str]) -> LinearExperts:
    """Unfuse an MoE: a Linear for each matrix, whose weight is a view where possible.

    Args:
        mixture: one that can be unfused.
        names: :data:`GATE`, :data:`UP`, :data:`DOWN` → what the Linears are to be called.
    """
    assert mixture.form is not None
    made = LinearExperts(mixture.module, mixture.form, names)
    for own in mixture.module.children():
        own.train(made.training)
    return made


def put_together(mixture: LinearExperts, *, hollow: bool = False) -> Module:
    """Fuse the Linears of ``mixture`` into a module like the original, with stacked weights.

    Args:
        mixture: its Linears stay as they are.
        hollow: leave the stacks on the meta device, without data.
    """
    form = mixture.form
    whole = copy.copy(mixture.hollow)
    stacks: dict[str, Parameter | None] = {}
    for part in form.parts:
        for kind in ("weight", "bias") if form.biased else ("weight",):
            key = part.stack if kind == "weight" else f"{part.stack}_bias"
            for expert in range(form.experts):
                own = getattr(mixture.linear(expert, part.role), kind).detach()
                if key not in stacks:
                    device = "meta" if hollow else own.device
                    empty = own.new_empty(form.shape_of(key), device=device)
                    stacks[key] = Parameter(empty, requires_grad=empty.is_floating_point())
                stack = stacks[key]
                assert stack is not None
                if hollow:
                    continue
                matrix_of(stack.data, form, expert, part).copy_(own)
    whole._parameters = stacks
    return whole


def _experts(original: Module, form: StackForm, names: Mapping[str, str]) -> Iterator[Expert]:
    """The experts of an MoE; all but the weights is built once, as there may be hundreds."""
    blank = Expert()
    blank.training = original.training
    linears = [_blank_linear(original, form, part) for part in form.parts]
    values = [_own_values(original, form, part) for part in form.parts]
    for number in range(form.experts):
        expert = _copy(blank)
        for part, linear, own in zip(form.parts, linears, values, strict=True):
            made = _copy(linear)
            for kind, (matrices, needs_grad) in own.items():
                value = matrices[number].contiguous()
                made._parameters[kind] = Parameter(value, requires_grad=needs_grad)
            expert._modules[names[part.role]] = made
        yield expert


def _own_values(
    original: Module, form: StackForm, part: Part
) -> dict[str, tuple[Sequence[Tensor], bool]]:
    """``weight`` and ``bias`` of a Linear for each expert, and whether they need gradients."""
    found: dict[str, tuple[Sequence[Tensor], bool]] = {}
    for kind, key in (("weight", part.stack), ("bias", f"{part.stack}_bias")):
        stack = original._parameters.get(key)
        if stack is not None:
            found[kind] = matrices_of(stack.detach(), form, part), stack.requires_grad
    return found


def _blank_linear(original: Module, form: StackForm, part: Part) -> Linear:
    """A Linear of the right size without weights."""
    linear = Linear.__new__(Linear)  # nothing is to be initialized
    Module.__init__(linear)
    linear.training = original.training
    stack = original._parameters[part.stack]
    assert stack is not None
    linear.out_features, linear.in_features = matrices_of(stack, form, part)[0].shape
    linear.register_parameter("weight", None)
    linear.register_parameter("bias", None)
    return linear


def _copy(module: _M) -> _M:
    """A shallow copy of a module without weights, ten times faster than a new one."""
    kind = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(
        (key, value.copy() if isinstance(value, dict | set) else value)
        for key, value in module.__dict__.items()
    )
    return made


def _hollow(original: Module) -> Module:
    """The original without its stacked weights, which computes the activation."""
    hollow = copy.copy(original)
    hollow._parameters = {}
    return hollow
