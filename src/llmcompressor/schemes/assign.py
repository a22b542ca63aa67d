# SPDX-License-Identifier: Apache-2.0
"""Assignment of quantization schemes to the modules of a model.

Matching is done by compressed-tensors, because the loader of the checkpoint decides by it too.
(A Linear of an expert may also match by a second name, which is never written to a checkpoint.)
Four decisions on top of it keep the checkpoint servable. Each is logged once, with names:

- **What engines build unquantized stays so.** A class target such as ``Linear`` does not match
  the router gate of an MoE, what joins the inputs of a draft layer, or a module whose weight its
  parent uses without calling it (:func:`reason_to_leave`). Naming one still quantizes it.
- **A tied head stays unquantized.** A class target does not match an output head that shares its
  weight with the input embedding: a packed weight cannot be shared. Naming the head quantizes it,
  and then the weights must be untied first (``tied_weights`` in
  :mod:`llmcompressor.schemes.checks`).
- **An untied head is targeted by name.** Engines do not find heads by ``Linear``. Where a class
  target matches the head, a pattern for its name is added to the group's targets.
- **Narrow matrices get narrow groups.** A matrix with fewer columns than an integer group gets
  one group as wide as the matrix. This is a scheme of its own, targeted by full module names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import (
    QuantizationScheme,
)
from compressed_tensors.utils.match import is_narrow_match, match_targets
from torch.nn import Embedding, Linear, Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.names import (
    NameForms,
    TargetIndex,
    matches_target,
    name_aliases,
    named_modules,
)
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.attention import is_cached_attention

_ROUTER = re.compile(r"(?:.*\.)?(?:(?:gate|router)(?:\..+)?|router_gate|shared_expert_gate)")
_SERVED_PLAIN = {
    "a part of an indexer": re.compile(r"(?:.*\.)?indexer\.(?:wk|weights_proj)"),
    "a part of a draft layer": re.compile(
        r"(?:.*\.)?(?:eh_proj|mtp_linear_proj(?:\.\d+)?|mtp_layers\.\d+\.input_proj|shared_head\.head"
        r"|masked_embedding\.centroids|(?:confidence|markov)_head\..*)"
    ),
    "a step of a state-space model": re.compile(r"(?:.*\.)?dt_proj"),
}
"""What is built plain → its names: the indexer selects the tokens of sparse attention."""
_ROUTER_CLASS = re.compile(r"Router|Gating|Gate(?![a-z])")


def is_empty(scheme: QuantizationScheme) -> bool:
    """Return True if ``scheme`` quantizes nothing, such as ``UNQUANTIZED``."""
    return not (scheme.weights or scheme.input_activations or scheme.output_activations)


def is_router(name: str, module: Module) -> bool:
    """Return True if the name or the class of a module is that of an MoE router."""
    return bool(_ROUTER.fullmatch(name) or _ROUTER_CLASS.search(type(module).__name__))


def reason_to_leave(name: str, module: Module, parent: Module | None) -> str:
    """The reason why a class target leaves a Linear unquantized; empty if there is none.

    No reader has codes in its place: engines build it plain, or its parent reads its weight.

    Args:
        name: of the Linear, in the model.
        module: the Linear.
        parent: the module that holds it, if known.

    >>> reason_to_leave("model.layers.0.mlp.gate", torch.nn.Linear(1, 1), None)
    'a router, which engines serve unquantized'
    >>> reason_to_leave("out_proj", torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(2, 1))
    'a weight that MultiheadAttention uses without calling it, so that nothing unpacks it'
    """
    if is_router(name, module):
        return "a router, which engines serve unquantized"
    found = (what for what, pattern in _SERVED_PLAIN.items() if pattern.fullmatch(name))
    if what := next(found, ""):
        return f"{what}, which engines serve unquantized"
    own = name.rpartition(".")[2]
    kind: Any = type(parent)  # hashable, whatever it is a class of
    is_read = parent is not None and _reads_weight(kind, own)
    # known by its other parameters, where there is no class
    is_in_attention = own == "out_proj" and "in_proj_weight" in getattr(parent, "_parameters", ())
    if not (is_read or is_in_attention):
        return ""
    return f"a weight that {kind.__name__} uses without calling it, so that nothing unpacks it"


_SETTING_UP = re.compile(r"__init__|_?init_weights|reset_\w+|_?tie_\w+|[gs]et_\w+")
_FACTS = {"dtype", "device", "shape", "data_ptr", "requires_grad"}


@functools.cache
def _reads_weight(kind: Any, own: str) -> bool:
    """Return True if methods of a class use the weight of this child, and none calls the child."""
    used = re.compile(rf"\bself\.{re.escape(own)}\b(?:\.(?P<own>\w+))?(?:\.(?P<fact>\w+))?")
    uses = set()
    for cls in kind.__mro__[: kind.__mro__.index(Module)]:
        for name, method in vars(cls).items():
            if inspect.isfunction(method) and not _SETTING_UP.fullmatch(name):
                with contextlib.suppress(OSError, TypeError):  # made while running
                    code = re.sub("#.*", "", inspect.getsource(method))
                    uses |= {one.group("own", "fact") for one in used.finditer(code)}
    are_read = any(each == "weight" and fact not in _FACTS for each, fact in uses)
    return are_read and (None, None) not in uses


def weight_without_onloading(module: Module) -> torch.Tensor | None:
    """The module's weight on its present device; an offloaded weight is not moved."""
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
    """Lookup of the scheme of a single Linear by name, without the decisions for a whole model.

    Args:
        groups: the schemes with their targets.
        ignore: names, ``re:`` patterns or class names; they win over every target.
    """

    def __init__(self, groups: Iterable[QuantizationScheme], ignore: Iterable[str]) -> None:
        self._by_target = {target: scheme for scheme in groups for target in scheme.targets}
        self._targets, self._ignore = TargetIndex(self._by_target), TargetIndex(ignore)

    def of(self, name: str, module: Module) -> QuantizationScheme | None:
        """The scheme of a module; ``None`` if no target matches it or an ignore entry does."""
        matched = matching_targets(name, module, self._targets.of(name, module))
        if not matched or matching_targets(name, module, self._ignore.of(name, module)):
            return None
        return self._by_target[matched[0]]


