# SPDX-License-Identifier: Apache-2.0
"""Importance-weighted MSE observers: ranges that minimize the error weighted by the inputs.

The error of weight column c is multiplied by input feature c, so its weight is the mean of x_c^2.
An input that was zero in every token counts as in :mod:`llmcompressor.numerics.hessian`: with no
weight at all, a whole group of such columns would be clipped to nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.logger import logger
from llmcompressor.numerics.hessian import fill_dead_columns
from llmcompressor.observers.base import ObserverOptions
from llmcompressor.observers.canonical import CanonicalTensor
from llmcompressor.observers.mse import (
    ExpandedSearchOptions,
    MemorylessMSEObserver,
    SearchOptions,
)


class IMatrixOptions(SearchOptions):
    """Options of the weighted search.

    Attributes:
        strict: raise an error for missing or unusable importance; otherwise it is logged and all
            columns have equal weight.
    """

    maxshrink: float = Field(default=0.95, ge=0, le=1)
    grid: int = Field(default=20, gt=0)
    norm: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    strict: bool = False


class ExpandedIMatrixOptions(ExpandedSearchOptions):
    """Options of the weighted search that starts beyond the extremes."""

    strict: bool = False


class IMatrixMSEObserver(MemorylessMSEObserver):
    """The shrunk range of a weight with the least error, weighted by :attr:`importance`."""

    Options: ClassVar[type[ObserverOptions]] = IMatrixOptions
    uses_importance = True
    inclusive = True
    _has_warned = False

    def error_weights(self, observed: CanonicalTensor) -> Tensor | None:
        """The importance of each element of the cells, in their layout."""
        unusable = self._unusable(observed.matrix.shape[1])
        if unusable is not None:
            if self.options.strict:
                raise InputError(unusable, "Calibrate with data, or set strict to false.")
            if not self._has_warned:  # it observes many batches
                logger.warning("{} All columns count the same.", unusable)
            self._has_warned = True
            return None
        assert self.importance is not None
        importance_C = self.importance.to(device=observed.matrix.device, dtype=torch.float32)
        importance_C = fill_dead_columns(importance_C / importance_C.mean())
        R, C = observed.matrix.shape
        height = min(observed.partition.rows or R, R)
        return observed.partition.cells(importance_C.expand(height, C))[0]

    def _unusable(self, columns: int) -> str | None:
        """Why the importance cannot be used, or ``None`` if it can."""
        if self.base_name != "weight":
            return f"Importance weighs weights, but the {self.base_name} is observed."
        if self.importance is None:
            return "The importance of the weight's columns is not known."
        if self.importance.shape != (columns,):
            return (
                f"The importance has shape {tuple(self.importance.shape)}, "
                f"but the weight has {columns} columns."
            )
        if not bool(torch.isfinite(self.importance).all() & (self.importance >= 0).all()):
            return "The importance of the weight's columns holds NaN, infinity or negative values."
        if not bool(self.importance.any()):
            return "The importance of all of the weight's columns is zero."
        return None


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """The weighted search over ranges from 1.8 down to 0.8 times the extremes."""

    Options = ExpandedIMatrixOptions
