# SPDX-License-Identifier: Apache-2.0
"""Structure of a model for device placement."""

from __future__ import annotations

from torch.nn import Module

__all__ = ["get_no_split_params"]

_ALL = "__ALL__"


def get_no_split_params(model: Module) -> str | list[str]:
    """Return the class names of modules that must stay on one device: decoder layers.

    Returns:
        The names; ``"__ALL__"`` for a model that declares none.
    """
    return sorted(getattr(model, "_no_split_modules", None) or ()) or _ALL
