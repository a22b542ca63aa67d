# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's modules, found from the names, dtypes and shapes of its tensors.

What a module is, its name tells where nothing else is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.families import Family

__all__ = [
    "EXPERT",
    "FLOATS",
    "PLAIN_FLOATS",
    "Entry",
    "entries_of",
    "is_doubtful",
    "served_name",
]

PLAIN_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
FLOATS = PLAIN_FLOATS | {"F8_E4M3"}
EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)\.(?P<own>\w+)$")
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:(?:\w+_)?embed_tokens\w*(?:\.\d+)?|wte|wpe|\w*embeddings?|\w+_embed|tok_embeddings|embed_in"
    r"|embed_(?:positions|audio_tokens|text_tokens|speaker|char|global|timestep)|relative_attention_bias"
    r"|\w+_embeds_layer|(?:row|column)_embedder|(?:rel_)?pos_emb|segment_emb|shared"
    r"|position_embedding_table)|transformer\.w"
)
_CLEAR_EMBEDDING = re.compile(r"embed_tokens|wte|wpe")
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)")
_GATE = re.compile(r"(?:.*\.)?(?:(?:gate|router)(?:\.(?:layer|classifier|proj|wg))?|router_gate)")


@dataclass(frozen=True)
class Entry:
    """A module of the checkpoint and its own tensors.

    Attributes:
        name: its path in the checkpoint.
        own: own name → tensor, such as ``weight_scale``.
        kind: ``linear``, ``embedding``, ``head``, ``gate`` (a router's) or ``other``.
        form: ``dense``, ``packed``, ``coded`` (8 bits, under the name ``weight``) or ``none``.
    """

    name: str
    own: Mapping[str, TensorInfo]
    kind: str
    form: str

    @cached_property
    def last(self) -> str:
        """The last part of its path."""
        return self.name.rpartition(".")[2]

    @cached_property
    def parent(self) -> str:
        """The path without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether it holds codes instead of a weight."""
        return self.form in ("packed", "coded")

    @cached_property
    def is_expert(self) -> bool:
        """Whether it is a projection of one expert of a mixture."""
        return EXPERT.match(self.name) is not None

    @cached_property
    def rows(self) -> int | None:
        """Rows of its weight, where it is a matrix."""
        weight = self.own.get("weight") or self.own.get("weight_packed")
        return weight.shape[0] if weight is not None and len(weight.shape) == 2 else None


def entries_of(
    headers: Mapping[str, TensorInfo], kind_of: Callable[[str], str] | None = None
) -> dict[str, Entry]:
    """All modules with tensors of their own, by path.

    Args:
        headers: tensor name → dtype and shape.
        kind_of: path of a module → ``linear``, ``embedding`` or ``other`` by its class; nothing
            where its class does not tell. Without it names tell.
    """
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers.items():
        module, _, own = name.rpartition(".")
        grouped.setdefault(module, {})[own] = info
    return {
        name: Entry(name, own, _kind(name, own, kind_of), _form(own))
        for name, own in grouped.items()
    }


def is_doubtful(entry: Entry) -> bool:
    """Whether the name of a module does not tell for sure what it is.

    What holds codes is taken for a Linear unless it is named otherwise.
    """
    if entry.kind == "embedding":
        return _CLEAR_EMBEDDING.fullmatch(entry.last) is None
    return entry.kind == "linear" and not entry.is_quantized and not entry.is_expert


def _kind(
    name: str, own: Mapping[str, TensorInfo], kind_of: Callable[[str], str] | None = None
) -> str:
    weight = own.get("weight")
    if "weight_packed" not in own and (weight is None or len(weight.shape) != 2):
        return "other"
    for pattern, kind in ((_HEAD, "head"), (_GATE, "gate")):
        if pattern.fullmatch(name):
            return kind
    told = kind_of(name) if kind_of is not None and not EXPERT.match(name) else ""
    return told or ("embedding" if _EMBEDDING.fullmatch(name) else "linear")


def _form(own: Mapping[str, TensorInfo]) -> str:
    if "weight_packed" in own:
        return "packed"
    weight = own.get("weight")
    if weight is None:
        return "none"
    if weight.dtype in PLAIN_FLOATS:
        return "dense"
    return "coded"


def served_name(name: str, config: Mapping[str, Any], family: Family) -> str:
    """The path under which vLLM looks a module's scheme up (S18, S18a).

    >>> served_name("model.language_model.layers.0.mlp.up_proj", {"text_config": {}}, Family(()))
    'language_model.model.layers.0.mlp.up_proj'
    """
    for part, other in family.lookup.items():
        name = name.replace(part, other)
    if isinstance(config.get("text_config"), Mapping):
        if name.startswith("model.language_model."):
            return f"language_model.model.{name.removeprefix('model.language_model.')}"
        if name.startswith("lm_head"):
            return f"language_model.{name}"
        for tower in ("visual", "vision_tower", "multi_modal_projector", "audio_tower"):
            if name.startswith(f"model.{tower}."):
                return name.removeprefix("model.")
    found = EXPERT.match(name)
    if found and found["own"] in ("gate_proj", "up_proj", "down_proj"):
        index = ("gate_proj", "up_proj", "down_proj").index(found["own"])
        return f"{found['experts']}.{found['index']}.{family.experts[index]}"
    return name
