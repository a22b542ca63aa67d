# SPDX-License-Identifier: Apache-2.0
"""Histogram observers: ranges from the distribution of all observed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from torch import Tensor

from llmcompressor.errors import NonFiniteError
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.histogram import (
    Histogram,
    entropy_range,
    mse_range,
    percentile_range,
)
from llmcompressor.observers.base import Observer, ObserverOptions
from llmcompressor.observers.canonical import CanonicalTensor, Range
from llmcompressor.schemes.bridge import grid_of

__all__ = ["EntropyObserver", "HistogramObserver", "PercentileObserver"]

Method = Literal["percentile", "mse", "entropy"]


_FEWEST_BINS = 128


class HistogramOptions(ObserverOptions):
    """Options of the histogram.

    Attributes:
        method: the criterion for the range: a percentile of the values, the mean square error, or
            the divergence of the rounded values' distribution.
        percentile: the percentage of values within the range, for that method.
        bins: bins on each side of zero. By default a weight, which is observed once, has at most
            as many bins as values share a scale, rounded up to a power of two, but at least 128.
    """

    method: Method = "mse"
    percentile: float = Field(default=99.99, gt=0, le=100)
    bins: int = Field(default=2048, ge=_FEWEST_BINS)


class PercentileOptions(HistogramOptions):
    """Options of the histogram, with the percentile as the default method."""

    method: Method = "percentile"


class EntropyOptions(HistogramOptions):
    """Options of the histogram, with the divergence as the default method."""

    method: Method = "entropy"


class HistogramObserver(Observer):
    """The best range for the distribution of all observed values.

    The histogram is exact and independent of the order of observations; merging those of two halves
    of the data gives that of the whole.
    """

    Options: ClassVar[type[ObserverOptions]] = HistogramOptions

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._histogram: Histogram | None = None
        self._scale_shape: tuple[int, ...] = (1,)
        self._dtype = torch.float32

    def reset(self) -> None:
        """Discard all observations."""
        super().reset()
        self._histogram = None

    def _update(self, observed: CanonicalTensor) -> None:
        self._include(self._counted(observed))
        self._scale_shape, self._dtype = observed.scale_shape, observed.matrix.dtype

    def _counted(self, observed: CanonicalTensor) -> Histogram:
        bins = self.options.bins
        is_asked_for = "bins" in self.options.model_fields_set
        if self.base_name == "weight" and not is_asked_for:  # it may have 10^5 scales
            bins = min(bins, max(_FEWEST_BINS, 1 << (observed.values.shape[1] - 1).bit_length()))
        seen = Histogram.of(observed.values, bins)
        if not observed.partition.divides(*observed.matrix.shape):
            seen = seen.without_zeros(observed.padding)
        return seen

    def _include(self, seen: Histogram) -> None:
        self._histogram = seen if self._histogram is None else self._histogram.merge(seen)

    def _measured(self, observed: CanonicalTensor) -> tuple[Tensor, ...]:
        if not all(map(is_finite, observed.extremes)):  # non-finite values belong to no bin
            raise NonFiniteError(f"NaN or infinity in the {self.base_name} that was observed.")
        # an empty tensor stores the shape and the dtype of the scales
        like = observed.matrix.new_empty((0, *observed.scale_shape))
        return *_parts(self._counted(observed)), like

    def _joined(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *_parts(Histogram(*own[:4]).merge(Histogram(*other[:4]))), own[4]

    def _take(self, measured: tuple[Tensor, ...]) -> None:
        self._include(Histogram(*measured[:4]))
        self._scale_shape, self._dtype = tuple(measured[4].shape[1:]), measured[4].dtype

    def _saved(self) -> dict[str, Any]:
        assert self._histogram is not None
        like = torch.empty((0, *self._scale_shape), dtype=self._dtype)
        return {"histogram": [*_parts(self._histogram)], "like": like}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._histogram = Histogram(*saved["histogram"])
        self._scale_shape, self._dtype = tuple(saved["like"].shape[1:]), saved["like"].dtype

    def _range(self) -> Range:
        assert self._histogram is not None
        options, grid = self.options, grid_of(self.args)
        if options.method == "percentile":
            low_S, high_S = percentile_range(
                self._histogram, options.percentile, symmetric=grid.symmetric
            )
        else:
            find = mse_range if options.method == "mse" else entropy_range
            low_S, high_S = find(self._histogram, grid)
        return Range(self._shaped(low_S), self._shaped(high_S))

    def _shaped(self, bound_S: Tensor) -> Tensor:
        return bound_S.to(self._dtype).reshape(self._scale_shape)

    def _merge(self, other: Self) -> None:
        assert self._histogram is not None
        assert other._histogram is not None
        self._histogram = self._histogram.merge(other._histogram)

    def _adopt(self, other: Self) -> None:
        self._histogram = other._histogram
        self._scale_shape, self._dtype = other._scale_shape, other._dtype


def _parts(histogram: Histogram) -> tuple[Tensor, ...]:
    return histogram.counts, histogram.exponent, histogram.low, histogram.high


class PercentileObserver(HistogramObserver):
    """The range that contains 99.99 percent of all observed values, or another percentage."""

    Options = PercentileOptions


class EntropyObserver(HistogramObserver):
    """The range with the least divergence between original and rounded values."""

    Options = EntropyOptions
