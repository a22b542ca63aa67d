# SPDX-License-Identifier: Apache-2.0
"""Benchmark of rounding and packing on small matrices: time and memory per weight of a scheme."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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

    fixed: float = 0.0
    per_weight: float = 0.0
    small: float = 0.0

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

    seconds: float = 0.0
    rounding: PeakBytes = PeakBytes()
    packing: PeakBytes = PeakBytes()


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
        return SchemeCost()
    # numbers of rows and columns that the scheme's blocks or groups divide
    block = scheme.weights.block_structure[0] if scheme.weights.block_structure else 1
    group = max(scheme.weights.group_size or 1, 1)
    columns = max(_COLUMNS // group, 1) * group
    sizes = sorted({-(-rows // block) * block for rows in (*_ROWS, 2 * block)})
    found: list[tuple[int, int, int]] = []
    try:
        for rows in sizes:
            weight_RC, entry = _matrix(rows, columns, scheme, dtype, device, is_written=is_written)
            start = time.thread_time()  # of this thread: the machine may be busy
            with try_few_ranges():
                with count_memory() as rounding:
                    own = _rounded(weight_RC, scheme, entry)
                with count_memory() as packing:
                    compress(entry, own)
            found.append((weight_RC.numel(), rounding.peak, packing.peak))
            is_long = time.thread_time() - start > _MOST_SECONDS
            if len(found) > 1 and (is_long or max(rounding.peak, packing.peak) > _MOST_BYTES):
                break
        start = time.perf_counter()  # without the counting, which takes time
        compress(entry, _rounded(weight_RC, scheme, entry))
        seconds = time.perf_counter() - start
    except CompressorError:
        return SchemeCost()
    (few, *small), (many, *large) = found[-2:]
    peaks = []
    for less, more in zip(small, large, strict=True):  # a line through two measurements
        slope = max(more - less, 0) / (many - few)
        peaks.append(PeakBytes(max(more - slope * many, 0.0), slope, less / few))
    return SchemeCost(seconds / many, *peaks)


def _matrix(
    rows: int,
    columns: int,
    scheme: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_written: bool,
) -> tuple[Tensor, QuantizedModule]:
    """Return a random matrix that is to be quantized by the scheme."""
    linear = Linear(columns, rows, bias=False, dtype=dtype, device="meta")
    if is_written and format_of(scheme) != "dense":
        vars(linear)["quantization_status"] = QuantizationStatus.FROZEN
    weight_RC = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    entry = quantized_module("trial", linear, scheme)
    assert entry is not None
    return weight_RC.to(device, dtype), entry


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
