# SPDX-License-Identifier: Apache-2.0
"""The observer base classes: accumulate statistics of tensors and compute their scales.

A concrete observer defines the statistics of one tensor, how they add up to those of all tensors,
and the range that these give.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypedDict, TypeVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from llmcompressor.errors import InputError, NonFiniteError, did_you_mean
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.scales import (
    global_scale_from_amax,
    parameter_dtype,
    scales_from_range,
)
from llmcompressor.observers.canonical import CanonicalTensor, Range, to_canonical
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.registry import LazyRegistry, resolve
from llmcompressor.schemes.bridge import (
    grid_of,
    needs_global_scale,
    scale_dtype_of,
    scale_format_of,
    zero_dtype_of,
)

__all__ = [
    "OBSERVERS",
    "MinMaxTuple",
    "Observer",
    "ObserverOptions",
    "QParamsDict",
    "ScaleAndZeroPoint",
    "fused_global_scale",
]

OBSERVERS = LazyRegistry(
    "observer",
    {
        "memoryless_minmax": "llmcompressor.observers.min_max:MemorylessMinMaxObserver",
        "static_minmax": "llmcompressor.observers.min_max:StaticMinMaxObserver",
        "minmax": "llmcompressor.observers.min_max:MinMaxObserver",
        "memoryless_mse": "llmcompressor.observers.mse:MemorylessMSEObserver",
        "mse": "llmcompressor.observers.mse:MSEObserver",
        "nvfp4_expanded_mse": "llmcompressor.observers.mse:NVFP4ExpandedMSEObserver",
        "fouroversix": "llmcompressor.observers.mse:NVFP4ExpandedMSEObserver",
        "imatrix_mse": "llmcompressor.observers.imatrix:IMatrixMSEObserver",
        "nvfp4_expanded_imatrix": "llmcompressor.observers.imatrix:NVFP4ExpandedIMatrixObserver",
        "histogram": "llmcompressor.observers.histogram:HistogramObserver",
        "percentile": "llmcompressor.observers.histogram:PercentileObserver",
        "entropy": "llmcompressor.observers.histogram:EntropyObserver",
    },
)

_STATISTICS = "llmcompressor.observers.statistics"

ObserverClass = TypeVar("ObserverClass", bound=type)

MinMaxTuple: TypeAlias = tuple[Tensor, Tensor]
"""Least and greatest value per scale."""


class QParamsDict(TypedDict, total=False):
    """The return value of :meth:`Observer.get_qparams`."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


class ScaleAndZeroPoint(tuple[Tensor, Tensor]):
    """Scale and zero point of all tensors observed so far, the result of calling an observer.

    It keeps a reference to the observer, so that ``observer(x).get_qparams()`` works too.
    """

    observer: Observer

    def get_qparams(self) -> QParamsDict:
        """:meth:`Observer.get_qparams` of the observer."""
        return self.observer.get_qparams()


