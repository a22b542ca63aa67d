# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch counts for among those that make up one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from llmcompressor.observers.tokens import token_total

__all__ = ["micro_batch_weight", "task_loss"]

_IGNORED = -100  # transformers' label of a position without a target


def micro_batch_weight(batch: Any, given: Mapping[str, Any]) -> float | Tensor:
    """What a mean over this micro-batch is multiplied by, so that it adds up as the loss does.

    A loss comes in one of two forms. A mean over the micro-batch is divided by the number of
    micro-batches later on, or weighted otherwise, and so is what is added to it: 1. The sum over
    the micro-batch, divided by the number of targets of the whole step, is added up as it is: a
    mean goes with its share of the step's tokens, or of its targets where only these are known.

    Args:
        batch: of the micro-batch.
        given: what came with ``LOSS_CALCULATED``. ``num_items_in_batch``: targets in the whole
            step, where the loss is divided by it. ``num_tokens_in_batch``: its tokens that are no
            padding. ``token_weight``: the weight itself, from who knows all this.
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
    """The loss of the task, zero for a batch without targets: the mean of nothing is 0 / 0."""
    labels = batch.get("labels", batch.get("shift_labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return loss
    has_targets = (labels != _IGNORED).any().to(loss.device)
    return torch.where(has_targets, loss, torch.zeros_like(loss))


def _targets(batch: Mapping[str, Any]) -> Tensor | None:
    """How many tokens are predicted; the first of a row never is."""
    labels = batch.get("shift_labels")
    if labels is None and isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"][..., 1:]
    return (labels != _IGNORED).sum() if isinstance(labels, Tensor) else None
