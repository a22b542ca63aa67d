# SPDX-License-Identifier: Apache-2.0
"""Smoothing mappings of a model: a norm or Linear, and the Linears that read it.

They are named by the recipe, or else found from the structure of the blocks, as a run of one shows
it (:mod:`llmcompressor.equalization.probe`). Each one that is named is tried on that run: one that
would change the model's output is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.nn import Linear, Module

from llmcompressor.equalization.probe import (
    BlockProbe,
    ChannelLink,
    ValidationOutcome,
    ValidationResult,
    block_probes,
)
from llmcompressor.equalization.rescale import input_channels
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.fused import parse_expert_name
from llmcompressor.modeling.matching import group_matches, match_named_modules, matches
from llmcompressor.modeling.names import NameForms, TargetIndex, named_modules
from llmcompressor.moe.linear_experts import find_stacked_moes
from llmcompressor.runtime.progress import join_names

Names = tuple[str, tuple[str, ...]]
"""A target for the smooth module, and targets for those that read it."""
_SHOWN = 8
"""Names that are written out."""


# --------------------
# Mappings of known architectures, for code that reads them to write its own.
#
# A run finds mappings from a model's structure, regardless of this table. Mappings that are read
# here, changed and passed to a modifier are the user's own.

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
_LISTED: dict[str, tuple[Names, ...]] = {
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
    **_LISTED,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma3ForConditionalGeneration": _in_submodel("language_model", _LISTED["Gemma3ForCausalLM"]),
    "Mistral3ForConditionalGeneration": _in_submodel(
        "language_model", _LISTED["MistralForCausalLM"]
    ),
    "Qwen2_5_VLForConditionalGeneration": _in_submodel(
        "language_model", _LISTED["Qwen2ForCausalLM"]
    ),
    "Qwen3MoeForCausalLM": _MIXTURE,
}
"""Smooth targets with those that read them, by the name of the model's class."""


def norm_mappings(names: Sequence[Names]) -> tuple[Names, ...]:
    """The mappings that begin with a norm."""
    return tuple(one for one in names if "norm" in one[0])


# --------------------
# Smoothing sets, found from the structure of the blocks.


@dataclass(frozen=True, eq=False)
class SmoothSet:
    """A smooth module and the modules that balance it.

    Attributes:
        name: of the smooth module.
        smooth: the module whose output channels are divided: a norm or a Linear.
        balance: name → Linear, or router, whose input columns are multiplied.
        offset: what a norm adds to its weight.
        block: name of the block that holds it all; ``None`` for what lies in no block.
    """

    name: str
    smooth: Module
    balance: Mapping[str, Module]
    offset: float = 0.0
    block: str | None = None

    @property
    def is_norm(self) -> bool:
        """Return True if the smooth module is a norm, not a Linear."""
        return not isinstance(self.smooth, Linear)

    @property
    def columns(self) -> int:
        """Number of channels, C."""
        columns = input_channels(next(iter(self.balance.values())))
        assert columns is not None
        return columns

    @property
    def rows(self) -> int:
        """Number of rows of a Linear, 0 of a norm."""
        return self.smooth.out_features if isinstance(self.smooth, Linear) else 0

    @cached_property
    def linears(self) -> dict[str, Module]:
        """The members of ``balance`` whose inputs are observed: all but routers."""
        return {name: one for name, one in self.balance.items() if isinstance(one, Linear)}

    def __str__(self) -> str:
        return f"{self.name} -> {format_names(self.balance)}"


def format_names(names: Iterable[str]) -> str:
    """Format names for a message: those of all experts as one, and only the first of many.

    >>> format_names(f"mlp.experts.{number}.{own}" for number in range(128) for own in ("w1", "w3"))
    'mlp.experts.*.w1, mlp.experts.*.w3'
    """
    parts = ((name, parse_expert_name(name)) for name in names)
    every = [name if part is None else f"{part.experts}.*.{part.own}" for name, part in parts]
    return join_names(list(dict.fromkeys(every)), most=_SHOWN)


