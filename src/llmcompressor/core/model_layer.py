# SPDX-License-Identifier: Apache-2.0
"""A parameter, and the module that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ModelParameterizedLayer"]


@dataclass
class ModelParameterizedLayer:
    """A parameter with its module, each by name.

    Attributes:
        layer_name: of the module.
        layer: the module.
        param_name: of the parameter, within the model.
        param: the parameter.
    """

    layer_name: str
    layer: Any
    param_name: str
    param: Any
