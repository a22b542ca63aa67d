# SPDX-License-Identifier: Apache-2.0
"""Cost model of AWQ: T tokens, C columns, R rows of all Linears with one input.

=================  =======================================  ===============================
step               multiply-adds                            bytes
=================  =======================================  ===============================
second moments     T C² · 36/64 (block rows of a triangle)  4 C²
one candidate      R C (C + W) / 2, blocks of W columns     4 C (C + W) / 2; 16 R C elsewhere
clipping, a sweep  R C (C + (K + 1) g), groups of g         2 of the weight, 4 C² and, of the
                   columns, K attempts                      rows at once, 12 C + 20 K g each
=================  =======================================  ===============================

With ``loss: output`` a candidate instead reruns the set's parent on all tokens and takes 8 passes
over the weights. The calls of the parents are kept for all tokens until their sets are done,
together with the original outputs of the current parent; the outputs of a candidate are compared
batch by batch. Attention masks and position embeddings belong to the paused forwards.

On an accelerator all rows are processed at once.

Before rows are clipped, float32 copies of the weight (8 R C) or of the moments (8 C²) are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modifiers.demands import DataSize, Effort
from llmcompressor.names import own_parameters
from llmcompressor.numerics.awq import CLIP_ATTEMPTS, CLIPPED_ROWS
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.numerics.quadratic import WIDTH
from llmcompressor.schemes.attention import updates_cache

__all__ = ["VISITS", "effort_of", "run_products", "running"]

_FLOAT = 4
_MATRIX = 2
"""Dimensions; what has more is a stack of experts' matrices."""
VISITS = 8
"""Passes over a weight for one candidate: scaled, extremes, rounded, compared."""


def effort_of(
    weights: Sequence[Tensor], *, points: int, clipped: Sequence[Tensor] = (), group: int = 0
) -> Effort:
    """Cost of finding the scale of Linears with one input, and the clip bounds of their groups.

    Args:
        weights: weights that the scale is evaluated on, each ``[R_i, C]``; only their shapes
            matter.
        points: number of candidates.
        clipped: weights that are clipped.
        group: columns of them that share a scale; 0 for all.
    """
    every = [*weights, *clipped]
    if not every:
        return Effort()
    columns = every[0].shape[-1]
    searched = _search(weights, columns, points)
    ends = _clipping(clipped, columns, min(group, columns) or columns)
    return Effort(
        gram=columns**2 * 36 // 64,
        solve=searched.solve + ends.solve,
        visits=searched.visits + ends.visits,
        statistics=_FLOAT * columns**2,
        buffered=CHUNK_TOKENS * columns * every[0].element_size(),
        workspace=max(searched.workspace, ends.workspace),
        on_device=max(one.workspace_on(device=True) for one in (searched, ends)),
    )


def run_products(parent: Module, data: DataSize) -> tuple[int, int]:
    """Multiply-adds of a module for one token: with weights, and between tokens.

    Args:
        parent: an attention, an MLP, an MoE or a Linear; only its shapes matter.
        data: has the cost of attention and the share of experts that a token is routed to.
    """
    mixtures = [one for one in parent.modules() if isinstance(one, LinearExperts)]
    experts = {inner for mixture in mixtures for inner in mixture.modules()}
    found = attention = 0
    for module in parent.modules():
        attention += data.attention if updates_cache(module) else 0
        for one in own_parameters(module):
            routed = module in experts or one.ndim > _MATRIX
            matrix = one.numel() if one.ndim >= _MATRIX else 0
            found += int(matrix * (data.expert_share if routed else 1))
    return found, attention


def running(found: Effort, weights: Sequence[Tensor], place: str | None) -> Effort:
    """Add the bytes for rerunning the parent of some Linears to ``found``.

    Args:
        found: the other costs.
        weights: weights of the Linears, which share one input; only their shapes matter.
        place: device for the parent's inputs and outputs; ``None``: wherever there is room.
    """
    columns, itemsize = weights[0].shape[-1], weights[0].element_size()
    rows = [weight.shape[0] for weight in weights]
    returned = columns if len(weights) > 1 else rows[0]  # output of a parent, or a Linear
    elements = [weight.numel() for weight in weights]
    inside = sum(rows) + max(rows) if len(weights) > 1 else returned
    compared = 3 * itemsize * returned + 2 * _FLOAT * returned  # both outputs, and their difference
    on_host = place is not None and place.startswith("cpu")
    is_counted = place is None or on_host  # memory of another accelerator is not counted
    return replace(
        found,
        kept=itemsize * columns * is_counted,
        scaled=itemsize * sum(elements) + 3 * _FLOAT * max(elements),
        outputs=itemsize * returned * is_counted,
        running=itemsize * columns + max(itemsize * inside, compared),
        offloads=on_host,
    )


def _search(weights: Sequence[Tensor], columns: int, points: int) -> Effort:
    if not weights:
        return Effort()
    elements = sum(weight.numel() for weight in weights)
    form = columns * (columns + WIDTH) // 2
    return Effort(
        solve=(points + 1) * elements * (columns + WIDTH) // 2,
        visits=(points + 1) * VISITS * elements,
        workspace=_FLOAT * max(form, 4 * max(weight.numel() for weight in weights)),
    )


def _clipping(weights: Sequence[Tensor], columns: int, group: int) -> Effort:
    if not weights:
        return Effort()
    elements = sum(weight.numel() for weight in weights)
    tries, square = sum(CLIP_ATTEMPTS), columns**2
    rows = elements // columns
    itemsize = weights[0].element_size()

    def bytes_of(at_once: int) -> int:
        """Bytes with this many rows clipped at once."""
        own = at_once * (12 * columns + 20 * max(CLIP_ATTEMPTS) * group)
        clipping = 4 * square + 8 * elements // group + own
        return elements * itemsize + max(8 * elements, 8 * square, clipping)

    return Effort(
        solve=elements * (len(CLIP_ATTEMPTS) * columns + (tries + len(CLIP_ATTEMPTS)) * group),
        visits=tries * VISITS * elements,
        workspace=bytes_of(min(rows, CLIPPED_ROWS * torch.get_num_threads())),
        on_device=bytes_of(rows),
    )
