# SPDX-License-Identifier: Apache-2.0
"""Which module of a model gets which scheme.

The matching itself is compressed-tensors' own, because what reads the checkpoint decides by it
(an expert's Linears may be meant by a second name, which never gets into a checkpoint).
Around it, four decisions keep the checkpoint servable. Each is logged once, with names:

- **Router gates stay out.** A class target such as ``Linear`` does not reach the gate of a
  mixture of experts: engines build gates unquantized. Naming a gate still quantizes it.
- **A tied head stays out.** A class target does not reach an output head whose weight is the
  input embedding's: packed, it could no longer be shared. Naming the head asks for it, and then
  the weights must be untied first (``tied_weights`` in :mod:`llmcompressor.schemes.checks`).
- **An untied head is targeted by name.** Engines do not find heads by ``Linear``. Where a class
  target reaches the head, a pattern for its name is added to the group's targets.
- **Narrow matrices get narrow groups.** A matrix with fewer columns than an integer group has
  one group, as wide as the matrix. It is a scheme of its own, targeted by the full names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.utils.match import is_narrow_match, match_targets
from torch.nn import Embedding, Linear, Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.names import Forms, Possible, means, named_modules, names_of
from llmcompressor.schemes.attention import is_cached_attention
from llmcompressor.wording import listed

__all__ = [
    "SchemeLookup",
    "assign_schemes",
    "is_empty",
    "is_quantizable",
    "is_router",
    "is_served_plain",
    "matching_targets",
    "output_head",
    "reached",
    "weight_of",
]

_ROUTER = re.compile(r"(?:.*\.)?(?:(?:gate|router)(?:\..+)?|router_gate|shared_expert_gate)")
_INDEXER = re.compile(r"(?:.*\.)?indexer\.(?:wk|weights_proj)")
_ROUTER_CLASS = re.compile(r"Router|Gating|Gate(?![a-z])")


def is_empty(scheme: QuantizationScheme) -> bool:
    """Whether ``scheme`` quantizes nothing, as ``UNQUANTIZED`` does."""
    return not (scheme.weights or scheme.input_activations or scheme.output_activations)


def is_router(name: str, module: Module) -> bool:
    """Whether a module decides which expert a token goes to, by its name or its class."""
    return bool(_ROUTER.fullmatch(name) or _ROUTER_CLASS.search(type(module).__name__))


def is_served_plain(name: str, module: Module) -> bool:
    """Whether servers build a module without quantization: routers, and parts of indexers.

    These choose which tokens sparse attention looks at.
    """
    return is_router(name, module) or _INDEXER.fullmatch(name) is not None


def weight_of(module: Module) -> torch.Tensor | None:
    """The module's weight where it lies, without moving an offloaded one."""
    weight: object = None
    if type(module._parameters) is dict:  # nothing of it is offloaded
        weight = module._parameters.get("weight")
        if weight is None:
            weight = getattr(module, "weight", None)
    else:
        with disable_onloading():
            weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


class SchemeLookup:
    """The scheme that a Linear of a name would get, without what is decided for whole models.

    Args:
        groups: the schemes with their targets.
        ignore: names, ``re:`` patterns or class names; they win over every target.
    """

    def __init__(self, groups: Iterable[QuantizationScheme], ignore: Iterable[str]) -> None:
        self._by_target = {target: scheme for scheme in groups for target in scheme.targets}
        self._targets, self._ignore = Possible(self._by_target), Possible(ignore)

    def of(self, name: str, module: Module) -> QuantizationScheme | None:
        """``None`` if no target means it, or an ignore entry does."""
        matched = matching_targets(name, module, self._targets.of(name, module))
        if not matched or matching_targets(name, module, self._ignore.of(name, module)):
            return None
        return self._by_target[matched[0]]


def matching_targets(name: str, module: Module, targets: Iterable[str]) -> list[str]:
    """Those of the targets that mean a module; the first one counts.

    compressed-tensors' order, a name before a pattern before a class, over all the names that
    a module is meant by (:func:`llmcompressor.names.names_of`).
    """
    every = list(targets)
    matched: list[str] = match_targets(name, module, every)
    if len(names_of(name)) == 1:
        return matched
    by_name = sorted(
        {target for target in every if means(target, name)},
        key=lambda target: (target.startswith("re:"), target),
    )
    by_class = (one for one in matched if one not in by_name and not one.startswith("re:"))
    return [*by_name, *by_class]


