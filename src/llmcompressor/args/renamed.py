# SPDX-License-Identifier: Apache-2.0
"""Arguments that transformers has renamed within the supported releases."""

from __future__ import annotations

from collections.abc import Container, Mapping

__all__ = ["RENAMED", "name_among"]

RENAMED: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Old name → new name. A release that has the new one may know the old one too, and warns of it."""


def name_among(known: Container[str], name: str) -> str:
    """Return the name of an argument that is among ``known``, whichever release is installed.

    Args:
        known: the names of a class's fields or of a function's parameters.
        name: any of the argument's names.

    >>> name_among({"gradient_checkpointing", "seed"}, "activation_checkpointing")
    'gradient_checkpointing'
    >>> name_among({"gradient_checkpointing", "activation_checkpointing"}, "gradient_checkpointing")
    'activation_checkpointing'
    >>> name_among({"seed"}, "seed")
    'seed'
    """
    new = RENAMED.get(name, name)
    if new in known:
        return new
    return next((old for old, other in RENAMED.items() if other == new and old in known), name)
