# SPDX-License-Identifier: Apache-2.0
"""Target matching: the modules that a target or an ignore entry of a recipe matches.

The rule is the one that compressed-tensors, and so every loader of the checkpoint, applies. A
target matches a module if it is

- ``re:`` and a pattern that matches the module's full name, anchored at its start only, or
- the module's full name, or
- the name of the module's class or of any of its base classes (``LinearBase`` counts as
  ``Linear``).

The Linears of an expert have other names where the file calls them ``w1``, ``w3`` and ``w2``:
``gate_proj``, ``up_proj`` and ``down_proj``, and those below ``block_sparse_moe``; towers have
those that transformers gave them before (:func:`llmcompressor.modeling.names.name_aliases`).

There is no substring and no glob match. Helper modules of compressed-tensors (observers,
caches, transforms) never match. A target that matches nothing is an error that lists what it
may have meant, an ignore entry that matches nothing a warning that does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from compressed_tensors.utils.internal import InternalModule
from torch.nn import Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.names import NameForms, TargetIndex, matches_target, named_modules
from llmcompressor.runtime.limits import TimedPattern, timed_pattern

REGEX = "re:"
_MOST_SUGGESTIONS = 3


def as_targets(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Convert one target, several or none to a tuple.

    >>> as_targets("Linear"), as_targets(["a", "b"]), as_targets(None)
    (('Linear',), ('a', 'b'), ())
    """
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _compiled(pattern: str) -> TimedPattern:
    try:
        return timed_pattern(pattern)
    except re.error as error:
        raise TargetError(
            f"The pattern '{REGEX}{pattern}' is not a valid regular expression: {error}.",
            "Correct it; a name that is no pattern is written without 're:'.",
        ) from error


def matches_name(name: str, target: str) -> bool:
    """Return True if ``target`` matches the full name ``name``.

    >>> matches_name("model.layers.0.mlp", "re:.*mlp"), matches_name("model.layers.0.mlp", "mlp")
    (True, False)
    """
    if target.startswith(REGEX):
        _compiled(target.removeprefix(REGEX))  # an invalid pattern raises with a helpful message
    return matches_target(target, name)


def matches_class(module: Module, target: str) -> bool:
    """Return True if ``target`` names a class that ``module`` is an instance of."""
    return any(
        cls.__name__ == target or (cls.__name__ == "LinearBase" and target == "Linear")
        for cls in type(module).__mro__
        if issubclass(cls, Module)
    )


def matches(name: str, module: Module, target: str) -> bool:
    """Return True if ``target`` matches the module called ``name``; see the module's docstring."""
    return not isinstance(module, InternalModule) and (
        matches_name(name, target) or matches_class(module, target)
    )


def matches_any(name: str, module: Module, targets: Iterable[str]) -> bool:
    """Return True if one of the targets matches the module called ``name``."""
    return any(matches(name, module, target) for target in targets)


def _matching(name: str, module: Module, targets: TargetIndex) -> list[str]:
    return [target for target in targets.of(name, module) if matches(name, module, target)]


def match_named_modules(
    model: Module,
    targets: str | Iterable[str] | None,
    ignore: str | Iterable[str] | None = None,
) -> Iterator[tuple[str, Module]]:
    """The modules that a target matches and no ignore entry does.

    Args:
        model: where to look.
        targets: names, ``re:`` patterns or class names.
        ignore: the same; it always wins.

    Yields:
        ``(name, module)`` in the order of ``model.named_modules()``, each module once.
    """
    wanted, unwanted = as_targets(targets), as_targets(ignore)
    forms = NameForms((*wanted, *unwanted))
    meant, left_out = TargetIndex(wanted), TargetIndex(unwanted)
    known: dict[object, bool] = {}
    for name, module in named_modules(model):
        form = (type(module), forms.of(name))
        if form not in known:
            known[form] = bool(_matching(name, module, meant)) and not _matching(
                name, module, left_out
            )
        if known[form]:
            yield name, module