def assign_schemes(
    model: Module,
    groups: Iterable[QuantizationScheme],
    ignore: Sequence[str] = (),
    *,
    may_be_empty: bool = False,
    allow_unquantizable: bool = False,
) -> dict[str, QuantizationScheme]:
    """The scheme of each module to quantize, by full name, in model order.

    Args:
        model: the model; nothing in it is changed.
        groups: the schemes with their targets.
        ignore: names, ``re:`` patterns or class names; they win over every target.
        may_be_empty: accept that no module is left to quantize.
        allow_unquantizable: accept targets that match only modules that cannot be quantized.

    Raises:
        TargetError: a target reaches only modules that cannot be quantized, or none is left.
    """
    schemes = list(groups)
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    found = _Walk(model, by_target, list(ignore)).run()
    if not allow_unquantizable:
        _refuse_useless(found)
    _report(found)
    if not found.schemes and not may_be_empty and not all(map(is_empty, schemes)):
        others = {type(one).__name__ for one in found.modules.values() if _is_unreadable(one)}
        raise TargetError(
            f"No module of {type(model).__name__} is left to quantize by "
            f"{', '.join(map(repr, by_target))}: what matches is ignored or cannot be quantized"
            f"{_unreadable(others)}.",
            "Correct targets or ignore; Linear and Embedding modules can be quantized.",
        )
    return _with_named_heads(_fitted(found.modules, found.schemes), found.heads)


def reached(
    model: Module, groups: Iterable[QuantizationScheme], ignore: Sequence[str] = ()
) -> dict[str, QuantizationScheme]:
    """Which modules targets reach, by full name: nothing is refused, told or fitted."""
    by_target = {target: scheme for scheme in groups for target in scheme.targets}
    return _Walk(model, by_target, list(ignore)).run().schemes


class _Matched(NamedTuple):
    """What all modules of one form get."""

    targets: list[str]
    """The targets that match them, the first counts."""
    by_name: list[str]
    """Those that match by name."""
    is_ignored: bool


@dataclass
class _Walk:
    """One walk over a model, and what it found, for the log and the errors."""

    model: Module
    by_target: Mapping[str, QuantizationScheme]
    ignore: list[str]
    modules: dict[str, Module] = field(default_factory=dict)
    schemes: dict[str, QuantizationScheme] = field(default_factory=dict)
    served_plain: list[str] = field(default_factory=list)
    tied_heads: list[str] = field(default_factory=list)
    heads: dict[str, QuantizationScheme] = field(default_factory=dict)
    contested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    useful: set[str] = field(default_factory=set)
    useless: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(named_modules(self.model))
        embeddings = (each for each in self.modules.values() if isinstance(each, Embedding))
        self._embedded = {id(weight_of(each)) for each in embeddings}
        self._head = output_head(self.model)
        self._possible = Possible(self.by_target)
        self._left_out = Possible(self.ignore)

    def run(self) -> _Walk:
        forms = Forms([*self.by_target, *self.ignore])
        known: dict[object, _Matched] = {}
        for name, module in self.modules.items():
            form = (type(module), forms.of(name))
            if form not in known:
                known[form] = self._match(name, module)
            found = known[form]
            if not found.targets:
                continue
            if found.is_ignored:
                self.useful.update(found.targets)
            elif self._can_carry(name, module, self.by_target[found.targets[0]]):
                self.useful.update(found.targets)
                self._assign(name, module, found)
            else:
                self._note_useless(name, module, found.targets)
        return self

    def _note_useless(self, name: str, module: Module, targets: list[str]) -> None:
        for target in targets:
            self.useless.setdefault(target, set()).add(type(module).__name__)
        if _is_unreadable(module):
            self.unreadable[name] = type(module).__name__

    def _match(self, name: str, module: Module) -> _Matched:
        matched = matching_targets(name, module, self._possible.of(name, module))
        ignore = self._left_out.of(name, module)
        return _Matched(
            matched,
            [target for target in matched if means(target, name)],
            bool(matched) and bool(matching_targets(name, module, ignore)),
        )

    def _can_carry(self, name: str, module: Module, scheme: QuantizationScheme) -> bool:
        """Linears and embeddings carry any scheme; attention carries one for its inputs only."""
        if is_quantizable(module):
            return True
        for_inputs = scheme.input_activations is not None and scheme.weights is None
        return (
            for_inputs
            and is_cached_attention(module)
            and is_narrow_match(self.model, scheme.targets, name, module)
        )

    def _assign(self, name: str, module: Module, found: _Matched) -> None:
        matched, by_name = found.targets, found.by_name
        scheme = self.by_target[matched[0]]
        if is_empty(scheme):
            return
        if len({id(self.by_target[target]) for target in by_name}) > 1:
            self.contested[name] = tuple(by_name)
        # A class of its own, such as Llama4Router, names the module as well as its name does.
        own_class = type(module).__name__ in set(matched) - {"Linear"}
        if isinstance(module, Linear) and not by_name and not own_class:
            if is_served_plain(name, module):
                self.served_plain.append(name)
                return
            if id(weight_of(module)) in self._embedded:
                self.tied_heads.append(name)
                return
            if module is self._head or _last(name) == "lm_head":
                self.heads[name] = scheme
        self.schemes[name] = scheme


def output_head(model: Module) -> Module | None:
    """The output embedding of a model that says which one it is."""
    getter = getattr(model, "get_output_embeddings", None)
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = getter() if callable(getter) else None
        return head if isinstance(head, Module) else None
    return None


def is_quantizable(module: Module) -> bool:
    """Whether it is a Linear or an Embedding that computes from its input alone.

    That is what readers give to a quantized module; learned positions of many classes (OPT's,
    BART's, Whisper's) are Embeddings that want the length of a cache or a mask, too.
    """
    kind: Any = type(module)  # hashable, whatever it is a class of
    return isinstance(module, Linear | Embedding) and _takes_one(kind)


