# SPDX-License-Identifier: Apache-2.0
"""Fused layers: the Linears that a serving engine joins into one.

Engines run q, k and v as one matrix, gate and up as another. The members of such a set must be
quantized alike: the engine looks up one scheme for the joined matrix and, for formats with one
scale per tensor (NVFP4's global scale), keeps one scale. The experts of an MoE are joined too: one
scheme is looked up for all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator
from typing import NamedTuple

from torch.nn import Linear, Module

from llmcompressor.modeling.names import named_modules

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
MLP_INPUTS = frozenset(
    {"gate_proj", "up_proj", "w1", "w3", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h"}
)
"""Names of Linears that another one of the same MLP follows."""
JOINED_QKV = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv"})
"""Names of Linears that are queries, keys and values in one."""

_FORGET_GATE = ("f_a_proj", "forget_gate.f_a_proj")
"""The first half of what tells a delta attention to forget: in files, and in transformers."""

_DELTA_ATTENTION = ("q_proj", "k_proj", "v_proj", "b_proj", *_FORGET_GATE, "g_a_proj", "g_proj")
"""What is joined where there is a forget gate (Kimi Linear, GLM-5 Next)."""

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<own>.+)")


class ExpertModuleName(NamedTuple):
    """The name of an expert's module, split into its parts."""

    experts: str
    """What the list of experts is called."""
    number: str
    """Which expert."""
    own: str
    """The name within it."""


def fused_partners(name: str, present: Container[str] = ()) -> tuple[str, ...]:
    """The full names that are fused with ``name`` when served, whether or not the model has them.

    Args:
        name: of a Linear.
        present: names that the model has; with a forget gate, the Linears next to it are fused.

    >>> fused_partners("layers.0.self_attn.k_proj")
    ('layers.0.self_attn.q_proj', 'layers.0.self_attn.v_proj')
    >>> fused_partners("layers.0.mlp.down_proj")
    ()
    """
    return tuple(one for one in _fused_names(name, present) if one != name)


def _fused_names(name: str, present: Container[str]) -> Iterator[str]:
    """``name`` and all names that may be fused with it, in the order of fusion."""
    parent, dot, own = name.rpartition(".")
    prefix = parent + dot
    for nested in _FORGET_GATE[1:]:
        if name.endswith(f".{nested}"):
            prefix, own = name.removesuffix(nested), nested
    found = dict.fromkeys(
        each for suffixes in FUSED_SUFFIXES if own in suffixes for each in suffixes
    )
    if own in _DELTA_ATTENTION and any(f"{prefix}{one}" in present for one in _FORGET_GATE):
        found = dict.fromkeys(_DELTA_ATTENTION)
    return (f"{prefix}{suffix}" for suffix in found)


def fused_sets(model: Module) -> list[tuple[str, ...]]:
    """The sets of Linears in ``model`` that are fused when served, two or more names each.

    Sets are in model order, the names of a set in the order of fusion.
    """
    linears = [name for name, module in named_modules(model) if isinstance(module, Linear)]
    known = set(linears)
    sets: dict[tuple[str, ...], None] = {}
    for name in linears:
        present = tuple(each for each in _fused_names(name, known) if each in known)
        if len(present) > 1:
            sets[present] = None
    return list(sets)


def missing_qkv_partners(present: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Map each query whose attention lacks keys or values to the names these would have.

    Gemma 4's full attention uses the keys as values, and its last layers take both from another
    layer. Engines fuse q, k and v there as elsewhere, and look up the scheme of all three by name.
    In models without any such keys, as with latent attention, nothing is fused.

    >>> missing_qkv_partners(["0.attn.q_proj", "0.attn.k_proj", "1.attn.q_proj", "1.cross.q_proj"])
    {'0.attn.q_proj': ('0.attn.v_proj',), '1.attn.q_proj': ('1.attn.k_proj', '1.attn.v_proj')}
    """
    query, key, value = FUSED_SUFFIXES[0]
    known, parted = set(present), [(name, *name.rpartition(".")[::2]) for name in present]
    kinds = {parent.rpartition(".")[2] for _, parent, own in parted if own == key}
    found = {}
    for name, parent, own in parted:
        if own == query and parent.rpartition(".")[2] in kinds:
            others = (f"{parent}.{each}" for each in (key, value))
            found[name] = tuple(one for one in others if one not in known)
    return {name: absent for name, absent in found.items() if absent}


def is_expert(name: str) -> bool:
    """Return True if a module is part of one expert of an MoE.

    >>> is_expert("model.layers.0.mlp.experts.3.up_proj"), is_expert("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return _EXPERT.match(name) is not None


def parse_expert_name(name: str) -> ExpertModuleName | None:
    """Split the name of an expert's module into its parts; ``None`` for other modules.

    >>> parse_expert_name("mlp.experts.3.up_proj")
    ExpertModuleName(experts='mlp.experts', number='3', own='up_proj')
    >>> parse_expert_name("mlp.up_proj") is None
    True
    """
    found = _EXPERT.fullmatch(name)
    return None if found is None else ExpertModuleName(*found.groups())


def expert_sets(model: Module) -> list[tuple[str, ...]]:
    """The names of all expert Linears of each MoE, in model order.

    Only experts that are modules of their own (``…experts.3.up_proj``) are found.
    """
    sets: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in named_modules(model):
        found = parse_expert_name(name) if isinstance(module, Linear) else None
        if found:
            sets[found.experts].append(name)
    return [tuple(names) for names in sets.values()]
