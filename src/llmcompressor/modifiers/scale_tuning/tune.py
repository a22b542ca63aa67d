# SPDX-License-Identifier: Apache-2.0
r"""Training of scales and gains: divergence from the original model, steps of Adam, the journal.

With codes frozen, the trained tensors :math:`\theta` minimize, over the real tokens of the
calibration data,

.. math:: \min_\theta\; \mathrm{KL}\big(p_{\text{original}} \,\|\, p_\theta\big)

where EfficientQAT (arXiv:2407.11062, section 3.3) has the cross entropy of the next token: with the
few tokens of a calibration, the whole distribution of the original model says more than one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from llmcompressor.core.block_source import BlockSource
from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.logger import logger
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modifiers.scale_tuning.model import Batch, TunedModel
from llmcompressor.numerics.scale_tuning import AdamState
from llmcompressor.runtime.durable import SavingPace
from llmcompressor.runtime.progress import progress

_PROGRESS = "scales"
_COMPARED_SHARE = 8
_MOST_COMPARED = 16
"""One in so many batches is held out to compare with, and so many at most."""
_RUN_TOKENS = 2048
_PRODUCTS = 5
"""Of an epoch: forward, forward again, gradients of inputs and of weights; some to compare."""
_DECODED = 16
"""Bytes per weight of a block: float32 codes, values, the weight it runs with and its gradient."""
_HELD = 20
"""Bytes per trained number: value, two means, gradient and the best value."""
_SAVED = 1.5
"""Elements that a backward reads, over those that go into Linears and come out of them."""
_LOGIT_BYTES = 24
"""Of a token and an entry of the vocabulary: logits of both models, and their gradients."""
_FLOAT = 4


@dataclass(frozen=True)
class TuningOptions:
    """Options of the training.

    Attributes:
        epochs: passes over the batches.
        rate: of the first step; it decays linearly to zero.
        samples: rows of a step, at least.
        seed: of the order of the batches.
    """

    epochs: int
    rate: float
    samples: int
    seed: int


@dataclass(frozen=True)
class OriginalOutputs:
    """The original model's predictions, from which divergences are measured.

    Attributes:
        batches: the calibration batches.
        store: the inputs of the head.
        tickets: of the store, one for each batch.
        head: weight and bias of the head.
    """

    batches: Sequence[Batch]
    store: TensorStore
    tickets: Sequence[int]
    head: tuple[Tensor, Tensor | None]

    def hidden(self, index: int) -> Tensor:
        """The input of the head for a batch, ``[batch, tokens, C]``."""
        return self.store.peek(self.tickets[index], self.head[0].device)

    def tokens(self, index: int) -> int:
        """Number of real tokens of a batch."""
        given, mask = self.batches[index]
        if mask is not None:
            return int(mask.sum())
        return int(self.hidden(index)[..., 0].numel()) if given else 0

    def rows(self, index: int) -> int:
        """Number of samples of a batch."""
        return len(self.hidden(index))


@dataclass(frozen=True)
class TuningResult:
    """Result of the training.

    Attributes:
        offsets: name of a stored tensor → its offset, float32; empty if it was no better.
        steps: number of steps.
        divergence_before: KL from the original model on the batches that are compared, in nats per
            token, before.
        divergence_after: the same after.
    """

    offsets: Mapping[str, Tensor]
    steps: int
    divergence_before: float
    divergence_after: float


def split_batches(count: int) -> tuple[list[int], list[int]]:
    """The batches to train on and those to compare with: the last ones, or all if there are few.

    >>> split_batches(9)
    ([0, 1, 2, 3, 4, 5, 6, 7], [8])
    >>> split_batches(2)
    ([0, 1], [0, 1])
    """
    every = list(range(count))
    kept = min(count // _COMPARED_SHARE, _MOST_COMPARED)
    return (every[:-kept], every[-kept:]) if kept else (every, every)


def step_batches(
    batches: Sequence[int], rows: Sequence[int], options: TuningOptions
) -> list[list[list[int]]]:
    """The batches of each step of each epoch: every one comes once in it, in a new order.

    Epochs may differ in their number of steps, as batches may differ in their number of samples.

    Args:
        batches: indices to train on.
        rows: number of samples of each batch, by index.
        options: of the training.
    """
    generator = torch.Generator().manual_seed(options.seed)
    epochs: list[list[list[int]]] = []
    for _ in range(options.epochs):
        steps: list[list[int]] = []
        picked: list[int] = []
        for place in torch.randperm(len(batches), generator=generator).tolist():
            picked.append(batches[place])
            if sum(rows[one] for one in picked) >= options.samples:
                steps.append(picked)
                picked = []
        if picked:
            steps.append(picked)
        epochs.append(steps)
    return epochs


def tune_scales(
    model: TunedModel,
    starts: Mapping[str, Tensor],
    original: OriginalOutputs,
    options: TuningOptions,
    source: BlockSource,
) -> TuningResult:
    """Train the offsets of some tensors.

    Args:
        model: the quantized model.
        starts: offsets of zero, on the device to train on.
        original: the predictions of the original model.
        options: of the training.
        source: keeps the progress, where the run can be continued.

    Returns:
        Of the offsets after each epoch, and of none, those with the least divergence on the batches
        that are compared, which are held out from the steps if there are enough.
    """
    training, compared = split_batches(len(original.batches))
    rows = [original.rows(index) for index in range(len(original.batches))]
    epochs = step_batches(training, rows, options)
    steps, ends = list(chain(*epochs)), set(accumulate(map(len, epochs)))
    run = _Training(model, starts, original, source)
    if not run.resume():
        run.before = run.least = run.mean_divergence(compared)
        run.keep()
    with progress(len(steps) - run.steps, "Tuning scales") as advance:
        for number in range(run.steps, len(steps)):
            loss = run.step(steps[number], options.rate * (1 - number / len(steps)))
            if number + 1 in ends:
                run.compare(compared)
            run.keep_if_due(last=number + 1 == len(steps))
            advance(1, note=f"divergence {loss:.4f}")
    told = f"{len(steps)} steps: divergence {run.before:.4f} before, {run.least:.4f} at best"
    if run.least >= run.before:
        logger.warning(f"Scales tuned in {told}. They are no better, so the first ones are kept.")
        return TuningResult({}, len(steps), run.before, run.before)
    logger.info(f"Scales tuned in {told}.")
    return TuningResult(run.best, len(steps), run.before, run.least)


class _Training:
    """Trained offsets, and how far the training is.

    Attributes:
        steps: number of completed steps.
        before: divergence on the batches that are compared, before the first step.
        least: the least one so far.
        best: the offsets that have it.
    """

    def __init__(
        self,
        model: TunedModel,
        starts: Mapping[str, Tensor],
        original: OriginalOutputs,
        source: BlockSource,
    ) -> None:
        self._model, self._original, self._source = model, original, source
        self._states = {name: AdamState.of(one) for name, one in starts.items()}
        self.steps, self.before, self.least = 0, 0.0, 0.0
        self.best = {name: torch.zeros_like(one) for name, one in starts.items()}
        self._pace = SavingPace()

    @property
    def offsets(self) -> dict[str, Tensor]:
        """The present offsets."""
        return {name: one.value for name, one in self._states.items()}

    def step(self, picked: Sequence[int], rate: float) -> float:
        """Take one step on some batches; return the mean divergence before it."""
        loss, gradients = 0.0, dict[str, Tensor]()
        for index, share in self._shares(picked):
            with torch.enable_grad():
                leaves = {name: one.clone().requires_grad_() for name, one in self.offsets.items()}
                loss += share * self._divergence(index, leaves)
            for name, leaf in leaves.items():
                if leaf.grad is not None:  # an expert without tokens has none
                    total = gradients.get(name)
                    own = leaf.grad * share
                    gradients[name] = own if total is None else total + own
        self.steps += 1
        for name, gradient in gradients.items():
            self._states[name].step(gradient, rate, self.steps)
        return loss

    def compare(self, indices: Sequence[int]) -> None:
        """Keep the present offsets if they are the best ones on some batches."""
        found = self.mean_divergence(indices)
        if found < self.least:
            self.least = found
            self.best = {name: one.clone() for name, one in self.offsets.items()}

    @torch.no_grad()
    def mean_divergence(self, indices: Sequence[int]) -> float:
        """Mean divergence over the tokens of some batches, with the present offsets."""
        return sum(
            share * self._divergence(index, self.offsets) for index, share in self._shares(indices)
        )

    def _shares(self, indices: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield the batches that have real tokens, with their share of all these tokens."""
        counts = {index: self._original.tokens(index) for index in indices}
        total = sum(counts.values())
        yield from ((index, count / total) for index, count in counts.items() if count)

    def _divergence(self, index: int, leaves: Mapping[str, Tensor]) -> float:
        original = self._original
        batch, hidden = original.batches[index], original.hidden(index)
        return float(self._model.divergence(batch, hidden, original.head, leaves))

    # ------------------------------------------------------------------ progress

    def resume(self) -> bool:
        """Resume an earlier run, if there is one; return True if so."""
        found = self._source.recall(_PROGRESS)
        if found is None:
            self._source.forget()
            return False
        tensors, figures = found
        for name, one in self._states.items():
            for part in ("value", "mean", "square"):
                getattr(one, part).copy_(tensors[f"{part} {name}"])
            self.best[name].copy_(tensors[f"best {name}"])
        self.steps, self.before = figures["steps"], figures["before"]
        self.least = figures["least"]
        logger.info(f"The tuning of scales goes on behind step {self.steps}.")
        return True

    def keep_if_due(self, *, last: bool) -> None:
        """Keep the progress, unless that would take a large share of the time."""
        if last or self._pace.is_due():
            self.keep()

    def keep(self) -> None:
        """Keep the progress; it is durable on return."""
        tensors = {
            f"{part} {name}": getattr(one, part)
            for name, one in self._states.items()
            for part in ("value", "mean", "square")
        }
        tensors |= {f"best {name}": one for name, one in self.best.items()}
        figures = {"steps": self.steps, "before": self.before, "least": self.least}
        with self._pace.saving():
            self._source.remember(_PROGRESS, tensors, figures)


def tuning_cost(
    elements: int, widths: int, vocabulary: int, trained: int, epochs: int, data: DataSize
) -> Cost:
    """Cost of all epochs through some modules.

    Args:
        elements: of the weights of the modules.
        widths: sum of their inputs and outputs.
        vocabulary: outputs of the head if that is among them, else 0.
        trained: trained numbers of the whole model.
        epochs: passes over the data.
        data: size of the calibration data.
    """
    batch = min(max(data.batch, _RUN_TOKENS), data.tokens)
    runs = -(-data.tokens // max(batch, 1))
    flops = (1 + _PRODUCTS * epochs) * data.tokens * elements
    return Cost(
        flops=flops + 4 * ELEMENTWISE * epochs * runs * elements,
        held_bytes=_HELD * trained,
        peak_bytes=_DECODED * elements
        + int(batch * _SAVED * _FLOAT * widths)
        + batch * vocabulary * _LOGIT_BYTES,
    )
