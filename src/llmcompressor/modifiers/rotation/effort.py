# SPDX-License-Identifier: Apache-2.0
r"""Cost model of rotations: a weight of R rows and C columns, rotations of order N.

=========================  ===============================================  ======================
step                       passes over a weight                             multiply-adds
=========================  ===============================================  ======================
by the input, Hadamard     10 + 12 per butterfly in float64, 5 + 5 else     R C B
by the output, the same    50 more in float64, 20 else                      R C B
by any other matrix        10                                               R C N
trying it out              3, and once as above in float32                  3 runs of 8 tokens
=========================  ===============================================  ======================

N is a power of two, one butterfly for each of its doublings, times a base B. Multiply-adds in
float64 count twice. A model that is not in memory is read three times to be tried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import Embedding, Module

from llmcompressor.core.contract import CalibrationCost, ComputeCost, LearningCost
from llmcompressor.modeling.names import own_parameters
from llmcompressor.modifiers.rotation.learned import COMPARED, PIECE
from llmcompressor.modifiers.rotation.plan import Fusion, RotationPlan
from llmcompressor.numerics.hadamard import split_order

__all__ = ["fusion_cost", "learning_cost", "recomputation_cost", "trial_cost"]

_TRIAL_TOKENS = 8
_TRIAL_RUNS = 3
_TRIAL_VISITS = 3
_WIDE, _NARROW = torch.float64, torch.float32
_FIXED = {_WIDE: 10, _NARROW: 5}
_BUTTERFLY = {_WIDE: 12, _NARROW: 5}
_TURNED = {_WIDE: 50, _NARROW: 20}
_SCALED = 10
"""To look at the columns behind a norm, and to multiply them."""
_FACTOR = {_WIDE: 2, _NARROW: 1}


def fusion_cost(
    plan: RotationPlan, modules: Sequence[Module], precision: torch.dtype
) -> ComputeCost:
    """Compute for fusing rotations into the weights of ``modules``."""
    wide = _WIDE if precision == _WIDE else _NARROW
    found = ComputeCost()
    for module in modules:
        fusion = plan.fusions.get(module)
        if fusion is not None:
            found += _cost_of_fusion(fusion, _elements([module]), wide)
    return found


def trial_cost(plan: RotationPlan, modules: Sequence[Module]) -> ComputeCost:
    """Compute for the trial of the rotations on a few tokens in float32."""
    elements = _elements(modules)
    products = _TRIAL_RUNS * _TRIAL_TOKENS * _elements(_modules_with_products(modules))
    runs = ComputeCost(solve=products, visits=_TRIAL_VISITS * elements, readings=_TRIAL_RUNS)
    return runs + fusion_cost(plan, modules, _NARROW)


def _cost_of_fusion(fusion: Fusion, elements: int, precision: torch.dtype) -> ComputeCost:
    found = ComputeCost() if fusion.norm is None else ComputeCost(visits=_SCALED * elements)
    for number, one in enumerate((*fusion.inputs, *fusion.outputs)):
        visits, products = _FIXED[precision], one.order
        if one.signs_N is not None:
            power, products = split_order(one.order)
            visits += _BUTTERFLY[precision] * (power.bit_length() - 1)
            products = products if products > 1 else 0
        if number >= len(fusion.inputs):
            visits += _TURNED[precision]
        found += ComputeCost(
            solve=_FACTOR[precision] * elements * products, visits=elements * visits
        )
    return found


def _modules_with_products(modules: Iterable[Module]) -> list[Module]:
    return [one for one in modules if not isinstance(one, Embedding)]


def _elements(modules: Iterable[Module]) -> int:
    return sum(one.numel() for module in modules for one in own_parameters(module) if one.ndim > 1)


# --------------------
# Cost model of learned rotations: bytes and multiply-adds.

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


def learning_cost(orders: Iterable[int], *, steps: int) -> LearningCost:
    """Cost of learning matrices of these sizes.

    Args:
        orders: sizes of all learned matrices.
        steps: number of steps.
    """
    sizes = list(orders)
    return LearningCost(
        steps=steps,
        compared=COMPARED,
        held=_HELD * sum(size**2 for size in sizes),
        kept=_KEPT * sum(size**2 for size in sizes),
        stepping=_STEPPING * max(sizes, default=0) ** 2,
        products=_SOLVED * sum(size**3 for size in sizes),
    )


def recomputation_cost(plan: RotationPlan, modules: Sequence[Module]) -> CalibrationCost:
    """Cost of computing the weights of ``modules`` and their gradients once.

    Args:
        plan: the rotations that are fused into weights.
        modules: modules of one part of the model; their weights may be on the meta device.
    """
    own = [(one, plan.fusions[one]) for one in modules if one in plan.fusions]
    return CalibrationCost(
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
