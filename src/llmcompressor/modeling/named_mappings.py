# SPDX-License-Identifier: Apache-2.0
"""Smoothing mappings of a recipe: resolved, verified, and rejected with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.expert_search import find_mixtures
from llmcompressor.modeling.mapped_places import Names, Place, Places, SmoothSet, shown, written
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.probes import probes_of
from llmcompressor.modeling.proof import Prover
from llmcompressor.modeling.structure import Outcome

__all__ = ["named_sets"]

_OR_LEAVE_OUT = "or leave mappings out: they are then found from the model."


def named_sets(
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
    places = Places(model, names)
    for one in names:
        _refuse_unmatched(model, one, places.unmatched(one))
    search = _Search(model, places, Prover(probes_of(model, batches)), _matching(model, ignore))
    for one in names:
        search.add(one)
    search.finish()
    return search.found


@dataclass
class _Search:
    """The sets found so far for the mappings, and what was left out."""

    model: Module
    places: Places
    prover: Prover
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
            raise _apart(names, self.model, self.places)
        for place in places:
            if self.ignored.intersection((place.name, *place.readers)):
                reasons["all that it matches is to be ignored"] = False
                continue
            self._refuse_taken(place)
            reasons |= self._judge(place, written(names))
        is_empty = len(self.found) == before
        told = [one for one in reasons.items() if is_empty or one[1]]
        told.sort(key=lambda one: not one[1])  # layers are alike: one reason is enough
        self.left_out += [(f"{written(names)}: {why}", warns) for why, warns in told[:1]]

    def _judge(self, place: Place, said: str) -> dict[str, bool]:
        """Add a place that holds; else return why it is left out, and whether that is a warning."""
        verdict = self.prover.judge(place)
        if verdict.outcome is Outcome.HOLDS:
            self.found.append(place.as_set(verdict.offset))
            return {}
        reason = self.prover.reason(place, verdict)
        if verdict.outcome is not Outcome.CHANGES:
            return {reason: verdict.outcome is Outcome.UNTRIED}
        whole = self._completed(place)
        if whole is None:
            raise TargetError(f"{reason}.", f"Name all modules that read it, {_OR_LEAVE_OUT}")
        others = [name for name in whole.readers if name not in place.readers]
        if ignored := self.ignored.intersection(others):
            return {f"{shown(sorted(ignored))} reads {place.name}, too, and is to be ignored": True}
        self._refuse_taken(replace(whole, readers={name: whole.readers[name] for name in others}))
        text = (
            f"The mapping {said} does not name all that reads {place.name}, and what it leaves out "
            f"is scaled, too, or the model would compute something else: {shown(others)}."
        )
        self.completed.setdefault(re.sub(r"\d+", "", text), []).append(text)
        self.found.append(whole.as_set(self.prover.judge(whole).offset))
        return {}

    def _completed(self, place: Place) -> Place | None:
        """The place with all modules that read its smooth module, such as unnamed routers."""
        every = self.prover.readers(place)
        if not place.readers.keys() < set(every):
            return None
        return replace(place, readers={name: self.model.get_submodule(name) for name in every})

    def _refuse_taken(self, place: Place) -> None:
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


def _apart(names: Names, model: Module, places: Places) -> TargetError:
    """The error for a mapping whose matches lie in different blocks."""
    smooth = shown(places.matched(names[0]))
    readers = shown(dict.fromkeys(one for target in names[1] for one in places.matched(target)))
    return TargetError(
        f"The mapping {written(names)} joins nothing: no block of {type(model).__name__} holds a "
        f"module to smooth and one that reads it. It matches {smooth} and {readers}.",
        f"Correct it, {_OR_LEAVE_OUT}",
    )


def _matching(model: Module, targets: Sequence[str]) -> set[str]:
    return {name for name, _ in match_named_modules(model, targets)} if targets else set()


def _refuse_unmatched(model: Module, names: Names, missing: Sequence[str]) -> None:
    if not missing:
        return
    stacked = [one.name for one in find_mixtures(model)]
    if stacked and any("experts" in target for target in missing):
        raise TargetError(
            f"The mapping {written(names)} names parts of experts, and those of "
            f"{shown(stacked)} are in stacks: no Linear is called {missing[0]!r}. They are taken "
            "apart where the targets of a modifier that quantizes or prunes reach them.",
            "Have such a modifier's targets mean the experts, and none of its ignore entries, or "
            "leave them out of the mapping.",
        )
    raise TargetError(
        f"The mapping {written(names)} matches nothing: no module of {type(model).__name__} "
        f"is called {missing[0]!r}.",
        f"Correct it, {_OR_LEAVE_OUT}",
    )