def find_smooth_sets(
    model: Module,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    norms_only: bool = False,
    mixtures: bool = True,
) -> list[SmoothSet]:
    """Find the smoothing sets of a model by the structure of its blocks.

    Args:
        model: its weights may be on the meta device.
        batches: model inputs to try where a row of token ids alone does not do.
        norms_only: leave out those whose smooth module is a Linear.
        mixtures: also those from a norm to a router and the experts of an MoE; one that feeds
            attention as well is found in any case.

    Returns:
        The sets in the order of the model; none where nothing is to be found.
    """
    links: dict[BlockProbe, list[ChannelLink]] = {}
    found = []
    for block, probe in block_probes(model, batches).items():
        if probe not in links:
            links[probe] = probe.find(norms_only=norms_only, mixtures=mixtures)
        for link in links[probe]:
            name = f"{block}.{link.smooth}"
            names = [f"{block}.{own}" for own in link.balance]
            readers = {own: model.get_submodule(own) for own in names}
            found.append(SmoothSet(name, model.get_submodule(name), readers, link.offset, block))
    return _without_shared(model, found)


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


# --------------------
# Smoothing mappings of a recipe: matched block by block, tried, and rejected with the reason.
#
# A smooth module and the modules that read it belong to one block. A norm without readers in its
# block, or readers without a norm, are no match. So a mapping may cover some of the layers, and
# layers need not be alike: where a dense layer has no router, its gate and up are all that reads
# the norm.

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
    matched = _MappingMatches(model, names)
    for one in names:
        _refuse_unmatched(model, one, matched.unmatched(one))
    probes = block_probes(model, batches)
    resolver = _MappingResolver(
        model, probes, {name for name, _ in match_named_modules(model, list(ignore))}
    )
    for one in names:
        resolver.add(one, matched.places(one))
    return resolver.finish()


def _format_mapping(names: Names) -> str:
    """Format a mapping as a recipe has it; of many targets only the first ones."""
    return f"{names[0]!r} -> [{join_names(map(repr, names[1]), most=_SHOWN)}]"


def _refuse_unmatched(model: Module, names: Names, missing: Sequence[str]) -> None:
    if not missing:
        return
    stacked = [one.name for one in find_stacked_moes(model)]
    if stacked and any("experts" in target for target in missing):
        raise TargetError(
            f"The mapping {_format_mapping(names)} names parts of experts, and those of "
            f"{format_names(stacked)} are in stacks: no Linear is called {missing[0]!r}. They are "
            "unfused where the targets of a modifier that quantizes or prunes reach them.",
            "Have such a modifier's targets mean the experts, and none of its ignore entries, or "
            "leave them out of the mapping.",
        )
    raise TargetError(
        f"The mapping {_format_mapping(names)} matches nothing: no module of "
        f"{type(model).__name__} is called {missing[0]!r}.",
        f"Correct it, {_OR_LEAVE_OUT}",
    )


