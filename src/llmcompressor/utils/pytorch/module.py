# SPDX-License-Identifier: Apache-2.0
"""What a model says of its parts."""

from __future__ import annotations

from torch.nn import Module

__all__ = ["get_no_split_params"]

_ALL = "__ALL__"


def get_no_split_params(model: Module) -> str | list[str]:
    """The classes of modules that are to stay on one device: decoder layers.

    Returns:
        Their names; ``"__ALL__"`` for a model that names none.
    """
    return sorted(getattr(model, "_no_split_modules", None) or ()) or _ALL
