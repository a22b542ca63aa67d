# SPDX-License-Identifier: Apache-2.0
"""Size, sparsity and quantized share of a model after its training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

from llmcompressor.modeling.flat_pieces import is_flat, shapes_shown
from llmcompressor.modeling.spread import whole

__all__ = ["summary"]


def summary(model: Module) -> dict[str, float]:
    """Return metrics of a whole model; in a distributed run every process calls this.

    Returns:
        ``total_params``; ``sparsity_percent``, the share of zeros in the matrices outside
        embeddings; ``quantized_percent``, the share of those matrices' elements whose module has a
        scheme for its weight.
    """
    elements = zeros = quantized = 0
    with shapes_shown(model):
        matrices = [(module, matrix, matrix.numel()) for module, matrix in _matrices(model)]
        total = sum(each.numel() for each in (*model.parameters(), *_late_parameters(model)))
    for module, matrix, size in matrices:
        elements += size
        zeros += _zeros(matrix)
        scheme = getattr(module, "quantization_scheme", None)
        quantized += size if getattr(scheme, "weights", None) is not None else 0
    return {
        "total_params": float(total),
        "sparsity_percent": 100.0 * zeros / max(elements, 1),
        "quantized_percent": 100.0 * quantized / max(elements, 1),
    }


def _matrices(model: Module) -> Iterator[tuple[Module, Parameter]]:
    """Yield each parameter of two or more dimensions once, without embeddings and vectors."""
    modules = list(model.modules())
    seen = {id(each.weight) for each in modules if isinstance(each, Embedding)}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            is_vector = parameter.dim() < 2 or parameter.numel() == max(parameter.shape)
            if not is_vector and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, parameter


def _late_parameters(model: Module) -> Iterator[Tensor]:
    """Yield quantization parameters of modules with flattened weights, where they are buffers."""
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            yield from module.buffers(recurse=False)


@torch.no_grad()
def _zeros(matrix: Tensor) -> int:
    count = ((whole(matrix) if is_flat(matrix) else matrix) == 0).sum()
    # A sharded tensor's sum is distributed over the processes.
    return int(whole(count))
