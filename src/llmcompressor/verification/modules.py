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
_W13: Fusion = {**_QKV, "w13": ("w1", "w3")}
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_DRAFT_JOINS = (
    r"(?:.*\.)?(?:eh_proj|mtp_linear_proj(?:\.\d+)?|mtp_layers\.\d+\.input_proj"
    r"|masked_embedding\.centroids|confidence_head\..*|markov_head\.(?:markov_w1|embed))"
)
"""What joins a draft layer's two inputs, or finds its tokens: an ``nn.Linear`` in most classes."""


@dataclass(frozen=True)
class Family:
    """An architecture as vLLM builds it.

    Patterns of ``mapped`` and ``lookup`` are replaced once in a path, in their order. A number in
    ``<>`` of what replaces them is raised by ``raised``.

    Attributes:
        types: the values of ``model_type`` in ``config.json``.
        fused: joined module → its shards, in order (S17).
        names_shards: names of shards reach the joined module; else its class and its own name do.
        parts: own name of a matrix that the file holds joined → of what (:func:`part_rows`).
        experts: names of gate, up and down as vLLM looks them up (S62, S68).
        mapped: pattern of a checkpoint's path → vLLM's; names in the configuration follow (S18).
        lookup: the same where they do not follow: the prefix that is looked up (S18a); empty for
            a module that is built without one, and so found by its class alone.
        raised: setting of ``config.json``, a number or a list, by which ``lookup`` raises numbers.
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
    names_shards: bool = True
    parts: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str] = _GATE_UP_DOWN
    mapped: Mapping[str, str] = field(default_factory=dict)
    lookup: Mapping[str, str] = field(default_factory=dict)
    raised: str = ""
    plain: tuple[str, ...] = (_DRAFT_JOINS,)
    gate_is_quantizable: bool = False
    quantizes_head: bool = True
    quantizes_embedding: bool = True
    drops_scales: bool = False
    is_mla: bool = False
    draft: str = r"(?:model\.)?mtp\."


_SHARED_GATE = r"(?:.*\.)?shared_expert_gate"
_INDEXER = r"(?:.*\.)?indexer\.(?:wk|weights_proj)"
_TOWERS = r"(?:.*\.)?(?:vision_tower|embed_vision|audio_tower|embed_audio)\..*"
_PROJECTOR = r"(?:.*\.)?multi_modal_projector\..*"
_NAMELESS = MappingProxyType({r"^(?:.*\.)?embed_tokens$": ""})
"""Llama's class and its like build the embedding without a prefix."""
_OUTSIDE_ATTENTION = MappingProxyType({r"\.self_attn\.": "."})
_INNER = MappingProxyType({r"^gpt_neox\.|^transformer\.": "model."})
_DENSE_GATE_UP = MappingProxyType({"gate_up_proj": "pair"})
_MAMBA = MappingProxyType({"in_proj": "mamba"})
_BESIDE_TEXT = MappingProxyType({r"^model\.(?!visual\.|language_model\.)": "language_model.model."})

