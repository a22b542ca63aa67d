# SPDX-License-Identifier: Apache-2.0
r"""REAP: saliency of each expert of an MoE, its mean contribution to the MoE's output.

REAP (Lasby et al., arXiv:2510.13999): with router weights g and expert outputs f, over the tokens
T_e that are routed to expert e,

.. math:: S_e = \frac{1}{|T_e|} \sum_{t \in T_e} g_e(x_t)\, \lVert f_e(x_t) \rVert_2 .

The experts with the least S are dropped, equally many in each routing group. An expert without
tokens has S = 0.

Shapes: T tokens, K experts per token, P routed pairs of a token and an expert, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.numerics.extremes import is_finite

_CHUNK_TOKENS = 1024


@dataclass
class Saliency:
    """Sums over tokens; add batches, then read :meth:`mean`.

    ``sum_E`` is that of weight times norm, float64; ``count_E`` the number of routed tokens, int64;
    both on the CPU.
    """

    sum_E: Tensor
    count_E: Tensor

    @classmethod
    def of(cls, experts: int) -> Saliency:
        """The saliency of ``experts`` experts before any token."""
        return cls(torch.zeros(experts, dtype=torch.float64), torch.zeros(experts).long())

    def add(
        self,
        run: Callable[[Tensor, Tensor, Tensor], Tensor],
        hidden_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
    ) -> None:
        """Accumulate the tokens of one batch.

        Args:
            run: the MoE itself: tokens ``[P, H]``, experts ``[P, 1]`` and weights ``[P, 1]`` to
                outputs ``[P, H]``. Each pair is passed to it as a token of its own with weight 1.
            hidden_TH: input of the MoE.
            index_TK: the experts of each token; those beyond E belong to other ranks.
            weight_TK: their router weights.
        """
        experts = len(self.sum_E)
        for top in range(0, len(hidden_TH), _CHUNK_TOKENS):
            rows = slice(top, top + _CHUNK_TOKENS)
            chosen_TK = (index_TK[rows] >= 0) & (index_TK[rows] < experts)
            token_P, _ = chosen_TK.nonzero(as_tuple=True)
            if not len(token_P):
                continue
            index_P, weight_P = index_TK[rows][chosen_TK], weight_TK[rows][chosen_TK]
            ones_P1 = torch.ones_like(weight_P).unsqueeze(-1)
            output_PH = run(hidden_TH[rows][token_P], index_P.unsqueeze(-1), ones_P1)
            score_P = (output_PH.float().norm(dim=-1) * weight_P.float()).double().cpu()
            where_P = index_P.cpu().long()
            self.sum_E.index_add_(0, where_P, score_P)
            self.count_E += where_P.bincount(minlength=experts)

    def mean(self) -> Tensor:
        """S, float64 ``[E]``."""
        return self.sum_E / self.count_E.clamp(min=1)


def dropped_experts(saliency_E: Tensor, sparsity: float, groups: int = 1) -> list[int]:
    """The indices of the experts to drop: the least salient fraction of each group, rounded down.

    Groups are of consecutive experts, of one size. Indices increase; of equal saliencies the first
    is dropped.

    Raises:
        InputError: the experts do not make groups of one size.
        NonFiniteError: a saliency is NaN or infinite.

    >>> dropped_experts(torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]), 0.5)
    [0, 1, 2]
    >>> dropped_experts(torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]), 0.5, groups=2)
    [1, 4]
    """
    if groups < 1 or len(saliency_E) % groups:
        raise InputError(
            f"{len(saliency_E)} experts do not make {groups} groups of one size.",
            "Check the model's configuration.",
        )
    if not is_finite(saliency_E):
        bad = (~saliency_E.isfinite()).nonzero().flatten().tolist()
        raise NonFiniteError(f"The saliency of experts {bad} is NaN or infinite.")
    size = len(saliency_E) // groups
    count = int(size * sparsity + 1e-9)  # 0.3 of 10 are 3, whatever the floats say
    order_GS = saliency_E.reshape(groups, size).argsort(dim=-1, stable=True)
    first_G1 = torch.arange(groups, device=order_GS.device).unsqueeze(-1) * size
    found: list[int] = (order_GS[:, :count] + first_G1).flatten().sort().values.tolist()
    return found
