# SPDX-License-Identifier: Apache-2.0
"""Workaround for loading packed zero points, which compressed-tensors does not pack on meta.

transformers determines the shape of each tensor by compressing a model on the meta device. There
compressed-tensors packs the codes but not the zero points, so its own files do not fit; since
transformers 5.23 that fails the load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

__all__ = ["packed_zero_points_fit"]

_PACKED = ("group", "channel")
_lock = threading.RLock()
"""The method is one for all threads: what one puts in its place another would put back."""


@contextmanager
def packed_zero_points_fit() -> Iterator[None]:
    """Let ``from_pretrained`` load packed zero points, whatever the release, inside."""
    _lock.acquire()
    own = vars(PackedQuantizationCompressor)["compress"]

    def compress(
        cls: Any, state_dict: dict[str, Tensor], scheme: QuantizationScheme
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = own.__func__(cls, state_dict, scheme)
        zero, scale = found.get("weight_zero_point"), found.get("weight_scale")
        args = scheme.weights
        if args is None or args.symmetric or args.strategy not in _PACKED or zero is None:
            return found
        if zero.is_meta and scale is not None and zero.shape == scale.shape:
            rows = ceil(zero.shape[0] * args.num_bits / 32)
            found["weight_zero_point"] = torch.empty(
                (rows, *zero.shape[1:]), dtype=torch.int32, device="meta"
            )
        return found

    PackedQuantizationCompressor.compress = classmethod(compress)
    try:
        yield
    finally:
        PackedQuantizationCompressor.compress = own
        _lock.release()
