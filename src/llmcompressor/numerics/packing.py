# SPDX-License-Identifier: Apache-2.0
"""4-bit floats as they are stored: two to a byte.

A value of e2m1 is stored as its sign (bit 3) and the place of its magnitude among the eight that
there are (bits 0 to 2)::

    magnitude  0  0.5  1  1.5  2  3  4  6
    code       0   1   2   3   4  5  6  7

The even column of each pair lies in the low half of the byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_e2m1"]


def pack_e2m1(values_RC: Tensor) -> Tensor:
    """Values of the e2m1 grid as bytes.

    Args:
        values_RC: members of the grid, any floating dtype, ``[R, C]`` with C even.

    Returns:
        uint8 ``[R, C / 2]``.

    >>> pack_e2m1(torch.tensor([[0.5, -6.0, 3.0, 0.0]])).tolist()
    [[241, 5]]
    """
    magnitude_RC = values_RC.abs()
    # 2m up to 2, then m + 2 up to 4, then 7: the lowest of the three lines, at every member.
    code_RC = torch.minimum(magnitude_RC * 2, magnitude_RC + 2).clamp_(max=7).to(torch.uint8)
    code_RC |= torch.signbit(values_RC).to(torch.uint8) << 3
    return code_RC[:, 0::2] | (code_RC[:, 1::2] << 4)
