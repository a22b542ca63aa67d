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

from llmcompressor.modifiers.demands import Work
from llmcompressor.modifiers.rotation.plan import Fusion, Plan
from llmcompressor.names import own_parameters
from llmcompressor.numerics.hadamard import split_order

__all__ = ["rotating_work", "trial_work"]

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


def rotating_work(plan: Plan, modules: Sequence[Module], precision: torch.dtype) -> Work:
    """Compute for fusing rotations into the weights of ``modules``."""
    wide = _WIDE if precision == _WIDE else _NARROW
    found = Work()
    for module in modules:
        fusion = plan.fusions.get(module)
        if fusion is not None:
            found += _fusing(fusion, _elements([module]), wide)
    return found


def trial_work(plan: Plan, modules: Sequence[Module]) -> Work:
    """Compute for the trial of the rotations on a few tokens in float32."""
    elements = _elements(modules)
    products = _TRIAL_RUNS * _TRIAL_TOKENS * _elements(_multiplying(modules))
    runs = Work(solve=products, visits=_TRIAL_VISITS * elements, readings=_TRIAL_RUNS)
    return runs + rotating_work(plan, modules, _NARROW)


def _fusing(fusion: Fusion, elements: int, precision: torch.dtype) -> Work:
    found = Work() if fusion.norm is None else Work(visits=_SCALED * elements)
    for number, one in enumerate((*fusion.inputs, *fusion.outputs)):
        visits, products = _FIXED[precision], one.order
        if one.signs_N is not None:
            power, products = split_order(one.order)
            visits += _BUTTERFLY[precision] * (power.bit_length() - 1)
            products = products if products > 1 else 0
        if number >= len(fusion.inputs):
            visits += _TURNED[precision]
        found += Work(solve=_FACTOR[precision] * elements * products, visits=elements * visits)
    return found


def _multiplying(modules: Iterable[Module]) -> list[Module]:
    return [one for one in modules if not isinstance(one, Embedding)]


def _elements(modules: Iterable[Module]) -> int:
    return sum(one.numel() for module in modules for one in own_parameters(module) if one.ndim > 1)
