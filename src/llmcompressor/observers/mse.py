# SPDX-License-Identifier: Apache-2.0
"""MSE observers: ranges that minimize the rounding error."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from llmcompressor.numerics.range_search import ShrinkSearch, search_range
from llmcompressor.observers.base import ObserverOptions
from llmcompressor.observers.canonical import CanonicalTensor, Range
from llmcompressor.observers.min_max import AverageOptions, MemorylessMinMaxObserver, average
from llmcompressor.schemes.bridge import grid_of, scale_dtype_of, scale_format_of

_OF_SEARCH = {"maxshrink", "patience", "norm", "expand"}
_EXPANDED = 1.8
_LEAST = 0.8


class SearchOptions(ObserverOptions):
    """Options of the search over shrunk ranges.

    Attributes:
        maxshrink: largest fraction by which the range is shrunk.
        patience: stop after this many steps without improvement; 0 for never.
        grid: number of steps from the full range to zero.
        norm: exponent of the error.
        expand: factor on the extremes at the start, at least 1: a smaller one would clip values.
    """

    maxshrink: float = Field(default=0.2, ge=0, le=1)
    patience: int = Field(default=5, ge=0)
    grid: int = Field(default=100, gt=0)
    norm: float = Field(default=2.4, gt=0, allow_inf_nan=False)
    expand: float = Field(default=1.0, ge=1, allow_inf_nan=False)


class AveragedSearchOptions(SearchOptions, AverageOptions):
    """Options of a search whose results are averaged over observations."""


class ExpandedSearchOptions(SearchOptions):
    """Options of a search that starts beyond the extremes.

    Attributes:
        scale_selection: the criterion for a scale, always the error; its exponent is ``norm``.
    """

    maxshrink: float = Field(default=1 - _LEAST / _EXPANDED, ge=0, le=1)
    patience: int = Field(default=1000, ge=0)
    grid: int = Field(default=200, gt=0)
    expand: float = Field(default=_EXPANDED, ge=1, allow_inf_nan=False)
    scale_selection: Literal["mse"] = "mse"


class MemorylessMSEObserver(MemorylessMinMaxObserver):
    """The shrunk range of the last tensor with the least error."""

    Options: ClassVar[type[ObserverOptions]] = SearchOptions
    inclusive = False
    """Whether the most shrunk range is tried too."""

    def measure(self, observed: CanonicalTensor) -> Range:
        """The shrunk range of each cell with the least error."""
        options = self.options.model_dump(include=_OF_SEARCH)
        search = ShrinkSearch(**options, resolution=self.options.grid, inclusive=self.inclusive)
        minimum, maximum = search_range(
            observed.values,
            grid_of(self.args),
            search,
            importance_PN=self.error_weights(observed),
            scale_format=scale_format_of(self.args),
            scale_dtype=scale_dtype_of(self.args),
        )
        return Range(minimum.reshape(observed.scale_shape), maximum.reshape(observed.scale_shape))

    def error_weights(self, observed: CanonicalTensor) -> Tensor | None:
        """Weights of the errors, see :func:`search_range`; ``None`` if all are equal."""
        del observed
        return None


class MSEObserver(MemorylessMSEObserver):
    """An exponential moving average of the ranges with the least error."""

    Options = AveragedSearchOptions

    def combine(self, old: Range, new: Range) -> Range:
        """A step from the old range towards the new one."""
        return self.combine_peers(old, new, self.options.averaging_constant)

    def combine_peers(self, own: Range, other: Range, share: float) -> Range:
        """The mean, weighted by the number of observations."""
        return average(own, other, share)


MovingAverageMSEObserver = MSEObserver
"""Another name of it."""


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """A search over ranges from 1.8 down to 0.8 times the extremes.

    On the unevenly spaced 4-bit floats a larger scale can be better: a group that is scaled to end
    at 4 rather than 6 has a value at 3/4 of its maximum (Cook et al., "Four over six",
    arXiv:2512.02010).
    """

    Options = ExpandedSearchOptions
