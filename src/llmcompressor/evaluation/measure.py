# SPDX-License-Identifier: Apache-2.0
"""Evaluation of models on windows of text, compared with a reference model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import nn

from llmcompressor.errors import ArgumentError, NonFiniteError
from llmcompressor.evaluation.metrics import MetricSums, Passage, Report, batch_sums
from llmcompressor.evaluation.models import check_causal, compute_logits
from llmcompressor.evaluation.sources import Window, padded_batches
from llmcompressor.modeling.patches import eval_mode, float32_linears
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import progress


def measure(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    reference: nn.Module | None = None,
    batch_size: int = 8,
    ranks: Ranks | None = None,
) -> Report:
    """Evaluate one model on windows, see :func:`compare`; it is neither moved nor changed."""
    how: dict[str, Any] = {"reference": reference, "batch_size": batch_size, "ranks": ranks}
    return compare({"model": model}, windows, **how)["model"]


def compare(
    models: Mapping[str, nn.Module],
    windows: Sequence[Window],
    *,
    reference: nn.Module | None = None,
    batch_size: int = 8,
    ranks: Ranks | None = None,
) -> dict[str, Report]:
    """Evaluate several models on the same windows; the reference runs once for all of them.

    All tokens have the same weight, whichever window they are in: metrics are sums over all tokens
    divided by their number, not means of means.

    Args:
        models: name → causal language model.
        windows: token ids, each window at least two.
        reference: the original, with the same vocabulary.
        batch_size: windows per forward.
        ranks: the ranks that share the windows. All have the same models and all windows.

    Returns:
        Name → report, of all windows on each rank.

    Raises:
        ArgumentError: a model and the reference have different vocabularies, or one gives no
            probabilities to tokens.
        CheckpointError: a model is not causal.
        NonFiniteError: a model gave NaN or infinite probabilities to a token of the text.
    """
    if batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size}.", "Give 1 or more.")
    ranks = ranks or Ranks()
    own_windows = windows[ranks.rank :: ranks.count]
    each: dict[str, list[MetricSums]] = {name: [] for name in models}  # of each window
    steps = -(-len(own_windows) // batch_size)
    everything = [*models.values(), *([] if reference is None else [reference])]
    with ExitStack() as modes, torch.no_grad(), progress(steps, "Evaluating") as advance:
        modes.enter_context(float32_linears())
        for model in everything:
            modes.enter_context(eval_mode(model))
        for model, window in product(everything, windows[:1]):
            check_causal(model, window)
        for ids_BT, mask_BT in padded_batches(own_windows, batch_size):
            expected = None if reference is None else compute_logits(reference, ids_BT, mask_BT)
            for name, model in models.items():
                logits_BTV = compute_logits(model, ids_BT, mask_BT)
                if expected is not None and expected.shape != logits_BTV.shape:
                    raise ArgumentError(
                        f"{name} has a vocabulary of {logits_BTV.shape[-1]} tokens and its "
                        f"reference one of {expected.shape[-1]}: their probabilities cannot be "
                        "compared.",
                        "Give the model that was compressed as the reference.",
                    )
                for row in range(len(ids_BT)):
                    own = slice(row, row + 1)
                    other = None if expected is None else expected[own]
                    found = batch_sums(logits_BTV[own], ids_BT[own], mask_BT[own], other)
                    each[name].append(found)
            advance()
    return {
        name: _report(name, _of_all_ranks(each[name], len(windows), ranks), reference)
        for name in models
    }


def _of_all_ranks(own: Sequence[MetricSums], count: int, ranks: Ranks) -> Sequence[MetricSums]:
    """Return the sums of all windows in their order, of which each rank has those of its share.

    So all figures are added up in the same order, whatever the number of ranks.
    """
    if ranks.count == 1:
        return own
    counts_W2 = torch.zeros(count, 2, dtype=torch.int64)
    sums_W3 = torch.zeros(count, 3, dtype=torch.float64)
    for place, one in zip(range(ranks.rank, count, ranks.count), own, strict=True):
        counts_W2[place] = torch.tensor([one.tokens, one.agreed])
        values = [one.nll, one.reference_nll, one.kl]
        sums_W3[place] = torch.tensor(values, dtype=torch.float64)
    counts = ranks.sum_all(counts_W2, what="tokens of the evaluation").tolist()
    sums = ranks.sum_all(sums_W3, what="losses of the evaluation").tolist()
    return [
        MetricSums(tokens, nll, reference_nll, kl, agreed)
        for (tokens, agreed), (nll, reference_nll, kl) in zip(counts, sums, strict=True)
    ]


_MOST_PASSAGES = 5


def _report(name: str, each: Sequence[MetricSums], reference: nn.Module | None) -> Report:
    sums = sum(each, MetricSums())
    if not sums.tokens:
        raise ArgumentError("There is no token to predict.", "Give windows of at least two tokens.")
    if not torch.isfinite(torch.tensor([sums.nll, sums.reference_nll, sums.kl])).all():
        raise NonFiniteError(
            f"The probabilities of {name} or of its reference are NaN or zero on this text: "
            f"loss {sums.nll / sums.tokens}, reference {sums.reference_nll / sums.tokens}, "
            f"divergence {sums.kl / sums.tokens}. The weights are likely damaged."
        )
    loss, of_reference, kl, agreed = (
        one / sums.tokens for one in (sums.nll, sums.reference_nll, sums.kl, sums.agreed)
    )
    values = [
        Passage(place, (one.nll if reference is None else one.kl) / one.tokens)
        for place, one in enumerate(each)
        if one.tokens
    ]
    worst = tuple(sorted(values, key=lambda one: -one.value)[:_MOST_PASSAGES])
    if reference is None:
        return Report(sums.tokens, len(each), loss, worst=worst)
    kl = max(0.0, kl)  # rounding can leave that of equal models below zero
    return Report(sums.tokens, len(each), loss, of_reference, kl, agreed, worst)


# --------------------
# Peak memory of the process while some code runs.

_EVERY_S = 0.02


class PeakMemory:
    """Samples the resident memory of this process; on an accelerator, also the allocator's peak.

    ::

        with PeakMemory() as peak:
            work()
        print(peak.bytes)

    Attributes:
        bytes: most bytes resident at any sample, Python and its libraries included.
        device_bytes: most bytes of the accelerator's memory in use, 0 without one.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.device_bytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._watch()
        if torch.accelerator.is_available():
            self.device_bytes = int(torch.accelerator.max_memory_allocated())

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, self._process.memory_info().rss)
            if self._done.wait(_EVERY_S):
                return
