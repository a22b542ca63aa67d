# SPDX-License-Identifier: Apache-2.0
"""Merging of small calibration batches into larger ones.

Calibration usually runs one sample at a time, which is slow: operations are so short that launch
overhead and waiting for the slowest thread dominate. Text batches of the same shape are therefore
run as one. The sizes of the original batches are kept, for observers that count batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MergedBatch", "merge_batches"]

_MERGEABLE = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "loss_mask"}
)
RUN_TOKENS = 2048
"""Tokens that are run at once, where samples are shorter: enough for large products."""


class MergedBatch(NamedTuple):
    """Batches that are run as one."""

    batch: Mapping[str, Any]
    """Their tensors, one below the other."""
    sizes: tuple[int, ...]
    """How many samples each of them brought."""


def merge_batches(
    batches: Iterable[Mapping[str, Any]], tokens: int | None = None
) -> Iterator[MergedBatch]:
    """Merge successive batches of the same shape, up to ``tokens`` (``RUN_TOKENS``) tokens.

    Only batches of plain text with samples of equal length are merged: nothing is padded and
    nothing is reordered.

    >>> ones = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 3
    >>> [merged.sizes for merged in merge_batches(ones, tokens=8)]
    [(1, 1), (1,)]
    """
    tokens = RUN_TOKENS if tokens is None else tokens
    held: list[Mapping[str, Any]] = []
    for batch in batches:
        joined = [*held, batch]
        if held and (_form(batch) != _form(held[0]) or _tokens(joined) > tokens):
            yield _merged(held)
            joined = [batch]
        held = joined
        if _form(batch) is None:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def _form(batch: Mapping[str, Any]) -> object:
    """Key that is equal for batches that can be merged; ``None`` if a batch cannot be merged."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not set(batch) <= _MERGEABLE:
        return None
    if any(not isinstance(v, Tensor) or v.shape != ids.shape for v in batch.values()):
        return None
    return tuple(sorted(batch)), ids.shape[1], ids.device


def _tokens(batches: Iterable[Mapping[str, Any]]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)


def _merged(batches: list[Mapping[str, Any]]) -> MergedBatch:
    if len(batches) == 1:
        ids = batches[0].get("input_ids")
        size = len(ids) if isinstance(ids, Tensor) and ids.ndim else 1
        return MergedBatch(batches[0], (size,))
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return MergedBatch(joined, tuple(len(batch["input_ids"]) for batch in batches))
