# SPDX-License-Identifier: Apache-2.0
"""Scaling of a micro-batch's loss between the modifiers' view and the optimizer's view.

A step's loss is a weighted sum over its micro-batches, on all processes. transformers builds it in
one of two ways: it divides the sum over a micro-batch's tokens by the number of tokens in the
whole step (where the model takes ``num_items_in_batch``), or it takes means and divides them by
the number of micro-batches afterwards. In the first case the number that ``compute_loss`` returns
is small for a small micro-batch. A modifier that added a term of its own, a mean, would count it
once per micro-batch.

So modifiers always see the mean over the micro-batch, and their result is scaled back::

    loss = share * mean        share = tokens here * processes / tokens of the step

With accumulation or without, on one process or several, the same recipe has the same effect.

A micro-batch without targets has no mean and a share of zero. Loss terms over all its tokens count
nevertheless, and must not be lost in a product with zero. So it gets a share that is so small that
terms weighted by targets vanish, and the weight of terms over tokens is that much larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from llmcompressor.errors import DatasetError
from llmcompressor.observers.tokens import num_batch_tokens
from llmcompressor.transformers_internals import loss_shifts_labels

__all__ = [
    "RunLoss",
    "StepLoss",
    "count_step_tokens",
    "count_targets",
    "explain_missing_loss",
    "micro_batch_mean",
    "micro_batch_share",
    "scale_to_share",
    "token_weight",
]

_IGNORED = -100  # transformers' label of a position without a target
_SAYS = "loss_is_scaled_for_ga"  # what a trainer says of its loss itself, from 5.19 on
_NO_SHARE = 2.0**-20  # in place of zero; a power of two, so that nothing is rounded


@contextmanager
def explain_missing_loss() -> Iterator[None]:
    """Raise a clear error if the model returned no loss, because a batch has no labels."""
    try:
        yield
    except ValueError as error:
        if "did not return a loss" not in str(error):
            raise
        raise DatasetError(
            f"A batch has no labels, and so there is nothing to learn. {error}",
            "Have the data, or its data_collator, give labels.",
        ) from error


def micro_batch_share(
    trainer: Trainer, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None
) -> Tensor | None:
    """Return the factor from a micro-batch's mean to its part of the step's loss.

    Args:
        trainer: the trainer, which defines how the loss is built.
        inputs: the micro-batch, with its labels.
        num_items_in_batch: targets in the whole step, on all processes.

    Returns:
        A scalar; ``None`` where the loss is the mean already.
    """
    if num_items_in_batch is None or not _divides_by_items(trainer):
        return None
    processes = _averaged_processes(trainer)
    if trainer.current_gradient_accumulation_steps == 1 and processes == 1:
        return None
    targets = count_targets(trainer, inputs)
    # A step without any target has a share of zero too, not one of 0 / 0.
    least = torch.as_tensor(num_items_in_batch).clamp(min=1)
    return None if targets is None else targets * processes / least.to(targets.device)


def _divides_by_items(trainer: Trainer) -> bool:
    """Return True if the loss is divided by the targets of the whole step (``training_step``).

    The trainer's own flag counts from the release on whose ``training_step`` uses it.
    """
    said = getattr(trainer, _SAYS) if hasattr(Trainer, _SAYS) else None
    if said is not None:
        return bool(said)
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def count_targets(trainer: Trainer, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the number of targets in a micro-batch.

    Args:
        trainer: the trainer, whose loss may shift the labels.
        inputs: the micro-batch, with its labels.

    Returns:
        A scalar; ``None`` without labels.
    """
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in inputs and loss_shifts_labels(trainer):
        labels = labels[..., 1:]
    return labels.ne(_IGNORED).sum()


def count_step_tokens(trainer: Trainer, batches: Iterable[Any]) -> Tensor | None:
    """Return the number of non-padding tokens in the micro-batches of a step, on all processes.

    Args:
        trainer: the trainer, which defines the processes to count together.
        batches: the micro-batches of this process.

    Returns:
        A scalar; ``None`` where it is unknown.
    """
    counts = [num_batch_tokens(batch) for batch in batches]
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
    """Return the factor that weights a mean over tokens by the number of tokens.

    The loss is a mean over targets, weighted by ``share``, its part of the step's targets. Without
    this factor a mean over all tokens would be weighted by targets too.

    Args:
        trainer: the trainer, which defines how the loss is built.
        inputs: the micro-batch.
        tokens_in_step: the result of :func:`count_step_tokens`.
        share: the result of :func:`micro_batch_share`.

    Returns:
        A scalar; ``None`` where no factor is needed.
    """
    own = num_batch_tokens(inputs)
    if share is None or own is None or tokens_in_step is None:
        return None
    of_tokens = (
        own.to(share.device) * _averaged_processes(trainer) / tokens_in_step.to(share.device)
    )
    return of_tokens / _nonzero_share(share)


def _nonzero_share(share: Tensor) -> Tensor:
    """Return the share, with a small number in place of zero."""
    return torch.where(share > 0, share, _NO_SHARE)


