# SPDX-License-Identifier: Apache-2.0
"""Formatting of sizes."""

from __future__ import annotations

__all__ = ["in_bytes"]


def in_bytes(size: int) -> str:
    """Format a number of bytes with a suitable unit.

    >>> in_bytes(7_348_736), in_bytes(1_319_560_307_784), in_bytes(0)
    ('7.35 MB', '1.32 TB', '0 B')
    """
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
