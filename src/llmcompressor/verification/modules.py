# SPDX-License-Identifier: Apache-2.0
"""Modules of a checkpoint by their names, and the architectures that vLLM builds of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from llmcompressor.verification.facts import TensorInfo

Fusion = Mapping[str, tuple[str, ...]]

_QKV: Fusion = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP: Fusion = {"gate_up_proj": ("gate_proj", "up_proj")}
_BOTH: Fusion = {**_QKV, **_GATE_UP}
_MLA: Fusion = {**_GATE_UP, "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
_LINEAR_ATTENTION: Fusion = {
    **_BOTH,
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
CROSS: Mapping[str, Fusion] = {"encoder_attn": {"kv_proj": ("k_proj", "v_proj")}}
"""Own name of a cross attention, where queries are of other states → what is joined there."""
_W123 = ("w1", "w3", "w2")
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """An architecture as vLLM builds it.

    Attributes:
        types: the values of ``model_type`` in ``config.json``.
        fused: joined module → its shards, in order (S17).
        experts: names of gate, up and down as vLLM looks them up (S62, S68).
        lookup: part of a checkpoint's path → what stands there in vLLM's (S18a).
        plain: patterns of modules that are never quantized (S20).
        gate_is_quantizable: the router gate gets the quantization configuration (S58).
        quantizes_head: the output head does (S59).
        quantizes_embedding: the input embedding does (S57).
        drops_scales: suffixes of unknown scales are dropped without a word (S19).
        is_mla: attention caches a latent, so the scales of keys and values do nothing (S55).
        draft: pattern of the draft layers' modules (S61).
    """

    types: tuple[str, ...]
    fused: Fusion = field(default_factory=lambda: MappingProxyType(_BOTH))
    experts: tuple[str, str, str] = _GATE_UP_DOWN
    lookup: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    plain: tuple[str, ...] = ()
    gate_is_quantizable: bool = False
    quantizes_head: bool = True
    quantizes_embedding: bool = True
    drops_scales: bool = False
    is_mla: bool = False
    draft: str = r"(?:model\.)?mtp\."


_SHARED_GATE = r"(?:.*\.)?shared_expert_gate"
_MTP_FC = r"(?:.*\.)?eh_proj"
_INDEXER = r"(?:.*\.)?indexer\.(?:wk|weights_proj)"

_TOWERS = r"(?:.*\.)?(?:vision_tower|embed_vision|audio_tower|embed_audio)\..*"

_TYPES_LIKE_LLAMA = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "granite",
    "smollm3",
    "olmo2",
    "seed_oss",
)
FAMILIES: tuple[Family, ...] = (
    Family(_TYPES_LIKE_LLAMA),
    Family(("phi3",), fused={}),
    Family(
        ("mixtral",),
        fused=_QKV,
        experts=_W123,
        quantizes_embedding=False,
    ),
    Family(("phimoe",), fused=_QKV, experts=_W123),
    Family(
        ("minimax_m2",),
        fused=_QKV,
        experts=_W123,
        lookup={".block_sparse_moe.": ".mlp."},
    ),
    Family(("qwen2_moe",), plain=(_SHARED_GATE,)),
    Family(("qwen3_moe",), plain=(_SHARED_GATE,), gate_is_quantizable=True, drops_scales=True),
    Family(
        ("qwen3_next",),
        plain=(_SHARED_GATE,),
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        fused=_LINEAR_ATTENTION,
        plain=(_SHARED_GATE,),
        quantizes_embedding=False,
    ),
    Family(("olmoe", "nemotron_h"), fused=_QKV),
    Family(("glm4_moe",), quantizes_embedding=False, plain=(_MTP_FC,), draft=""),
    Family(("gpt_oss",), fused=_QKV, quantizes_head=False, quantizes_embedding=False),
    Family(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        fused=_MLA,
        plain=(_MTP_FC,),
        is_mla=True,
        draft="",
    ),
    Family(
        ("deepseek_v32", "glm_moe_dsa"),
        fused=_MLA,
        plain=(_MTP_FC, _INDEXER),
        is_mla=True,
        draft="",
    ),
    Family(("llama4", "llama4_text")),
    Family(("exaone_moe",), drops_scales=True),
    Family(("exaone",), lookup={"transformer.": "model."}),
    Family(
        ("falcon_h1", "zamba2", "granitemoehybrid"),
        lookup={".mamba.": ".mixer."},
        quantizes_head=False,
    ),
    Family(("jamba", "mamba", "mamba2", "bloom", "opt"), quantizes_head=False),
    Family(("mistral3",), drops_scales=True),
    Family(("gemma4", "gemma4_text"), lookup={".experts.": ".moe.experts."}),
)
_BY_TYPE = {name: family for family in FAMILIES for name in family.types}
_LIKE_LLAMA = FAMILIES[0]


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def class_names(config: Mapping[str, Any]) -> list[str]:
    """The classes that ``config.json`` names, as far as they are names."""
    found = config.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def family_of(
    config: Mapping[str, Any],
    present: Collection[str] | None = None,
    experts: Collection[str] = (),
) -> Family:
    """The row for a configuration; that of Llama if there is none.

    Args:
        config: the content of ``config.json``.
        present: own names of the modules of a checkpoint, where there is one: what it has no shard
            of is joined nowhere, as gate and up in an MLP without a gate.
        experts: own names of experts there, by which they are looked up where there is no row.
    """
    types = [str(each.get("model_type") or "") for each in (config, text_settings(config))]
    found = next((_BY_TYPE[name] for name in types if name in _BY_TYPE), None)
    row = _LIKE_LLAMA if found is None else found
    if found is not None and found.is_mla and not text_settings(config).get("q_lora_rank"):
        # DeepSeek joins q_a_proj only where queries go through a latent (S17)
        row = replace(found, fused=dict(_GATE_UP))
    row = _with_plain_towers(row, config)
    if found is None and set(_W123) <= set(experts):
        row = replace(row, experts=_W123)
    if present is None:
        return row
    fused = {key: own for key, own in row.fused.items() if all(one in present for one in own)}
    return row if fused == dict(row.fused) else replace(row, fused=fused)


def _with_plain_towers(family: Family, config: Mapping[str, Any]) -> Family:
    """Gemma 4's towers are quantized where the sizes of that for pictures are multiples of 64.

    >>> vision = {"hidden_size": 1152, "intermediate_size": 4304}
    >>> config = {"model_type": "gemma4", "vision_config": vision}
    >>> _with_plain_towers(Family(()), config).plain == (_TOWERS,)
    True
    """
    vision = config.get("vision_config")
    if config.get("model_type") != "gemma4" or not isinstance(vision, Mapping):
        return family
    sizes = (vision.get("hidden_size", 768), vision.get("intermediate_size", 3072))
    are_served = all(isinstance(size, int) and size % 64 == 0 for size in sizes)
    return family if are_served else replace(family, plain=(*family.plain, _TOWERS))


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
        """True if it holds codes instead of a weight."""
        return self.form in ("packed", "coded")

    @cached_property
    def is_expert(self) -> bool:
        """True if it is a projection of one expert of a mixture."""
        return EXPERT.match(self.name) is not None

    @cached_property
    def rows(self) -> int | None:
        """Rows of its weight, where it is a matrix."""
        weight = self.own.get("weight") or self.own.get("weight_packed")
        return weight.shape[0] if weight is not None and len(weight.shape) == 2 else None


def entries_of(
    headers: Mapping[str, TensorInfo], kinds: Mapping[str, str] | None = None
) -> dict[str, Entry]:
    """All modules with tensors of their own, by path.

    Args:
        headers: tensor name → dtype and shape.
        kinds: path of a module → ``linear``, ``embedding`` or ``other`` by its class; otherwise
            names tell.
    """
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers.items():
        module, _, own = name.rpartition(".")
        grouped.setdefault(module, {})[own] = info
    return {
        name: Entry(name, own, _kind(name, own, kinds or {}), _form(own))
        for name, own in grouped.items()
    }


def is_doubtful(entry: Entry) -> bool:
    """True if the name of a module does not tell for sure what it is.

    What holds codes is taken for a Linear unless it is named otherwise.
    """
    if entry.kind == "embedding":
        return _CLEAR_EMBEDDING.fullmatch(entry.last) is None
    return entry.kind == "linear" and not entry.is_quantized and not entry.is_expert


def _kind(name: str, own: Mapping[str, TensorInfo], kinds: Mapping[str, str]) -> str:
    weight = own.get("weight")
    if "weight_packed" not in own and (weight is None or len(weight.shape) != 2):
        return "other"
    for pattern, kind in ((_HEAD, "head"), (_GATE, "gate")):
        if pattern.fullmatch(name):
            return kind
    told = kinds.get(name) if kinds and not EXPERT.match(name) else ""
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
