# SPDX-License-Identifier: Apache-2.0
"""Aliases shared by several packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch"]

Batch: TypeAlias = "Mapping[str, Tensor | Any]"
"""One batch of model inputs: argument name → value; token tensors are ``[batch, tokens]``."""
