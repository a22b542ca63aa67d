# SPDX-License-Identifier: Apache-2.0
"""Tokens with massive activations, limited before second moments are taken.

In most language models a few tokens, the first of a text above all, have activations that are
hundreds of times as large as those of all others (Sun et al., *Massive Activations in Large
Language Models*, arXiv:2402.17762). Their squares make up most of ``XᵀX``, and a solver that
minimizes ``tr(D XᵀX Dᵀ)`` then spends the weights on the outputs of these few tokens, on which
predictions hardly depend. So token t counts with the weight

.. math:: w_t^2, \\qquad w_t = \\min\\bigl(1,\\; 2 \\operatorname{median}_s \\lVert x_s \\rVert
          \\mathbin{/} \\lVert x_t \\rVert\\bigr),

where the median is over the tokens with an input that is not zero. Where no token is longer than
twice the median, nothing changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 2.0
"""The length, in medians, from which on a token counts less."""


def limit_massive_tokens(input_TC: Tensor, *others_TC: Tensor) -> list[Tensor]:
    """Scale tokens by w, as the second moments are to count them.

    Args:
        input_TC: the inputs x, floating dtype.
        others_TC: tensors of the same tokens, which get the weights of ``input_TC``.

    Returns:
        All tensors in their dtypes; the given ones where no token is too long.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [300.0, 400.0]])
    >>> limit_massive_tokens(x)[0].tolist()[-1]
    [1.2000000476837158, 1.600000023841858]
    """
    length_T = torch.linalg.vector_norm(input_TC, dim=-1).float()
    present_T = length_T[length_T > 0]
    if not len(present_T):
        return [input_TC, *others_TC]
    most = _MOST * present_T.median()
    if not bool((length_T > most).any()):  # NaN is not: what is not finite stays so
        return [input_TC, *others_TC]
    weight_T1 = (most / length_T.clamp(min=most)).unsqueeze(-1)
    return [one_TC * weight_T1.to(one_TC.dtype) for one_TC in (input_TC, *others_TC)]