def _averaged_processes(trainer: Trainer) -> int:
    """Return the number of processes with one count of targets, as in ``compute_loss``."""
    if not trainer.args.average_tokens_across_devices:
        return 1
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    replicas: int = 1 if parallel is None else parallel.tp_size
    return int(trainer.accelerator.num_processes) // replicas


class StepLoss:
    """The losses of one step's micro-batches, kept on their device until they are needed.

    >>> step = StepLoss()
    >>> step.add(own=torch.tensor(2.0), final=torch.tensor(3.0), share=None)
    >>> step.add(own=torch.tensor(4.0), final=torch.tensor(5.0), share=None)
    >>> step.figures()["loss"], step.figures()["step_loss"]
    (4.0, 3.0)
    """

    def __init__(self) -> None:
        self._own: Tensor | float = 0.0
        self._final: Tensor | float = 0.0
        self._own_weight: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self.is_empty = True
        self.is_replaced = False

    def add(
        self, own: Tensor, final: Tensor, share: Tensor | None, targets: Tensor | None = None
    ) -> None:
        """Add a micro-batch.

        Args:
            own: the model's own loss, a mean.
            final: the loss after the modifiers.
            share: the result of :func:`micro_batch_share`.
            targets: the result of :func:`count_targets`; with 0 the model has no loss of its own.
        """
        self.is_empty = False
        weight: Tensor | float = 1.0 if share is None else share
        counts = weight if targets is None else weight * targets.gt(0)
        self._own = self._own + own.detach() * counts
        self._final = self._final + scale_to_share(final.detach(), share)
        self._own_weight = self._own_weight + counts
        self._weight = self._weight + weight
        self.is_replaced |= final is not own

    @property
    def has_no_loss(self) -> bool:
        """True if there were micro-batches, and none had a loss; this waits for the device."""
        return not (self.is_empty or self.is_replaced or float(self._own_weight))

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the model's own weighted loss, its weight, and the optimizer's loss."""
        final = torch.as_tensor(self._final)
        own, weight = (torch.as_tensor(each) for each in (self._own, self._own_weight))
        return own.to(final.device), weight.to(final.device), final

    def figures(self) -> dict[str, float]:
        """Return means over the step on this process: ``loss``, ``step_loss``, ``perplexity``.

        ``loss`` is the optimizer's loss, ``step_loss`` the model's own, and ``perplexity`` the
        exponential of the latter. Where modifiers replaced the loss, ``distill_step_loss`` is the
        difference of the two. Empty before the first micro-batch; a step without targets has no
        loss of its own.
        """
        found: dict[str, float] = {}
        weight, own_weight = float(self._weight), float(self._own_weight)
        if own_weight or self.is_replaced:
            found["loss"] = float(self._final) / (weight or 1.0)
        if own_weight:
            own = float(self._own) / own_weight
            found |= {"step_loss": own, "perplexity": _exp(own)}
            if self.is_replaced:
                found["distill_step_loss"] = found["loss"] - own
        return found


class RunLoss:
    """The losses of all steps of a run on this process, kept on their device until its end.

    The trainer reports zero for a step without a loss, so only this distinguishes a training in
    which nothing was learned from one that has nothing left to learn.
    """

    def __init__(self) -> None:
        self._own: Tensor | float = 0.0
        self._own_steps: Tensor | float = 0.0
        self._finite_steps: Tensor | float = 0.0
        self._steps = 0
        self.is_replaced = False

    def add(self, step: StepLoss) -> None:
        """Add a step that was taken."""
        if step.is_empty:  # its loss was never reported
            return
        self._steps += 1
        own, weight, final = step.sums()
        self._own = self._own + torch.where(weight > 0, own / weight, 0.0)
        self._own_steps = self._own_steps + weight.gt(0)
        known = final.isfinite() if step.is_replaced else final.isfinite() & weight.gt(0)
        self._finite_steps = self._finite_steps + known
        self.is_replaced |= step.is_replaced

    @property
    def has_no_loss(self) -> bool:
        """True if there were steps, and none had a finite loss."""
        return bool(self._steps) and not float(self._finite_steps)

    def figures(self) -> dict[str, float]:
        """Return the model's own mean loss and perplexity, if modifiers replaced the loss.

        >>> RunLoss().figures()
        {}
        """
        steps = float(self._own_steps)
        if not self.is_replaced or not steps:
            return {}
        own = float(self._own) / steps
        return {"task_loss": own, "perplexity": _exp(own)} if math.isfinite(own) else {}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def micro_batch_mean(loss: Tensor, share: Tensor | None, targets: Tensor | None = None) -> Tensor:
    """Return the mean over the micro-batch from its part of the step's loss.

    Args:
        loss: the trainer's loss.
        share: the result of :func:`micro_batch_share`.
        targets: the result of :func:`count_targets`. With 0 the mean, 0 / 0, is replaced by zero.
    """
    mean = loss if share is None else loss / _nonzero_share(share)
    if targets is None:
        return mean
    return torch.where(targets.to(mean.device) > 0, mean, torch.zeros_like(mean))


def scale_to_share(mean: Tensor, share: Tensor | None) -> Tensor:
    """Scale a micro-batch mean to its part of the loss; undoes :func:`micro_batch_mean`."""
    return mean if share is None else mean * _nonzero_share(share)
