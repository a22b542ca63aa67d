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
from collections.abc import Collection, Container, Iterator

from torch.nn import Linear, Module

from llmcompressor.names import named_modules

__all__ = [
    "FUSED_SUFFIXES",
    "expert_sets",
    "fused_partners",
    "fused_sets",
    "is_expert",
    "keys_for_values",
]

FUSED_SUFFIXES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("q_a_proj", "kv_proj"),
    ("wq_a", "wkv_a_with_mqa"),
    ("wq_a", "wkv"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Names, below one parent, of Linears that are joined when served, as far as it has them."""

_FORGET_GATE = ("f_a_proj", "forget_gate.f_a_proj")
"""The first half of what tells a delta attention to forget: in files, and in transformers."""

_DELTA_ATTENTION = ("q_proj", "k_proj", "v_proj", "b_proj", *_FORGET_GATE, "g_a_proj", "g_proj")
"""What is joined where there is a forget gate (Kimi Linear, GLM-5 Next)."""

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.")


def fused_partners(name: str, present: Container[str] = ()) -> tuple[str, ...]:
    """The full names that would be joined with ``name``, whether or not the model has them.

    Args:
        name: of a Linear.
        present: names that the model has; those of a forget gate decide about what is beside them.

    >>> fused_partners("layers.0.self_attn.k_proj")
    ('layers.0.self_attn.q_proj', 'layers.0.self_attn.v_proj')
    >>> fused_partners("layers.0.mlp.down_proj")
    ()
    """
    return tuple(one for one in _joined(name, present) if one != name)


def _joined(name: str, present: Container[str]) -> Iterator[str]:
    """``name`` and all that may be joined with it, in the order in which they are joined."""
    prefix, own = _parted(name)
    found = dict.fromkeys(
        each for suffixes in FUSED_SUFFIXES if own in suffixes for each in suffixes
    )
    if own in _DELTA_ATTENTION and any(f"{prefix}{one}" in present for one in _FORGET_GATE):
        found = dict.fromkeys(_DELTA_ATTENTION)
    return (f"{prefix}{suffix}" for suffix in found)


def _parted(name: str) -> tuple[str, str]:
    """What a name begins with, dot included, and what of it stands in the tables."""
    for nested in _FORGET_GATE[1:]:
        if name.endswith(f".{nested}"):
            return name.removesuffix(nested), nested
    parent, dot, own = name.rpartition(".")
    return f"{parent}{dot}", own


def fused_sets(model: Module) -> list[tuple[str, ...]]:
    """The sets of Linears in ``model`` that are joined when served, two or more names each.

    Sets come in model order, the names of a set in the order in which they are joined.
    """
    linears = [name for name, module in named_modules(model) if isinstance(module, Linear)]
    known = set(linears)
    sets: dict[tuple[str, ...], None] = {}
    for name in linears:
        present = tuple(each for each in _joined(name, known) if each in known)
        if len(present) > 1:
            sets[present] = None
    return list(sets)


def keys_for_values(present: Collection[str]) -> list[str]:
    """Names of keys beside queries that have no values: attention takes them for those too.

    Engines join q, k and v of such a layer as of any other (Gemma 4), and ask for the scheme of all
    three by name.

    >>> keys_for_values(["a.q_proj", "a.k_proj", "b.q_proj", "b.k_proj", "b.v_proj", "c.q_proj"])
    ['a.k_proj']
    """
    known = set(present)
    query, key, value = FUSED_SUFFIXES[0]
    found = []
    for name in present:
        parent, _, own = name.rpartition(".")
        if own == key and f"{parent}.{query}" in known and f"{parent}.{value}" not in known:
            found.append(name)
    return found


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
