# SPDX-License-Identifier: Apache-2.0
"""Module names: fast traversal, name aliases, and equivalence of names under targets.

An MoE model has some ten thousand modules whose names differ only by numbers. Work per module is
done once per form of name where the result cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache

from torch.nn import Module, Parameter

from llmcompressor.runtime.limits import TimedPattern, timed_pattern

_REGEX = "re:"
_ZEROS = str.maketrans("123456789", "000000000")
# a digit as such, in a range or by its code; what a group held; a character by its name
_TELLING = re.compile(r"[0-9]|\(\?P=|\\N")
_RANGE = re.compile(r"(?<![A-Za-z])-|-(?![A-Za-z])")

_EXPERT = re.compile(r"((?:.*\.)?experts\.\d+\.)(w[123])((?:\..*)?)")
_SPARSE = re.compile(r"(?<=\.)mlp(?=\.(?:experts\.\d+\.w[123]|gate)(?:\.|$))")
_TOWERS = tuple(
    f"model.{own}"
    for own in ("audio_tower", "multi_modal_projector", "vision_model", "vision_tower", "visual")
)
_TEXT, _EARLIER_TEXT = "model.language_model.", "language_model.model."
_HEAD = "lm_head"
_USUAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def name_aliases(name: str) -> tuple[str, ...]:
    """Return the names by which a target may refer to a module, its own first.

    An expert's Linears have their names in the file. Where these are ``w1``, ``w3`` and ``w2``,
    recipes may also use the common projection names, and ``block_sparse_moe``, as before
    transformers 5. Likewise for vision towers and projectors without the prefix ``model``, and for
    the text part of such a model, ``language_model.model``, with its head
    ``language_model.lm_head``.

    >>> name_aliases("layers.0.mlp.experts.3.w1")[1:]
    ('layers.0.block_sparse_moe.experts.3.w1', 'layers.0.mlp.experts.3.gate_proj')
    >>> name_aliases("layers.0.mlp.gate")
    ('layers.0.mlp.gate', 'layers.0.block_sparse_moe.gate')
    >>> name_aliases("model.visual.blocks.0"), name_aliases("lm_head")
    (('model.visual.blocks.0', 'visual.blocks.0'), ('lm_head', 'language_model.lm_head'))
    >>> name_aliases("model.language_model.norm")
    ('model.language_model.norm', 'language_model.model.norm')
    >>> name_aliases("layers.0.mlp.w1")
    ('layers.0.mlp.w1',)
    """
    if is_in_tower(name):
        return name, name.removeprefix("model.")
    if name == _HEAD:
        return name, f"language_model.{_HEAD}"
    names = _aliases_in_moe(name)
    if not name.startswith(_TEXT):
        return names
    # without these, a pattern for all of the text would match its head alone
    return *names, *(_EARLIER_TEXT + one.removeprefix(_TEXT) for one in names)


def _aliases_in_moe(name: str) -> tuple[str, ...]:
    inside = "experts." in name
    if not (inside or name.endswith(".gate")):
        return (name,)
    sparse = _SPARSE.sub("block_sparse_moe", name)
    names = (name,) if sparse == name else (name, sparse)
    found = _EXPERT.fullmatch(name) if inside else None
    return names if found is None else (*names, found[1] + _USUAL[found[2]] + found[3])


def is_in_tower(name: str) -> bool:
    """Return True if a module lies in a vision or audio tower, or projects from it to the text."""
    return name.startswith(_TOWERS)


def matches_target(target: str, name: str) -> bool:
    """Return True if a target is one of a module's names, or a pattern that matches one.

    A pattern's exclusions (``(?!`` and ``(?<!``) apply to all of the names: a pattern that excludes
    ``vision_tower`` excludes the tower under its new name too.

    >>> matches_target("re:(?!vision_tower).*proj", "model.vision_tower.proj")
    False
    >>> matches_target("re:(?!vision_tower).*proj", "model.layers.0.proj")
    True
    """
    names = name_aliases(name)
    if not target.startswith(_REGEX):
        return target in names
    pattern, rest = _split_exclusions(target.removeprefix(_REGEX))
    hits = [pattern.match(one) for one in names]
    if not any(hits) or all(hits):
        return all(hits)
    left_out = (rest.match(one) for one, hit in zip(names, hits, strict=True) if not hit)
    return rest is pattern or not any(left_out)


@lru_cache(maxsize=4096)
def _split_exclusions(pattern: str) -> tuple[TimedPattern, TimedPattern]:
    """Compile a pattern, and the same pattern without its exclusions."""
    whole = timed_pattern(pattern)
    rest = _without_exclusions(pattern)
    try:
        return whole, whole if rest == pattern else timed_pattern(rest)
    except re.error:  # an exclusion may define a group, for instance
        return whole, whole


def _without_exclusions(pattern: str) -> str:
    r"""Return a pattern without ``(?!…)`` and ``(?<!…)``.

    >>> _without_exclusions(r"^(?!a|.*(b|\)))x(?<!y)[(?!]")
    '^x[(?!]'
    """
    kept, depth, in_set = "", 0, False
    for part in re.findall(r"\\.|\(\?<?!|.", pattern, flags=re.DOTALL):
        starts = part.startswith("(?") and len(part) > 1 and not in_set
        if starts or (depth and part == "(" and not in_set):
            depth += 1
        if not depth:
            kept += part
        if depth and part == ")" and not in_set:
            depth -= 1
        in_set = (in_set or part == "[") and part != "]"
    return kept


def named_modules(model: Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
    """Return the same as ``model.named_modules()``, without its nested generators.

    Args:
        model: the model.
        remove_duplicate: yield a module that has several names once.

    >>> from torch.nn import Identity, Sequential
    >>> [name for name, _ in named_modules(Sequential(Sequential(Identity()), Identity()))]
    ['', '0', '0.0', '1']
    """
    if type(model).named_modules is not Module.named_modules:
        yield from model.named_modules(remove_duplicate=remove_duplicate)
        return
    seen: set[Module] = set()
    waiting: list[tuple[str, Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if remove_duplicate:
            if module in seen:
                continue
            seen.add(module)
        yield name, module
        if module._modules:  # most have none
            prefix = f"{name}." if name else ""
            inner = [(prefix + own, one) for own, one in module._modules.items() if one is not None]
            waiting.extend(reversed(inner))


def own_parameters(module: Module) -> list[Parameter]:
    """Return the same as ``module.parameters(recurse=False)``, without its nested generators.

    >>> [one.ndim for one in own_parameters(__import__("torch").nn.Linear(2, 3))]
    [2, 1]
    """
    found = [one for one in module._parameters.values() if one is not None]
    return found if len(found) < 2 else list({id(one): one for one in found}.values())


def distinguishes_digits(pattern: str) -> bool:
    r"""Return True if a regular expression may distinguish one digit from another.

    It cannot if it has no digit, no range that could begin or end between digits, and no
    backreference. Every digit of a name may then be replaced by every other.

    >>> distinguishes_digits(r".*layers\.\d+\.mlp"), distinguishes_digits(".*layers.[0-9]+.mlp")
    (False, False)
    >>> [distinguishes_digits(one) for one in (r".*layers\.3\.", "[+-:]", r"(?P<a>.).*(?P=a)")]
    [True, True, True]
    """
    text = re.sub(r"(?<!\\)\[0-9\]", r"\\d", pattern)
    return bool(_TELLING.search(text)) or ("[" in text and bool(_RANGE.search(text)))


class NameForms:
    """Groups names that the targets of a list cannot distinguish.

    Args:
        targets: names, ``re:`` patterns or class names.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        every = list(targets)
        self._exact = {one for one in every if not one.startswith(_REGEX)}
        patterns = [one.removeprefix(_REGEX) for one in every if one.startswith(_REGEX)]
        self._telling = [
            found for found in map(_compile_digit_pattern, patterns) if found is not None
        ]

    def of(self, name: str) -> Hashable:
        """Return a key; names with equal keys match exactly the same targets."""
        names = name_aliases(name)
        if not self._exact.isdisjoint(names):
            return name
        # w1, w2 and w3 of an expert differ by letters only in the last name
        return tuple([one.translate(_ZEROS) for one in names]), tuple(
            [pattern.match(one) for one in names for pattern in self._telling]
        )