@functools.cache
def _takes_one(kind: Any) -> bool:
    parameters = list(inspect.signature(kind.forward).parameters.values())
    return len(parameters) == 2 and parameters[1].kind is not inspect.Parameter.VAR_KEYWORD


def _is_unreadable(module: Module) -> bool:
    """Whether its weight is a matrix, of a class that compressed-tensors cannot run quantized."""
    if is_quantizable(module):
        return False
    weight = weight_of(module)
    return weight is not None and weight.ndim > 1


def _unreadable(classes: Iterable[str]) -> str:
    """What to say of matrices that stay in full, empty if there are none."""
    names = ", ".join(sorted(set(classes)))
    return f"; no reader knows a quantized {names}" if names else ""


def _refuse_useless(found: _Walk) -> None:
    for target, classes in found.useless.items():
        if target not in found.useful:
            reason = _unreadable(classes & set(found.unreadable.values()))
            raise TargetError(
                f"The target {target!r} matches only modules of class "
                f"{', '.join(sorted(classes))}, which its scheme cannot be applied to{reason}.",
                "Linear and Embedding modules can be quantized, and attention modules by a scheme "
                "with input_activations alone; for the Linears inside, end the pattern with '.*'.",
            )


def _report(found: _Walk) -> None:
    if found.served_plain:
        logger.info(
            f"Left unquantized: {len(found.served_plain)} router gate(s) or the like, which "
            f"engines serve unquantized ({listed(found.served_plain)}). To quantize one, target it "
            "by name."
        )
    if found.unreadable:
        logger.info(
            f"Left unquantized: {len(found.unreadable)} module(s) that targets match "
            f"({listed(found.unreadable)}){_unreadable(found.unreadable.values())}."
        )
    if found.tied_heads:
        logger.warning(
            f"Left unquantized: {listed(found.tied_heads)}, whose weight is the input "
            "embedding's. Add it to ignore, or pass tie_word_embeddings=False to quantize it."
        )
    if found.contested:
        name, targets = next(iter(found.contested.items()))
        logger.warning(
            f"{len(found.contested)} module(s) match targets of different schemes; {name}, for "
            f"one, matches {' and '.join(map(repr, targets))} and gets the scheme of "
            f"{targets[0]!r}. An engine takes the first in the file's order, which may be "
            "another. Make the patterns exclude each other."
        )


def _with_named_heads(
    schemes: Mapping[str, QuantizationScheme], heads: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """The schemes, where those that reach a head by class also target it by name."""
    patterns: dict[int, list[str]] = {}
    for name, scheme in heads.items():
        if schemes[name] is scheme:
            patterns.setdefault(id(scheme), []).append(f"re:.*{re.escape(_last(name))}$")
    # Names stand before classes: readers report a target as unmatched if another came first.
    named = {
        id(scheme): scheme.model_copy(update={"targets": [*patterns[id(scheme)], *scheme.targets]})
        for scheme in heads.values()
        if id(scheme) in patterns
    }
    return {name: named.get(id(scheme), scheme) for name, scheme in schemes.items()}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fitted(
    modules: Mapping[str, Module], schemes: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """The schemes, where matrices narrower than their group have one of their own."""
    narrowed: dict[tuple[int, int], QuantizationScheme | None] = {}
    fitted: dict[str, QuantizationScheme] = {}
    for name, scheme in schemes.items():
        columns = _columns(modules[name])
        if columns is None:
            fitted[name] = scheme
            continue
        key = (id(scheme), columns)
        if key not in narrowed:
            is_narrow = any(_is_narrow(args, columns) for _, args in _grouped(scheme))
            narrowed[key] = _narrow(scheme, columns) if is_narrow else None
        own = narrowed[key]
        if own is not None:
            own.targets.append(name)
        fitted[name] = scheme if own is None else own
    for (_, columns), narrow in narrowed.items():
        if narrow is None:
            continue
        logger.info(
            f"{listed(narrow.targets)}: {columns} columns are fewer than a group has; each row "
            "is one group there."
        )
    return fitted


def _columns(module: Module) -> int | None:
    weight = weight_of(module)
    return weight.shape[-1] if weight is not None and weight.dim() == 2 else None


def _grouped(scheme: QuantizationScheme) -> Iterator[tuple[str, QuantizationArgs]]:
    for field_name in ("weights", "input_activations"):
        args = getattr(scheme, field_name)
        if args is not None and args.strategy == "group" and args.group_size:
            yield field_name, args


def _is_narrow(args: QuantizationArgs, columns: int) -> bool:
    # The group of an MX format is part of the format.
    return bool(columns < args.group_size and args.scale_dtype != torch.uint8)


def _narrow(scheme: QuantizationScheme, columns: int) -> QuantizationScheme:
    update: dict[str, object] = {
        name: args.model_copy(update={"group_size": columns})
        for name, args in _grouped(scheme)
        if _is_narrow(args, columns)
    }
    return scheme.model_copy(update={**update, "targets": []})
