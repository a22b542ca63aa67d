# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group do in the tests of shared statistics; each runs on all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from tests.support.rank_group import on_ranks
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.observers.base import Observer
from llmcompressor.observers.input_statistics import InputCollector, InputStatistics
from llmcompressor.runtime.collectives import Ranks

C = 24
EXPERTS = 3
OBSERVERS = ("static_minmax", "minmax", "mse", "percentile")


def tokens(rank: int, count: int = 60) -> Tensor:
    """Other tokens on each rank, and another number of them."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(count + rank, C, generator=draw)


def as_dict(one: InputStatistics) -> dict[str, Any]:
    return {"tokens": one.tokens, "gram": one.gram, "cross": one.cross, "missing": one.missing}


def statistics(rank: int, rows: int, *, twin: bool) -> InputStatistics:
    """The statistics of one rank; with few rows the residual takes the place of the products."""
    weight = torch.ones(rows, C)
    found = InputStatistics(C, "cpu", twin=twin, weights=[weight], name="a module")
    found.update(tokens(rank), tokens(rank).square() if twin else None)
    return found


def sums(rows: int, *, twin: bool, owner: int | None) -> dict[str, Any]:
    def body(ranks: Ranks) -> dict[str, Any]:
        found = statistics(ranks.rank, rows, twin=twin)
        found.sum_over(ranks, owner)
        return as_dict(found)

    return on_ranks(body)


def routed() -> dict[int, Any]:
    """Experts of which each rank has routed tokens to its own one only; nobody to the last."""

    def body(ranks: Ranks) -> dict[int, Any]:
        experts: list[Module] = [Linear(C, 4) for _ in range(EXPERTS)]

        def create(_: Module, input_TC: Tensor, twin: bool) -> InputStatistics:
            return InputStatistics(input_TC.shape[-1], input_TC.device, twin=twin)

        order: Any = SimpleNamespace(group_of=lambda module: (module,))
        inputs = InputCollector(create, lambda _: True, order)
        inputs.add(experts[ranks.rank], tokens(ranks.rank), None)
        inputs.sum_over(ranks, experts, {one: "an expert" for one in experts})
        found = {place: inputs.of(one) for place, one in enumerate(experts)}
        return {place: as_dict(one) for place, one in found.items() if one is not None}

    return on_ranks(body)


def observer(name: str) -> Observer:
    args = QuantizationArgs(num_bits=8, symmetric=False, observer=name, dynamic=False)
    found: Observer = Observer.load_from_registry(name, base_name="input", args=args)
    return found


def observed(rank: int, name: str) -> Observer:
    return observer(name).observe(tokens(rank)).observe(3 * tokens(rank + 10))


def merged(name: str) -> tuple[int, Tensor, Tensor]:
    """Count and range of what all ranks have observed; the last one has seen nothing."""

    def body(ranks: Ranks) -> tuple[int, Tensor, Tensor]:
        idle = ranks.rank == ranks.count - 1
        one = observer(name) if idle else observed(ranks.rank, name)
        one.merge_over(ranks)
        return (one.observations, *one.range())

    return on_ranks(body)
