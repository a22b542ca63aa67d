# SPDX-License-Identifier: Apache-2.0
"""Selection of the real tokens of an activation, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_BY_QUERY = (3, 4)
"""Dimensions of masks that say for each query which keys it sees."""


def token_mask(batch: Mapping[str, Any], key: str = "attention_mask") -> Tensor | None:
    """Bool ``[batch, tokens]``, true at real tokens; ``None`` if there is no padding.

    The mask ``key`` of a batch is ``[batch, tokens]``; or ``[batch, queries, keys]`` or ``[batch,
    heads, queries, keys]``, either boolean (true where attended) or numbers that are added to
    scores; or a mapping of several of these, for models with two kinds of attention.
    """
    mask, ids = batch.get(key), batch.get("input_ids")
    several = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    found = [one for one in map(_attended_positions, several) if one is not None]
    if not found:
        return None
    real = found[0]
    for other in found[1:]:
        real = real | other
    if isinstance(ids, Tensor) and len(real) == 1:
        real = real.expand(len(ids), -1)
    return None if bool(real.all()) else real


def num_batch_tokens(batch: Any) -> Tensor | None:
    """Number of non-padding tokens of a batch, on the mask's device; ``None`` if unknown."""
    if not isinstance(batch, Mapping):
        return None
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:  # summed without waiting for the device
        return mask.bool().sum()
    real = token_mask(batch)
    if real is not None:
        return real.sum()
    return torch.tensor(ids.numel(), device=ids.device) if isinstance(ids, Tensor) else None


def _attended_positions(mask: Any) -> Tensor | None:
    """Bool ``[batch, tokens]``, true at attended positions; ``None`` if unknown.

    A query that attends to nothing often gets to attend to everything, so that no row of a softmax
    is empty. It is recognized by attending to later positions, and does not count.
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim not in _BY_QUERY:
        return mask.bool() if mask.ndim == 2 else None
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    sight = mask.bool() if mask.ndim == 3 else mask.bool().any(dim=1)
    if sight.shape[1] != sight.shape[2]:  # keys of a cache, or of another sequence
        return None
    open_BQ = sight.all(dim=2)
    open_BQ[:, -1] = False
    some_closed_B1 = ~open_BQ[:, :-1].all(dim=1, keepdim=True)
    counts_BQ1 = ~(open_BQ & some_closed_B1).unsqueeze(2)
    return torch.any(sight & counts_BQ1, dim=1)


def real_tokens(activation: Tensor, token_mask: Tensor | None) -> Tensor:
    """Flatten an activation to ``[tokens, columns]`` and drop padding positions.

    It is ``[batch, tokens, C]``, already flattened, or a vector, which is one token. The mask is
    bool ``[batch, tokens]``, true at real tokens. Activations of another layout (tokens routed to
    an expert, patches of an image) have no padding positions, and all rows count.
    """
    if token_mask is not None:
        token_mask = token_mask.to(activation.device)  # a model may be spread over devices
        if activation.shape[:-1] == token_mask.shape:
            return activation[token_mask]
        if activation.ndim == 2 and len(activation) == token_mask.numel():
            return activation[token_mask.flatten()]
    return activation.reshape(-1, activation.shape[-1])


def count_tokens(activation: Tensor, token_mask: Tensor | None) -> int:
    """Number of rows that :func:`real_tokens` would return for the same arguments."""
    if token_mask is not None:
        alike = activation.shape[:-1] == token_mask.shape
        if alike or (activation.ndim == 2 and len(activation) == token_mask.numel()):
            return int(token_mask.sum())
    return activation.shape[:-1].numel()


def split_batches(
    activation: Tensor, token_mask: Tensor | None, sizes: tuple[int, ...] | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Split an activation and its mask into the calibration batches that were run in one forward.

    ``sizes`` are the samples of each batch. Without them, or if the layout is not ``[samples, …]``,
    it is one batch.
    """
    if sizes is None or len(sizes) == 1 or len(activation) != sum(sizes):
        yield activation, token_mask
        return
    split = list(sizes)
    masks = [None] * len(split) if token_mask is None else torch.split(token_mask, split)
    yield from zip(torch.split(activation, split), masks, strict=True)


def num_equal_batches(
    activation: Tensor, token_mask: Tensor | None, sizes: tuple[int, ...] | None
) -> int:
    """Number of the batches of :func:`split_batches` if they have one size, unpadded; or 1."""
    if sizes is None or token_mask is not None or len(activation) != sum(sizes):
        return 1
    return len(sizes) if len(set(sizes)) == 1 else 1


def real_states(states_BHTD: Tensor, token_mask: Tensor | None) -> Tensor:
    """The real tokens of attention states as one sequence ``[1, H, N, D]``, if any are hidden."""
    states_BTHD = states_BHTD.transpose(1, 2)
    if token_mask is None or token_mask.shape != states_BTHD.shape[:2]:
        return states_BHTD
    return states_BTHD[token_mask].transpose(0, 1).unsqueeze(0)
