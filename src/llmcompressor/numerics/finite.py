# SPDX-License-Identifier: Apache-2.0
"""Check for NaN and infinity in one pass over a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_finite"]


def is_finite(tensor: Tensor) -> bool:
    """Return True if ``tensor`` (any shape and dtype) holds neither NaN nor infinity.

    Only minimum and maximum are checked: NaN propagates into both, infinity is one of them. They
    are computed at memory bandwidth and without a temporary, unlike a sum of 16-bit values.

    >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((2,), 3e38))
    (False, True)
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    least, greatest = tensor.detach().aminmax()
    return bool(torch.isfinite(least) & torch.isfinite(greatest))
