# SPDX-License-Identifier: Apache-2.0
"""How many tokens a model takes: by its configuration, and by its table of positions.

Rotary models run beyond what their configuration says, and their outputs get worse. A model with
a row for each position (OPT, GPT-2, BERT) has nothing to look up there, and fails.
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
    """Tokens that a model takes.

    Attributes:
        limit: at most; ``None`` if that is not known.
        in_table: positions are looked up, so that there is nothing beyond the limit.
    """

    limit: int | None = None
    in_table: bool = False


def positions_of(model: Any) -> Positions:
    """What is known of a model's positions; its weights may be on ``meta``.

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
    """Positions that each table in the model has a row for."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_of_positions(name):
            # Where there is a padding position, counting starts behind it (RoBERTa).
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            yield module.num_embeddings - unused
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim == 2 and _is_of_positions(name):  # GPT-J keeps sines and cosines in one
            yield tensor.shape[0]


def _is_of_positions(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return "pos" in leaf or leaf == "wpe"