class _MappingMatches:
    """The matches of all mappings, from one traversal of the model.

    Recipes may name each expert of each layer, and have as many mappings as the model has modules.
    """

    def __init__(self, model: Module, mappings: Sequence[Names]) -> None:
        self._model = model
        targets = list(dict.fromkeys(one for smooth, own in mappings for one in (smooth, *own)))
        blocks = set(find_blocks(model).values())
        forms, possible, known = NameForms(targets), TargetIndex(targets), dict[object, list[str]]()
        self._hits: dict[str, list[int]] = {target: [] for target in targets}
        self._modules: list[tuple[str, Module, str | None]] = []
        block: str | None = None
        for name, module in named_modules(model):
            if name in blocks:
                block = name
            elif block is not None and not name.startswith(f"{block}."):
                block = None
            form = (type(module), forms.of(name))
            if form not in known:
                meant = possible.of(name, module)
                known[form] = [target for target in meant if matches(name, module, target)]
            for target in known[form]:
                self._hits[target].append(len(self._modules))
            self._modules.append((name, module, block))

    def unmatched(self, names: Names) -> list[str]:
        """Targets of a mapping that match no module."""
        return [target for target in (names[0], *names[1]) if not self._hits[target]]

    def places(self, names: Names) -> list[SmoothSet]:
        """The matches of a mapping in model order, without the norm's offset.

        Raises:
            TargetError: it matches in no block; several modules are to be smoothed in one place, or
                a reader cannot take scales.
        """
        targets, hits = (names[0], *names[1]), dict[int, list[str]]()
        for target in targets:
            for place in self._hits[target]:
                hits.setdefault(place, []).append(target)
        by_block: dict[str | None, list[tuple[str, Module, list[str]]]] = {}
        for place in sorted(hits):
            name, module, block = self._modules[place]
            by_block.setdefault(block, []).append((name, module, hits[place]))
        found = []
        for block, members in by_block.items():
            there = {target for _, _, own in members for target in own}
            if names[0] not in there or len(there) == 1:
                continue
            for first, *others in group_matches(members, [one for one in targets if one in there]):
                readers = {name: module for pairs in others for name, module in pairs}
                _check_place(names, first, readers)
                found.append(SmoothSet(*first[0], readers, block=block))
        if not found:
            smooth, *readers_of = ([self._modules[p][0] for p in self._hits[t]] for t in targets)
            every = dict.fromkeys(name for each in readers_of for name in each)
            raise TargetError(
                f"The mapping {_format_mapping(names)} joins nothing: no block of "
                f"{type(self._model).__name__} holds a module to smooth and one that reads it. It "
                f"matches {format_names(smooth)} and {format_names(every)}.",
                f"Correct it, {_OR_LEAVE_OUT}",
            )
        return found


def _check_place(
    names: Names, first: Sequence[tuple[str, Module]], readers: Mapping[str, Module]
) -> None:
    if len(first) > 1:
        raise TargetError(
            f"The mapping {_format_mapping(names)} has more than one module to smooth in one "
            f"place: {format_names(name for name, _ in first)}.",
            "Make its target match one of them.",
        )
    wrong = [name for name, module in readers.items() if input_channels(module) is None]
    if wrong:
        raise TargetError(
            f"{wrong[0]} is a {type(readers[wrong[0]]).__name__}; only Linears, and routers with "
            "one matrix, can take the scales that smoothing moves.",
            "Correct the mapping.",
        )


