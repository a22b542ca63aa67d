# SPDX-License-Identifier: Apache-2.0
"""Weight of a micro-batch in gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from llmcompressor.observers.tokens import token_total

__all__ = ["micro_batch_weight", "task_loss"]

_IGNORED = -100  # transformers' label of a position without a target


def micro_batch_weight(batch: Any, given: Mapping[str, Any]) -> float | Tensor:
    """Factor for a mean over this micro-batch, so that it accumulates as the loss does.

    A loss comes in one of two forms. A mean over the micro-batch is divided by the number of
    micro-batches later on, and so is a term that is added to it: the factor is 1. A sum over the
    micro-batch that is divided by the number of targets of the whole step is accumulated unchanged:
    the factor of a mean is its share of the step's tokens, or of its targets if only these are
    known.

    Args:
        batch: the micro-batch.
        given: arguments of ``LOSS_CALCULATED``. ``num_items_in_batch``: targets in the whole step,
            if the loss is divided by it. ``num_tokens_in_batch``: its tokens without padding.
            ``token_weight``: the factor itself, from a caller that knows it.
    """
    if given.get("token_weight") is not None:
        return cast(Tensor, given["token_weight"])
    items, tokens = given.get("num_items_in_batch"), given.get("num_tokens_in_batch")
    if items is None or not isinstance(batch, Mapping):
        return 1.0
    own = _targets(batch) if tokens is None else token_total(batch)
    if own is None:
        return 1.0
    total = items if tokens is None else tokens
    weight: Tensor = own / (total.to(own.device) if isinstance(total, Tensor) else total)
    return weight


def task_loss(loss: Tensor, batch: Any) -> Tensor:
    """The task loss; zero for a batch without targets, whose mean would be 0 / 0."""
    labels = batch.get("labels", batch.get("shift_labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return loss
    has_targets = (labels != _IGNORED).any().to(loss.device)
    return torch.where(has_targets, loss, torch.zeros_like(loss))


def _targets(batch: Mapping[str, Any]) -> Tensor | None:
    """Number of predicted tokens; the first of a row is not predicted."""
    labels = batch.get("shift_labels")
    if labels is None and isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"][..., 1:]
    return (labels != _IGNORED).sum() if isinstance(labels, Tensor) else None
