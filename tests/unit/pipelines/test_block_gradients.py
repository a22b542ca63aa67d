# SPDX-License-Identifier: Apache-2.0
"""Gradients block by block: those of a plain backward, with one block at a time in memory."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.tiny_models import ARCHITECTURES, build, leaves, text_batches
from torch import Tensor, nn

from llmcompressor.core.block_source import BlockSource
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.pipelines.batches import CalibrationBatches, calibration_mode
from llmcompressor.pipelines.block_gradients import watch_gradients

Sums = dict[str, Tensor]


def loss_of(index: int, returned: Any) -> Tensor:
    """Depends on all logits, and on the batch."""
    logits = returned.logits.float()
    return logits.log_softmax(-1)[..., index + 1].sum() + logits.square().mean()


def added(sums: Sums, name: str, given: Tensor, gradient: Tensor) -> None:
    """What a weight's gradient is, summed over the batches, and its square over calls."""
    tokens, rows = given.flatten(0, -2).double(), gradient.flatten(0, -2).double()
    sums[name] = sums.get(name, torch.zeros(())) + rows.T @ tokens


def plain(model: nn.Module, linears: dict[nn.Module, str], batches: CalibrationBatches) -> Sums:
    """One graph of the whole model for each batch."""
    sums: Sums = {}
    handles = []

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        given = args[0].detach()
        output.register_hook(lambda one: added(sums, linears[module], given, one))

    handles = [one.register_forward_hook(record) for one in linears]
    with torch.enable_grad():
        for index, batch in enumerate(batches):
            loss_of(index, batches.run(batch)).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return sums


class _Visited(BlockSource):
    """Notes which blocks are brought in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = find_blocks(model)
        self.order: list[str] = []

    @contextmanager
    def visits(self):
        yield lambda block, then: self.order.append(self.names[block])


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_gradients_are_those_of_a_plain_backward(name: str) -> None:
    model, how = build(name), ARCHITECTURES[name]
    linears = leaves(model, "Linear", how.ignore)
    batches = CalibrationBatches(model, how.batches())
    found: Sums = {}
    with calibration_mode(model):
        expected = plain(model, linears, batches)
        source = _Visited(model)
        flags = [one.requires_grad for one in model.parameters()]
        losses = watch_gradients(
            model,
            list(linears),
            batches,
            loss_of,
            lambda one, given, gradient: added(found, linears[one], given, gradient),
            source=source,
            shelf=TensorStore(1 << 30),
        )
        for index, batch in enumerate(batches):
            with torch.no_grad():
                assert losses[index] == pytest.approx(float(loss_of(index, batches.run(batch))))
    assert found.keys() == expected.keys()
    assert found
    for own, value in expected.items():
        rounding = 1e-5 * float(value.abs().max())  # of sums of both signs
        torch.testing.assert_close(found[own], value, rtol=1e-4, atol=max(1e-6, rounding))
    assert all(one.grad is None for one in model.parameters())
    assert [one.requires_grad for one in model.parameters()] == flags


def test_each_block_is_brought_in_once_forward_and_once_back() -> None:
    model = build("llama")
    batches = CalibrationBatches(model, text_batches())
    source, left = _Visited(model), []
    names = find_blocks(model)
    with calibration_mode(model):
        watch_gradients(
            model,
            [],
            batches,
            loss_of,
            lambda *_: None,
            source=source,
            shelf=TensorStore(0),  # all inputs wait in files
            leave=lambda block: left.append(names[block]),
        )
    forward = list(names.values())
    assert source.order == [*forward, *reversed(forward)]
    assert left == list(reversed(forward))


class _Block(nn.Module):
    """Also returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(hidden).tanh(), hidden


class _Looped(nn.Module):
    """Blocks that are called twice, in turn, and a skip past both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(2)])
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor) -> Any:
        first = hidden = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            made, same = layer(hidden)
            hidden = made + same
        return SimpleNamespace(logits=self.head(hidden * first))


def test_blocks_may_be_called_again_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = _Looped()
    blocks = {one: f"layers.{place}" for place, one in enumerate(model.layers)}
    monkeypatch.setattr("llmcompressor.pipelines.block_gradients.find_blocks", lambda _: blocks)
    linears = {one: name for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    data = [{"input_ids": one["input_ids"]} for one in text_batches()]
    batches = CalibrationBatches(model, data)
    expected, found = plain(model, linears, batches), Sums()
    watch_gradients(
        model,
        list(linears),
        batches,
        loss_of,
        lambda one, given, gradient: added(found, linears[one], given, gradient),
        source=BlockSource(),
        shelf=TensorStore(1 << 30),
    )
    for own, value in expected.items():
        torch.testing.assert_close(found[own], value)
