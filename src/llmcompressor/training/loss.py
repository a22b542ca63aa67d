# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch, as modifiers see it and as the optimizer sees it.

A step's loss is a weighted sum over its micro-batches, on all processes. transformers builds it in
one of two ways: it divides the sum over a micro-batch's tokens by the number of tokens in the
whole step (where the model takes ``num_items_in_batch``), or it takes means and divides them by
the number of micro-batches afterwards. In the first case the number that ``compute_loss`` returns
is small for a small micro-batch. A modifier that added a term of its own, a mean, would count it
once per micro-batch.

So modifiers always see the mean over the micro-batch, and what they make of it is scaled back::

    loss = share * mean        share = tokens here * processes / tokens of the step

With accumulation or without, on one process or several, the same recipe has the same effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["StepLoss", "mean_of", "micro_batch_share", "token_weight", "tokens_of_step"]

_IGNORED = -100  # transformers' label of a position without a target


def micro_batch_share(
    trainer: Trainer, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None
) -> Tensor | None:
    """What the mean over a micro-batch is multiplied with to be its part of the step's loss.

    Args:
        trainer: tells how it builds the loss.
        inputs: the micro-batch, with its labels.
        num_items_in_batch: targets in the whole step, on all processes.

    Returns:
        A scalar; ``None`` where the loss is the mean already.
    """
    by_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if num_items_in_batch is None or not by_items:
        return None
    processes = _averaged_processes(trainer)
    if trainer.current_gradient_accumulation_steps == 1 and processes == 1:
        return None
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in inputs and getattr(trainer, "_loss_shifts_labels", False):
        labels = labels[..., 1:]
    return labels.ne(_IGNORED).sum() * processes / num_items_in_batch


def tokens_of_step(trainer: Trainer, batches: Iterable[Any]) -> Tensor | None:
    """How many tokens that are no padding the micro-batches of a step have, on all processes.

    Args:
        trainer: tells whose tokens are counted together.
        batches: the micro-batches of this process.

    Returns:
        A scalar; ``None`` where it is not known.
    """
    counts = [_tokens_of(batch) for batch in batches]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    total = torch.stack(known).sum().to(trainer.args.device)
    if _averaged_processes(trainer) > 1:
        gathered: Tensor = trainer.accelerator.gather(total)
        total = gathered.sum() * _averaged_processes(trainer) // trainer.accelerator.num_processes
    return total


def token_weight(
    trainer: Trainer, inputs: Mapping[str, Any], tokens_in_step: Tensor | None, share: Tensor | None
) -> Tensor | None:
    """What a mean over a micro-batch's tokens is multiplied with to be weighted by their number.

    The loss is a mean over targets and weighted by ``share``, its part of the step's targets. What
    is a mean over all tokens instead would be weighted by targets too, without this factor.

    Args:
        trainer: tells how it builds the loss.
        inputs: the micro-batch.
        tokens_in_step: of :func:`tokens_of_step`.
        share: of :func:`micro_batch_share`.

    Returns:
        A scalar; ``None`` where all is well without.
    """
    own = _tokens_of(inputs)
    if share is None or own is None or tokens_in_step is None:
        return None
    of_tokens = (
        own.to(share.device) * _averaged_processes(trainer) / tokens_in_step.to(share.device)
    )
    return of_tokens / torch.where(share > 0, share, torch.ones_like(share))


def _tokens_of(batch: Any) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.eq(1).sum() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _averaged_processes(trainer: Trainer) -> int:
    """How many processes share one count of targets, as in ``Trainer.compute_loss``."""
    if not trainer.args.average_tokens_across_devices:
        return 1
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    replicas: int = 1 if parallel is None else parallel.tp_size
    return int(trainer.accelerator.num_processes) // replicas


class StepLoss:
    """The losses of the micro-batches of one step, kept on their device until someone asks.

    >>> step = StepLoss()
    >>> step.add(own=torch.tensor(2.0), final=torch.tensor(3.0), share=None)
    >>> step.add(own=torch.tensor(4.0), final=torch.tensor(5.0), share=None)
    >>> step.figures()["loss"], step.figures()["step_loss"]
    (4.0, 3.0)
    """

    def __init__(self) -> None:
        self._own: Tensor | float = 0.0
        self._final: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def add(self, own: Tensor, final: Tensor, share: Tensor | None) -> None:
        """Add a micro-batch.

        Args:
            own: what the model's own loss was, a mean.
            final: what the modifiers made of it.
            share: of :func:`micro_batch_share`.
        """
        weight: Tensor | float = 1.0 if share is None else share
        self._own = self._own + own.detach() * weight
        self._final = self._final + final.detach() * weight
        self._weight = self._weight + weight

    def figures(self) -> dict[str, float]:
        """Means over the step on this process: ``loss``, ``step_loss`` and ``perplexity``.

        ``loss`` is what the optimizer saw, ``step_loss`` the model's own, and ``perplexity`` is
        the exponential of the latter. Empty before the first micro-batch.
        """
        weight = float(self._weight)
        if not weight:
            return {}
        own = float(self._own) / weight
        final = float(self._final) / weight
        return {"loss": final, "step_loss": own, "perplexity": _exp(own)}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def mean_of(loss: Tensor, share: Tensor | None) -> Tensor:
    """The mean over the micro-batch of a loss that is its part of the step's."""
    if share is None:
        return loss
    # A micro-batch without targets has no mean; its part of the loss is zero.
    return loss / torch.where(share > 0, share, torch.ones_like(share))
