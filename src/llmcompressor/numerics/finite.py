# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor holds NaN or infinity, in one pass over it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_finite"]

_CHUNK = 1 << 24


def is_finite(tensor: Tensor) -> bool:
    """Whether ``tensor`` (any shape and dtype) holds neither NaN nor infinity.

    A float32 sum is NaN or infinite whenever one of its terms is, so one pass over the data
    without a temporary settles the usual case. Where finite terms overflow the sum, each element
    is looked at.

    >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((2,), 3e38))
    (False, True)
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    if bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32))):
        return True
    return all(bool(torch.isfinite(part).all()) for part in tensor.reshape(-1).split(_CHUNK))
