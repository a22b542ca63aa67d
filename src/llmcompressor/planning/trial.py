# SPDX-License-Identifier: Apache-2.0
"""Rounding and packing, tried on a small matrix: what a scheme takes per weight."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from llmcompressor.checkpoint.compress import compress, quantized_module
from llmcompressor.errors import CompressorError
from llmcompressor.quantization.parameters import observe_weight

__all__ = ["Trial", "try_rounding"]

_ROWS, _COLUMNS = 256, 2048
_REPEATS = 2


@dataclass(frozen=True)
class Trial:
    """What a scheme takes per weight.

    Attributes:
        seconds: to find scales, round and pack.
        rounding: most bytes of intermediate tensors while a weight is rounded.
        packing: the same while it is packed, the packed form included.
    """

    seconds: float
    rounding: float
    packing: float


def try_rounding(scheme: Any, dtype: torch.dtype, device: torch.device) -> Trial:
    """Find scales for a small random matrix, round it and pack it.

    Args:
        scheme: a ``QuantizationScheme``.
        dtype: of the weights.
        device: where the model would compute.
    """
    if scheme.weights is None:
        return Trial(0.0, 0.0, 0.0)
    columns = _fitting(scheme.weights)
    linear = Linear(columns, _ROWS, bias=False, dtype=dtype, device="meta")
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(_ROWS, columns, generator=generator).mul_(0.02).to(device, dtype)
    try:
        trials = [_once(linear, weight_RC, scheme) for _ in range(_REPEATS)]
    except CompressorError:
        return Trial(0.0, 0.0, 0.0)
    size = weight_RC.numel()
    last = trials[-1]
    seconds = min(trial.seconds for trial in trials)
    return Trial(seconds / size, last.rounding / size, last.packing / size)


def _fitting(args: Any) -> int:
    """Columns that the scheme's groups divide."""
    group = args.group_size or 1
    return max(_COLUMNS // group, 1) * group if group > 0 else _COLUMNS


def _once(linear: Linear, weight_RC: Tensor, scheme: Any) -> Trial:
    entry = quantized_module("trial", linear, scheme)
    assert entry is not None
    start = time.perf_counter()
    parameters = observe_weight(weight_RC, scheme.weights)
    rounded_RC = parameters.round(weight_RC)
    own = {"weight": rounded_RC, "weight_scale": parameters.scale}
    if not scheme.weights.symmetric:
        own["weight_zero_point"] = parameters.zero_point
    if parameters.global_scale is not None:
        own["weight_global_scale"] = parameters.global_scale
    for base in ("input", "output"):
        own |= {f"{base}_scale": torch.ones(1), f"{base}_global_scale": torch.ones(1)}
    compress(entry, own)
    seconds = time.perf_counter() - start
    with _counted() as rounding:
        observe_weight(weight_RC, scheme.weights)
        parameters.round(weight_RC)
    with _counted() as packing:
        compress(entry, own)
    return Trial(seconds, rounding.peak, packing.peak)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes of the tensors that come and go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_iter((args, kwargs)):
            if isinstance(one, Tensor):
                self._seen.add(one.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                self._count(one)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@contextmanager
def _counted() -> Iterator[_Counter]:
    counter = _Counter()
    with counter:
        yield counter
