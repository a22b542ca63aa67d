# SPDX-License-Identifier: Apache-2.0
"""Rounding and packing, tried on a small matrix: what a scheme takes per weight."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from llmcompressor.checkpoint.compress import QuantizedModule, compress, quantized_module
from llmcompressor.errors import CompressorError
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.presets import format_of
from llmcompressor.threads import in_turn

__all__ = ["MemoryCounter", "Peak", "Trial", "counted_memory", "try_rounding"]

_ROWS = (512, 2048)
"""Of the two matrices: what works on parts of a matrix takes less per weight of a large one."""
_COLUMNS = 2048


@dataclass(frozen=True)
class Peak:
    """Bytes of intermediate tensors, by the number of weights.

    Attributes:
        fixed: of any large matrix.
        per_weight: in addition.
        small: per weight, where that is less.
    """

    fixed: float
    per_weight: float
    small: float

    def of(self, weights: int) -> int:
        """For a matrix of so many weights."""
        return int(min(self.fixed + self.per_weight * weights, self.small * weights))


@dataclass(frozen=True)
class Trial:
    """What a scheme takes.

    Attributes:
        seconds: per weight, to find scales, round and pack.
        rounding: most bytes of intermediate tensors while a weight is rounded.
        packing: the same while it is packed, the packed form included.
    """

    seconds: float
    rounding: Peak
    packing: Peak


_NOTHING = Trial(0.0, Peak(0.0, 0.0, 0.0), Peak(0.0, 0.0, 0.0))


def try_rounding(
    scheme: Any, dtype: torch.dtype, device: torch.device, *, is_written: bool = True
) -> Trial:
    """Find scales for a small random matrix, round it and pack it.

    Args:
        scheme: a ``QuantizationScheme``.
        dtype: of the weights.
        device: where the model would compute.
        is_written: weights are packed as they are, and not rounded in memory before.
    """
    if scheme.weights is None:
        return _NOTHING
    try:
        small, large = (_once(rows, scheme, dtype, device, is_written) for rows in _ROWS)
    except CompressorError:
        return _NOTHING
    return Trial(
        large.seconds / large.weights,
        _peak(small.weights, small.rounding, large.weights, large.rounding),
        _peak(small.weights, small.packing, large.weights, large.packing),
    )


def _peak(few: int, small: int, many: int, large: int) -> Peak:
    """The line through two measurements."""
    slope = max(large - small, 0) / (many - few)
    return Peak(max(large - slope * many, 0.0), slope, small / few)


class _Measured(NamedTuple):
    weights: int
    seconds: float
    rounding: int
    packing: int


def _fitting(args: Any) -> int:
    """Columns that the scheme's groups divide."""
    group = args.group_size or 1
    return max(_COLUMNS // group, 1) * group if group > 0 else _COLUMNS


def _once(
    rows: int, scheme: Any, dtype: torch.dtype, device: torch.device, is_written: bool
) -> _Measured:
    columns = _fitting(scheme.weights)
    linear = Linear(columns, rows, bias=False, dtype=dtype, device="meta")
    if is_written and format_of(scheme) != "dense":
        vars(linear)["quantization_status"] = QuantizationStatus.FROZEN
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(rows, columns, generator=generator).mul_(0.02).to(device, dtype)
    entry = quantized_module("trial", linear, scheme)
    assert entry is not None
    with counted_memory() as rounding:
        own = _rounded(weight_RC, scheme, entry)
    with counted_memory() as packing:
        compress(entry, own)
    start = time.perf_counter()  # apart: counting takes time, and it has one thread
    compress(entry, _rounded(weight_RC, scheme, entry))
    seconds = time.perf_counter() - start
    return _Measured(weight_RC.numel(), seconds, rounding.peak, packing.peak)


def _rounded(weight_RC: Tensor, scheme: Any, entry: QuantizedModule) -> dict[str, Tensor]:
    """A weight and its parameters, as they are handed over to be packed."""
    parameters = observe_weight(weight_RC, scheme.weights)
    rounded_RC = weight_RC if entry.is_raw else parameters.round(weight_RC)
    own = {"weight": rounded_RC, "weight_scale": parameters.scale}
    if not scheme.weights.symmetric:
        own["weight_zero_point"] = parameters.zero_point
    if parameters.global_scale is not None:
        own["weight_global_scale"] = parameters.global_scale
    for base in ("input", "output"):
        own |= {f"{base}_scale": torch.ones(1), f"{base}_global_scale": torch.ones(1)}
    return own


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes of the tensors that come and go.

    Attributes:
        now: bytes of those that were made and are still there.
        peak: the most that there were at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_iter((args, kwargs)):
            if isinstance(one, Tensor):
                self._meet(one.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                self._meet(one.untyped_storage(), one.untyped_storage().nbytes())
        return result

    def _meet(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage counts when it is first seen; what was there before the body counts nothing.

        Also that is forgotten when it goes: its address serves others then.
        """
        if storage.device.type == "meta" or not storage.nbytes():
            return  # where compressed-tensors is asked for shapes alone
        key = storage.data_ptr()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@contextmanager
def counted_memory() -> Iterator[MemoryCounter]:
    """Count the bytes of all tensors that are made in the body, on any device.

    Pieces come one after the other: what other threads make would not be seen, and would be
    another number each time.
    """
    counter = MemoryCounter()
    with in_turn(), counter:
        yield counter