def matching_targets(name: str, module: Module, targets: Iterable[str]) -> list[str]:
    """The targets that match a module; the first one decides.

    The order is that of compressed-tensors: names before patterns before classes, over all names
    under which a module can be matched (:func:`llmcompressor.modeling.names.name_aliases`).
    """
    every = list(targets)
    matched: list[str] = match_targets(name, module, every)
    if len(name_aliases(name)) == 1:
        return matched
    by_name = sorted(
        {target for target in every if matches_target(target, name)},
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
    found = _SchemeMatcher(model, by_target, list(ignore)).run()
    if not allow_unquantizable:
        _refuse_unquantizable_targets(found)
    _log_matches(found)
    if not found.schemes and not may_be_empty and not all(map(is_empty, schemes)):
        others = {
            type(one).__name__ for one in found.modules.values() if _is_unsupported_matrix(one)
        }
        raise TargetError(
            f"No module of {type(model).__name__} is left to quantize by "
            f"{', '.join(map(repr, by_target))}: what matches is ignored or cannot be quantized"
            f"{_unsupported_classes_note(others)}.",
            "Correct targets or ignore; Linear and Embedding modules can be quantized.",
        )
    return _with_named_heads(_with_narrow_groups(found.modules, found.schemes), found.heads)


def match_schemes(
    model: Module, groups: Iterable[QuantizationScheme], ignore: Sequence[str] = ()
) -> dict[str, QuantizationScheme]:
    """The scheme of every matched module by full name, without checks and without logging."""
    by_target = {target: scheme for scheme in groups for target in scheme.targets}
    return _SchemeMatcher(model, by_target, list(ignore)).run().schemes


class _TargetMatch(NamedTuple):
    """The targets that match all modules of one class and name form."""

    targets: list[str]
    """The targets that match them, the first counts."""
    by_name: list[str]
    """Those that match by name."""
    is_ignored: bool


@dataclass
class _SchemeMatcher:
    """A walk over the modules of a model that collects matches for the log and for errors."""

    model: Module
    by_target: Mapping[str, QuantizationScheme]
    ignore: list[str]
    modules: dict[str, Module] = field(default_factory=dict)
    schemes: dict[str, QuantizationScheme] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    tied_heads: list[str] = field(default_factory=list)
    heads: dict[str, QuantizationScheme] = field(default_factory=dict)
    contested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    useful: set[str] = field(default_factory=set)
    useless: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(named_modules(self.model))
        embeddings = (each for each in self.modules.values() if isinstance(each, Embedding))
        self._embedded = {id(weight_without_onloading(each)) for each in embeddings}
        self._head = output_head(self.model)
        self._possible = TargetIndex(self.by_target)
        self._left_out = TargetIndex(self.ignore)

    def run(self) -> _SchemeMatcher:
        forms = NameForms([*self.by_target, *self.ignore])
        known: dict[object, _TargetMatch] = {}
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
                for target in found.targets:
                    self.useless.setdefault(target, set()).add(type(module).__name__)
                if _is_unsupported_matrix(module):
                    self.unreadable[name] = type(module).__name__
        return self

    def _match(self, name: str, module: Module) -> _TargetMatch:
        matched = matching_targets(name, module, self._possible.of(name, module))
        ignore = self._left_out.of(name, module)
        return _TargetMatch(
            matched,
            [target for target in matched if matches_target(target, name)],
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

    def _assign(self, name: str, module: Module, found: _TargetMatch) -> None:
        matched, by_name = found.targets, found.by_name
        scheme = self.by_target[matched[0]]
        if is_empty(scheme):
            return
        if len({id(self.by_target[target]) for target in by_name}) > 1:
            self.contested[name] = tuple(by_name)
        # A class of its own, such as Llama4Router, names the module as well as its name does.
        own_class = type(module).__name__ in set(matched) - {"Linear"}
        if isinstance(module, Linear) and not by_name and not own_class:
            parent = self.modules.get(name.rpartition(".")[0])
            if reason := reason_to_leave(name, module, parent):
                self.left.setdefault(reason, []).append(name)
                return
            if id(weight_without_onloading(module)) in self._embedded:
                self.tied_heads.append(name)
                return
            if module is self._head or name.rpartition(".")[2] == "lm_head":
                self.heads[name] = scheme
        self.schemes[name] = scheme


def output_head(model: Module) -> Module | None:
    """The output embedding of the model, if the model declares it."""
    getter = getattr(model, "get_output_embeddings", None)
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = getter() if callable(getter) else None
        return head if isinstance(head, Module) else None
    return None


def is_quantizable(module: Module) -> bool:
    """Return True for a Linear or an Embedding whose forward takes its input alone.

    Loaders call quantized modules with one input. Position embeddings of many classes (OPT, BART,
    Whisper) are Embeddings that also take the length of a cache or a mask.
    """
    kind: Any = type(module)  # hashable, whatever it is a class of
    return isinstance(module, Linear | Embedding) and _has_single_input_forward(kind)


@functools.cache
def _has_single_input_forward(kind: Any) -> bool:
    parameters = list(inspect.signature(kind.forward).parameters.values())
    return len(parameters) == 2 and parameters[1].kind is not inspect.Parameter.VAR_KEYWORD


def _is_unsupported_matrix(module: Module) -> bool:
    """Return True if the weight is a matrix and compressed-tensors cannot quantize its class."""
    if is_quantizable(module):
        return False
    weight = weight_without_onloading(module)
    return weight is not None and weight.ndim > 1


def _unsupported_classes_note(classes: Iterable[str]) -> str:
    """A part of a message on matrices that stay unquantized; empty if there are none."""
    names = ", ".join(sorted(set(classes)))
    return f"; no reader knows a quantized {names}" if names else ""


def _refuse_unquantizable_targets(found: _SchemeMatcher) -> None:
    for target, classes in found.useless.items():
        if target not in found.useful:
            reason = _unsupported_classes_note(classes & set(found.unreadable.values()))
            raise TargetError(
                f"The target {target!r} matches only modules of class "
                f"{', '.join(sorted(classes))}, which its scheme cannot be applied to{reason}.",
                "Linear and Embedding modules can be quantized, and attention modules by a scheme "
                "with input_activations alone; for the Linears inside, end the pattern with '.*'.",
            )


def _log_matches(found: _SchemeMatcher) -> None:
    for reason, names in found.left.items():
        logger.info(
            f"Left unquantized: {join_names(names)}: {reason}. To quantize one, target it by name."
        )
    if found.unreadable:
        logger.info(
            f"Left unquantized: {len(found.unreadable)} module(s) that targets match "
            f"({join_names(found.unreadable)}){_unsupported_classes_note(found.unreadable.values())}."
        )
    if found.tied_heads:
        logger.warning(
            f"Left unquantized: {join_names(found.tied_heads)}, whose weight is the input "
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
    """The schemes, with the name of the head added to the targets if a class target matches it."""
    patterns: dict[int, list[str]] = {}
    for name, scheme in heads.items():
        if schemes[name] is scheme:
            own = re.escape(name.rpartition(".")[2])
            patterns.setdefault(id(scheme), []).append(f"re:.*{own}$")
    # Names stand before classes: loaders report a target as unmatched if another came first.
    named = {
        id(scheme): scheme.model_copy(update={"targets": [*patterns[id(scheme)], *scheme.targets]})
        for scheme in heads.values()
        if id(scheme) in patterns
    }
    return {name: named.get(id(scheme), scheme) for name, scheme in schemes.items()}


def _with_narrow_groups(
    modules: Mapping[str, Module], schemes: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """The schemes, with a scheme of their own for matrices narrower than their group."""
    narrowed: dict[tuple[int, int], QuantizationScheme | None] = {}
    fitted: dict[str, QuantizationScheme] = {}
    for name, scheme in schemes.items():
        columns = _columns(modules[name])
        if columns is None:
            fitted[name] = scheme
            continue
        key = (id(scheme), columns)
        if key not in narrowed:
            update: dict[str, object] = {
                field_name: args.model_copy(update={"group_size": columns})
                for field_name in ("weights", "input_activations")
                if (args := getattr(scheme, field_name)) is not None
                and args.strategy == "group"
                # the group of an MX format is part of the format
                and columns < (args.group_size or 0)
                and args.scale_dtype != torch.uint8
            }
            narrowed[key] = scheme.model_copy(update={**update, "targets": []}) if update else None
        own = narrowed[key]
        if own is not None:
            own.targets.append(name)
        fitted[name] = scheme if own is None else own
    for (_, columns), narrow in narrowed.items():
        if narrow is None:
            continue
        logger.info(
            f"{join_names(narrow.targets)}: {columns} columns are fewer than a group has; each row "
            "is one group there."
        )
    return fitted


def _columns(module: Module) -> int | None:
    weight = weight_without_onloading(module)
    return weight.shape[-1] if weight is not None and weight.dim() == 2 else None