@dataclass
class _MappingResolver:
    """The sets found so far for the mappings, and what was left out."""

    model: Module
    probes: Mapping[str, BlockProbe]
    ignored: set[str]
    found: list[SmoothSet] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    completed: dict[str, list[str]] = field(default_factory=dict)
    """What is said of places whose mapping does not name all that reads their smooth module; by
    the same without numbers, as layers are alike, and some recipes name each."""
    left_out: list[tuple[str, bool]] = field(default_factory=list)
    """What is said of a mapping, and whether it is a warning."""
    links: dict[BlockProbe, dict[str, ChannelLink]] = field(default_factory=dict)

    def add(self, names: Names, places: Iterable[SmoothSet]) -> None:
        """Add the sets of one mapping, or the reason why it has none."""
        before, reasons = len(self.found), dict[str, bool]()
        for place in places:
            if self.ignored.intersection((place.name, *place.balance)):
                reasons["all that it matches is to be ignored"] = False
                continue
            self._take(place, place.balance)
            reasons |= self._judge(place, _format_mapping(names))
        is_empty = len(self.found) == before
        told = [one for one in reasons.items() if is_empty or one[1]]
        told.sort(key=lambda one: not one[1])  # layers are alike: one reason is enough
        self.left_out += [(f"{_format_mapping(names)}: {why}", warns) for why, warns in told[:1]]

    def finish(self) -> list[SmoothSet]:
        """The sets; report what is left out, or raise if nothing is left."""
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
        return self.found

    def _judge(self, place: SmoothSet, said: str) -> dict[str, bool]:
        """Add a place that holds; else return why it is left out, and whether that is a warning."""
        verdict = self._validate(place)
        if verdict.outcome is ValidationOutcome.HOLDS:
            self.found.append(replace(place, offset=verdict.offset))
            return {}
        reason = _reason(place, verdict)
        if verdict.outcome is not ValidationOutcome.CHANGES:
            return {reason: verdict.outcome is ValidationOutcome.UNTRIED}
        every = self._readers(place)  # also those without a name in the recipe, as routers
        if not place.balance.keys() < set(every):
            raise TargetError(f"{reason}.", f"Name all modules that read it, {_OR_LEAVE_OUT}")
        whole = replace(place, balance={name: self.model.get_submodule(name) for name in every})
        others = [name for name in every if name not in place.balance]
        if ignored := self.ignored.intersection(others):
            names = format_names(sorted(ignored))
            return {f"{names} reads {place.name}, too, and is to be ignored": True}
        self._take(place, others)
        text = (
            f"The mapping {said} does not name all that reads {place.name}, and what it leaves out "
            f"is scaled, too, or the model would compute something else: {format_names(others)}."
        )
        self.completed.setdefault(re.sub(r"\d+", "", text), []).append(text)
        self.found.append(replace(whole, offset=self._validate(whole).offset))
        return {}

    def _take(self, place: SmoothSet, readers: Iterable[str]) -> None:
        """Refuse readers that another mapping scales."""
        for name in readers:
            before = self.taken.get(name)
            if before is not None:
                raise TargetError(
                    f"{name} stands in two mappings: it reads {before} and {place.name}.",
                    "Make the targets exclude each other.",
                )
            self.taken[name] = place.name

    def _validate(self, place: SmoothSet) -> ValidationResult:
        """The verdict on a place, from a run of its block."""
        probe = self.probes.get(place.block or "")
        shares = 0 < _value_rows(place) < place.columns
        if shares and place.rows < place.columns:
            return ValidationResult(ValidationOutcome.SHARES)
        if probe is None:
            return ValidationResult(ValidationOutcome.UNTRIED)
        own = [name.removeprefix(f"{place.block}.") for name in (place.name, *place.balance)]
        found = probe.verify(own[0], own[1:])
        if shares and found.outcome is ValidationOutcome.CHANGES:
            return ValidationResult(ValidationOutcome.SHARES)
        return found

    def _readers(self, place: SmoothSet) -> tuple[str, ...]:
        """All modules that read the smooth module of a place; empty if they were not found."""
        probe = self.probes[place.block or ""]
        if probe not in self.links:
            self.links[probe] = {link.smooth: link for link in probe.find()}
        link = self.links[probe].get(place.name.removeprefix(f"{place.block}."))
        return () if link is None else tuple(f"{place.block}.{name}" for name in link.balance)


def _value_rows(place: SmoothSet) -> int:
    """Rows of a Linear, in a fused one those of the values; 0 for a norm.

    They are the last rows of a fused Linear, after queries and as many rows for the keys.
    """
    rows, odd = divmod(place.rows - place.columns, 2)
    is_fused = not odd and 0 < rows < place.columns and place.columns % rows == 0
    return rows if is_fused else place.rows


def _reason(place: SmoothSet, verdict: ValidationResult) -> str:
    """Why a place is not smoothed, without a full stop."""
    others = ", ".join(f"{place.block}.{name}" for name in verdict.others)
    if verdict.outcome is ValidationOutcome.SHARES:
        rows, reader = _value_rows(place), next(iter(place.balance))
        has = f"{rows} rows" + ("" if rows == place.rows else " of values")
        return (
            f"{place.name} has {has} and {reader} {place.columns} columns: where heads share keys "
            "and values, several columns read one row, and one scale cannot serve them all"
        )
    if verdict.outcome is ValidationOutcome.CHANGES:
        also = f"it is read by {others}, too" if others else "it reaches them otherwise"
        return f"Smoothing {place} would change what the model computes: {also}"
    why = f"{place.block} could not be run"
    if others:
        why = f"no token reached {others}"
    elif place.block is None:
        why = f"{place.name} lies in no block"
    return f"Whether smoothing {place} leaves what the model computes cannot be tried: {why}"
