# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model's loss on a few samples, with labels that are drawn from its predictions.

Their second moments are the Fisher matrix (:mod:`llmcompressor.numerics.sampled_loss`). A forward
and a backward go block by block (:mod:`llmcompressor.pipelines.block_gradients`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import DatasetError, NonFiniteError, TargetError
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.offload import TensorStore, activation_budget, device_activation_budget
from llmcompressor.numerics.sampled_loss import sampled_loss
from llmcompressor.pipelines.batches import CalibrationBatches, calibration_mode, is_text
from llmcompressor.pipelines.block_gradients import Watch, watch_gradients
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.threads import short_spin_waits

_SEED = 20170
_ROWS_APART = 1 << 32
"""Between the seeds of two rows of a batch, each of which has a seed of its own by its place."""


class SampledGradients:
    """Gradients of the loss of the first samples of some batches.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        batches: calibration batches.
        samples: how many of their samples are run.
        use_loss_mask: only tokens whose ``loss_mask`` is 1 count.
        ranks: the ranks of the run, which share samples of plain text; each runs all others.
        without_logits: message and remedy where the model returns no logits.

    Attributes:
        ranks: those that share the samples; ``None`` where each runs all.

    Raises:
        DatasetError: there is no batch.
    """

    def __init__(
        self,
        model: Module,
        batches: Iterable[Mapping[str, Any]],
        samples: int,
        *,
        use_loss_mask: bool = False,
        ranks: Ranks | None = None,
        without_logits: tuple[str, str],
    ) -> None:
        taken = first_samples(batches, samples)
        if ranks is not None and (len(taken) < ranks.count or not all(map(is_text, taken))):
            ranks = None
        self.ranks, self._model, self._without_logits = ranks, model, without_logits
        self._data = CalibrationBatches(model, taken, use_loss_mask=use_loss_mask, ranks=ranks)

    @property
    def batches(self) -> int:
        """How many batches there are, of all ranks, which all ask."""
        own = len(self._data)
        return own if self.ranks is None else sum(self.ranks.exchange(own, what="batches"))

    @property
    def tokens(self) -> int:
        """Number of real tokens of all ranks, which all ask."""
        return self._data.real_tokens

    def __call__(
        self,
        linears: Sequence[Module],
        watch: Watch,
        *,
        source: BlockSource,
        leave: Callable[[Module], None],
        budget: int | str | None = None,
        device_memory: int | None = None,
    ) -> None:
        """Run the samples forward and backward, those of this rank.

        Args:
            linears: the Linears whose outputs are differentiated.
            watch: is given each of their calls.
            source: loads the blocks.
            leave: called when a block is done, which is still loaded.
            budget: bytes of activations that may wait in main memory; ``None``: half of what is
                free.
            device_memory: limit for bytes on an accelerator; ``None``: its free memory.

        Raises:
            TargetError: the model returns no logits.
            NonFiniteError: the loss is NaN or infinite.
        """
        model = self._model

        on_device = device_activation_budget(model_device(model), device_memory)
        shelf = TensorStore(activation_budget(budget), on_device)
        with contextlib.closing(shelf), calibration_mode(model), short_spin_waits():
            losses = watch_gradients(
                model,
                linears,
                self._data,
                _SampledLoss(self._data, self._without_logits),
                watch,
                source=source,
                shelf=shelf,
                leave=leave,
            )
        if not all(map(math.isfinite, losses)):
            raise NonFiniteError("The loss of the model is not finite on the calibration samples.")


def first_samples(batches: Iterable[Mapping[str, Any]], samples: int) -> list[dict[str, Any]]:
    """The first samples, one a batch; batches that are more than text stay whole.

    Samples alone do not depend on how they were batched, and ranks can share them. Those of equal
    length are run together anyway.
    """
    found: list[dict[str, Any]] = []
    left = samples
    for batch in batches:
        ids = batch.get("input_ids")
        rows = len(ids) if isinstance(ids, Tensor) and ids.ndim > 1 else 1
        taken = min(rows, left)
        if is_text(batch):
            found += [
                {name: one[row : row + 1] for name, one in batch.items()} for row in range(taken)
            ]
        else:
            cut = {
                name: one[:taken]
                for name, one in batch.items()
                if taken < rows and isinstance(one, Tensor) and one.ndim and len(one) == rows
            }
            found.append({**batch, **cut})
        left -= taken
        if left == 0:
            break
    if not found:
        raise DatasetError("The calibration data holds no batch.", "Give at least one sample.")
    return found


class _SampledLoss:
    """Sum of the losses of a batch's tokens, with labels that are drawn from the predictions.

    The draws of a sample depend on its place among all samples, not on its batch.
    """

    def __init__(self, batches: CalibrationBatches, without_logits: tuple[str, str]) -> None:
        self._batches, self._without_logits = batches, without_logits

    def __call__(self, index: int, returned: Any) -> Tensor:
        logits = getattr(returned, "logits", None)
        if not isinstance(logits, Tensor):
            raise TargetError(*self._without_logits)
        mask = self._batches.mask(index)
        is_alike = mask is not None and mask.shape == logits.shape[:-1]
        if mask is not None and is_alike:
            counts = mask.sum(dim=-1).tolist()
            counted_TV = logits[mask.to(logits.device)]
        else:
            rows = len(logits) if logits.ndim > 2 else 1
            counted_TV = logits.flatten(0, -2)
            counts = [len(counted_TV) // rows] * rows
        draws = []
        for sample, count in zip(self._samples(index, len(counts)), counts, strict=True):
            dice = torch.Generator().manual_seed(_SEED + sample)
            draws.append(torch.rand(count, generator=dice))
        return sampled_loss(counted_TV, torch.cat(draws).to(logits.device))

    def _samples(self, index: int, rows: int) -> list[int]:
        """A number of each sample of a batch that no other sample has."""
        pairs = zip(self._batches.numbers(index), self._batches.sizes(index), strict=True)
        found = [number + row * _ROWS_APART for number, size in pairs for row in range(size)]
        return found if len(found) == rows else [found[0] + row for row in range(rows)]
