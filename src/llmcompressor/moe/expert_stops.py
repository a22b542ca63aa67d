# SPDX-License-Identifier: Apache-2.0
"""Calibration of MoE experts in stages, where forwards can be paused.

During calibration an MoE has two further children per wave of experts, ``enter_0`` and ``leave_0``.
The first shows the Linears that take tokens their inputs, the last shows those after the activation
theirs and computes the output. All passes wait at each of them, and the Linears of a wave are
solved together. A waiting pass holds the tokens and their routes, which take little memory; the
activations between an expert's matrices are recomputed in the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.patches import linear_with_rotations
from llmcompressor.moe.layouts import DOWN
from llmcompressor.moe.linear_experts import LinearExperts, Routes


def begin_calibration_stages(mixture: LinearExperts, wave: int | None = None) -> None:
    """Call the experts of each wave together, in stages, until ``mixture.end()``.

    Args:
        mixture: the MoE.
        wave: experts per wave; all of them if ``None``.
    """
    mixture.end()
    size = wave or mixture.num_experts
    for place, first in enumerate(range(0, mixture.num_experts, size)):
        experts = range(first, min(first + size, mixture.num_experts))
        stages = (
            ExpertStage(mixture, experts, mixture.input_roles),
            ExpertStage(mixture, experts, (DOWN,)),
        )
        mixture.add_module(f"enter_{place}", stages[0])
        mixture.add_module(f"leave_{place}", stages[1])
        mixture.stages.append(stages)
    mixture.calibrating = True
    mixture.tokens = [0] * mixture.num_experts
    mixture.starved = {}


@contextmanager
def stages_bypassed(model: Module) -> Iterator[None]:
    """Run experts in the body as outside of calibration: each Linear is called for its tokens."""
    staged = [one for one in model.modules() if isinstance(one, LinearExperts) and one.calibrating]
    for one in staged:
        one.calibrating = False
    try:
        yield
    finally:
        for one in staged:
            one.calibrating = True


class ExpertStage(Module):
    """The first or the last stage of a wave of experts, where forwards can be paused.

    Attributes:
        experts: indices of the wave's experts.
        linears: the Linears that are shown their inputs here.
        is_done: the Linears are calibrated, and nothing is shown any more.
    """

    def __init__(self, mixture: LinearExperts, experts: range, roles: Sequence[str]) -> None:
        super().__init__()
        self._mixture = (mixture,)  # in a tuple it is no child
        self.experts = experts
        self.is_first = DOWN not in roles
        self.linears = [mixture.linear(one, role) for one in experts for role in roles]
        self.is_done = False

    @property
    def mixture(self) -> LinearExperts:
        """The MoE that the experts belong to."""
        return self._mixture[0]

    @property
    def last_stage(self) -> Module:
        """The last stage of the same wave."""
        return next(leave for enter, leave in self.mixture.stages if enter is self)

    def forward(self, tokens_TH: Tensor, routes: Routes, result: Tensor | None = None) -> Any:
        """Show tokens to the Linears of this stage; the last stage also adds to ``result``."""
        if result is None:
            if not self.is_done:
                self._show_tokens(routes)
            return None
        mixture = self.mixture
        if self.is_done:
            made = {
                one: linear_with_rotations(
                    mixture.linear(one, DOWN), mixture.between(one, routes.input_of(one))
                )
                for one in self.experts
            }
        else:
            made = self._show_activations(routes)
        return mixture.add(result.clone(), routes, made)

    def _calibration_tokens(self, expert: int, routes: Routes) -> Tensor | None:
        """The tokens that an expert is calibrated with; ``None`` for none."""
        how = self.mixture.shown[expert]
        if how == "all_tokens":
            return routes.tokens_TH
        sources = (
            [one for one in self.experts if one != expert] if how == "neighbours" else [expert]
        )
        given = torch.cat(
            [routes.without_padding(one, routes.input_of(one)) for one in sources]
            or [routes.tokens_TH[:0]]
        )
        if len(given) == 0 and self.mixture.calls_all:
            return routes.tokens_TH[:1].clone()
        if len(given) == 0 or how == "nothing":
            return None
        return _avoid_batch_shape(given, routes) if how == "neighbours" else given

    def _show_tokens(self, routes: Routes) -> None:
        mixture = self.mixture
        for expert in self.experts:
            given = self._calibration_tokens(expert, routes)
            if given is not None:
                for role in mixture.input_roles:
                    mixture.linear(expert, role)(given)

    def _show_activations(self, routes: Routes) -> dict[int, Tensor]:
        """Show the last Linears their inputs; the output is bit-identical to that of a later call.

        Products of more rows may round differently, and a run that is resumed after this layer
        shows it nothing. So the output is computed from the expert's own tokens alone.
        """
        made = {}
        for expert in self.experts:
            mixture, down = self.mixture, self.mixture.linear(expert, DOWN)
            own = mixture.between(expert, routes.input_of(expert))
            shown = self._calibration_activations(expert, own, routes)
            if shown is own and len(own):
                made[expert] = down(own)
                continue
            if shown is not None and len(shown):
                down(shown)
            made[expert] = linear_with_rotations(down, own)
        return made

    def _calibration_activations(self, expert: int, own: Tensor, routes: Routes) -> Tensor | None:
        """The calibration input of an expert's last Linear, given the expert's own activations."""
        mixture = self.mixture
        how = mixture.shown[expert]
        if how == "routed" and len(own):
            return routes.without_padding(expert, own)
        if how == "neighbours":
            others = [one for one in self.experts if one != expert and len(routes.rows[one])]
            found = [
                routes.without_padding(one, mixture.between(one, routes.input_of(one)))
                for one in others
            ]
            return _avoid_batch_shape(torch.cat(found), routes) if found else None
        given = self._calibration_tokens(expert, routes)
        return None if given is None else mixture.between(expert, given)


def _avoid_batch_shape(rows_TH: Tensor, routes: Routes) -> Tensor:
    """Drop the last row of several experts' rows if they are as many as the layer's tokens.

    Hooks would otherwise take them for these tokens, with their order and padding.
    """
    return rows_TH[:-1] if len(rows_TH) == len(routes.tokens_TH) else rows_TH
