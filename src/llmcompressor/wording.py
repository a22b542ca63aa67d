# SPDX-License-Identifier: Apache-2.0
"""Formatting of lists in messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed"]


def listed(names: Iterable[str], most: int = 6, separator: str = ", ") -> str:
    """Join names for a message; of a long list the first ones and the number of the rest.

    >>> listed("abcdefgh")
    'a, b, c, d, e, f and 2 more'
    >>> listed(["a, b", "c", "d"], most=2, separator="; ")
    'a, b; c; and 1 more'
    """
    every = list(names)
    shown, rest = separator.join(every[:most]), len(every) - most
    if rest <= 0:
        return shown
    return f"{shown}{separator if separator != ', ' else ' '}and {rest} more"
