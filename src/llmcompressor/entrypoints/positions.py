# SPDX-License-Identifier: Apache-2.0
"""Maximum sequence length of a model, from its configuration and its position embeddings.

Models with rotary embeddings run beyond the configured length with worse outputs. Models with
learned position embeddings (OPT, GPT-2, BERT) fail beyond their number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Positions", "positions_of"]

_MOST_UNUSED = 8
"""Rows that a table may have beyond the configuration's number; OPT leaves its first two free."""


@dataclass(frozen=True)
class Positions:
    """Maximum number of positions of a model.

    Attributes:
        limit: maximum sequence length; ``None`` if unknown.
        in_table: the model has a table of positions, so that it fails beyond the limit.
    """

    limit: int | None = None
    in_table: bool = False


def positions_of(model: Any) -> Positions:
    """Return the position limit of a model, whose weights may be on the meta device.

    >>> from types import SimpleNamespace
    >>> rotary = nn.Linear(2, 2)
    >>> rotary.config = SimpleNamespace(max_position_embeddings=16)
    >>> positions_of(rotary)
    Positions(limit=16, in_table=False)
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return Positions()
    rows = [one for one in _tables(model) if limit - _MOST_UNUSED <= one <= limit + _MOST_UNUSED]
    return Positions(min([limit, *rows]), bool(rows))


def _tables(model: nn.Module) -> Iterator[int]:
    """Yield the number of usable rows of each position table in the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_of_positions(name):
            # With a padding position, positions are counted from the row after it (RoBERTa).
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            yield module.num_embeddings - unused
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim == 2 and _is_of_positions(name):  # GPT-J keeps sines and cosines in a buffer
            yield tensor.shape[0]


def _is_of_positions(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return "pos" in leaf or leaf == "wpe"
