# SPDX-License-Identifier: Apache-2.0
"""Smoothing mappings of a model: a norm or Linear, and the Linears that read it.

In order of precedence: the recipe's own mappings (:mod:`llmcompressor.modeling.named_mappings`);
the names listed for the architecture; the structure of the blocks, as a run of one shows it
(:mod:`llmcompressor.modeling.structure`). Every mapping is verified on that run: one that would
change the model's output, or cannot be verified, is an error in a recipe, and dropped from a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from llmcompressor.logger import logger
from llmcompressor.modeling.mapped_places import Names, Places, SmoothSet
from llmcompressor.modeling.probes import probes_of
from llmcompressor.modeling.proof import Prover
from llmcompressor.modeling.structure import BlockProbe, Link, Outcome

__all__ = ["LISTED", "find_sets", "listed_names", "norm_sets"]

_QKV = ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$")
_GATE_UP = ("re:.*gate_proj$", "re:.*up_proj$")
_V_TO_O: Names = ("re:.*v_proj$", ("re:.*o_proj$",))
_UP_TO_DOWN: Names = ("re:.*up_proj$", ("re:.*down_proj$",))
_PLAIN: tuple[Names, ...] = (
    ("re:.*input_layernorm$", _QKV),
    _V_TO_O,
    ("re:.*post_attention_layernorm$", _GATE_UP),
    _UP_TO_DOWN,
)
_GEMMA: tuple[Names, ...] = (
    ("re:.*input_layernorm$", _QKV),
    _V_TO_O,
    ("re:.*pre_feedforward_layernorm$", _GATE_UP),
    _UP_TO_DOWN,
)
_COHERE: tuple[Names, ...] = (
    ("re:.*input_layernorm$", (*_QKV, *_GATE_UP)),
    _V_TO_O,
    _UP_TO_DOWN,
)
_PHI: tuple[Names, ...] = (
    ("re:.*input_layernorm$", ("re:.*qkv_proj$",)),
    ("re:.*qkv_proj$", ("re:.*o_proj$",)),
    ("re:.*post_attention_layernorm$", ("re:.*gate_up_proj$",)),
    ("re:.*gate_up_proj$", ("re:.*down_proj$",)),
)
LISTED: dict[str, tuple[Names, ...]] = {
    **dict.fromkeys(
        (
            "GraniteForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "SeedOssForCausalLM",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM"), _GEMMA),
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), _COHERE),
    **dict.fromkeys(("Phi3ForCausalLM", "Phi3VForCausalLM"), _PHI),
}
"""Names of what is smoothed together, by the name of the model's class."""


def listed_names(model: Module) -> tuple[Names, ...] | None:
    """The mappings that are listed for the model's architecture, or ``None``."""
    return LISTED.get(type(model).__name__)


def find_sets(
    model: Module,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    norms_only: bool = False,
    mixtures: bool = True,
) -> list[SmoothSet]:
    """Find the smoothing sets of a model without a recipe's mappings: listed, else by structure.

    Args:
        model: its weights may be on the meta device.
        batches: model inputs to try where a row of token ids alone does not do.
        norms_only: leave out those whose smooth module is a Linear.
        mixtures: also those from a norm to a router and the experts of an MoE; one that feeds
            attention as well is found in any case.

    Returns:
        The sets in the order of the model; none where nothing is to be found.
    """
    probes = probes_of(model, batches)
    names = listed_names(model)
    found = None if names is None else _listed_sets(model, names, probes)
    if not found:
        found = list(_structure(model, probes, norms_only=norms_only, mixtures=mixtures))
    return [one for one in _unshared(model, found) if one.is_norm or not norms_only]


def norm_sets(model: Module) -> list[SmoothSet]:
    """All smoothing sets that begin with a norm, by the structure of the blocks alone.

    Args:
        model: its weights may be on the meta device.
    """
    sets = _structure(model, probes_of(model), norms_only=True, mixtures=True)
    return _unshared(model, list(sets))


def _listed_sets(
    model: Module, names: Sequence[Names], probes: Mapping[str, BlockProbe]
) -> list[SmoothSet]:
    """The sets of listed mappings, without those that do not hold in this model."""
    places, prover = Places(model, names), Prover(probes)
    present = [one for one in names if not places.unmatched(one)]
    found = []
    for place in (place for one in present for place in places.of(one)):
        verdict = prover.judge(place)
        if verdict.outcome is Outcome.HOLDS:
            found.append(place.as_set(verdict.offset))
        elif verdict.outcome is Outcome.SHARES:
            logger.debug(f"Not smoothed: {prover.reason(place, verdict)}.")
        else:
            logger.warning(f"{place}: not smoothed. {prover.reason(place, verdict)}.")
    return found


def _unshared(model: Module, sets: Sequence[SmoothSet]) -> list[SmoothSet]:
    """Sets whose modules and parameters no other set, and no module outside, shares."""
    owners: dict[int, set[Module]] = {}
    holders: dict[Module, set[Module]] = {}
    for module in model.modules():
        for part in filter(None, module._modules.values()):
            holders.setdefault(part, set()).add(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(module)
    begun = Counter(one.smooth for one in sets)
    kept = []
    for one in sets:
        inside = {one.smooth, *one.balance.values()}
        own = [each for module in inside for each in module._parameters.values()]
        is_own = all(owners.get(id(each), inside) <= inside for each in own)
        is_held_once = all(len(holders.get(module, ())) <= 1 for module in inside)
        if is_own and is_held_once and begun[one.smooth] == 1:
            kept.append(one)
        else:
            logger.warning(f"{one}: left as it is. Others share its modules or their parameters.")
    return kept


def _structure(
    model: Module, probes: Mapping[str, BlockProbe], *, norms_only: bool, mixtures: bool
) -> Iterable[SmoothSet]:
    links: dict[int, list[Link]] = {}
    for block, probe in probes.items():
        if id(probe) not in links:
            links[id(probe)] = probe.find(norms_only=norms_only, mixtures=mixtures)
        for link in links[id(probe)]:
            name = f"{block}.{link.smooth}"
            names = [f"{block}.{own}" for own in link.balance]
            readers = {own: model.get_submodule(own) for own in names}
            yield SmoothSet(name, model.get_submodule(name), readers, link.offset)
