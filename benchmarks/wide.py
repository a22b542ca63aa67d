# SPDX-License-Identifier: Apache-2.0
"""Linears of 16 bits multiplied in float32, on processors that have no instruction for bfloat16.

There torch takes seven times as long for bfloat16 as for float32. Products of 16-bit operands are
exact in float32 and are summed there in any case: results agree up to the order of the sums. The
module knows torch alone, so that it runs in any interpreter.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_HALVES = (torch.bfloat16, torch.float16)
_plain = functional.linear


def multiply_in_float32() -> None:
    """Let this process multiply so from now on, where the processor makes it worth it."""
    has = (torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported())
    if not any(has):
        functional.linear = _wide_linear


def _wide_linear(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if given.device.type != "cpu" or given.dtype not in _HALVES or weight.dtype != given.dtype:
        return _plain(given, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return _plain(given.float(), weight.float(), wide_bias).to(given.dtype)
