# SPDX-License-Identifier: Apache-2.0
"""Ranks that solve a part of the rows each find what one finds of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from tests.support.divided_rows import of_ranks
from tests.support.rank_group import Group, group_of
from torch import Tensor

from llmcompressor.numerics.output_hessian import add_output_products, empty_blocks
from llmcompressor.quantization.column_solver import (
    Options,
    Problem,
    solve,
)
from llmcompressor.quantization.parameters import observe_weight

RANKS = 3
SCHEMES: dict[str, dict[str, Any]] = {
    "group": {"num_bits": 4, "group_size": 16, "strategy": "group"},
    "coarse": {"num_bits": 3, "group_size": 16, "strategy": "group"},
    "channel": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]},
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with group_of(RANKS, folder) as run:
        yield run


def problem(scheme: str, rows: tuple[int, ...], answered: str = "") -> Problem:
    """Linears of these rows with one input of 48 columns."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 48, generator=draw)
    weights = [torch.randn(count, 48, generator=draw).bfloat16() for count in rows]
    args = QuantizationArgs(**SCHEMES[scheme])
    other = torch.randn(48, 48, generator=draw) if answered == "cross" else None
    missing = torch.randn(48, sum(rows), generator=draw) if answered == "missing" else None
    found = [observe_weight(one, args) for one in weights]
    felt = [_felt(count, draw) for count in rows] if scheme == "coarse" else []
    return Problem(
        weights, found, x.T @ x, other, 200, ordered=True, missing_CR=missing, output_NBB=felt
    )


def _felt(rows: int, draw: torch.Generator) -> Tensor:
    """How the loss feels the outputs of these rows: alike in part."""
    blocks_NBB = empty_blocks(rows, torch.device("cpu"))
    gradient_TR = torch.randn(400, rows, generator=draw) + torch.randn(400, 1, generator=draw)
    add_output_products(blocks_NBB, gradient_TR)
    return blocks_NBB


@pytest.mark.parametrize("answered", ["", "cross", "missing"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_rows_give_what_all_rows_give(group: Group, scheme: str, answered: str) -> None:
    options = Options(16, 0.01, 0.05 if answered else None)
    rows = (400, 600) if scheme == "coarse" else (40, 24)
    problems = [problem(scheme, rows, answered), problem(scheme, (2, 24), answered)]
    expected = solve(problems, options)
    for found in group(of_ranks, problems, options):
        assert isinstance(found, list), found
        for one, other, given in zip(found, expected, problems, strict=True):
            for place, pair in enumerate(zip(one.weights, other.weights, strict=True)):
                ours, theirs = (values.to(torch.bfloat16) for values in pair)
                parameters = given.parameters[place]
                if one.scales is not None and other.scales is not None:
                    assert torch.equal(one.scales[place], other.scales[place])
                    parameters = parameters.__class__(
                        parameters.args, other.scales[place], parameters.zero_point
                    )
                assert torch.equal(parameters.round(ours), parameters.round(theirs))
            assert one.loss == pytest.approx(other.loss, rel=1e-3)
            assert (one.dampening, one.dead) == (other.dampening, other.dead)
