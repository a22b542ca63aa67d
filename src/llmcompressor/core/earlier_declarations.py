# SPDX-License-Identifier: Apache-2.0
"""Declarations of earlier releases, which feed the contract of a modifier.

Modifiers written for llm-compressor 0.14, or for earlier releases of this package, declare what
they need by single attributes: ``requires_calibration_data``, ``run_types``, ``effort``. They may
be class data, properties, fields of the recipe, or methods. A class that has such attributes of its
own gets the member of the contract that stands for them (``rules``, ``traits``, ``select``,
``check``, ``predict``, ``cost``), computed from its parent's and them. The other way round, the
attributes can still be read wherever the contract is declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from llmcompressor.core.contract import DataUse, Edits, Granularity, RecipeRules, Traits

__all__ = ["adapt_earlier_declarations", "readable_on_instances"]


class readable_on_instances:  # noqa: N801 - used like property
    """A property that a subclass may replace by a field of the same name.

    A property of a base class takes precedence over the instance dictionary, and so over a field of
    the same name in a subclass, such as ``requires_calibration_data: bool = True``. This descriptor
    does not. It exists on instances only: pydantic would warn about a field that shadows one of the
    class.
    """

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self._name = name
        self._read = read

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            raise AttributeError(self._name)
        return self._read(instance)


class _Trait(NamedTuple):
    """An earlier attribute as a part of :class:`Traits`."""

    read: Callable[[Traits], Any]
    write: Callable[[Traits, Any], Traits]


def _same(field: str, convert: Callable[[Any], Any] = lambda value: value) -> _Trait:
    return _Trait(
        lambda traits: getattr(traits, field),
        lambda traits, value: replace(traits, **{field: convert(value)}),
    )


def _edit(flag: Edits) -> _Trait:
    return _Trait(
        lambda traits: flag in traits.edits,
        lambda traits, value: replace(
            traits, edits=traits.edits | flag if value else traits.edits & ~flag
        ),
    )


def _data(use: DataUse) -> _Trait:
    """``use`` if the attribute is true; otherwise what is left of the data's use without it."""
    without = DataUse.NONE if use is DataUse.STREAM else DataUse.STREAM

    def read(traits: Traits) -> bool:
        return traits.needs_data if use is DataUse.STREAM else traits.data is use

    def write(traits: Traits, value: Any) -> Traits:
        if bool(value) == read(traits):
            return traits
        return replace(traits, data=use if value else without)

    return _Trait(read, write)


_TRAITS: Mapping[str, _Trait] = {
    "requires_calibration_data": _data(DataUse.STREAM),
    "learns_first": _data(DataUse.LEARN_FIRST),
    "surveys_first": _data(DataUse.SURVEY_FIRST),
    "finest_granularity": _same("granularity", Granularity),
    "takes_whole_blocks": _same("whole_blocks", bool),
    "twin_streams": _same("twin", bool),
    "propagates_error": _same("propagates_error", bool),
    "works_by_block": _same("by_block", bool),
    "changes_at_once": _edit(Edits.AT_ONCE),
    "rewrites_inputs": _edit(Edits.INPUTS),
    "leaves_open": _edit(Edits.OPEN),
    "changes_structure": _edit(Edits.STRUCTURE),
    "begins_a_pass": _same("begins_pass", bool),
    "joins": _same("joins", frozenset),
    "observing_steps": _same("observing_steps"),
    "means_unservable": _same("unservable", bool),
    "devices": _same("devices"),
    "writes": _same("files"),
}
"""In the order in which they are applied."""
_RULES = tuple(each.name for each in fields(RecipeRules))
_METHODS: Mapping[str, Mapping[str, str]] = {
    "select": {
        "calibrated_modules": "modules",
        "undivided": "undivided",
        "runs_to_end": "to_end",
        "accepts_unreached": "accepts_unreached",
    },
    "predict": {"planned": "modules", "as_written": "attached", "registered": "registered"},
    "cost": {
        "effort": "calibration",
        "work": "compute",
        "learning": "learning",
        "making": "recomputation",
        "beside": "held",
        "rehearse": "trial",
    },
}
"""Member of the contract → earlier method → field of what the member returns."""


