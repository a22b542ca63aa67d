# SPDX-License-Identifier: Apache-2.0
"""Residual stream of a model: traced in a forward, or given by the recipe.

::

    embedding --> stream --> norm --> readers (q, k, v; gate, up; routers; the head)
                    ^                    |
                    +---- writers <------+   (o, down)

A norm is identified by the Linears that read its output unchanged. Writers have no such property,
since their output is added to the stream: they are identified by their usual names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module

from llmcompressor.equalization.rescale import norm_offset, swapped_parameters
from llmcompressor.errors import TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import DataFlow, trace_flow
from llmcompressor.modeling.fused import is_expert
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import embeddings, text_config
from llmcompressor.modifiers.rotation.plan import (
    ATTENTION_WRITERS,
    MLP_WRITERS,
    SAY_PARTS,
    Norm,
    NormMapping,
    SpinQuantMapping,
)
from llmcompressor.moe.linear_experts import find_stacked_moes

__all__ = ["ResidualStream", "find_residual_stream", "untraced_linears"]

_EXPERT_READERS = ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj")
_NORM_CHECK = 4


@dataclass
class ResidualStream:
    """The residual stream: the modules that read it and write to it.

    Attributes:
        width: width of the stream.
        embeddings: embeddings that it starts from.
        norms: its norms by name, with their readers.
        writers: Linears whose output is added to it.
        head: the output head, one of the readers, if there is one.
    """

    width: int
    embeddings: dict[Module, str]
    norms: dict[str, Norm]
    writers: dict[Module, str]
    head: Module | None = None

    @property
    def readers(self) -> dict[Module, str]:
        """All modules that read the stream through a norm."""
        return {
            module: name for norm in self.norms.values() for module, name in norm.readers.items()
        }


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
        raise TargetError(f"{type(model).__name__} has no input embedding that is one.", SAY_PARTS)
    width = begin.embedding_dim
    flow = trace_flow(model)
    writers = _find_writers(model, names, width, mapping)
    fed = _norm_readers(model, names, width, flow, writers, norm_mappings)
    norms = {
        names[norm]: Norm(norm, _measure_norm_offset(norm, names[norm], width), readers)
        for norm, readers in fed.items()
    }
    first: dict[Module, str] = {
        module: names[module]
        for module in flow.called
        if isinstance(module, Embedding) and module.embedding_dim == width
    }
    stream = ResidualStream(width, first or {begin: names[begin]}, norms, writers, head)
    _check_rotatable(model, stream, flow, names)
    if mapping is not None:
        _check_mapping(model, stream, mapping)
    return stream


def untraced_linears(model: Module, stream: ResidualStream) -> list[str]:
    """Linears as wide as the stream that neither read it nor write to it, as far as traced.

    Linears that follow others of that width are among them.
    """
    seen = {*stream.readers, *stream.writers}
    return [
        name
        for name, module in named_modules(model)
        if isinstance(module, Linear)
        and module not in seen
        and stream.width in (module.in_features, module.out_features)
    ]


def _check_mapping(model: Module, stream: ResidualStream, mapping: SpinQuantMapping) -> None:
    """Refuse mappings whose readers have no norm of the stream before them."""
    targets = [mapping.attn_q, mapping.attn_k, mapping.attn_v, *mapping.mlp_in, mapping.lm_head]
    readers = stream.readers
    for name, module in match_named_modules(model, targets):
        if module not in readers:
            raise TargetError(
                f"mappings: no norm of the residual stream was seen to feed {name}.",
                "Say which does with norm_mappings.",
            )


def _check_text_only(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or text_config(config) is not config:
        raise TargetError(
            f"{type(model).__name__} is not a plain language model: what else feeds its residual "
            "stream (images, sounds) would have to be rotated too, and is not seen.",
            "Leave R1 out of rotations.",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"{type(model).__name__} has two residual streams, and R1 rotates one.",
            "Leave R1 out of rotations.",
        )


def _single_match(model: Module, target: str, role: str) -> Module:
    found = dict(match_named_modules(model, [target]))
    if len(found) != 1:
        raise TargetError(
            f"mappings: {role} is to be one module, and {target!r} matches {len(found)}.",
            "Give its name.",
        )
    return next(iter(found.values()))


def _find_writers(
    model: Module, names: Mapping[Module, str], width: int, mapping: SpinQuantMapping | None
) -> dict[Module, str]:
    if mapping is not None:
        targets = [mapping.attn_o, *mapping.mlp_out]
        return {module: name for name, module in match_named_modules(model, targets)}
    wanted = (*ATTENTION_WRITERS, *MLP_WRITERS)
    return {
        module: name
        for module, name in names.items()
        if isinstance(module, Linear)
        and name.rpartition(".")[2] in wanted
        and module.out_features == width
    }


def _norm_readers(
    model: Module,
    names: Mapping[Module, str],
    width: int,
    flow: DataFlow,
    writers: Mapping[Module, str],
    given: Iterable[NormMapping] | None,
) -> dict[Module, dict[Module, str]]:
    """Norm of the stream → the modules that read it."""
    if given is not None:
        return _norms_from_mappings(model, given)
    found: dict[Module, dict[Module, str]] = {}
    owner = {name: module for module, name in names.items()}
    for module, name in names.items():
        weight = module._parameters.get("weight")  # of a Linear, or a router's matrix
        if weight is None or weight.ndim != 2 or module in writers or isinstance(module, Embedding):
            continue
        norm = flow.feeder.get(module)
        if norm is None and is_expert(name) and name.rpartition(".")[2] in _EXPERT_READERS:
            norm = _feeder_above(owner, flow, name)  # experts get rows of their parent's input
        if norm is None or isinstance(norm, Linear | Embedding):
            continue
        if isinstance(flow.feeder.get(norm), Linear) or not _is_norm(norm, width):
            continue  # a norm within attention, an activation
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


def _feeder_above(owner: Mapping[str, Module], flow: DataFlow, name: str) -> Module | None:
    while name:
        name = name.rpartition(".")[0]
        feeder = flow.feeder.get(owner[name]) if name in owner else None
        if feeder is not None:
            return feeder
    return None


def _measure_norm_offset(norm: Module, name: str, width: int) -> float:
    """The constant that an RMS norm adds to its weight, measured by running it."""
    weight_C = norm._parameters.get("weight")
    if norm._parameters.get("bias") is not None:
        raise TargetError(
            f"The norm {name} has a bias.",
            "R1 needs RMS norms: leave it out of rotations.",
        )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NORM_CHECK, width, generator=generator)
    x = x if weight_C is None or weight_C.is_meta else x.to(weight_C.device)
    ones = {} if weight_C is None else {norm: {"weight": torch.ones_like(x[0])}}
    with torch.no_grad(), swapped_parameters(ones):
        centres = torch.allclose(norm(x), norm(x + 1), atol=1e-3)
    if centres:
        raise TargetError(
            f"The norm {name} subtracts the mean, which a rotation of the residual stream does not "
            "keep.",
            "R1 needs RMS norms: leave it out of rotations.",
        )
    if weight_C is None:
        return 0.0
    with (
        torch.no_grad(),
        swapped_parameters(ones),
    ):  # in float32: narrower weights would round the factors
        offset = norm_offset(norm, (x,), {})
    if offset is None:
        raise TargetError(
            f"The norm {name} ({type(norm).__name__}) does not multiply by its weight, so that it "
            "cannot be moved into the Linears behind it.",
            "Leave R1 out of rotations.",
        )
    return offset


def _check_rotatable(
    model: Module, stream: ResidualStream, flow: DataFlow, names: Mapping[Module, str]
) -> None:
    """Refuse a stream that cannot be rotated, and name the reason."""
    readers = stream.readers
    for module, name in names.items():
        feeder = flow.feeder.get(module)
        if feeder in stream.writers and _is_norm(module, stream.width):
            raise TargetError(
                f"The norm {name} acts on what {stream.writers[feeder]} adds to the residual "
                "stream: its gains cannot be moved into a Linear, nor past a rotation.",
                "Leave R1 out of rotations.",
            )
    stacked = find_stacked_moes(model)
    if stacked:
        raise TargetError(
            f"The experts {stacked[0].name} are stacked in one tensor, which R1 does not rotate, "
            "and are not taken apart.",
            "Leave R1 out of rotations.",
        )
    for block, name in find_blocks(model).items():
        inside = set(block.modules())
        if not inside & set(readers) or not inside & set(stream.writers):
            raise TargetError(
                f"What reads and writes the residual stream was not found in {name} "
                f"({type(block).__name__}).",
                SAY_PARTS,
            )
    if stream.head is not None and stream.head not in readers:
        raise TargetError(
            f"No norm was seen to feed the output head {names[stream.head]}.", SAY_PARTS
        )
    inside = {module for block in find_blocks(model) for module in block.modules()}
    if stream.head is None and inside.issuperset(readers):
        raise TargetError(
            f"{type(model).__name__} returns its residual stream: R1 would rotate what it returns.",
            "Load it with its head, or leave R1 out of rotations.",
        )
    wrong = [
        name
        for one, name in readers.items()
        if one.get_parameter("weight").shape[1] != stream.width
    ]
    if wrong:
        raise TargetError(f"{wrong[0]} does not read {stream.width} channels.", SAY_PARTS)