# Read from what vLLM 0.32 builds of a tiny model of each architecture, and where its tensors land.
FAMILIES: tuple[Family, ...] = (
    Family(
        (
            *("llama", "mistral", "ministral3", "granite", "granite_swa", "hyperclovax"),
            *("apertus", "ernie4_5", "exaone4", "exaone4_5_text", "llama4", "llama4_text"),
        ),
        lookup=_NAMELESS,
    ),
    Family(
        (
            *("gemma", "gemma2", "cohere", "cohere2", "cohere2_moe", "nemotron", "minicpm"),
            *("dbrx", "hy_v3", "longcat_flash", "olmo_hybrid"),
        ),
        quantizes_embedding=False,
    ),
    Family(("afmoe",), lookup={"^lm_head$": ""}, quantizes_embedding=False),
    Family(
        ("aria",),
        mapped={r"^language_model\.model\.": "language_model."},
        lookup={
            r"^language_model\.(?!lm_head)": "language_model.model.",
            r"^.*\.shared_experts\.": ".",
            **_NAMELESS,
        },
    ),
    Family(("phi3",), fused={}, parts={"qkv_proj": "qkv", **_DENSE_GATE_UP}, lookup=_NAMELESS),
    Family(("glm4", "glm4v_text"), parts=_DENSE_GATE_UP, lookup=_NAMELESS),
    Family(
        ("glm_ocr_text",),
        parts=_DENSE_GATE_UP,
        lookup={**_NAMELESS, r"(\.attn\.qkv)$": r"\1_proj"},
    ),
    Family(("mixtral",), fused=_QKV, experts=_W123, quantizes_embedding=False),
    Family(("phimoe",), fused=_QKV, experts=_W123),
    Family(
        ("minimax_m2",),
        fused=_QKV,
        experts=_W123,
        lookup={r"\.block_sparse_moe\.": ".mlp."},
    ),
    Family(("qwen2_moe",), plain=(_DRAFT_JOINS, _SHARED_GATE)),
    Family(
        ("qwen3_moe",),
        plain=(_DRAFT_JOINS, _SHARED_GATE),
        gate_is_quantizable=True,
        drops_scales=True,
    ),
    Family(
        ("qwen3_next",),
        plain=(_DRAFT_JOINS, _SHARED_GATE),
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        fused=_LINEAR_ATTENTION,
        plain=(_DRAFT_JOINS, _SHARED_GATE),
        quantizes_embedding=False,
    ),
    Family(("olmoe",), fused=_QKV, lookup=_NAMELESS),
    Family(
        ("nemotron_h",),
        fused=_QKV,
        parts=_MAMBA,
        mapped={r"^backbone\.": "model.", r"^(model\.)embeddings$": r"\1embed_tokens"},
        plain=(),
    ),
    Family(("glm4_moe",), quantizes_embedding=False, draft=""),
    Family(
        ("gpt_oss",),
        fused=_QKV,
        mapped={r"\.self_attn\.": ".attn."},
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(("gpt_neox", "gpt_bigcode"), mapped=_INNER, lookup={"^embed_out$": "lm_head"}),
    Family(("gpt2",), lookup={"^lm_head$": ".lm_head"}),
    Family(("gptj",), fused=_QKV, names_shards=False, quantizes_embedding=False),
    Family(("stablelm",), names_shards=False, lookup={"^lm_head$": ".lm_head"}),
    Family(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "axk1", "glm4_moe_lite"),
        fused=_MLA,
        is_mla=True,
        draft="",
    ),
    Family(
        ("deepseek_v32", "glm_moe_dsa"),
        fused=_MLA,
        plain=(_DRAFT_JOINS, _INDEXER),
        is_mla=True,
        draft="",
    ),
    Family(
        ("minicpm3",),
        lookup={r"^.*\.q_a_proj$": ""},
        quantizes_embedding=False,
    ),
    Family(("exaone_moe",), lookup={**_NAMELESS, "^lm_head$": ""}, drops_scales=True),
    Family(("exaone",), mapped={r"^transformer\.": "model."}),
    Family(("lfm2",), fused=_W13, quantizes_embedding=False),
    Family(
        ("lfm2_moe",),
        fused=_W13,
        parts={"in_proj": "thirds"},
        mapped={r"\.conv\.": ".short_conv."},
        gate_is_quantizable=True,
        quantizes_embedding=False,
    ),
    Family(
        ("hrm_text",),
        parts={"gqkv_proj": "quarters", **_DENSE_GATE_UP},
        mapped={r"\.attn\.": ".self_attn."},
    ),
    Family(("granitemoe",), fused=_QKV, quantizes_embedding=False),
    Family(
        ("granitemoeshared", "granitemoe_swa"),
        fused=_QKV,
        parts={"input_linear": "pair"},
        lookup=_NAMELESS,
    ),
    Family(
        ("granitemoehybrid",),
        fused=_QKV,
        parts={"input_linear": "pair", **_MAMBA},
        lookup={r"\.mamba\.": ".mixer."},
        quantizes_embedding=False,
    ),
    Family(
        ("falcon_h1",),
        parts=_MAMBA,
        lookup={**_OUTSIDE_ATTENTION, r"\.layers\.(\d+)\.mamba\.": r".<\1>.mixer."},
        raised="num_hidden_layers",
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(
        ("zamba2",),
        fused=_QKV,
        names_shards=False,
        parts={**_MAMBA, **_DENSE_GATE_UP},
        lookup={
            r"\.layers\.\d+\.shared_transformer\.(?:self_attn\.)?": ".",
            r"^model\.layers\.(\d+)\.(?:mamba_decoder\.)?mamba\.": r"<\1>.mixer.",
            r"^model\.layers\.(\d+)\.linear$": r"<\1>.linear",
            r"(_adapter_list\.\d+\.)0$": r"\1A",
            r"(_adapter_list\.\d+\.)1$": r"\1B",
        },
        raised="hybrid_layer_ids",
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(("mamba2",), parts=_MAMBA, quantizes_head=False, quantizes_embedding=False),
    Family(
        ("mamba", "falcon_mamba"),
        plain=(r".*\.mixer\..*",),
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(
        ("jamba",),
        mapped=_OUTSIDE_ATTENTION,
        plain=(r".*\.mamba\..*",),
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(
        ("bloom", "falcon"),
        fused={},
        parts={"query_key_value": "qkv"},
        quantizes_embedding=False,
    ),
    Family(
        ("minicpmv4_6", "minicpmv4_7"),
        fused=_LINEAR_ATTENTION,
        mapped={
            r"^model\.vision_tower\.vit_merger\.": "vit_merger.",
            r"^model\.vision_tower\.": "vpm.",
        },
        quantizes_embedding=False,
    ),
    Family(
        ("blip-2",),
        lookup={r"^vision_model\.": "."},
        quantizes_head=False,
        quantizes_embedding=False,
    ),
    Family(("opt",), quantizes_head=False, quantizes_embedding=False),
    Family(("mistral3",), lookup=_NAMELESS, drops_scales=True),
    Family(("qwen2_vl", "qwen2_5_vl"), mapped=_BESIDE_TEXT),
    Family(("paddleocr_vl",), mapped=_BESIDE_TEXT, lookup=_NAMELESS),
    Family(
        ("gemma3n_text", "gemma3n"),
        lookup={
            r"^model\.(embed_tokens$|per_layer_model_projection$|altup_projections\.)": (
                r"model.self_decoder.\1"
            ),
            r"^model\.(embed_tokens)_(per_layer)$": r"model.self_decoder.\2_\1",
        },
    ),
    Family(("gemma4", "gemma4_text"), lookup={r"\.experts\.": ".moe.experts."}),
)
_BY_TYPE = {name: family for family in FAMILIES for name in family.types}
_UNKNOWN = Family(())
_PLAIN_BESIDE_TEXT = {
    "llama4": r"(?:.*\.)?(?:vision_model|multi_modal_projector)\..*",
    "internvl": r"(?:.*\.)?(?:vision_tower|multi_modal_projector)\..*",
    "mistral3": r"(?:.*\.)?patch_merger\..*",
    "blip-2": r"(?:.*\.)?(?:qformer\..*|language_projection)",
    "paddleocr_vl": r"(?:visual\..*\.mlp|mlp_AR)\..*",
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), r".*\.(?:vit_)?merger\.(?:mlp\..*|linear_\d)"),
    **dict.fromkeys(
        ("aria", "cohere2_vision", "paligemma", "llava_next_video", "llava_onevision"), _PROJECTOR
    ),
}
"""Type of a model that sees → pattern of what vLLM builds plain beside its text part (S20)."""
_PLAIN_IN_DRAFTS = {
    r"(?:Eagle)?(?:Llama4For\w+|DeepSeekMTPModel|DeepseekV\d+ForCausalLM|MiniCPM\d*ForCausalLM)": (
        r"(?:model\.)?fc"
    ),
    "MedusaModel": ".*",
}
"""Class of a draft, with or without the word that vLLM adds → what is plain there (S20).

Elsewhere ``fc``, which joins the inputs of an Eagle draft, takes a scheme.
"""


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def class_names(config: Mapping[str, Any]) -> list[str]:
    """The classes that ``config.json`` names, as far as they are names."""
    found = config.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def plain_in_draft(config: Mapping[str, Any]) -> str | None:
    r"""The pattern of what vLLM builds plain in the draft that a configuration describes.

    >>> plain_in_draft({"architectures": ["EagleLlama4ForCausalLM"]})
    '(?:model\\.)?fc'
    """
    names = [*class_names(config), *(["MedusaModel"] * (config.get("model_type") == "medusa"))]
    rows = _PLAIN_IN_DRAFTS.items()
    return next((plain for name in names for kind, plain in rows if re.fullmatch(kind, name)), None)


def family_of(
    config: Mapping[str, Any],
    present: Collection[str] | None = None,
    experts: Collection[str] = (),
) -> Family:
    """The row for a configuration; one with every default if there is none.

    Args:
        config: the content of ``config.json``.
        present: own names of the modules of a checkpoint, where there is one: what it has no shard
            of is joined nowhere, as gate and up in an MLP without a gate.
        experts: own names of experts there, by which they are looked up where there is no row.
    """
    types = [str(each.get("model_type") or "") for each in (config, text_settings(config))]
    found = next((_BY_TYPE[name] for name in types if name in _BY_TYPE), None)
    row = _UNKNOWN if found is None else found
    if found is not None and found.is_mla and not text_settings(config).get("q_lora_rank"):
        # DeepSeek joins q_a_proj only where queries go through a latent (S17)
        row = replace(found, fused=dict(_GATE_UP))
    row = _beside_text(row, config)
    if (in_draft := plain_in_draft(config)) is not None:
        row = replace(row, plain=(*row.plain, in_draft))
    if found is None and set(_W123) <= set(experts):
        row = replace(row, experts=_W123)
    if present is None:
        return row
    fused = {key: own for key, own in row.fused.items() if all(one in present for one in own)}
    return row if fused == dict(row.fused) else replace(row, fused=fused)


def _beside_text(family: Family, config: Mapping[str, Any]) -> Family:
    """Add what lies beside the text part: what is plain there, and queries, keys, values in one.

    Gemma 4's towers are quantized where the sizes of that for pictures are multiples of 64.

    >>> vision = {"hidden_size": 1152, "intermediate_size": 4304}
    >>> config = {"model_type": "gemma4", "vision_config": vision}
    >>> _beside_text(Family(()), config).plain[1:] == (_TOWERS,)
    True
    """
    kind, vision = str(config.get("model_type") or ""), config.get("vision_config")
    found = _PLAIN_BESIDE_TEXT.get(kind)
    if isinstance(vision, Mapping):
        family = replace(family, parts={"qkv": "thirds", **family.parts})
    if kind == "gemma4" and isinstance(vision, Mapping):
        sizes = (vision.get("hidden_size", 768), vision.get("intermediate_size", 3072))
        are_served = all(isinstance(size, int) and size % 64 == 0 for size in sizes)
        found = None if are_served else _TOWERS
    return family if found is None else replace(family, plain=(*family.plain, found))


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
PLAIN_TABLE = re.compile(
    r"(?:.*\.)?(?:wpe|\w*pos\w*|relative_attention_bias|token_type_embeddings?"
    r"|layers\.\d+\.embed_tokens)"
)
"""Embeddings that vLLM builds plain in every class: of positions, and those of draft layers."""
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|shared_head\.head)")
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
    found = {}
    for name, tensors in grouped.items():
        form, weight = "packed" if "weight_packed" in tensors else "none", tensors.get("weight")
        if form == "none" and weight is not None:
            form = "dense" if weight.dtype in PLAIN_FLOATS else "coded"
        found[name] = Entry(name, tensors, _kind(name, tensors, kinds or {}), form)
    return found


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


def mapped_name(name: str, config: Mapping[str, Any], family: Family) -> str:
    """The path of a module in vLLM: names in the configuration are mapped likewise (S18).

    >>> mapped_name("backbone.layers.0.mixer.q_proj", {}, family_of({"model_type": "nemotron_h"}))
    'model.layers.0.mixer.q_proj'
    """
    for pattern, other in family.mapped.items():
        name = re.sub(pattern, other, name, count=1)
    if isinstance(config.get("text_config"), Mapping):
        if name.startswith("model.language_model."):
            return f"language_model.model.{name.removeprefix('model.language_model.')}"
        if name.startswith("lm_head"):
            return f"language_model.{name}"
        for tower in ("visual", "vision_tower", "multi_modal_projector", "audio_tower"):
            if name.startswith(f"model.{tower}."):
                return name.removeprefix("model.")
    found = EXPERT.match(name)
    if found and found["own"] in _GATE_UP_DOWN:
        index = _GATE_UP_DOWN.index(found["own"])
        return f"{found['experts']}.{found['index']}.{family.experts[index]}"
    return name


def served_name(name: str, config: Mapping[str, Any], family: Family) -> str:
    """The path under which vLLM looks a module's scheme up (S18, S18a).

    >>> served_name("model.language_model.layers.0.mlp.up_proj", {"text_config": {}}, Family(()))
    'language_model.model.layers.0.mlp.up_proj'
    """
    return prefix_of(mapped_name(name, config, family), config, family)


def prefix_of(path: str, config: Mapping[str, Any], family: Family) -> str:
    """The prefix that vLLM builds a module of this path with; empty for one without (S18a).

    >>> prefix_of("model.layers.1.mamba.in_proj", {"num_hidden_layers": 4}, family_of(_FALCON))
    'model.5.mixer.in_proj'
    """
    for pattern, other in family.lookup.items():
        path = re.sub(pattern, other, path, count=1)
    if "<" not in path:
        return path
    raised = text_settings(config).get(family.raised)
    more = len(raised) if isinstance(raised, list) else raised if isinstance(raised, int) else 0
    return re.sub(r"<(\d+)>", lambda found: str(int(found[1]) + more), path)


_FALCON = {"model_type": "falcon_h1"}
_MAMBA_SIZES = (
    ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    ("ssm_state_size", "state_size", "mamba_d_state"),
    ("mamba_num_heads", "num_heads", "mamba_n_heads", "n_mamba_heads"),
)


def part_rows(entry: Entry, config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Rows of the parts into which vLLM cuts a matrix that the file holds joined, in order.

    Nothing for another matrix, or where a size is not in the configuration.

    Args:
        entry: the module.
        config: the content of ``config.json``.
        family: how vLLM builds the architecture.
    """
    kind, rows = family.parts.get(entry.last, ""), entry.rows or 0
    if kind in _EQUAL_PARTS:
        return (rows // _EQUAL_PARTS[kind],) * _EQUAL_PARTS[kind]
    settings = text_settings(config)
    if kind == "qkv":
        heads = settings.get("num_attention_heads", settings.get("n_head"))
        keys = settings.get("num_key_value_heads", settings.get("num_kv_heads", heads))
        if settings.get("multi_query") and not settings.get("new_decoder_architecture"):
            keys = 1
        if not (isinstance(heads, int) and isinstance(keys, int) and heads > 0):
            return ()
        shares = (rows * one // (heads + 2 * keys) for one in (heads, keys, keys))
        return tuple(shares)
    if kind == "mamba":
        found = (next((settings[k] for k in keys if k in settings), None) for keys in _MAMBA_SIZES)
        sizes = [size for size in found if isinstance(size, int)]
        if len(sizes) < len(_MAMBA_SIZES):
            return ()
        states = sizes[0] * sizes[1]
        inner = (rows - 2 * states - sizes[2]) // 2
        return (inner, inner, states, states, sizes[2])
    return ()


_EQUAL_PARTS = {"pair": 2, "thirds": 3, "quarters": 4}
