# SPDX-License-Identifier: Apache-2.0
"""Observers whose state is one range: the extremes of tensors, or a range computed from each.

A concrete one defines the range of one tensor (:meth:`RangeObserver.measure`) and the way it
updates the range of the tensors before (:meth:`RangeObserver.combine`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from torch import Tensor

from llmcompressor.observers.base import Observer, ObserverOptions, range_union
from llmcompressor.observers.canonical import ACTIVATIONS, CanonicalTensor, Range, to_canonical


class RangeObserver(Observer):
    """An observer whose state is a single range.

    The range is kept in float32 or wider: moving averages in 16 bits stop changing.

    Attributes:
        depends_on_order: the range depends on the order of the tensors.
        history: the range of each tensor, where someone asked for it by setting a list.
    """

    depends_on_order: ClassVar[bool] = True
    history: list[Range] | None = None

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        self._state: Range | None = None
        self._dtype = torch.float32

    def measure(self, observed: CanonicalTensor) -> Range:
        """The range of one tensor: by default its minimum and maximum."""
        return observed.extremes

    @abstractmethod
    def combine(self, old: Range, new: Range) -> Range:
        """The updated range after a tensor of range ``new``, given the range ``old`` before."""

    def combine_peers(self, own: Range, other: Range, share: float) -> Range:
        """The merged range of two observers; ``share`` is the other's fraction of observations."""
        del share
        return range_union(own, other)

    @torch.no_grad()
    def observe_each(self, x: Tensor, parts: int) -> Self:
        """The same as repeated :meth:`observe`; the extremes are computed in one pass."""
        own = type(self)
        uses_only_extremes = (
            own.measure is RangeObserver.measure
            and own.observe is RangeObserver.observe
            and own._update is RangeObserver._update
        )
        if not uses_only_extremes or self.base_name not in ACTIVATIONS or x.numel() == 0:
            return super().observe_each(x, parts)
        every = to_canonical(x.detach(), self.base_name, self.args).extremes_of_each(parts)
        self._check_finite(every)
        for minimum, maximum in zip(*every, strict=True):
            self._include(Range(minimum, maximum))
        self.observations += parts
        return self

    def reset(self) -> None:
        """Discard all observations."""
        super().reset()
        self._state = None

    def _measured(self, observed: CanonicalTensor) -> Range:
        return self.measure(observed)

    def _joined(self, own: Range, other: Range) -> Range:
        return range_union(Range(*own), Range(*other))

    def replay(self, history: Iterable[Range]) -> None:
        """Start again with the tensors of these ranges, in their order."""
        self.reset()
        for one in history:
            self._include(one)
            self.observations += 1

    def _include(self, measured: Range) -> None:
        minimum, maximum = measured
        if self.history is not None:
            self.history.append(Range(minimum, maximum))
        self._dtype = minimum.dtype
        kept = torch.promote_types(minimum.dtype, torch.float32)
        new = Range(minimum.to(kept), maximum.to(kept))
        self._state = new if self._state is None else self.combine(self._state, new)

    def _saved(self) -> dict[str, Any]:
        assert self._state is not None
        # an empty tensor stores the dtype in which scales are computed
        minimum, maximum = self._state
        like = torch.empty(0, dtype=self._dtype)
        return {"minimum": minimum, "maximum": maximum, "like": like}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._state = Range(saved["minimum"], saved["maximum"])
        self._dtype = saved["like"].dtype

    def _range(self) -> Range:
        assert self._state is not None
        return Range(*(bound.to(self._dtype) for bound in self._state))

    def _merge(self, other: Self, share: float) -> None:
        assert self._state is not None
        assert other._state is not None
        self._state = self.combine_peers(self._state, other._state, share)


class AverageOptions(ObserverOptions):
    """Options of moving averages; ``averaging_constant`` is the weight of each new range."""

    averaging_constant: float = Field(default=0.01, gt=0, le=1)


class MemorylessMinMaxObserver(RangeObserver):
    """The extremes of the last tensor; suited to weights, which are observed once."""

    def combine(self, old: Range, new: Range) -> Range:
        """The new range."""
        del old
        return new


class StaticMinMaxObserver(RangeObserver):
    """The extremes of all tensors."""

    depends_on_order = False

    @classmethod
    def needs_extremes_only(cls) -> bool:
        """Return True unless a subclass measures something else."""
        is_own = cls.combine is StaticMinMaxObserver.combine
        return is_own and cls.measure is RangeObserver.measure

    def combine(self, old: Range, new: Range) -> Range:
        """The smallest range that contains both."""
        return range_union(old, new)


class MinMaxObserver(RangeObserver):
    """An exponential moving average of extremes: r += averaging_constant * (new - r)."""

    Options = AverageOptions

    def combine(self, old: Range, new: Range) -> Range:
        """A step from the old range towards the new one."""
        return self.combine_peers(old, new, self.options.averaging_constant)

    def combine_peers(self, own: Range, other: Range, share: float) -> Range:
        """The mean, weighted by the number of observations."""
        return average(own, other, share)


def average(a: Range, b: Range, weight: float) -> Range:
    """(1 - weight) a + weight b."""
    return Range(a.minimum.lerp(b.minimum, weight), a.maximum.lerp(b.maximum, weight))
