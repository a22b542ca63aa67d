# SPDX-License-Identifier: Apache-2.0
"""The version, as text and as a tuple."""

from __future__ import annotations

from llmcompressor import __version__

__all__ = ["__version__", "__version_tuple__", "version", "version_tuple"]

version = __version__
version_tuple: tuple[int | str, ...] = tuple(
    int(part) if part.isdecimal() else part for part in version.split(".")
)
__version_tuple__ = version_tuple
