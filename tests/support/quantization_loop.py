# SPDX-License-Identifier: Apache-2.0
"""A loop that trains a tiny model and sends its events, as one writes it by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from llmcompressor.core import CompressionSession, EventType
from llmcompressor.core.modifier import Modifier

Batch = dict[str, torch.Tensor]
Watch = Callable[[int], Any]


def begin(model: Any, *modifiers: Modifier, **arguments: Any) -> CompressionSession:
    session = CompressionSession()
    session.initialize(recipe=list(modifiers), model=model, **arguments)
    return session


def optimizer_of(model: Any, rate: float = 0.05) -> Optimizer:
    return SGD(model.parameters(), lr=rate, momentum=0.9)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, labels=batch["input_ids"]).loss
    return loss


def step(session: CompressionSession, model: Any, optimizer: Optimizer, *batches: Batch) -> float:
    """One optimizer step, of as many micro-batches as are given."""
    total = 0.0
    optimizer.zero_grad()
    for index, batch in enumerate(batches):
        session.event(EventType.BATCH_START, batch_data=batch)
        loss = loss_of(model, batch) / len(batches)
        loss = session.event(EventType.LOSS_CALCULATED, loss=loss).loss
        loss.backward()
        if index == len(batches) - 1:
            session.event(EventType.OPTIM_PRE_STEP)
            optimizer.step()
            session.event(EventType.OPTIM_POST_STEP)
        session.event(EventType.BATCH_END)
        total += float(loss.detach())
    return total


def train(
    session: CompressionSession, model: Any, optimizer: Optimizer, data: Iterable[Batch]
) -> list[float]:
    """The loss of each step."""
    return [step(session, model, optimizer, batch) for batch in data]
