# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are smoothed together: a norm or Linear, and the Linears that read it.

What counts, from the last word to the first: the recipe's own mappings; the names that the
architecture is listed with; the structure of the blocks, as a run of one shows it
(:mod:`llmcompressor.modeling.structure`). Whatever a mapping comes from, it is tried on that run:
one that would change what the model computes is an error in a recipe, and dropped from a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import Linear, Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import match_modules_set, unmatched
from llmcompressor.modeling.scaling import norm_offset, swapped
from llmcompressor.modeling.structure import BlockProbe, Link, probes_of
from llmcompressor.names import named_modules

__all__ = ["Names", "SmoothSet", "find_sets", "listed_names", "named_sets"]

Names = tuple[str, tuple[str, ...]]
"""A target for the smooth module, and targets for those that read it."""

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


@dataclass(frozen=True, eq=False)
class SmoothSet:
    """Modules that are smoothed together.

    Attributes:
        name: of the smooth module.
        smooth: the module whose output channels are divided: a norm or a Linear.
        balance: name → Linear whose input columns are multiplied.
        offset: what a norm adds to its weight.
    """

    name: str
    smooth: Module
    balance: Mapping[str, Module]
    offset: float = 0.0

    @property
    def is_norm(self) -> bool:
        """Whether a norm is smoothed, and not a Linear."""
        return not isinstance(self.smooth, Linear)

    @property
    def columns(self) -> int:
        """C, the channels."""
        first: Any = next(iter(self.balance.values()))
        return int(first.in_features)

    def __str__(self) -> str:
        return f"{self.name} -> {', '.join(self.balance)}"


def listed_names(model: Module) -> tuple[Names, ...] | None:
    """The names that the model's architecture is listed with, or ``None``."""
    return _LISTED.get(type(model).__name__)


def find_sets(
    model: Module, batches: Iterable[Mapping[str, Any]] = (), *, norms_only: bool = False
) -> list[SmoothSet]:
    """The sets of a model that nobody has named: listed ones, else those of its structure.

    Args:
        model: its weights may be on the meta device.
        batches: model inputs to try where a row of token ids alone does not do.
        norms_only: leave out those whose smooth module is a Linear.

    Returns:
        The sets in the order of the model; none where nothing is to be found.
    """
    probes = probes_of(model, batches)
    names = listed_names(model)
    found = None if names is None else _listed_sets(model, names, probes)
    if not found:
        found = list(_structure(model, probes))
    return [one for one in found if one.is_norm or not norms_only]


def _listed_sets(
    model: Module, names: Sequence[Names], probes: Mapping[str, BlockProbe]
) -> list[SmoothSet]:
    """Sets by listed names, but for those that do not fit this very model."""
    present = [
        (smooth, balance) for smooth, balance in names if not unmatched(model, (smooth, *balance))
    ]
    checker = _Checker(model, probes)
    found = []
    for smooth, readers in (pair for one in present for pair in _matched(model, one, ())):
        if reason := _grouped(smooth, readers):
            logger.debug(f"Not smoothed: {reason}.")
            continue
        fits = checker.check(smooth[0], readers)
        if fits is None:
            logger.warning(
                f"{smooth[0]} -> {', '.join(readers)}: not smoothed, since it would change what "
                "the model computes."
            )
            continue
        found.append(SmoothSet(smooth[0], smooth[1], readers, fits))
    return found


def _structure(model: Module, probes: Mapping[str, BlockProbe]) -> Iterable[SmoothSet]:
    modules = dict(named_modules(model))
    links: dict[int, list[Link]] = {}
    for block, probe in probes.items():
        if id(probe) not in links:
            links[id(probe)] = probe.find()
        for link in links[id(probe)]:
            name = f"{block}.{link.smooth}"
            readers = {f"{block}.{own}": modules[f"{block}.{own}"] for own in link.balance}
            yield SmoothSet(name, modules[name], readers, link.offset)


def named_sets(
    model: Module,
    names: Sequence[Names],
    ignore: Sequence[str] = (),
    batches: Iterable[Mapping[str, Any]] = (),
) -> list[SmoothSet]:
    """The sets that a recipe names.

    Args:
        model: its weights may be on the meta device.
        names: targets of the smooth module and of those that read it.
        ignore: modules that are left out.
        batches: as for :func:`find_sets`.

    Raises:
        TargetError: a mapping matches nothing, its smooth module is not one or cannot be scaled,
            it would change what the model computes, a module stands in two of them, or none of
            them can be smoothed.
    """
    checker = _Checker(model, probes_of(model, batches))
    found: list[SmoothSet] = []
    taken: dict[str, str] = {}
    left_out = []
    for names_of_one in names:
        _refuse_unmatched(model, names_of_one)
        before, reason = len(found), "all that it matches is to be ignored"
        for smooth, readers in _matched(model, names_of_one, ignore):
            _refuse_taken(smooth[0], readers, taken)
            if grouped := _grouped(smooth, readers):
                reason = grouped
                continue
            found.append(
                SmoothSet(smooth[0], smooth[1], readers, _offset(checker, smooth[0], readers))
            )
        if len(found) == before:
            left_out.append(f"{_written(names_of_one)}: {reason}")
    if left_out and not found:
        raise TargetError(
            f"None of the mappings can be smoothed in {type(model).__name__}. "
            f"{'. '.join(left_out)}.",
            "Name others, or leave mappings out: they are then found from the model.",
        )
    for one in left_out:
        logger.info(f"A mapping is not smoothed. {one}.")
    return found