def adapt_earlier_declarations(cls: type[Any]) -> None:
    """Give a modifier class the members that its earlier declarations stand for."""
    of_parents = {one for base in cls.__bases__ if hasattr(base, "rules") for one in base.__mro__}
    own = {name for one in cls.__mro__ if one not in of_parents for name in vars(one)}
    own |= inspect.get_annotations(cls).keys()
    _adapt_rules(cls, own)
    _adapt_traits(cls, own)
    for member, names in _METHODS.items():
        found = [name for name in names if name in own]
        if found and member not in own:
            setattr(cls, member, _member_of_methods(cls, member, found))
    if "check_data" in own and "check" not in own:
        cls.check = cls.check_data
    if "report_of" in own or ("report" in own and not _takes_argument(cls.report)):
        cls.report = _report_of_names(cls)


def _adapt_rules(cls: type[Any], own: Container[str]) -> None:
    given = {name: _class_value(cls, name) for name in _RULES if name in own}
    if given:
        cls.rules = replace(cls.rules, **given)
    if "rules" in own:
        for name in _RULES:
            setattr(cls, name, getattr(cls.rules, name))


def _class_value(cls: type[Any], name: str) -> Any:
    if name in cls.model_fields:
        return cls.model_fields[name].get_default(call_default_factory=True, validated_data={})
    return getattr(cls, name)


def _adapt_traits(cls: type[Any], own: Container[str]) -> None:
    if "traits" in own:
        declared: property = vars(cls)["traits"]
        for name in (name for name in _TRAITS if name not in own):
            setattr(cls, name, _readable_trait(name, declared))
        return
    given = [name for name in _TRAITS if name in own]
    if given:

        def traits(modifier: Any) -> Traits:
            found: Traits = super(cls, modifier).traits
            for name in given:
                found = _TRAITS[name].write(found, getattr(modifier, name))
            return found

        cls.traits = property(traits)


def _readable_trait(name: str, declared: property) -> readable_on_instances:
    # of this class, not of the instance's: an earlier property may ask its parent's
    return readable_on_instances(name, lambda one: _TRAITS[name].read(declared.__get__(one)))


def _member_of_methods(cls: type[Any], member: str, names: list[str]) -> Callable[..., Any]:
    """A method of the contract whose result has what the earlier methods ``names`` return."""
    called: dict[str, Callable[..., Any]] = {
        "calibrated_modules": lambda one, state: one(state),
        "undivided": lambda one, state: one(state),
        "planned": lambda one, state: one(state),
        "registered": lambda one, state: one(state.model),
        "as_written": lambda one, state: lambda: one(state),
        "learning": lambda one: one(),
    }

    def declare(modifier: Any, *state: Any) -> Any:
        found = getattr(super(cls, modifier), member)(*state)
        given = {name: getattr(modifier, name) for name in names}
        return replace(
            found,
            **{
                _METHODS[member][name]: called[name](one, *state) if name in called else one
                for name, one in given.items()
            },
        )

    return declare


def _takes_argument(method: Callable[..., Any]) -> bool:
    return len(inspect.signature(method).parameters) > 1


def _report_of_names(cls: type[Any]) -> Callable[..., dict[str, Any]]:
    """``report(names)`` of a class whose own takes no names."""
    whole, part = cls.report, getattr(cls, "report_of", None)

    def report(modifier: Any, names: Container[str] | None = None) -> dict[str, Any]:
        if names is not None and part is not None:
            found: dict[str, Any] = part(modifier, names)
            return found
        found = whole(modifier)
        return {key: one for key, one in found.items() if names is None or key in names}

    return report
