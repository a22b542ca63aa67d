# SPDX-License-Identifier: Apache-2.0
"""Histogram observers: ranges from the distribution of all observed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from torch import Tensor

from llmcompressor.numerics.histogram import (
    Histogram,
    entropy_range,
    mse_range,
    percentile_range,
)
from llmcompressor.observers.base import Observer, ObserverOptions
from llmcompressor.observers.canonical import CanonicalTensor, Range
from llmcompressor.schemes.bridge import grid_of

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
        self._like = torch.empty(0, 1)

    def reset(self) -> None:
        """Discard all observations."""
        super().reset()
        self._histogram = None

    def _measured(self, observed: CanonicalTensor) -> tuple[Tensor, ...]:
        self._check_finite(observed.extremes)  # non-finite values belong to no bin
        bins = self.options.bins
        is_asked_for = "bins" in self.options.model_fields_set
        if self.base_name == "weight" and not is_asked_for:  # it may have 10^5 scales
            bins = min(bins, max(_FEWEST_BINS, 1 << (observed.values.shape[1] - 1).bit_length()))
        seen = Histogram.of(observed.values, bins)
        if not observed.partition.divides(*observed.matrix.shape):
            seen = seen.without_zeros(observed.padding)
        # an empty tensor stores the shape and the dtype of the scales
        return *_parts(seen), observed.matrix.new_empty((0, *observed.scale_shape))

    def _joined(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *_parts(Histogram(*own[:4]).merge(Histogram(*other[:4]))), own[4]

    def _include(self, measured: tuple[Tensor, ...]) -> None:
        *parts, self._like = measured
        seen = Histogram(*parts)
        self._histogram = seen if self._histogram is None else self._histogram.merge(seen)

    def _saved(self) -> dict[str, Any]:
        assert self._histogram is not None
        return {"histogram": [*_parts(self._histogram)], "like": self._like.to("cpu")}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._histogram, self._like = Histogram(*saved["histogram"]), saved["like"]

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
        shape = self._like.shape[1:]
        return Range(*(one.to(self._like.dtype).reshape(shape) for one in (low_S, high_S)))

    def _merge(self, other: Self, share: float) -> None:
        assert self._histogram is not None
        assert other._histogram is not None
        self._histogram = self._histogram.merge(other._histogram)


def _parts(histogram: Histogram) -> tuple[Tensor, ...]:
    return histogram.counts, histogram.exponent, histogram.low, histogram.high


class PercentileObserver(HistogramObserver):
    """The range that contains 99.99 percent of all observed values, or another percentage."""

    Options = PercentileOptions


class EntropyObserver(HistogramObserver):
    """The range with the least divergence between original and rounded values."""

    Options = EntropyOptions
