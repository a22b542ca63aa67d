# SPDX-License-Identifier: Apache-2.0
"""Mixtures of transformers with a list of experts in place of their stacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AsList(nn.Module):
    """Its own code calls its experts one by one, each with its tokens.

    Args:
        mixture: with a router and stacks.
        narrower: by how much the first expert is narrower than the others.
    """

    def __init__(self, mixture: Any, *, narrower: int = 0) -> None:
        super().__init__()
        self.gate, stacks = mixture.gate, mixture.experts
        self.experts = nn.ModuleList()
        for gate_up, down in zip(stacks.gate_up_proj, stacks.down_proj, strict=True):
            kept = down.shape[1] - (0 if self.experts else narrower)
            gate, up = (one[:kept] for one in gate_up.chunk(2))
            self.experts.append(Gated(gate, up, down[:, :kept]))

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        _, weights, chosen = self.gate(rows)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                output.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return output.view_as(hidden_states)


class Gated(nn.Module):
    """One expert, made of three matrices."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight = nn.Parameter(weight.detach().clone())
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made
