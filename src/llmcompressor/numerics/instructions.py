# SPDX-License-Identifier: Apache-2.0
"""What the processor has instructions for, as far as torch can tell."""

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
    """Whether the CPU has an instruction for products of ``dtype``; ``None`` if nothing can tell.

    Only processors of the x86 kind can be asked, and only about 16 bits. Where torch has lost one
    of the questions, the answer is never ``False``.
    """
    names = _INSTRUCTIONS.get(dtype, ())
    if not names or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    known = [getattr(torch.cpu, name, None) for name in names]
    if any(has is not None and has() for has in known):
        return True
    return None if None in known else False
