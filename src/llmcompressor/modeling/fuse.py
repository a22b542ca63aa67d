# SPDX-License-Identifier: Apache-2.0
r"""Norm fusion before rotations: zero-mean embeddings, norm gains folded into Linears.

With g the gain of a norm n and b its bias, a Linear W that reads it computes the same from a norm
without gain once its columns have it:

.. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(g))\, (n(x) + b / g)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.errors import InputError
from llmcompressor.modeling.scaling import norm_offset, write_values

__all__ = ["center_embeddings", "fuse_norm_linears"]


@torch.no_grad()
def center_embeddings(embedding: Module) -> None:
    """Subtract the mean from each row of an embedding, in float64.

    Raises:
        InputError: the module has no weight.
    """
    wide = _weight(embedding).double()
    write_values(embedding, {"weight": wide - wide.mean(dim=-1, keepdim=True)})


@torch.no_grad()
def fuse_norm_linears(norm: Module, linears: Iterable[Linear]) -> None:
    """Fold the gain of a norm into the columns of the Linears that read it, in float64.

    Args:
        norm: a norm of the form ``(w + o) n(x) + b``, where o is 0, or 1 as in Gemma.
        linears: all that read its output.

    Raises:
        InputError: it is no such norm, or has a bias where its gain is zero.
    """
    weight_C = _weight(norm)
    sample = torch.linspace(-1, 2, len(weight_C), device=weight_C.device)
    try:
        offset = norm_offset(norm, (sample.to(weight_C)[None],), {})
    except (TypeError, RuntimeError):
        offset = None
    if offset is None:
        raise InputError(
            f"{type(norm).__name__} is not a norm that multiplies by its weight.",
            "Give a norm, and the Linears that read it.",
        )
    gain_C, bias_C = weight_C.double() + offset, norm._parameters.get("bias")
    if bias_C is not None and bool(((gain_C == 0) & (bias_C != 0)).any()):
        raise InputError(
            f"The gain of {type(norm).__name__} is zero where its bias is not.",
            "Such a norm cannot be taken over by what reads it.",
        )
    for linear in linears:
        write_values(linear, {"weight": _weight(linear).double() * gain_C.to(linear.weight.device)})
    values = {"weight": torch.full_like(weight_C, 1.0 - offset)}
    if bias_C is not None:
        values["bias"] = torch.where(gain_C == 0, 0.0, bias_C.double() / gain_C)
    write_values(norm, values)


def _weight(module: Module) -> Tensor:
    weight = module._parameters.get("weight")
    if weight is None:
        raise InputError(f"{type(module).__name__} has no weight.", "Give a module with a weight.")
    return weight.detach()
