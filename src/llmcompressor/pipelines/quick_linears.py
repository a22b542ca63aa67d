# SPDX-License-Identifier: Apache-2.0
"""Float32 matrix products for half-precision Linears on CPUs where that is faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompressor.modeling.linear_calls import linear_replaced
from llmcompressor.numerics.linear import is_slow, wide_linear

__all__ = ["quick_linears"]

_DTYPES = (torch.bfloat16, torch.float16)
_FEWEST_TOKENS = 64
"""Below this, widening the weight takes longer than multiplying it."""


@contextlib.contextmanager
def quick_linears() -> Iterator[None]:
    """Make ``torch.nn.functional.linear`` multiply in float32 where that is faster.

    This applies to plain CPU tensors of many tokens without gradients; other calls are unchanged.
    """
    if not any(is_slow(dtype) for dtype in _DTYPES):
        yield
        return
    with linear_replaced(_fits, wide_linear):
        yield


def _fits(given: Tensor, weight: Tensor) -> bool:
    return (
        given.dtype == weight.dtype
        and given.device.type == weight.device.type == "cpu"
        and is_slow(given.dtype)
        and given.numel() >= _FEWEST_TOKENS * weight.shape[-1]
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad))
    )
