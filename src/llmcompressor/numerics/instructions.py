# SPDX-License-Identifier: Apache-2.0
"""Detection of the CPU's multiplication instructions through torch."""

from __future__ import annotations

import functools
import platform

import torch

__all__ = ["multiplies"]

_INSTRUCTIONS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}


@functools.cache
def multiplies(dtype: torch.dtype) -> bool | None:
    """Return True if the CPU has an instruction for products of ``dtype``; ``None`` if unknown.

    Only x86 processors can be queried, and only for 16-bit dtypes. If torch lacks one of the
    queries, the result is never ``False``.
    """
    names = _INSTRUCTIONS.get(dtype, ())
    if not names or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    known = [getattr(torch.cpu, name, None) for name in names]
    if any(has is not None and has() for has in known):
        return True
    return None if None in known else False
