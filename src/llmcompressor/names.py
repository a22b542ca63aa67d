# SPDX-License-Identifier: Apache-2.0
"""Modules by name: all of them quickly, and which names no target tells apart.

A model of experts has some ten thousand modules of a few forms. What is asked of each module is
asked of each form instead, where the answer cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache

from torch.nn import Module, Parameter

__all__ = [
    "Forms",
    "Possible",
    "is_of_tower",
    "means",
    "named_modules",
    "names_of",
    "own_parameters",
    "tells_digits",
]

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


def names_of(name: str) -> tuple[str, ...]:
    """The names that a target may mean a module by, its own first.

    An expert's Linears have the names that they have in the file. Where these are ``w1``, ``w3``
    and ``w2``, recipes may as well say what they are elsewhere, and what they are below in the
    file: ``block_sparse_moe``, which transformers called it as well before its fifth release.
    So it did towers, and what joins them to the text, without ``model`` before them, and the text
    of such a model ``language_model.model``, its head ``language_model.lm_head``.

    >>> names_of("layers.0.mlp.experts.3.w1")[1:]
    ('layers.0.block_sparse_moe.experts.3.w1', 'layers.0.mlp.experts.3.gate_proj')
    >>> names_of("layers.0.mlp.gate")
    ('layers.0.mlp.gate', 'layers.0.block_sparse_moe.gate')
    >>> names_of("model.visual.blocks.0"), names_of("lm_head")
    (('model.visual.blocks.0', 'visual.blocks.0'), ('lm_head', 'language_model.lm_head'))
    >>> names_of("model.language_model.norm")
    ('model.language_model.norm', 'language_model.model.norm')
    >>> names_of("layers.0.mlp.w1")
    ('layers.0.mlp.w1',)
    """
    if is_of_tower(name):
        return name, name.removeprefix("model.")
    if name == _HEAD:
        return name, f"language_model.{_HEAD}"
    names = _names_in_mixture(name)
    if not name.startswith(_TEXT):
        return names
    # without these, a pattern for all of the text would mean its head alone
    return *names, *(_EARLIER_TEXT + one.removeprefix(_TEXT) for one in names)


def _names_in_mixture(name: str) -> tuple[str, ...]:
    inside = "experts." in name
    if not (inside or name.endswith(".gate")):
        return (name,)
    sparse = _SPARSE.sub("block_sparse_moe", name)
    names = (name,) if sparse == name else (name, sparse)
    found = _EXPERT.fullmatch(name) if inside else None
    return names if found is None else (*names, found[1] + _USUAL[found[2]] + found[3])


def is_of_tower(name: str) -> bool:
    """Whether a module lies in a tower beside the text, or joins it to that."""
    return name.startswith(_TOWERS)


def means(target: str, name: str) -> bool:
    """Whether a target is one of a module's names, or a pattern for one.

    What a pattern says that a name is not (``(?!`` and ``(?<!``) holds for all of the names: who
    leaves out ``vision_tower`` means the tower, whatever it is called now.

    >>> means("re:(?!vision_tower).*proj", "model.vision_tower.proj")
    False
    >>> means("re:(?!vision_tower).*proj", "model.layers.0.proj")
    True
    """
    names = names_of(name)
    if not target.startswith(_REGEX):
        return target in names
    pattern, rest = _parts(target.removeprefix(_REGEX))
    hits = [pattern.match(one) is not None for one in names]
    if not any(hits) or all(hits):
        return all(hits)
    left_out = (rest.match(one) for one, hit in zip(names, hits, strict=True) if not hit)
    return rest is pattern or not any(left_out)


@lru_cache(maxsize=4096)
def _parts(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A pattern, and the same without what it says that a name is not."""
    whole = re.compile(pattern)
    rest = _without_exclusions(pattern)
    try:
        return whole, whole if rest == pattern else re.compile(rest)
    except re.error:  # it may have named a group there, for one
        return whole, whole


def _without_exclusions(pattern: str) -> str:
    r"""A pattern without ``(?!…)`` and ``(?<!…)``.

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
    """The same as ``model.named_modules()``, which hands each through as many calls as it is deep.

    Args:
        model: where to look.
        remove_duplicate: a module that has several names comes once.

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
    """The same as ``module.parameters(recurse=False)``, which goes through three generators.

    >>> [one.ndim for one in own_parameters(__import__("torch").nn.Linear(2, 3))]
    [2, 1]
    """
    found = [one for one in module._parameters.values() if one is not None]
    return found if len(found) < 2 else list({id(one): one for one in found}.values())


def tells_digits(pattern: str) -> bool:
    r"""Whether a regular expression may tell one digit from another.

    Where it has no digit, no range that could begin or end between digits, and compares nothing
    with what was found before, every digit of a name may stand for every other.

    >>> tells_digits(r".*layers\.\d+\.mlp"), tells_digits(".*layers.[0-9]+.mlp")
    (False, False)
    >>> tells_digits(r".*layers\.3\."), tells_digits("[+-:]"), tells_digits(r"(?P<a>.).*(?P=a)")
    (True, True, True)
    """
    text = re.sub(r"(?<!\\)\[0-9\]", r"\\d", pattern)
    return bool(_TELLING.search(text)) or ("[" in text and bool(_RANGE.search(text)))


class Forms:
    """Which names the targets of a list do not tell apart.

    Args:
        targets: names, ``re:`` patterns or class names.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        every = list(targets)
        self._exact = {one for one in every if not one.startswith(_REGEX)}
        patterns = [one.removeprefix(_REGEX) for one in every if one.startswith(_REGEX)]
        self._telling = [found for found in map(_compiled, patterns) if found is not None]

    def of(self, name: str) -> Hashable:
        """A key: of two names that share it, every target matches both or neither."""
        names = names_of(name)
        if not self._exact.isdisjoint(names):
            return name
        # of an expert's Linears the last tells them apart by letters
        return tuple([one.translate(_ZEROS) for one in names]), tuple(
            [pattern.match(one) is not None for one in names for pattern in self._telling]
        )


class Possible:
    """Of a list of targets the few that can mean a module: recipes may name ten thousands.

    A plain target means modules of its name or class, and a pattern may mean any.

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
        """In the order of the list, each once.

        >>> from torch.nn import Identity
        >>> Possible(["b", "re:c", "Linear", "Identity", "a"]).of("a", Identity())
        ['re:c', 'Identity', 'a']
        """
        kind = type(module)
        if kind not in self._classes:
            self._classes[kind] = _class_names(kind)
        plain = self._classes[kind].union(names_of(name)) & self._places.keys()
        return sorted([*self._patterns, *plain], key=self._places.__getitem__)


def _class_names(kind: type[Module]) -> frozenset[str]:
    names = frozenset(cls.__name__ for cls in kind.__mro__ if issubclass(cls, Module))
    return names | {"Linear"} if "LinearBase" in names else names  # vLLM's


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """An expression that tells digits apart; what cannot be read is refused where it is used."""
    if not tells_digits(pattern):
        return None
    try:
        return re.compile(pattern)
    except re.error:
        return None