def unmatched(model: Module, targets: str | Iterable[str] | None) -> tuple[str, ...]:
    """The targets that match no module of ``model``, in their order."""
    left = dict.fromkeys(as_targets(targets))
    forms, possible, seen = NameForms(left), TargetIndex(left), set()
    for name, module in named_modules(model):
        if not left:
            break
        form = (type(module), forms.of(name))
        if form in seen:
            continue
        seen.add(form)
        for target in _matching(name, module, possible):
            left.pop(target, None)
    return tuple(left)


def check_targets(
    model: Module,
    targets: str | Iterable[str] | None,
    ignore: str | Iterable[str] | None = None,
    *,
    allow_unmatched: bool | None = None,
) -> None:
    """Raise for targets that match nothing, and warn about ignore entries that match nothing.

    Args:
        model: where to look.
        targets: each must match a module, ignored or not.
        ignore: recipes carry general ignore lists, so these only warn.
        allow_unmatched: turn the error into a warning; ``None`` if the caller has no such option.

    Raises:
        TargetError: a target matches no module; the message lists near matches.
    """
    if missing := unmatched(model, targets):
        problem, hints = _problem(model, ("target", "targets"), missing)
        if not allow_unmatched:
            classes = {
                type(each).__name__
                for each in model.modules()
                if any(True for _ in each.parameters(recurse=False))
            }
            hints = hints or f"It has weights in modules of class {', '.join(sorted(classes))}."
            if allow_unmatched is not None:
                hints += " If that is meant, set allow_unmatched: true."
            raise TargetError(problem, hints)
        logger.warning(f"{problem} {hints}".strip())
    if idle := unmatched(model, ignore):
        logger.warning(" ".join(_problem(model, ("ignore entry", "ignore entries"), idle)).strip())
    if ignore:
        meant = match_named_modules(model, targets)
        warn_of_parent_ignores(model, as_targets(ignore), (name for name, _ in meant))


def warn_of_parent_ignores(model: Module, ignore: Iterable[str], meant: Iterable[str]) -> None:
    """Warn of ignore entries that match only the parents of targets, and so ignore nothing.

    An entry ignores the modules that it matches, but not their children.

    Args:
        model: where to look.
        ignore: the entries.
        meant: names of the modules that targets match, ignored ones included.
    """
    names = set(meant)
    entries = as_targets(ignore)
    hits: dict[str, set[str]] = {entry: set() for entry in entries}
    forms, possible = NameForms(entries), TargetIndex(entries)
    known: dict[object, list[str]] = {}
    for name, module in named_modules(model):
        form = (type(module), forms.of(name))
        if form not in known:
            known[form] = _matching(name, module, possible)
        for entry in known[form]:
            hits[entry].add(name)
    left = names.difference(*hits.values())
    for entry, found in hits.items():
        inside = [name for name in left if any(each in found for each in _parent_names(name))]
        if inside and names.isdisjoint(found):
            holder = next(each for each in _parent_names(min(inside)) if each in found)
            within = _pattern_below(holder, alike=len(found) > 1)
            logger.warning(
                f"The ignore entry {entry!r} leaves nothing out: it means "
                f"{holder or 'the model'} itself, and not the {len(inside)} target(s) in what it "
                f"matches. {_did_you_mean([within])}"
            )


def _pattern_below(holder: str, *, alike: bool) -> str:
    """A pattern for all modules below ``holder``; with ``alike``, below its like of any number.

    >>> _pattern_below("model.layers.0.mlp", alike=True)
    're:model[.]layers[.][0-9]+[.]mlp[.]'
    >>> _pattern_below("model.layers.0", alike=False)
    're:model[.]layers[.]0[.]'
    """
    if not holder:
        return f"{REGEX}.*"
    parts = ["[0-9]+" if alike and part.isdigit() else part for part in holder.split(".")]
    return REGEX + "".join(f"{part}[.]" for part in parts)