class TargetIndex:
    """Finds the few targets of a long list that may match a module.

    A plain target matches modules of its name or class, and a pattern may match any.

    Args:
        targets: names, ``re:`` patterns or class names.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._places: dict[str, int] = {}
        for one in targets:
            self._places.setdefault(one, len(self._places))
        self._patterns = [one for one in self._places if one.startswith(_REGEX)]
        self._classes: dict[type[Module], frozenset[str]] = {}

    def of(self, name: str, module: Module) -> list[str]:
        """Return the targets that may match a module, in the order of the list, each once.

        >>> from torch.nn import Identity
        >>> TargetIndex(["b", "re:c", "Linear", "Identity", "a"]).of("a", Identity())
        ['re:c', 'Identity', 'a']
        """
        kind = type(module)
        if kind not in self._classes:
            names = frozenset(cls.__name__ for cls in kind.__mro__ if issubclass(cls, Module))
            is_of_vllm = "LinearBase" in names
            self._classes[kind] = names | {"Linear"} if is_of_vllm else names
        plain = self._classes[kind].union(name_aliases(name)) & self._places.keys()
        return sorted([*self._patterns, *plain], key=self._places.__getitem__)


def _compile_digit_pattern(pattern: str) -> TimedPattern | None:
    """Compile a pattern that distinguishes digits; invalid ones are refused where they are used."""
    if not distinguishes_digits(pattern):
        return None
    try:
        return timed_pattern(pattern)
    except re.error:
        return None
