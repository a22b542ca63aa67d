# SPDX-License-Identifier: Apache-2.0
"""Lists in words."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed"]


def listed(names: Iterable[str], most: int = 6, separator: str = ", ") -> str:
    """Some names for a message: all of a few, the first and the number of many.

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
