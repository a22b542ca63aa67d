# SPDX-License-Identifier: Apache-2.0
"""What experts are shown while a model is calibrated, and where forwards can be paused for it.

A mixture then has two further children per wave of experts, ``enter_0`` and ``leave_0``. The first
shows the Linears that get tokens their inputs, the last those that come behind the activation, and
computes the output. At each of them all passes wait, and the Linears of a wave are solved
together. What a waiting pass holds are the tokens and their routes, which take little memory: what
lies between an expert's matrices is computed once more in the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.expert_forms import DOWN
from llmcompressor.modeling.experts import LinearExperts, Routes
from llmcompressor.modeling.input_rotations import product

__all__ = ["ExpertStage", "begin_stages", "stages_passed"]


def begin_stages(mixture: LinearExperts, wave: int | None = None) -> None:
    """Have the experts of a wave called together, in stages, until ``mixture.end()``.

    Args:
        mixture: whose.
        wave: experts per wave; all of them if ``None``.
    """
    mixture.end()
    size = wave or mixture.num_experts
    for place, first in enumerate(range(0, mixture.num_experts, size)):
        experts = range(first, min(first + size, mixture.num_experts))
        stages = (
            ExpertStage(mixture, experts, mixture.entrances),
            ExpertStage(mixture, experts, (DOWN,)),
        )
        mixture.add_module(f"enter_{place}", stages[0])
        mixture.add_module(f"leave_{place}", stages[1])
        mixture.stages.append(stages)
    mixture.calibrating = True
    mixture.tokens = [0] * mixture.num_experts
    mixture.starved = {}


@contextmanager
def stages_passed(model: Module) -> Iterator[None]:
    """Have experts run inside as when nothing is calibrated, each Linear called for its tokens."""
    staged = [one for one in model.modules() if isinstance(one, LinearExperts) and one.calibrating]
    for one in staged:
        one.calibrating = False
    try:
        yield
    finally:
        for one in staged:
            one.calibrating = True


class ExpertStage(Module):
    """The first or the last step of a wave of experts, where forwards can be paused.

    Attributes:
        experts: which.
        linears: the Linears that are shown their inputs here.
        is_done: they have been calibrated: nothing is shown any more.
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
        """Whose experts these are."""
        return self._mixture[0]

    @property
    def follower(self) -> Module:
        """The other stage of the same wave."""
        return next(leave for enter, leave in self.mixture.stages if enter is self)

    def forward(self, tokens_TH: Tensor, routes: Routes, result: Tensor | None = None) -> Any:
        """Show tokens to the Linears of this stage; the last stage also adds to ``result``."""
        if result is None:
            if not self.is_done:
                self._show_tokens(routes)
            return None
        if self.is_done:
            made = {one: self._output(one, routes) for one in self.experts}
        else:
            made = self._show_between(routes)
        return self.mixture.add(result.clone(), routes, made)

    def _shown_to(self, expert: int, routes: Routes) -> Tensor | None:
        """The tokens that an expert's statistics are to be made of; ``None`` for none."""
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
        return _as_no_batch(given, routes) if how == "neighbours" else given

    def _show_tokens(self, routes: Routes) -> None:
        mixture = self.mixture
        for expert in self.experts:
            given = self._shown_to(expert, routes)
            if given is not None:
                for role in mixture.entrances:
                    mixture.linear(expert, role)(given)

    def _output(self, expert: int, routes: Routes) -> Tensor:
        mixture = self.mixture
        between = mixture.between(expert, routes.input_of(expert))
        return product(mixture.linear(expert, DOWN), between)

    def _show_between(self, routes: Routes) -> dict[int, Tensor]:
        """As :meth:`_output` of each expert: what it is shown besides does not change a bit of it.

        Products of more rows may be rounded otherwise, and a run that goes on behind this layer
        shows it nothing.
        """
        made = {}
        for expert in self.experts:
            mixture, down = self.mixture, self.mixture.linear(expert, DOWN)
            own = mixture.between(expert, routes.input_of(expert))
            shown = self._shown_between(expert, own, routes)
            if shown is own and len(own):
                made[expert] = down(own)
                continue
            if shown is not None and len(shown):
                down(shown)
            made[expert] = product(down, own)
        return made

    def _shown_between(self, expert: int, own: Tensor, routes: Routes) -> Tensor | None:
        """What the last Linear of an expert is shown, given what the expert has for itself."""
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
            return _as_no_batch(torch.cat(found), routes) if found else None
        given = self._shown_to(expert, routes)
        return None if given is None else mixture.between(expert, given)


def _as_no_batch(rows_TH: Tensor, routes: Routes) -> Tensor:
    """Rows of several experts; the last is left out if they are as many as the layer's tokens.

    Those who watch would take them for these tokens, padding and order and all.
    """
    return rows_TH[:-1] if len(rows_TH) == len(routes.tokens_TH) else rows_TH