class ObserverOptions(BaseModel):
    """The ``observer_kwargs`` that an observer accepts; none by default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Observer(ABC):
    """Accumulates statistics of tensors and computes their scale and zero point.

    Args:
        base_name: the kind of tensor: ``"weight"``, ``"input"``, ``"output"``, ``"q"``, ``"k"`` or
            ``"v"``.
        args: how it will be quantized; never changed.
        module: accepted for classes written for earlier releases, and unused.
        observer_kwargs: the observer's options; they override ``args.observer_kwargs``.
    """

    Options: ClassVar[type[ObserverOptions]] = ObserverOptions
    uses_importance: ClassVar[bool] = False
    """Whether errors are weighted by :attr:`importance`, which needs calibration data."""

    _stats_attrs: tuple[str, ...] | list[str] = ("min_vals", "max_vals")
    """Names of what :meth:`get_statistics` gives."""
    _act_sync_dict: Mapping[str, Any] = {}
    """Attribute → how those of several processes become one; by default the wider range."""

    importance: Tensor | None = None
    """Mean square of each input feature [C], or a multiple of it; set by who collects it."""

    def __init__(
        self, base_name: str, args: QuantizationArgs, module: Any = None, **observer_kwargs: Any
    ) -> None:
        del module
        self.base_name = base_name
        self.args = args
        self.options = self._read_options({**(args.observer_kwargs or {}), **observer_kwargs})
        self.observations = 0
        self._collected: Any = None

    @classmethod
    def load_from_registry(
        cls,
        name: str,
        base_name: str | None = None,
        args: QuantizationArgs | None = None,
        *,
        quantization_args: QuantizationArgs | None = None,
        **observer_kwargs: Any,
    ) -> Observer:
        """Create an observer by its registered name.

        ``quantization_args`` is the name of ``args`` in earlier releases. The default of
        ``base_name`` is a weight, unless the strategy is for activations only.

        Raises:
            InputError: there is no such observer, it does not have one of the options, or no
                quantization arguments are given.
        """
        how = quantization_args if args is None else args
        if how is None:
            raise InputError(
                f"Nothing says how what the observer {name!r} sees will be quantized.",
                "Give args, which are QuantizationArgs.",
            )
        if base_name is None:
            base_name = "input" if how.strategy == "token" else "weight"
        observer: Observer = OBSERVERS.load(name)(base_name, how, **observer_kwargs)
        return observer

    @classmethod
    def registered_names(cls) -> list[str]:
        """The names that :meth:`load_from_registry` accepts."""
        return OBSERVERS.names()

    @classmethod
    def register(
        cls, name: str, alias: str | Iterable[str] = ()
    ) -> Callable[[ObserverClass], ObserverClass]:
        """Class decorator: register an observer as ``name``, and as ``alias``.

        A class that keeps statistics of its own (:mod:`llmcompressor.observers.statistics`) is
        completed to an observer.

        Raises:
            InputError: the class lacks a required method.
        """
        names = [name, alias] if isinstance(alias, str) else [name, *alias]

        def add(observer: ObserverClass) -> ObserverClass:
            if resolve(f"{_STATISTICS}:has_update_method")(observer):
                observer = resolve(f"{_STATISTICS}:complete_observer")(observer)
            elif inspect.isabstract(observer):
                raise InputError(
                    f"{observer.__name__} does not say how a tensor changes its statistics.",
                    "Set min_vals and max_vals in a method update_statistics_from_observed(self, "
                    "observed); or derive from MemorylessMinMaxObserver, and override measure.",
                )
            for one in names:
                OBSERVERS.add(one, observer)
            return observer

        return add

    def __call__(self, x: Tensor) -> ScaleAndZeroPoint:
        """Observe ``x``, then return :meth:`qparams`."""
        found = ScaleAndZeroPoint(self.observe(x).qparams())
        found.observer = self
        return found

    if TYPE_CHECKING:
        min_vals: Tensor
        max_vals: Tensor
    else:

        def __getattr__(self, name: str) -> Any:
            """``min_vals`` and ``max_vals``, the bounds of :meth:`range`, once there are any.

            A subclass may set them itself.
            """
            if name in ("min_vals", "max_vals") and vars(self).get("observations"):
                minimum, maximum = self.range()
                return minimum if name == "min_vals" else maximum
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def has_statistics(self) -> bool:
        """True if anything has been observed."""
        return all(hasattr(self, name) for name in self._stats_attrs)

    @classmethod
    def needs_extremes_only(cls) -> bool:
        """Return True if the least and greatest value of each feature give the same range."""
        return False

    @property
    def is_weight_obs(self) -> bool:
        """True if the observed tensor is a weight."""
        return self.base_name == "weight"

    def get_statistics(self) -> dict[str, Tensor]:
        """The accumulated statistics by name: minimum and maximum per scale.

        Raises:
            InputError: nothing has been observed.
        """
        if not self.has_statistics:
            raise self._no_observations_error()
        return {name: getattr(self, name) for name in self._stats_attrs}

    @torch.no_grad()
    def observe(self, x: Tensor) -> Self:
        """Update the statistics with a tensor; an empty one changes nothing.

        Args:
            x: weight [R, C]; activation [..., C] without its padding; or attention states
                [batch, heads, tokens, head_dim].

        Raises:
            NonFiniteError: ``x`` holds NaN or infinity.
        """
        if x.numel() == 0:
            return self
        observed = to_canonical(x.detach(), self.base_name, self.args)
        self._check_finite(observed.extremes)
        self._update(observed)
        self.observations += 1
        return self

    @torch.no_grad()
    def observe_each(self, x: Tensor, parts: int) -> Self:
        """The same as :meth:`observe` of each of ``parts`` tensors of one size, joined in ``x``."""
        for part in x.chunk(parts):
            self.observe(part)
        return self

    @torch.no_grad()
    def collect(self, x: Tensor) -> Self:
        """Buffer the statistics of a tensor until :meth:`commit`.

        All tensors collected until then count as one observation: a training step is one
        observation, whatever its number of batches and processes.
        """
        if x.numel():
            found = self._measured(to_canonical(x.detach(), self.base_name, self.args))
            before = self._collected
            self._collected = found if before is None else self._joined(before, found)
        return self

    def collected(self) -> Any:
        """The statistics buffered since the last :meth:`commit`: a tuple, or ``None``."""
        return self._collected

    @torch.no_grad()
    def commit(self, seen: Iterable[Any] | None = None) -> Self:
        """Update the statistics with the collected tensors, as one observation.

        ``seen`` are the :meth:`collected` statistics of this tensor from all processes, including
        this one, in the same order on all of them.

        Raises:
            NonFiniteError: they hold NaN or infinity; nothing has changed then.
        """
        seen = [self._collected] if seen is None else seen
        self._collected = None
        parts = [one for one in seen if one is not None]
        if parts:
            found = functools.reduce(self._joined, parts)
            self._check_finite(found)
            self._include(found)
            self.observations += 1
        return self

    def state_dict(self) -> dict[str, Any]:
        """The accumulated statistics as tensors, numbers and strings, without uncommitted ones."""
        return {"observations": self.observations, **(self._saved() if self.observations else {})}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the statistics saved by :meth:`state_dict`."""
        self.reset()
        self.observations = int(saved["observations"])
        if self.observations:
            self._load(saved)

    def _check_finite(self, found: Iterable[Tensor]) -> None:
        if not all(map(is_finite, found)):
            raise NonFiniteError(f"NaN or infinity in the {self.base_name} that was observed.")

    @abstractmethod
    def _measured(self, observed: CanonicalTensor) -> Any:
        """The statistics of one tensor: a tuple of tensors."""

    @abstractmethod
    def _joined(self, own: Any, other: Any) -> Any:
        """Combine the statistics of two tensors; the order does not matter."""

    @abstractmethod
    def _include(self, measured: Any) -> None:
        """Accumulate the finite statistics of an observation."""

    def _update(self, observed: CanonicalTensor) -> None:
        """Accumulate a finite, non-empty tensor."""
        self._include(self._measured(observed))

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """The accumulated statistics, for :meth:`state_dict`."""

    @abstractmethod
    def _load(self, saved: Mapping[str, Any]) -> None:
        """Restore the accumulated statistics from the result of :meth:`_saved`."""

    @abstractmethod
    def _range(self) -> Range:
        """The range after at least one observation."""

    @abstractmethod
    def _merge(self, other: Self, share: float) -> None:
        """Merge the statistics of ``other``, which has this share of all observations."""

    def range(self) -> tuple[Tensor, Tensor]:
        """The range that values are clipped to: two tensors of the scale's shape.

        Raises:
            InputError: nothing has been observed.
        """
        if self.observations == 0:
            raise self._no_observations_error()
        return self._range()

    def _no_observations_error(self) -> InputError:
        return InputError(
            f"The observer of the {self.base_name} has not seen any value.",
            "Check that the module is reached by the calibration data.",
        )

    @torch.no_grad()
    def qparams(
        self, global_scale: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the observed tensors, of the scale's shape.

        Zero points are zero on symmetric grids.

        Args:
            global_scale: float32 [1], if several tensors share one; by default this observer's own,
                if the strategy has one.
            dtype: dtype of the module, in which the scale is stored (float16 for unusual dtypes);
                by default the scale keeps the dtype in which it was computed.

        Raises:
            InputError: nothing has been observed.
            NonFiniteError: the scale does not fit ``dtype``.
        """
        minimum, maximum = self.range()
        scale, zero = scales_from_range(
            minimum,
            maximum,
            grid_of(self.args),
            scale_format=scale_format_of(self.args),
            global_scale=self.global_scale() if global_scale is None else global_scale,
            scale_dtype=scale_dtype_of(self.args),
            zero_dtype=zero_dtype_of(self.args),
            stored_in=None if dtype is None else parameter_dtype(dtype),
        )
        if not is_finite(scale):
            raise NonFiniteError(f"A scale of the {self.base_name} does not fit {scale.dtype}.")
        return scale, zero

    def get_qparams(self) -> QParamsDict:
        """:meth:`qparams` and :meth:`global_scale`, by name."""
        scale, zero_point = self.qparams()
        return {"scale": scale, "zero_point": zero_point, "global_scale": self.global_scale()}

    def global_scale(self) -> Tensor | None:
        """The scale of the whole tensor, float32 [1]; ``None`` if the strategy has none."""
        return fused_global_scale([self])

    def merge(self, other: Self) -> Self:
        """Merge the statistics of ``other``, an observer of the same class."""
        if type(other) is not type(self) or other.args != self.args:
            raise InputError(
                f"{type(self).__name__} cannot take over what {type(other).__name__} observed.",
                "Merge observers of the same class and arguments.",
            )
        if other.observations:
            self.observations += other.observations
            if self.observations > other.observations:
                self._merge(other, other.observations / self.observations)
            else:
                self._load(other._saved())
        return self

    def merge_over(self, ranks: Ranks) -> Self:
        """Merge what the observers of all ranks have observed, in the order of the ranks.

        All end with the same statistics. A rank that has observed nothing adds nothing.
        """
        if ranks.count == 1:
            return self
        saved = io.BytesIO()
        torch.save(self.state_dict(), saved)
        own, what = bytearray(saved.getvalue()), f"statistics of the {self.base_name}"
        self.reset()
        for rank in range(ranks.count):
            sent = {"": torch.frombuffer(own, dtype=torch.uint8)} if rank == ranks.rank else {}
            got = ranks.broadcast_from(rank, sent, what=what)[""]
            other = copy.copy(self)
            other.load_state_dict(torch.load(io.BytesIO(bytes(got.numpy())), weights_only=True))
            self.merge(other)
        return self

    def reset(self) -> None:
        """Discard all observations."""
        self.observations = 0
        self._collected = None

    def delete_statistics(self, check_fused: bool = True) -> None:
        """Delete the statistics that a class keeps as attributes."""
        del check_fused
        for name in self._stats_attrs:
            self.__dict__.pop(name, None)

    def _read_options(self, given: Mapping[str, Any]) -> Any:
        """``given``, validated against the observer's options."""
        for key in given:
            if key not in self.Options.model_fields:
                raise InputError(
                    f"{type(self).__name__} has no option {key!r}.",
                    did_you_mean(key, self.Options.model_fields) or "It has none.",
                )
        try:
            return self.Options(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise InputError(
                f"{type(self).__name__}: {name} = {first['input']!r} cannot be used.",
                f"{first['msg']}.",
            ) from error


def range_union(a: Range, b: Range) -> Range:
    """The smallest range that contains both."""
    return Range(torch.minimum(a.minimum, b.minimum), torch.maximum(a.maximum, b.maximum))


@torch.no_grad()
def fused_global_scale(observers: Iterable[Observer]) -> Tensor | None:
    """The shared global scale of tensors that are fused in serving: q, k and v; gate and up.

    Returns:
        float32 [1]; ``None`` if their strategy has none.
    """
    members = list(observers)
    if not all(needs_global_scale(observer.args) for observer in members):
        return None
    ranges = [observer.range() for observer in members]
    return global_scale_from_amax(
        torch.stack([torch.maximum(-low.min(), high.max()) for low, high in ranges])
    )
