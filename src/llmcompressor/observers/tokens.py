# SPDX-License-Identifier: Apache-2.0
"""From what a module gets to what counts: one row per real token, padding left out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["alike_batches", "count_tokens", "per_batch", "real_tokens"]


def real_tokens(activation: Tensor, token_mask: Tensor | None) -> Tensor:
    """Flatten an activation to ``[tokens, columns]`` and drop the positions that are padding.

    Args:
        activation: ``[batch, tokens, C]``, or already flattened ``[batch · tokens, C]``; a
            vector ``[C]`` is one token.
        token_mask: bool ``[batch, tokens]``, true where a real token is; ``None``: all are. An
            activation that is laid out otherwise (tokens routed to an expert, patches of an
            image) has no such positions, and all of it counts.
    """
    if token_mask is not None:
        if activation.shape[:-1] == token_mask.shape:
            return activation[token_mask]
        if activation.ndim == 2 and len(activation) == token_mask.numel():
            return activation[token_mask.flatten()]
    return activation.reshape(-1, activation.shape[-1])


def count_tokens(activation: Tensor, token_mask: Tensor | None) -> int:
    """How many rows :func:`real_tokens` would return; arguments as there."""
    if token_mask is not None:
        alike = activation.shape[:-1] == token_mask.shape
        if alike or (activation.ndim == 2 and len(activation) == token_mask.numel()):
            return int(token_mask.sum())
    return activation.shape[:-1].numel()


def per_batch(
    activation: Tensor, token_mask: Tensor | None, sizes: tuple[int, ...] | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What each of the calibration batches brought that were run as one.

    Args:
        activation: ``[samples, …]``; laid out otherwise, it is one batch.
        token_mask: bool ``[samples, tokens]``, or ``None``.
        sizes: samples of each batch, or ``None`` for one batch.

    Yields:
        Activation and mask of one batch after the other.
    """
    if sizes is None or len(sizes) == 1 or len(activation) != sum(sizes):
        yield activation, token_mask
        return
    split = list(sizes)
    masks = [None] * len(split) if token_mask is None else torch.split(token_mask, split)
    yield from zip(torch.split(activation, split), masks, strict=True)


def alike_batches(
    activation: Tensor, token_mask: Tensor | None, sizes: tuple[int, ...] | None
) -> int:
    """How many batches were run as one, if they are of one size and nothing in them is padding.

    1 where they are not, and where :func:`per_batch`, whose arguments these are, would yield one.
    """
    if sizes is None or token_mask is not None or len(activation) != sum(sizes):
        return 1
    return len(sizes) if len(set(sizes)) == 1 else 1
