# SPDX-License-Identifier: Apache-2.0
"""Smoothing mappings of a model: a norm or Linear, and the Linears that read it.

In order of precedence: the recipe's own mappings (:mod:`llmcompressor.equalization.mappings`);
the names listed for the architecture; the structure of the blocks, as a run of one shows it
(:mod:`llmcompressor.equalization.probe`). Every mapping is verified on that run: one that would
change the model's output, or cannot be verified, is an error in a recipe, and dropped from a list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from llmcompressor.equalization.probe import (
    BlockProbe,
    ChannelLink,
    MappingMatch,
    MappingMatches,
    MappingValidator,
    Names,
    SmoothSet,
    ValidationOutcome,
    block_probes,
    format_mapping,
    format_names,
)
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.moe.linear_experts import find_stacked_moes

__all__ = [
    "LISTED",
    "WRITTEN",
    "architecture_mappings",
    "find_norm_sets",
    "find_smooth_sets",
    "matching_names",
    "norm_mappings",
    "resolve_mappings",
]

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


def architecture_mappings(model: Module) -> tuple[Names, ...] | None:
    """The mappings that are listed for the model's architecture, or ``None``."""
    return LISTED.get(type(model).__name__)


def find_smooth_sets(
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
    probes = block_probes(model, batches)
    names = architecture_mappings(model)
    found = None if names is None else _listed_sets(model, names, probes)
    if not found:
        found = list(_structural_sets(model, probes, norms_only=norms_only, mixtures=mixtures))
    return [one for one in _without_shared(model, found) if one.is_norm or not norms_only]


def find_norm_sets(model: Module) -> list[SmoothSet]:
    """All smoothing sets that begin with a norm, by the structure of the blocks alone.

    Args:
        model: its weights may be on the meta device.
    """
    sets = _structural_sets(model, block_probes(model), norms_only=True, mixtures=True)
    return _without_shared(model, list(sets))


def _listed_sets(
    model: Module, names: Sequence[Names], probes: Mapping[str, BlockProbe]
) -> list[SmoothSet]:
    """The sets of listed mappings, without those that do not hold in this model."""
    places, prover = MappingMatches(model, names), MappingValidator(probes)
    present = [one for one in names if not places.unmatched(one)]
    found = []
    for place in (place for one in present for place in places.of(one)):
        verdict = prover.validate_match(place)
        if verdict.outcome is ValidationOutcome.HOLDS:
            found.append(place.to_smooth_set(verdict.offset))
        elif verdict.outcome is ValidationOutcome.SHARES:
            logger.debug(f"Not smoothed: {prover.reason(place, verdict)}.")
        else:
            logger.warning(f"{place}: not smoothed. {prover.reason(place, verdict)}.")
    return found


def _without_shared(model: Module, sets: Sequence[SmoothSet]) -> list[SmoothSet]:
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


def _structural_sets(
    model: Module, probes: Mapping[str, BlockProbe], *, norms_only: bool, mixtures: bool
) -> Iterable[SmoothSet]:
    links: dict[int, list[ChannelLink]] = {}
    for block, probe in probes.items():
        if id(probe) not in links:
            links[id(probe)] = probe.find(norms_only=norms_only, mixtures=mixtures)
        for link in links[id(probe)]:
            name = f"{block}.{link.smooth}"
            names = [f"{block}.{own}" for own in link.balance]
            readers = {own: model.get_submodule(own) for own in names}
            yield SmoothSet(name, model.get_submodule(name), readers, link.offset)


# --------------------
# Mappings of known architectures, for code that reads them to write its own.
#
# A run finds mappings from a model's structure (:mod:`llmcompressor.equalization.mappings`),
# regardless of this table. Mappings that are read here, changed and passed to a modifier are the
# user's own.

_ROUTED = ("re:.*mlp.gate$", "re:.*mlp.experts.*.gate_proj$", "re:.*mlp.experts.*.up_proj$")
_MIXTURE: tuple[Names, ...] = (
    ("re:.*input_layernorm$", ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$")),
    ("re:.*v_proj$", ("re:.*o_proj$",)),
    ("re:.*post_attention_layernorm$", _ROUTED),
    ("re:.*up_proj$", ("re:.*down_proj$",)),
)
_LATENT: tuple[Names, ...] = (
    ("re:.*input_layernorm$", ("re:.*(q|q_a)_proj$", "re:.*kv_a_proj_with_mqa$")),
    ("re:.*q_a_layernorm$", ("re:.*q_b_proj$",)),
    ("re:.*kv_a_layernorm$", ("re:.*kv_b_proj$",)),
    ("re:.*post_attention_layernorm$", ("re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$")),
    ("re:.*up_proj$", ("re:.*down_proj$",)),
)


def _in_submodel(part: str, names: tuple[Names, ...]) -> tuple[Names, ...]:
    """The same names, restricted to a part of the model."""

    def placed(name: str) -> str:
        return name.replace("re:.*", f"re:.*{part}.*", 1)

    return tuple((placed(smooth), tuple(map(placed, readers))) for smooth, readers in names)


WRITTEN: dict[str, tuple[Names, ...]] = {
    **LISTED,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma3ForConditionalGeneration": _in_submodel("language_model", LISTED["Gemma3ForCausalLM"]),
    "Mistral3ForConditionalGeneration": _in_submodel(
        "language_model", LISTED["MistralForCausalLM"]
    ),
    "Qwen2_5_VLForConditionalGeneration": _in_submodel(
        "language_model", LISTED["Qwen2ForCausalLM"]
    ),
    "Qwen3MoeForCausalLM": _MIXTURE,
}
"""Smooth targets with those that read them, by the name of the model's class."""


def norm_mappings(names: Sequence[Names]) -> tuple[Names, ...]:
    """The mappings that begin with a norm."""
    return tuple(one for one in names if "norm" in one[0])


# --------------------
# Smoothing mappings of a recipe: resolved, verified, and rejected with the reason.

_OR_LEAVE_OUT = "or leave mappings out: they are then found from the model."


def resolve_mappings(
    model: Module,
    names: Sequence[Names],
    ignore: Sequence[str] = (),
    batches: Iterable[Mapping[str, Any]] = (),
) -> list[SmoothSet]:
    """The smoothing sets that a recipe names.

    Args:
        model: its weights may be on the meta device.
        names: targets of the smooth module and of those that read it.
        ignore: modules that are left out, and what is smoothed together with them.
        batches: model inputs to try where a row of token ids alone does not do.

    Raises:
        TargetError: a mapping matches nothing, or not within one block; its smooth module is not
            one or cannot be scaled; it would change what the model computes, whatever is scaled
            with it; a module stands in two of them; or none of them can be smoothed.
    """
    places = MappingMatches(model, names)
    for one in names:
        _refuse_unmatched(model, one, places.unmatched(one))
    search = _MappingResolver(
        model, places, MappingValidator(block_probes(model, batches)), matching_names(model, ignore)
    )
    for one in names:
        search.add(one)
    search.finish()
    return search.found


@dataclass
class _MappingResolver:
    """The sets found so far for the mappings, and what was left out."""

    model: Module
    places: MappingMatches
    prover: MappingValidator
    ignored: set[str]
    found: list[SmoothSet] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    completed: dict[str, list[str]] = field(default_factory=dict)
    """What is said of places whose mapping does not name all that reads their smooth module; by
    the same without numbers, as layers are alike, and some recipes name each."""
    left_out: list[tuple[str, bool]] = field(default_factory=list)
    """What is said of a mapping, and whether it is a warning."""

    def add(self, names: Names) -> None:
        """Add the sets of one mapping, or the reason why it has none."""
        before, reasons = len(self.found), dict[str, bool]()
        places = list(self.places.of(names))
        if not places:
            raise _different_blocks_error(names, self.model, self.places)
        for place in places:
            if self.ignored.intersection((place.name, *place.readers)):
                reasons["all that it matches is to be ignored"] = False
                continue
            self._refuse_duplicates(place)
            reasons |= self._judge(place, format_mapping(names))
        is_empty = len(self.found) == before
        told = [one for one in reasons.items() if is_empty or one[1]]
        told.sort(key=lambda one: not one[1])  # layers are alike: one reason is enough
        self.left_out += [(f"{format_mapping(names)}: {why}", warns) for why, warns in told[:1]]

    def _judge(self, place: MappingMatch, said: str) -> dict[str, bool]:
        """Add a place that holds; else return why it is left out, and whether that is a warning."""
        verdict = self.prover.validate_match(place)
        if verdict.outcome is ValidationOutcome.HOLDS:
            self.found.append(place.to_smooth_set(verdict.offset))
            return {}
        reason = self.prover.reason(place, verdict)
        if verdict.outcome is not ValidationOutcome.CHANGES:
            return {reason: verdict.outcome is ValidationOutcome.UNTRIED}
        every = self.prover.readers(place)  # also those without a name in the recipe, as routers
        if not place.readers.keys() < set(every):
            raise TargetError(f"{reason}.", f"Name all modules that read it, {_OR_LEAVE_OUT}")
        whole = replace(place, readers={name: self.model.get_submodule(name) for name in every})
        others = [name for name in whole.readers if name not in place.readers]
        if ignored := self.ignored.intersection(others):
            names = format_names(sorted(ignored))
            return {f"{names} reads {place.name}, too, and is to be ignored": True}
        self._refuse_duplicates(
            replace(whole, readers={name: whole.readers[name] for name in others})
        )
        text = (
            f"The mapping {said} does not name all that reads {place.name}, and what it leaves out "
            f"is scaled, too, or the model would compute something else: {format_names(others)}."
        )
        self.completed.setdefault(re.sub(r"\d+", "", text), []).append(text)
        self.found.append(whole.to_smooth_set(self.prover.validate_match(whole).offset))
        return {}

    def _refuse_duplicates(self, place: MappingMatch) -> None:
        for name in place.readers:
            before = self.taken.get(name)
            if before == place.name:
                raise TargetError(
                    f"Two mappings have {before}, and both scale {name}, which reads it.",
                    "Name all that reads it in one of them.",
                )
            if before is not None:
                raise TargetError(
                    f"{name} stands in two mappings: it reads {before} and {place.name}.",
                    "Make the targets exclude each other.",
                )
            self.taken[name] = place.name

    def finish(self) -> None:
        """Report what is left out, or raise if nothing is left."""
        if self.left_out and not self.found:
            said = ". ".join(text for text, _ in self.left_out)
            raise TargetError(
                f"None of the mappings can be smoothed in {type(self.model).__name__}. {said}.",
                f"Name others, {_OR_LEAVE_OUT}",
            )
        for first, *alike in self.completed.values():
            logger.warning(f"{first} The same in {len(alike)} more places." if alike else first)
        for text, warns in self.left_out:
            (logger.warning if warns else logger.info)(f"A mapping is not smoothed. {text}.")


def _different_blocks_error(names: Names, model: Module, places: MappingMatches) -> TargetError:
    """The error for a mapping whose matches lie in different blocks."""
    smooth = format_names(places.matched(names[0]))
    readers = format_names(
        dict.fromkeys(one for target in names[1] for one in places.matched(target))
    )
    return TargetError(
        f"The mapping {format_mapping(names)} joins nothing: no block of {type(model).__name__} "
        "holds a "
        f"module to smooth and one that reads it. It matches {smooth} and {readers}.",
        f"Correct it, {_OR_LEAVE_OUT}",
    )


def matching_names(model: Module, targets: Sequence[str]) -> set[str]:
    """Names of the modules that any of the targets matches."""
    return {name for name, _ in match_named_modules(model, targets)} if targets else set()


def _refuse_unmatched(model: Module, names: Names, missing: Sequence[str]) -> None:
    if not missing:
        return
    stacked = [one.name for one in find_stacked_moes(model)]
    if stacked and any("experts" in target for target in missing):
        raise TargetError(
            f"The mapping {format_mapping(names)} names parts of experts, and those of "
            f"{format_names(stacked)} are in stacks: no Linear is called {missing[0]!r}. They are "
            "taken "
            "apart where the targets of a modifier that quantizes or prunes reach them.",
            "Have such a modifier's targets mean the experts, and none of its ignore entries, or "
            "leave them out of the mapping.",
        )
    raise TargetError(
        f"The mapping {format_mapping(names)} matches nothing: no module of {type(model).__name__} "
        f"is called {missing[0]!r}.",
        f"Correct it, {_OR_LEAVE_OUT}",
    )
