# SPDX-License-Identifier: Apache-2.0
"""Which Linears a serving engine joins into one.

Engines run q, k and v as one matrix, gate and up as another. The members of such a set must be
quantized alike: the engine looks up one scheme for the joined matrix and, for formats with one
scale per tensor (NVFP4's global scale), keeps one scale. The experts of a mixture are joined
too: one scheme is looked up for all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict

from torch.nn import Linear, Module

from llmcompressor.names import named_modules

__all__ = ["FUSED_SUFFIXES", "expert_sets", "fused_partners", "fused_sets", "is_expert"]

FUSED_SUFFIXES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Names, below one parent, of Linears that are joined when served."""

_SET_OF = {suffix: suffixes for suffixes in FUSED_SUFFIXES for suffix in suffixes}
_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.")


def fused_partners(name: str) -> tuple[str, ...]:
    """The full names that would be joined with ``name``, whether or not the model has them.

    >>> fused_partners("layers.0.self_attn.k_proj")
    ('layers.0.self_attn.q_proj', 'layers.0.self_attn.v_proj')
    >>> fused_partners("layers.0.mlp.down_proj")
    ()
    """
    parent, dot, own = name.rpartition(".")
    return tuple(f"{parent}{dot}{suffix}" for suffix in _SET_OF.get(own, ()) if suffix != own)


def fused_sets(model: Module) -> list[tuple[str, ...]]:
    """The sets of Linears in ``model`` that are joined when served, two or more names each.

    Sets come in model order, the names of a set in the order in which they are joined.
    """
    linears = [name for name, module in named_modules(model) if isinstance(module, Linear)]
    known = set(linears)
    sets: dict[tuple[str, ...], None] = {}
    for name in linears:
        parent, dot, own = name.rpartition(".")
        wanted = (f"{parent}{dot}{suffix}" for suffix in _SET_OF.get(own, ()))
        present = tuple(each for each in wanted if each in known)
        if len(present) > 1:
            sets[present] = None
    return list(sets)


def is_expert(name: str) -> bool:
    """Whether a module is part of one expert of a mixture.

    >>> is_expert("model.layers.0.mlp.experts.3.up_proj"), is_expert("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return _EXPERT.match(name) is not None


def expert_sets(model: Module) -> list[tuple[str, ...]]:
    """Per mixture of experts, the names of all Linears of its experts, in model order.

    Only experts that are modules of their own (``…experts.3.up_proj``) are seen.
    """
    sets: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in named_modules(model):
        found = _EXPERT.match(name) if isinstance(module, Linear) else None
        if found:
            sets[found["experts"]].append(name)
    return [tuple(names) for names in sets.values()]
