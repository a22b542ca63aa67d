# SPDX-License-Identifier: Apache-2.0
"""Support for third-party observers that keep their statistics as attributes.

Such a class derives from ``Observer`` and defines how a tensor updates ``min_vals`` and
``max_vals``, or the other attributes that it lists in ``_stats_attrs``::

    @Observer.register("mine")
    class Mine(Observer):
        def update_statistics_from_observed(self, observed):
            self.min_vals = observed.amin(dim=(0, -1))
            self.max_vals = observed.amax(dim=(0, -1))

``observed`` is ``[observations, *scale, elements]``: one observation for a weight, one for each
token of an activation. On registration the class inherits the other methods of an observer from
here. A class with other statistics may compute scales and zero points in ``get_qparams``.

In earlier releases the method was ``update_statistics``, and before that ``get_min_max``, which
returns the two; classes with either are completed as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.scales import parameter_dtype, stored_scale
from llmcompressor.observers.base import Observer, range_union
from llmcompressor.observers.canonical import CanonicalTensor, Range, to_observations
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, zero_dtype_of


def has_update_method(observer: type) -> bool:
    """Return True if a class has one of the update methods and has not been completed yet."""
    said = any(hasattr(observer, name) for name in _UPDATES)
    return said and not issubclass(observer, StatisticsObserver)


def complete_observer(observer: type) -> type[StatisticsObserver]:
    """Add the missing methods of an observer to ``observer``."""
    own = {key: getattr(observer, key) for key in ("__module__", "__doc__", "__qualname__")}
    return type(observer.__name__, (StatisticsObserver, observer), own)


class StatisticsObserver(Observer):
    """An observer whose statistics are attributes that a subclass accumulates."""

    _scale_shape: tuple[int, ...] = ()
    _is_asked: bool = False
    """The class is being asked for scales, and may ask what every observer would find."""

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        if self._has_own_qparams and needs_global_scale(args):
            raise InputError(
                f"{type(self).__name__} finds scales by itself, and under a global scale, which "
                "tensors share, they have to follow from ranges.",
                "Keep min_vals and max_vals instead of overriding get_qparams.",
            )
        self._begun = dict(vars(self))

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for attributes that the class has not set yet."""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _has_own_qparams(self) -> bool:
        """True if the class computes scales from its statistics by a ``get_qparams`` of its own."""
        return type(self).get_qparams is not Observer.get_qparams and not self._is_asked

    def qparams(
        self, global_scale: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero point, from the class's own ``get_qparams`` if it has one."""
        if not self._has_own_qparams:
            return super().qparams(global_scale, dtype=dtype)
        if self.observations == 0:
            raise self._no_observations_error()
        scale, zero = self._found()
        kept = scale if dtype is None else stored_scale(scale, parameter_dtype(dtype))
        if not is_finite(kept):
            raise NonFiniteError(f"A scale of the {self.base_name} does not fit {kept.dtype}.")
        return kept, zero

    def _found(self) -> tuple[Tensor, Tensor]:
        """Scales and zero points from the class's ``get_qparams``; zeros where it returns none."""
        self._is_asked = True
        try:
            found: Any = self.get_qparams()
        finally:
            self._is_asked = False
        needed = {"scale"} if self.args.symmetric else {"scale", "zero_point"}
        if missing := needed - (found.keys() if isinstance(found, Mapping) else set()):
            raise InputError(
                f"{type(self).__name__}.get_qparams gives {type(found).__name__} without "
                f"{' and '.join(sorted(missing))}.",
                "Return a dictionary with scale and, unless it is symmetric, zero_point.",
            )
        scale = self._shaped(found["scale"], "scale")
        zero = found.get("zero_point")
        if zero is None:
            zero = torch.zeros(scale.shape, dtype=zero_dtype_of(self.args), device=scale.device)
        return scale, self._shaped(zero, "zero_point")

    def _shaped(self, found: Tensor, name: str) -> Tensor:
        """A result of the class in the shape of the scales, after a check of its size."""
        if found.numel() != math.prod(self._scale_shape):
            raise InputError(
                f"{type(self).__name__} gives {name} of the shape {tuple(found.shape)}, and the "
                f"scales of the {self.base_name} have the shape {self._scale_shape}.",
                "Reduce what is observed over its first and its last dimension.",
            )
        return found.reshape(self._scale_shape)

    def _read_options(self, given: Mapping[str, Any]) -> Any:
        """``given`` without validation; the class reads it from ``args.observer_kwargs``."""
        self.args = self.args.model_copy(update={"observer_kwargs": dict(given)})
        return dict(given)

    def observe(self, x: Tensor) -> Self:
        """Observe a tensor, and check all of its values."""
        return super().observe(x)

    def reset(self) -> None:
        """Discard all observations and all attributes that the class set since construction."""
        self.delete_statistics()
        vars(self).update(self._begun)
        super().reset()

    def _update(self, observed: CanonicalTensor) -> None:
        self._scale_shape = observed.scale_shape
        self._apply(to_observations(observed, self.base_name))

    def _apply(self, observed: Tensor) -> None:
        """Give a tensor to the update method that the class has, the newest first."""
        name = next(one for one in _UPDATES if hasattr(type(self), one))
        found = getattr(self, name)(observed)
        if name == "get_min_max":
            self.min_vals, self.max_vals = found

    def _measured(self, observed: CanonicalTensor) -> Range:
        return observed.extremes

    def _joined(self, own: Range, other: Range) -> Range:
        return range_union(Range(*own), Range(*other))

    def _include(self, measured: Range) -> None:
        self._scale_shape = tuple(measured[0].shape)
        self._apply(torch.stack(list(measured), dim=-1).unsqueeze(0))

    def _saved(self) -> dict[str, Any]:
        return {**self.get_statistics(), "shape": list(self._scale_shape)}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._scale_shape = tuple(saved["shape"])
        if hasattr(type(self), "get_min_max"):  # it may keep further attributes
            self._apply(
                torch.stack([saved[name] for name in self._stats_attrs], dim=-1).unsqueeze(0)
            )
        for name in self._stats_attrs:
            setattr(self, name, saved[name])

    def _range(self) -> Range:
        if self._has_own_qparams:
            grid, (scale, zero) = grid_of(self.args), self.qparams()
            ends = ((end - zero.to(scale.dtype)) * scale for end in (grid.qmin, grid.qmax))
            return Range(*ends)
        return Range(
            self._shaped(self.min_vals, "min_vals"), self._shaped(self.max_vals, "max_vals")
        )

    def _merge(self, other: Self, share: float) -> None:
        for name in self._stats_attrs:
            pair = getattr(self, name), getattr(other, name)
            setattr(self, name, _REDUCED[self._reduction_of(name)](*pair, share))

    def _reduction_of(self, name: str) -> str:
        usual = {"min_vals": "MIN", "max_vals": "MAX"}
        operation = self._act_sync_dict.get(name)
        # torch's own names: RedOpType.MIN, or ReduceOp.MIN, which may not be compared
        found = usual.get(name) if operation is None else str(operation).partition(":")[0]
        kind = "" if found is None else found.rpartition(".")[2].strip("<> ")
        if kind not in _REDUCED:
            raise InputError(
                f"{type(self).__name__} does not say how its {name} of several processes become "
                "one.",
                f"Give _act_sync_dict an entry for it: {', '.join(_REDUCED)} of ReduceOp.",
            )
        return kind


_UPDATES = ("update_statistics_from_observed", "update_statistics", "get_min_max")
"""The methods one of which such a class has, the newest first."""

_REDUCED: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "MIN": lambda own, other, _: torch.minimum(own, other),
    "MAX": lambda own, other, _: torch.maximum(own, other),
    "SUM": lambda own, other, _: own + other,
    "AVG": lambda own, other, share: torch.lerp(own.float(), other.float(), share).to(own.dtype),
}
