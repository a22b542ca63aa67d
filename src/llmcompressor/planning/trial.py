# SPDX-License-Identifier: Apache-2.0
"""Benchmark of rounding and packing on small matrices: time and memory per weight of a scheme."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from llmcompressor.checkpoint.packing import QuantizedModule, compress, quantized_module
from llmcompressor.errors import CompressorError
from llmcompressor.numerics.histogram import try_few_ranges
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.runtime.threads import run_serially
from llmcompressor.schemes.presets import format_of

__all__ = ["MemoryCounter", "PeakBytes", "SchemeCost", "count_memory", "measure_scheme"]

_ROWS = (8, 32, 128, 512, 2048)
"""Of the matrices: what works on parts of a matrix takes less per weight of a large one."""
_COLUMNS = 2048
_ENOUGH_SECONDS = 0.2
"""A matrix that takes so long to round is large enough to time; the next takes four times that."""
_MOST_SECONDS, _MOST_BYTES = 1.0, 2**29
"""Where counting the memory of a matrix takes so long, or so much, no larger one is made.

An observer that keeps something for every group may take a thousand times what another takes.
"""


@dataclass(frozen=True)
class PeakBytes:
    """Peak bytes of intermediate tensors as a function of the number of weights.

    Attributes:
        fixed: bytes for any large matrix.
        per_weight: additional bytes per weight.
        small: bytes per weight of small matrices, where that is less.
    """

    fixed: float
    per_weight: float
    small: float

    def of(self, weights: int) -> int:
        """Return the bytes for a matrix with this number of weights."""
        return int(min(self.fixed + self.per_weight * weights, self.small * weights))


@dataclass(frozen=True)
class SchemeCost:
    """Measured time and memory of a scheme.

    Attributes:
        seconds: per weight, to find scales, round and pack.
        rounding: peak bytes of intermediate tensors while a weight is rounded.
        packing: the same while it is packed, including the packed form.
    """

    seconds: float
    rounding: PeakBytes
    packing: PeakBytes


_NOTHING = SchemeCost(0.0, PeakBytes(0.0, 0.0, 0.0), PeakBytes(0.0, 0.0, 0.0))


def measure_scheme(
    scheme: Any, dtype: torch.dtype, device: torch.device, *, is_written: bool = True
) -> SchemeCost:
    """Measure a scheme: find scales for small random matrices, round and pack them.

    Args:
        scheme: a ``QuantizationScheme``.
        dtype: of the weights.
        device: the device to compute on.
        is_written: weights are quantized while they are packed, not in memory before.
    """
    if scheme.weights is None:
        return _NOTHING
    # Numbers of rows, at least two, as multiples of the scheme's block size.
    block = scheme.weights.block_structure[0] if scheme.weights.block_structure else 1
    sizes = sorted({-(-rows // block) * block for rows in _ROWS})
    if len(sizes) == 1:
        sizes.append(2 * sizes[0])
    made = partial(_TrialMatrix, scheme=scheme, dtype=dtype, device=device, is_written=is_written)
    try:
        small, large = _measured([made(rows) for rows in sizes])
        seconds = _timed([made(rows) for rows in sizes])
    except CompressorError:
        return _NOTHING
    return SchemeCost(
        seconds,
        _peak(small.weights, small.rounding, large.weights, large.rounding),
        _peak(small.weights, small.packing, large.weights, large.packing),
    )


def _peak(few: int, small: int, many: int, large: int) -> PeakBytes:
    """Fit a line through two measurements."""
    slope = max(large - small, 0) / (many - few)
    return PeakBytes(max(large - slope * many, 0.0), slope, small / few)


def _column_count(args: Any) -> int:
    """Number of columns, divisible by the scheme's group size."""
    group = args.group_size or 1
    return max(_COLUMNS // group, 1) * group if group > 0 else _COLUMNS


class _Measured(NamedTuple):
    weights: int
    rounding: int
    packing: int


@dataclass(frozen=True)
class _TrialMatrix:
    """A random matrix to be quantized by a scheme."""

    rows: int
    scheme: Any
    dtype: torch.dtype
    device: torch.device
    is_written: bool

    @property
    def weights(self) -> int:
        return self.rows * _column_count(self.scheme.weights)

    def made(self) -> tuple[Tensor, QuantizedModule]:
        columns = _column_count(self.scheme.weights)
        linear = Linear(columns, self.rows, bias=False, dtype=self.dtype, device="meta")
        if self.is_written and format_of(self.scheme) != "dense":
            vars(linear)["quantization_status"] = QuantizationStatus.FROZEN
        generator = torch.Generator().manual_seed(0)
        weight_RC = torch.randn(self.rows, columns, generator=generator).mul_(0.02)
        entry = quantized_module("trial", linear, self.scheme)
        assert entry is not None
        return weight_RC.to(self.device, self.dtype), entry


def _measured(matrices: Sequence[_TrialMatrix]) -> tuple[_Measured, _Measured]:
    """Return the memory of the two largest matrices that are measured quickly."""
    found: list[_Measured] = []
    for matrix in matrices:
        weight_RC, entry = matrix.made()
        start = time.thread_time()  # of this thread: the machine may be busy
        with try_few_ranges():
            with count_memory() as rounding:
                own = _rounded(weight_RC, matrix.scheme, entry)
            with count_memory() as packing:
                compress(entry, own)
        found.append(_Measured(matrix.weights, rounding.peak, packing.peak))
        is_long = time.thread_time() - start > _MOST_SECONDS
        if len(found) > 1 and (is_long or max(rounding.peak, packing.peak) > _MOST_BYTES):
            break
    return found[-2], found[-1]


def _timed(matrices: Sequence[_TrialMatrix]) -> float:
    """Return the seconds per weight, without the counting of memory, which takes time."""
    seconds = 0.0
    for matrix in matrices:
        weight_RC, entry = matrix.made()
        start = time.perf_counter()
        compress(entry, _rounded(weight_RC, matrix.scheme, entry))
        took = time.perf_counter() - start
        seconds = took / matrix.weights
        if took > _ENOUGH_SECONDS:
            break
    return seconds


def _rounded(weight_RC: Tensor, scheme: Any, entry: QuantizedModule) -> dict[str, Tensor]:
    """Return a rounded weight with its quantization parameters, as input for packing."""
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
    """Counts the bytes of tensors that are created and freed.

    Attributes:
        now: bytes of created tensors that still exist.
        peak: maximum of ``now``.
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
        """Count a storage when it is first seen; one from before the body counts as 0.

        Every storage is forgotten when it is freed, as its address is reused.
        """
        if storage.device.type == "meta" or not storage.nbytes():
            return  # compressed-tensors computes shapes on the meta device
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
def count_memory() -> Iterator[MemoryCounter]:
    """Count the bytes of all tensors that are created in the body, on any device.

    Parallel work runs sequentially, as tensors of other threads would not be counted and the
    result would vary.
    """
    counter = MemoryCounter()
    with run_serially(), counter:
        yield counter
