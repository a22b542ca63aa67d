# SPDX-License-Identifier: Apache-2.0
"""Parts of a language model that rotations act on: the residual stream, heads and down projections.

::

    embedding --> stream --> norm --> readers (q, k, v; gate, up; routers; the head)
                    ^                    |
                    +---- writers <------+   (o, down)

A norm is identified in a traced forward by the Linears that read its output unchanged. Writers have
no such property, since their output is added to the stream: they are identified by their usual
names. The recipe, or a registry, may name all parts instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch.nn import Embedding, Linear, Module

from llmcompressor.equalization.rescale import norm_offset, swapped_parameters
from llmcompressor.errors import TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import DataFlow, trace_flow
from llmcompressor.modeling.fused import is_expert
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import embeddings, text_config
from llmcompressor.modifiers.rotation.online import check_attention_hookable
from llmcompressor.modifiers.rotation.plan import Norm
from llmcompressor.moe.linear_experts import find_stacked_moes
from llmcompressor.quantization.attach import cached_attention_modules, check_kv_shape_attributes
from llmcompressor.runtime.registry import UserOverrides
from llmcompressor.schemes.attention import CACHED_ATTENTION

NAME_PARTS = "Name its parts with the fields mappings and norm_mappings."
_WITHOUT_R1 = "Leave R1 out of rotations."


# --------------------
# Names of the parts, for models where they are not inferred.


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("mlp_in", "mlp_out", "linears", mode="before", check_fields=False)
    @classmethod
    def _to_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class SpinQuantMapping(_Mapping):
    """Targets (names, ``re:`` patterns or classes) of the parts that rotations act on.

    Attributes:
        embedding: writes the initial residual stream.
        attn: the attention modules, whose queries and keys R3 rotates.
        attn_q: reads the residual stream.
        attn_k: reads the residual stream.
        attn_v: reads the residual stream; R2 rotates its output.
        attn_o: writes to the residual stream; R2 rotates its input.
        attn_head_dim: head dimension, if it is not in the configuration.
        mlp_in: read the residual stream: gate, up, routers.
        mlp_out: write to the residual stream: down; R4 rotates their input.
        lm_head: reads the final residual stream.
    """

    embedding: str
    attn: str
    attn_q: str
    attn_k: str
    attn_v: str
    attn_o: str
    attn_head_dim: int | None = Field(default=None, gt=0)
    mlp_in: list[str]
    mlp_out: list[str]
    lm_head: str


class NormMapping(_Mapping):
    """A norm and the Linears that read its output.

    Attributes:
        norm: target of the norms.
        linears: targets of the Linears; each belongs to the norm with the same parent.
    """

    norm: str
    linears: list[str]


def _llama() -> SpinQuantMapping:
    return SpinQuantMapping(
        embedding="re:.*embed_tokens$",
        attn="re:.*self_attn$",
        attn_q="re:.*q_proj$",
        attn_k="re:.*k_proj$",
        attn_v="re:.*v_proj$",
        attn_o="re:.*o_proj$",
        mlp_in=["re:.*up_proj$", "re:.*gate_proj$"],
        mlp_out=["re:.*down_proj$"],
        lm_head="lm_head",
    )


def _norms_of_llama() -> list[NormMapping]:
    qkv = ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]
    gate_up = ["re:.*up_proj$", "re:.*gate_proj$"]
    return [
        NormMapping(norm="re:.*input_layernorm$", linears=qkv),
        NormMapping(norm="re:.*post_attention_layernorm$", linears=gate_up),
        NormMapping(norm="model.norm", linears=["lm_head"]),
    ]


SPINQUANT_MAPPING_REGISTRY: UserOverrides[SpinQuantMapping] = UserOverrides(
    {"LlamaForCausalLM": _llama}
)
"""The parts of models that users add by class name. Llama's can be read; unless some are added,
they are found."""
NORM_MAPPING_REGISTRY: UserOverrides[list[NormMapping]] = UserOverrides(
    {"LlamaForCausalLM": _norms_of_llama}
)
"""Likewise, which norm feeds which Linears."""


# --------------------
# Heads and down projections.

_VALUES = r"re:(?:.*\.)?v_proj$"
_ATTENTION_WRITERS = r"re:(?:.*\.)?(?:o_proj|out_proj|linear_out|wo|dense)$"
"""The Linears at the end of attention, and of what stands in its place."""
_MLP_WRITERS = r"re:(?:.*\.)?(?:down_proj|w2|fc2|dense_4h_to_h|linear_2|output_linear)$"


class Site(NamedTuple):
    """Modules that one matrix rotates together.

    Attributes:
        what: what it rotates, for error messages.
        width: number of channels.
        modules: location of the transform → the modules there, by name.
    """

    what: str
    width: int
    modules: Mapping[str, Mapping[str, Module]]


def head_sites(model: Any, mapping: SpinQuantMapping | None = None) -> list[Site]:
    """The value and output projections of each attention module.

    Raises:
        TargetError: there are none, or their widths do not go together.
    """
    values = _linears(model, [mapping.attn_v if mapping else _VALUES])
    outputs = _linears(model, [mapping.attn_o if mapping else _ATTENTION_WRITERS])
    by_parent = {name.rpartition(".")[0]: name for name in outputs}
    found = []
    for name, module in values.items():
        parent = name.rpartition(".")[0]
        if parent not in by_parent:
            raise TargetError(f"Nothing beside {name} was found that reads the values.", NAME_PARTS)
        output = outputs[by_parent[parent]]
        width = (mapping.attn_head_dim if mapping else None) or _head_dim(model, parent)
        if not width or module.out_features % width or output.in_features % width:
            raise TargetError(
                f"The width of a head of {parent} is not known.",
                "Give attn_head_dim in mappings, or leave R2 out of rotations.",
            )
        modules = {"weight_output": {name: module}, "weight_input": {by_parent[parent]: output}}
        found.append(Site(f"a head of {parent} (R2)", width, modules))
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no Linear that makes values alone (v_proj).",
            "Leave R2 out of rotations, or name one that does in the field mappings.",
        )
    return found


def _head_dim(model: Any, attention: str) -> int:
    own = getattr(model.get_submodule(attention), "head_dim", None)
    if isinstance(own, int):
        return own
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def query_and_key_sites(model: Any, mapping: SpinQuantMapping | None = None) -> list[Site]:
    """The attention modules, whose queries and keys can be hooked.

    Raises:
        TargetError: there are none, or readers cannot tell the width of a head.
    """
    attention = cached_attention_modules(model)
    if mapping is not None:
        wanted = {one for _, one in match_named_modules(model, [mapping.attn])}
        attention = {one: name for one, name in attention.items() if one in wanted}
    if not attention:
        raise TargetError(
            "R3 rotates cached keys, and this model has no attention module of the form that "
            f"readers know: {CACHED_ATTENTION}.",
            "Leave R3 out of rotations.",
        )
    check_attention_hookable(model)
    try:
        check_kv_shape_attributes(model)
    except (TargetError, AttributeError, RuntimeError) as error:  # layers differ
        raise TargetError(
            "R3: readers take the shape of queries and keys from num_attention_heads, "
            f"num_key_value_heads and head_dim, which {type(text_config(model.config)).__name__} "
            "does not tell for all layers.",
            "Leave R3 out of rotations.",
        ) from error
    return [
        Site(
            f"a head of {name} (R3)",
            (mapping.attn_head_dim if mapping else None) or _head_dim(model, name),
            {"q_attn": {name: module}, "k_cache": {name: module}},
        )
        for module, name in attention.items()
    ]


def down_sites(model: Any, mapping: SpinQuantMapping | None = None) -> list[Site]:
    """The last Linear of each MLP.

    Raises:
        TargetError: there are none.
    """
    found = _linears(model, mapping.mlp_out if mapping else [_MLP_WRITERS])
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no down projection that is a Linear.",
            f"Leave R4 out of rotations. {NAME_PARTS}",
        )
    return [
        Site(
            f"the input of {name} (R4)",
            module.in_features,
            {"input": {name: module}, "weight_input": {name: module}},
        )
        for name, module in found.items()
    ]


def _linears(model: Module, targets: Sequence[str]) -> dict[str, Linear]:
    matched = match_named_modules(model, list(targets))
    return {name: module for name, module in matched if isinstance(module, Linear)}


# --------------------
# The residual stream.

_EXPERT_READERS = ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj")
_TRIED_ROWS = 4


@dataclass
class ResidualStream:
    """The residual stream: the modules that read it and write to it, with their names.

    Attributes:
        width: width of the stream.
        norms: its norms, with their readers.
        writers: embeddings that it starts from, and Linears whose output is added to it.
    """

    width: int
    norms: list[Norm]
    writers: dict[Module, str]

    @property
    def readers(self) -> dict[Module, str]:
        """All modules that read the stream through a norm."""
        return {module: name for norm in self.norms for module, name in norm.readers.items()}

    @property
    def site(self) -> Site:
        """All of it: one matrix rotates the whole stream."""
        writers = {name: one for one, name in self.writers.items()}
        readers = {name: one for one, name in self.readers.items()}
        modules = {"weight_output": writers, "weight_input": readers}
        return Site("the residual stream (R1)", self.width, modules)


def find_residual_stream(
    model: Any,
    mapping: SpinQuantMapping | None = None,
    norm_mappings: Iterable[NormMapping] | None = None,
) -> ResidualStream:
    """Find the residual stream of a language model.

    Args:
        model: its weights may be on the meta device.
        mapping: the parts of the model, instead of inferred ones.
        norm_mappings: norms and the Linears they feed, instead of traced ones.

    Raises:
        TargetError: a part of the model is not invariant under a rotation of the stream; names it.
    """
    _check_text_only(model)
    names = {module: name for name, module in named_modules(model)}
    begin, head = embeddings(model)
    if mapping is not None:
        begin = _single_match(model, mapping.embedding, "embedding")
        head = _single_match(model, mapping.lm_head, "lm_head")
    if not isinstance(begin, Embedding):
        raise TargetError(f"{type(model).__name__} has no input embedding that is one.", NAME_PARTS)
    width, flow = begin.embedding_dim, trace_flow(model)
    if mapping is not None:
        writing = match_named_modules(model, [mapping.attn_o, *mapping.mlp_out])
        writers = {module: name for name, module in writing}
    else:
        linears = _linears(model, [_ATTENTION_WRITERS, _MLP_WRITERS]).items()
        writers = {module: name for name, module in linears if module.out_features == width}
    if norm_mappings is not None:
        fed = _norms_from_mappings(model, norm_mappings)
    else:
        fed = _traced_norms(names, width, flow, writers)
    norms = [Norm(one, _rms_norm_offset(one, names[one], width), fed[one]) for one in fed]
    _check_rotatable(model, ResidualStream(width, norms, writers), flow, head)
    called = [one for one in flow.called if isinstance(one, Embedding)]
    begins = [one for one in called if one.embedding_dim == width] or [begin]
    return ResidualStream(width, norms, {**{one: names[one] for one in begins}, **writers})


def untraced_linears(model: Module, stream: ResidualStream) -> list[str]:
    """Linears as wide as the stream that neither read it nor write to it, as far as traced."""
    seen = {*stream.readers, *stream.writers}
    return [
        name
        for name, module in named_modules(model)
        if isinstance(module, Linear)
        and module not in seen
        and stream.width in (module.in_features, module.out_features)
    ]


def _check_text_only(model: Any) -> None:
    config, reason = getattr(model, "config", None), ""
    if config is None or text_config(config) is not config:
        reason = (
            "is not a plain language model: what else feeds its residual stream (images, sounds) "
            "would have to be rotated too, and is not seen"
        )
    elif getattr(config, "is_encoder_decoder", False):
        reason = "has two residual streams, and R1 rotates one"
    if reason:
        raise TargetError(f"{type(model).__name__} {reason}.", _WITHOUT_R1)


def _single_match(model: Module, target: str, role: str) -> Module:
    found = dict(match_named_modules(model, [target]))
    if len(found) != 1:
        raise TargetError(
            f"mappings: {role} is to be one module, and {target!r} matches {len(found)}.",
            "Give its name.",
        )
    return next(iter(found.values()))


def _traced_norms(
    names: Mapping[Module, str], width: int, flow: DataFlow, writers: Mapping[Module, str]
) -> dict[Module, dict[Module, str]]:
    """Norm of the stream → the modules that read it."""
    owner = {name: module for module, name in names.items()}
    found: dict[Module, dict[Module, str]] = {}
    for module, name in names.items():
        weight = module._parameters.get("weight")  # of a Linear, or a router's matrix
        if weight is None or weight.ndim != 2 or module in writers or isinstance(module, Embedding):
            continue
        norm, parent = flow.feeder.get(module), name
        if is_expert(name) and name.rpartition(".")[2] in _EXPERT_READERS:
            while norm is None and parent:  # experts get rows of their parent's input
                parent = parent.rpartition(".")[0]
                norm = flow.feeder.get(owner[parent]) if parent in owner else None
        if norm is None or isinstance(norm, Linear | Embedding) or not _is_norm(norm, width):
            continue  # an activation
        if not isinstance(flow.feeder.get(norm), Linear):  # else a norm within attention
            found.setdefault(norm, {})[module] = name
    return found


def _norms_from_mappings(
    model: Module, given: Iterable[NormMapping]
) -> dict[Module, dict[Module, str]]:
    found: dict[Module, dict[Module, str]] = {}
    for mapping in given:
        linears = list(match_named_modules(model, mapping.linears))
        norms = list(match_named_modules(model, [mapping.norm]))
        if not norms or not linears:
            empty = mapping.linears if norms else mapping.norm
            raise TargetError(f"norm_mappings: {empty!r} matches no module.", "Correct the target.")
        for name, norm in norms:
            parent = name.rpartition(".")[0]
            own = {m: n for n, m in linears if len(norms) == 1 or n.startswith(f"{parent}.")}
            if not own:
                raise TargetError(
                    f"norm_mappings: none of {mapping.linears} lies beside {name}.",
                    "Correct the targets.",
                )
            found.setdefault(norm, {}).update(own)
    return found


def _is_norm(module: Module, width: int) -> bool:
    weight = module._parameters.get("weight")
    if weight is not None:
        return weight.ndim == 1 and len(weight) == width
    return "Norm" in type(module).__name__ and not module._modules


def _rms_norm_offset(norm: Module, name: str, width: int) -> float:
    """The constant that an RMS norm adds to its weight, measured by running it in float32.

    Raises:
        TargetError: it does not commute with a rotation, even without its gain.
    """
    weight_C, reason = norm._parameters.get("weight"), ""
    x = torch.randn(_TRIED_ROWS, width, generator=torch.Generator().manual_seed(0))
    x = x if weight_C is None or weight_C.is_meta else x.to(weight_C.device)
    ones = {} if weight_C is None else {norm: {"weight": torch.ones_like(x[0])}}
    offset: float | None = 0.0
    if norm._parameters.get("bias") is not None:
        reason = "has a bias"
    else:
        with torch.no_grad(), swapped_parameters(ones):
            if torch.allclose(norm(x), norm(x + 1), atol=1e-3):
                reason = "subtracts the mean"
            elif weight_C is not None:
                offset = norm_offset(norm, (x,), {})
    if offset is None:
        reason = "does not multiply by its weight"
    if reason:
        raise TargetError(
            f"The norm {name} {reason}, and R1 needs RMS norms, whose gains it moves into the "
            "Linears after them.",
            _WITHOUT_R1,
        )
    assert offset is not None
    return offset


def _check_rotatable(
    model: Module, stream: ResidualStream, flow: DataFlow, head: Module | None
) -> None:
    """Refuse a stream that cannot be rotated, and name the reason."""
    readers, kind = stream.readers, type(model).__name__
    for name, module in named_modules(model):
        feeder = flow.feeder.get(module)
        if feeder in stream.writers and _is_norm(module, stream.width):
            raise TargetError(
                f"The norm {name} acts on what {stream.writers[feeder]} adds to the residual "
                "stream: its gains cannot be moved into a Linear, nor past a rotation.",
                _WITHOUT_R1,
            )
    stacked = find_stacked_moes(model)
    if stacked:
        raise TargetError(
            f"The experts {stacked[0].name} are stacked in one tensor, which R1 does not rotate, "
            "and are not unfused.",
            _WITHOUT_R1,
        )
    inside: set[Module] = set()
    for block, name in find_blocks(model).items():
        own = set(block.modules())
        inside |= own
        if own.isdisjoint(readers) or own.isdisjoint(stream.writers):
            raise TargetError(
                f"What reads and writes the residual stream was not found in {name} "
                f"({type(block).__name__}).",
                NAME_PARTS,
            )
    if head is None and inside.issuperset(readers):
        raise TargetError(
            f"{kind} returns its residual stream: R1 would rotate what it returns.",
            f"Load it with its head. {_WITHOUT_R1}",
        )
    if head is not None and head not in readers:
        raise TargetError(f"No norm was seen to feed the output head of {kind}.", NAME_PARTS)