def _parent_names(name: str) -> Iterator[str]:
    """Names of a module's parents, the nearest first.

    >>> list(_parent_names("model.layers.0"))
    ['model.layers', 'model', '']
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


def _problem(model: Module, nouns: tuple[str, str], targets: Sequence[str]) -> tuple[str, str]:
    """What to say of targets that match nothing, and hints at what they may have meant."""
    index, is_one = _NameIndex(model), len(targets) == 1
    hints = {target: index.hint(target) for target in targets}
    several = " ".join(f"For {target!r}: {hint}" for target, hint in hints.items() if hint)
    said = (
        f"{nouns[0]} {targets[0]!r} matches"
        if is_one
        else (f"{nouns[1]} {', '.join(map(repr, targets))} match")
    )
    return (
        f"The {said} no module of {type(model).__name__}.",
        hints[targets[0]] if is_one else several,
    )


def looks_like_pattern(target: str) -> bool:
    r"""Return True if a plain target has characters of a pattern, which no name has.

    >>> looks_like_pattern(r"model\.embed_tokens"), looks_like_pattern("model.embed_tokens")
    (True, False)
    """
    return not target.startswith(REGEX) and re.search(r"[*^$|\\]", target) is not None


def suggest_targets(model: Module, target: str) -> str:
    """A hint, in a sentence or two, at what ``target`` may have meant; empty if nothing is near."""
    return _NameIndex(model).hint(target)


class _NameIndex:
    """The names of a model, indexed for suggestions of near matches."""

    def __init__(self, model: Module) -> None:
        self._names = [name for name, _ in model.named_modules() if name]
        # Blocks repeat: one name stands for all that differ in numbers only.
        self._first: dict[str, str] = {}
        for name in self._names:
            self._first.setdefault(re.sub(r"\d+", "0", name), name)
        self._last = {name.rpartition(".")[2] for name in self._names}
        self._last = {last for last in self._last if not last.isdigit()}
        self._words = {part for name in self._first for part in name.split(".")} - {"0"}
        self._classes = {
            cls.__name__
            for module in model.modules()
            for cls in type(module).__mro__
            if issubclass(cls, Module) and cls is not Module
        }

    def hint(self, target: str) -> str:
        if target.startswith(REGEX):
            return self._pattern_hint(target.removeprefix(REGEX))
        if looks_like_pattern(target):
            if not re.search(r"\.\*|[\^$|\\]", target):  # a glob
                target = ".*".join(re.escape(part) for part in target.split("*"))
            return f"Patterns begin with 're:', as in {REGEX + target!r}."
        return _did_you_mean(self._plain_suggestions(target))

    def _plain_suggestions(self, target: str) -> list[str]:
        tail = target.rpartition(".")[2]
        owner, _, parameter = target.rpartition(".")
        if parameter in {"weight", "bias"} and (owner in self._names or owner in self._last):
            return [owner if owner in self._names else self._by_last(owner)]
        if target in self._last:
            return [self._by_last(target)]
        inner = [name for name in self._first.values() if name.endswith(f".{target}")]
        if "." in target and not inner:
            near = _closest(re.sub(r"\d+", "0", target), self._first)
            inner = [self._first[name] for name in near]
        found = inner if "." in target else []
        found += _closest(target, self._classes)
        found += [self._by_last(last) for last in _closest(tail, self._last)]
        return found

    def _by_last(self, last: str) -> str:
        return last if last in self._names else f"{REGEX}.*{last}$"

    def _pattern_hint(self, pattern: str) -> str:
        of_parameter = re.fullmatch(r"(.+?)\\?\.(?:weight|bias)\$?", pattern)
        if of_parameter:
            hint = "Patterns match module names, not parameter names."
            bare = of_parameter.group(1)
            return f"{hint} {_did_you_mean([REGEX + bare])}" if self._any(bare) else hint
        floating = pattern.removeprefix("^")
        if any(_compiled(floating).search(name) for name in self._names):
            hint = "Patterns are anchored at the start of the full name."
            return f"{hint} {_did_you_mean([f'{REGEX}.*{floating}'])}"
        repaired = pattern  # unknown words replaced by the nearest known ones
        for word in re.findall(r"(?<!\\)[A-Za-z_][A-Za-z0-9_]+", pattern):
            if not any(word in known for known in self._words):
                near = _closest(word, self._words)
                repaired = repaired.replace(word, near[0]) if near else repaired
        if repaired != pattern and self._any(repaired):
            return _did_you_mean([REGEX + repaired])
        # names that hold the longest word of the pattern
        words = re.findall(r"[A-Za-z_][A-Za-z0-9_]+", re.sub(r"\[[^\]]*\]", "*", pattern))
        for word in sorted(words, key=len, reverse=True):
            holding = [name for name in self._first.values() if word.lower() in name.lower()]
            if holding:
                return _did_you_mean(holding)
        return ""

    def _any(self, pattern: str) -> bool:
        return any(_compiled(pattern).match(name) for name in self._names)


def _closest(word: str, options: Iterable[str]) -> list[str]:
    """The options nearest to ``word``, ignoring case, nearest first."""
    by_folded = {option.casefold(): option for option in sorted(options)}
    near = difflib.get_close_matches(
        word.casefold(), list(by_folded), n=_MOST_SUGGESTIONS, cutoff=0.7
    )
    return [by_folded[folded] for folded in near]


def _did_you_mean(suggestions: Iterable[str]) -> str:
    unique = list(dict.fromkeys(suggestions))[:_MOST_SUGGESTIONS]
    return f"Did you mean {' or '.join(repr(name) for name in unique)}?" if unique else ""


def common_parent(first: str, second: str) -> str:
    """The longest dotted name that both names equal or lie below.

    >>> common_parent("layers.0.mlp.up", "layers.0.mlp.down"), common_parent("a.b", "a")
    ('layers.0.mlp', 'a')
    """
    shared: list[str] = []
    for left, right in zip(first.split("."), second.split("."), strict=False):
        if left != right:
            break
        shared.append(left)
    return ".".join(shared)


def match_modules_set(
    model: Module,
    targets: Sequence[str],
    ignore: str | Iterable[str] | None = None,
    *,
    allow_overlap: bool = False,
) -> Iterator[list[list[tuple[str, Module]]]]:
    """Sets of modules that belong together, such as one norm and the Linears that read it.

    Walks the modules in order and collects, per target, the modules that match it. Once every
    target has a match, the set is complete at the first further match that does not lie below
    the common parent of those found so far. So a block yields one set, and all experts of a
    block are in the set of that block.

    Args:
        model: where to look.
        targets: one per member of the set.
        ignore: modules never collected.
        allow_overlap: let one module match several targets.

    Yields:
        Per target, in the order of ``targets``, its ``(name, module)`` pairs in model order.

    Raises:
        TargetError: the last set lacks a target, or a module matches two targets.
    """
    unwanted = TargetIndex(as_targets(ignore))
    hits = (
        (name, module, [target for target in targets if matches(name, module, target)])
        for name, module in model.named_modules()
        if not _matching(name, module, unwanted)
    )
    yield from group_matches(hits, targets, allow_overlap=allow_overlap)


def group_matches(
    modules: Iterable[tuple[str, Module, Sequence[str]]],
    targets: Sequence[str],
    *,
    allow_overlap: bool = False,
) -> Iterator[list[list[tuple[str, Module]]]]:
    """Like :func:`match_modules_set`, for modules whose matching targets are known.

    Args:
        modules: name, module and the targets that match it, in the order of the model.
        targets: one per member of a set.
        allow_overlap: let one module match several targets.
    """
    found: dict[str, list[tuple[str, Module]]] = {target: [] for target in targets}
    parent: str | None = None
    for name, module, hits in modules:
        if len(hits) > 1 and not allow_overlap:
            raise TargetError(
                f"The module {name!r} matches {' and '.join(map(repr, hits))}, "
                "which are to be different modules of one set.",
                "Make the patterns exclude each other.",
            )
        for target in hits:
            widened = name if parent is None else common_parent(name, parent)
            if all(found.values()) and widened != parent:
                yield [found[each] for each in targets]
                found, widened = {each: [] for each in targets}, name
            found[target].append((name, module))
            parent = widened
    if not any(found.values()):
        return
    missing = [target for target in targets if not found[target]]
    if missing:
        there = [pairs[0][0] for pairs in found.values() if pairs]
        raise TargetError(
            f"After {', '.join(map(repr, there))} nothing matches "
            f"{', '.join(map(repr, missing))}, so the last set of this mapping is incomplete.",
            "Correct the mapping or ignore the modules it should leave out.",
        )
    yield [found[target] for target in targets]
