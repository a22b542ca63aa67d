# SPDX-License-Identifier: Apache-2.0
"""Gradients through blocks that are forgotten and run again are those of one graph."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcompressor.modeling.gradient_checkpointing import CheckpointedBlocks
from llmcompressor.modeling.offload import TensorStore

WIDTH, ROWS, BLOCKS = 8, 5, 3
ALL, NOTHING = 10**9, 0


class Block(nn.Module):
    """Takes a tensor by name and a table that all share; returns more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, side: dict[str, Tensor], table: Tensor) -> Any:
        y = torch.tanh(self.linear(x) * table) + side["first"]
        return {"y": y, "mask": y.detach() > 0, "table": table, "nothing": None}


class Model(nn.Module):
    """Blocks with something between them, the last of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("table", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        first = x * 2
        for block in [*self.blocks, self.blocks[-1]]:
            found = block(x, side={"first": first}, table=self.table)
            assert found["table"] is self.table
            assert not found["mask"].requires_grad
            x = x + found["y"].sin()
        return x.square().sum()


class Blocks:
    """Makes each block's weight of one matrix, and notes which blocks are there."""

    def __init__(self, model: Model, budget: int) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self._places = {block: place for place, block in enumerate(model.blocks)}
        self._own = {block: block.linear.weight.detach().clone() for block in model.blocks}
        self.shelf = TensorStore(budget)
        self.way = CheckpointedBlocks(list(model.blocks), self._arrive, self._inside, self.shelf)

    def _arrive(self, block: nn.Module, then: nn.Module | None) -> None:
        self.seen.append((self._places[block], None if then is None else self._places[then]))

    @contextlib.contextmanager
    def _inside(self, block: Any, sources: Sequence[Tensor]) -> Iterator[None]:
        weight = block.linear._parameters["weight"]
        block.linear._parameters["weight"] = self._own[block] @ sources[0]
        try:
            yield
        finally:
            block.linear._parameters["weight"] = weight


def model_of() -> Model:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def leaves_of() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    return x, torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_()


def in_one_graph() -> list[Tensor]:
    model = model_of()
    x, matrix = leaves_of()
    for block in model.blocks:
        own = block.linear.weight.detach()
        block.linear._parameters["weight"] = own @ matrix
    return [*torch.autograd.grad(model(x), (x, matrix))]


@pytest.mark.parametrize("budget", [ALL, NOTHING])
def test_the_gradients_are_those_of_one_graph(budget: int) -> None:
    model = model_of()
    blocks = Blocks(model, budget)
    x, matrix = leaves_of()
    with blocks.way.checkpointing({block: [matrix] for block in model.blocks}):
        found = torch.autograd.grad(model(x), (x, matrix))
    for one, other in zip(found, in_one_graph(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (blocks.shelf.spilled > 0) == (budget == NOTHING)
    blocks.shelf.close()


def test_blocks_come_in_order_and_back() -> None:
    model = model_of()
    blocks = Blocks(model, ALL)
    x, matrix = leaves_of()
    with blocks.way.checkpointing({block: [matrix] for block in model.blocks}):
        loss = model(x)
        assert blocks.seen == [(0, 1), (1, 2), (2, None), (2, None)]
        blocks.seen.clear()
        torch.autograd.grad(loss, matrix)
    assert blocks.seen == [(2, 1), (2, 1), (1, 0), (0, None)]


def test_nothing_of_a_forward_is_kept_but_what_went_into_blocks() -> None:
    """Two tensors go into each of the four calls: where none may stay, all of them are in files."""
    model = model_of()
    blocks = Blocks(model, NOTHING)
    x, matrix = leaves_of()
    with blocks.way.checkpointing({block: [matrix] for block in model.blocks}):
        loss = model(x)
    size = x.numel() * x.element_size()
    assert blocks.shelf.spilled == 2 * (BLOCKS + 1) * size
    assert blocks.shelf.peak == 0
    assert loss.requires_grad
    blocks.shelf.close()


def test_without_gradients_nothing_is_kept() -> None:
    model = model_of()
    blocks = Blocks(model, ALL)
    x, matrix = leaves_of()
    expected = model_of()
    with torch.no_grad(), blocks.way.checkpointing({block: [matrix] for block in model.blocks}):
        model(x)
    assert blocks.shelf.peak == 0
    assert all("forward" not in vars(block) for block in model.blocks)
    assert torch.equal(model(x), expected(x))


def test_what_exceeds_the_budget_waits_in_files_that_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = [torch.randn(4, 6).t(), torch.randn(24), torch.randn(7)]
    shelf = TensorStore(24 * 4 * 2)
    tickets = [shelf.put(one) for one in given]
    assert (shelf.peak, shelf.spilled) == (24 * 4 * 2, 7 * 4)
    assert not list(tmp_path.iterdir())  # what is killed now leaves none behind
    for ticket, one in zip(reversed(tickets), reversed(given), strict=True):
        back = shelf.take(ticket, one.device)
        assert torch.equal(back, one)
        assert back.stride() == one.stride()
    shelf.put(given[0])  # there is room again
    assert shelf.spilled == 7 * 4
    shelf.close()
    assert not list(tmp_path.rglob("*"))
