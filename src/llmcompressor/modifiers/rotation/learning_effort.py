# SPDX-License-Identifier: Apache-2.0
"""Cost model of learned rotations: bytes and multiply-adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn import Module

from llmcompressor.modifiers.demands import Effort, Learning
from llmcompressor.modifiers.rotation.learned import COMPARED
from llmcompressor.modifiers.rotation.plan import Fusion, Plan
from llmcompressor.modifiers.rotation.turned import PIECE

__all__ = ["learning_of", "making_of"]

_HELD = 24
"""Bytes per entry of a matrix: it and its momentum in float64, its leaf and gradient in float32."""
_KEPT = 16
"""Of these what a later run needs: it and its momentum."""
_STEPPING = 64
"""Bytes per entry of a matrix while a step is taken: eight in float64."""
_SOLVED = 8
"""Products of its size that a step of a matrix costs."""
_VISITS = 12
"""Passes over a weight to make it, where it is not rounded."""
_ROUNDING_VISITS = 15
"""Further ones to find its scales and to round it."""
_FLOAT = 4
_ROUNDED = 9
"""Bytes per weight that is rounded: before and after, and whether it was cut off."""


def learning_of(orders: Iterable[int], *, steps: int) -> Learning:
    """Cost of learning matrices of these sizes.

    Args:
        orders: sizes of all learned matrices.
        steps: number of steps.
    """
    sizes = list(orders)
    return Learning(
        steps=steps,
        compared=COMPARED,
        held=_HELD * sum(size**2 for size in sizes),
        kept=_KEPT * sum(size**2 for size in sizes),
        stepping=_STEPPING * max(sizes, default=0) ** 2,
        products=_SOLVED * sum(size**3 for size in sizes),
    )


def making_of(plan: Plan, modules: Sequence[Module]) -> Effort:
    """Cost of computing the weights of ``modules`` and their gradients once.

    Args:
        plan: the rotations that are fused into weights.
        modules: modules of one part of the model; their weights may be on the meta device.
    """
    own = [(one, plan.fusions[one]) for one in modules if one in plan.fusions]
    return Effort(
        solve=sum(_products(module, fusion) for module, fusion in own),
        visits=sum(_visits(module) for module, _ in own),
        statistics=sum(_size(module) * _itemsize(module) for module, _ in own),
        workspace=max((_workspace(module, fusion) for module, fusion in own), default=0),
    )


def _products(module: Module, fusion: Fusion) -> int:
    return _size(module) * sum(one.order for one in (*fusion.inputs, *fusion.outputs))


def _workspace(module: Module, fusion: Fusion) -> int:
    """Peak bytes besides the weight during the backward from its gradient to the rotations."""
    rotations = len(fusion.inputs) + len(fusion.outputs)
    whole, narrow = _size(module), _itemsize(module)
    if _is_rounded(module):
        making = whole * (_FLOAT * (rotations + 1) + _ROUNDED)
    elif fusion.outputs:
        making = whole * (_FLOAT * (rotations + 2) + narrow)
    else:
        making = min(whole, PIECE) * (_FLOAT * (rotations + 1) + narrow)
    return making + whole * narrow  # the weight's gradient


def _visits(module: Module) -> int:
    return _size(module) * (_VISITS + (_ROUNDING_VISITS if _is_rounded(module) else 0))


def _is_rounded(module: Module) -> bool:
    scheme = getattr(module, "quantization_scheme", None)
    return scheme is not None and getattr(scheme, "weights", None) is not None


def _size(module: Module) -> int:
    return module.get_parameter("weight").numel()


def _itemsize(module: Module) -> int:
    return module.get_parameter("weight").dtype.itemsize