def _written(names: Names) -> str:
    return f"{names[0]!r} -> {list(names[1])}"


def _refuse_unmatched(model: Module, names: Names) -> None:
    missing = unmatched(model, (names[0], *names[1]))
    if missing:
        raise TargetError(
            f"The mapping {_written(names)} matches nothing: no module of {type(model).__name__} "
            f"is called {missing[0]!r}.",
            "Correct it, or leave mappings out: they are then found from the model.",
        )


def _offset(checker: _Checker, smooth: str, readers: Iterable[str]) -> float:
    """The offset of a set that has to be one."""
    offset = checker.check(smooth, readers)
    if offset is None:
        raise TargetError(
            f"Smoothing {smooth} -> {', '.join(readers)} would change what the model computes: "
            "its output is read elsewhere too, or reaches them otherwise.",
            "Name all modules that read it, or leave mappings out: they are then found from the "
            "model.",
        )
    return offset


def _refuse_taken(smooth: str, readers: Mapping[str, Module], taken: dict[str, str]) -> None:
    for name in readers:
        if name in taken:
            raise TargetError(
                f"{name} stands in two mappings: it reads {taken[name]} and {smooth}.",
                "Make the targets exclude each other.",
            )
        taken[name] = smooth


def _matched(
    model: Module, names: Names, ignore: Sequence[str]
) -> Iterable[tuple[tuple[str, Module], dict[str, Module]]]:
    """Smooth module and readers of each place where the names match."""
    for first, *others in match_modules_set(model, [names[0], *names[1]], ignore):
        if len(first) > 1:
            raise TargetError(
                f"The mapping {_written(names)} has more than one module to smooth in one place: "
                f"{', '.join(name for name, _ in first[:4])}.",
                "Make its target match one of them.",
            )
        readers = {name: module for pairs in others for name, module in pairs}
        wrong = [name for name, module in readers.items() if not isinstance(module, Linear)]
        if wrong:
            raise TargetError(
                f"{wrong[0]} is a {type(readers[wrong[0]]).__name__}; only Linears can take "
                "the scales that smoothing moves.",
                "Correct the mapping.",
            )
        yield first[0], readers


def _grouped(smooth: tuple[str, Module], readers: Mapping[str, Module]) -> str | None:
    """That several columns read one row, if so: values of grouped heads, which are not smoothed."""
    name, first = next(iter(readers.items()))
    columns = cast(Linear, first).in_features
    rows = getattr(smooth[1], "out_features", None)
    if rows is None or rows >= columns:
        return None
    return (
        f"{smooth[0]} has {rows} rows and {name} {columns} columns: where heads share keys and "
        "values, several columns read one row, and one scale cannot serve them all"
    )


class _Checker:
    """Tries named sets on a run of their block, once per form of block."""

    def __init__(self, model: Module, probes: Mapping[str, BlockProbe]) -> None:
        self._probes = probes
        self._modules = dict(named_modules(model))
        self._known: dict[object, float | None] = {}

    def check(self, smooth: str, readers: Iterable[str]) -> float | None:
        """The offset of a norm (0 for a Linear); ``None`` where outputs would change."""
        names = (smooth, *readers)
        block = next((one for one in self._probes if _all_inside(names, one)), None)
        if block is None:
            return self._unproven(smooth)
        own = tuple(name.removeprefix(f"{block}.") for name in names)
        key = (id(self._probes[block]), own)
        if key not in self._known:
            try:
                link = self._probes[block].verify(own[0], own[1:])
            except LookupError:
                return self._unproven(smooth)
            self._known[key] = None if link is None else link.offset
        return self._known[key]

    def _unproven(self, smooth: str) -> float | None:
        """What lies in no block that was run is taken at the recipe's word."""
        logger.debug(f"{smooth}: that smoothing it changes no output could not be tried.")
        return _offset_alone(self._modules[smooth])


def _all_inside(names: Iterable[str], block: str) -> bool:
    return all(name.startswith(f"{block}.") for name in names)


def _offset_alone(module: Module) -> float | None:
    """The offset of a norm that is run by itself."""
    if isinstance(module, Linear):
        return 0.0
    own = {name: p for name, p in dict.items(module._parameters) if p is not None}
    if "weight" not in own or own["weight"].ndim != 1:
        return None
    columns = len(own["weight"])
    states = torch.linspace(-1, 1, 4 * columns).sin().reshape(1, 4, columns)
    with torch.no_grad(), swapped({module: {name: torch.ones(p.shape) for name, p in own.items()}}):
        return norm_offset(module, (states,), {})
