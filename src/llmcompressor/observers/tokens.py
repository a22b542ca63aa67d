# SPDX-License-Identifier: Apache-2.0
"""From what a module gets to what counts: one row per real token, padding left out."""

from __future__ import annotations

from torch import Tensor

__all__ = ["real_tokens"]


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
