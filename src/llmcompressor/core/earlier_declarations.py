# SPDX-License-Identifier: Apache-2.0
"""Declarations of earlier releases, which feed the contract of a modifier.

Modifiers written for llm-compressor 0.14, or for earlier releases of this package, declare what
they need by single attributes: ``requires_calibration_data``, ``run_types``, ``planned``. They may
be class data, properties, fields of the recipe, or methods. A class that has such attributes of its
own gets the member of the contract that stands for them (``rules``, ``traits``, ``select``,
``check``, ``predict``), computed from its parent's and them. The other way round, the
attributes can still be read wherever the contract is declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from llmcompressor.core.contract import DataUse, Edits, Granularity, RecipeRules, Traits

__all__ = ["EARLIER_NAMES", "adapt_earlier_declarations", "readable_on_instances"]


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


_Written = Callable[[Traits, Any], Mapping[str, Any]]


def _same(field: str, convert: Callable[[Any], Any]) -> tuple[Callable[[Traits], Any], _Written]:
    return (lambda traits: getattr(traits, field)), (lambda _, value: {field: convert(value)})


def _edit(flag: Edits) -> tuple[Callable[[Traits], Any], _Written]:
    return (
        lambda traits: flag in traits.edits,
        lambda traits, value: {"edits": traits.edits | flag if value else traits.edits & ~flag},
    )


def _data(*uses: DataUse) -> tuple[Callable[[Traits], Any], _Written]:
    """True for any of ``uses``; a value that is so already changes nothing."""
    otherwise = DataUse.NONE if len(uses) > 1 else DataUse.STREAM

    def write(traits: Traits, value: Any) -> Mapping[str, Any]:
        is_so = bool(value) == (traits.data in uses)
        return {} if is_so else {"data": uses[0] if value else otherwise}

    return (lambda traits: traits.data in uses), write


_TRAITS: Mapping[str, tuple[Callable[[Traits], Any], _Written]] = {
    "requires_calibration_data": _data(DataUse.STREAM, DataUse.SURVEY_FIRST, DataUse.LEARN_FIRST),
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
    "observing_steps": _same("observing_steps", int),
    "means_unservable": _same("unservable", bool),
    "devices": _same("devices", dict),
    "writes": _same("files", dict),
}
"""Earlier attribute → its value in :class:`Traits`, and what of these its value stands for."""
_RULES = tuple(each.name for each in fields(RecipeRules))
EARLIER_NAMES = frozenset({*_TRAITS, *_RULES})
"""Class data by which earlier classes declare what they need."""
_METHODS: Mapping[str, Mapping[str, tuple[str, Callable[..., Any] | None]]] = {
    "select": {
        "calibrated_modules": ("modules", lambda method, state: method(state)),
        "undivided": ("undivided", lambda method, state: method(state)),
        "runs_to_end": ("to_end", None),
        "accepts_unreached": ("accepts_unreached", None),
    },
    "predict": {
        "planned": ("modules", lambda method, state: method(state)),
        "as_written": ("attached", partial),
        "registered": ("registered", lambda method, state: method(state.model)),
    },
}
"""Member of the contract → earlier attribute → field of what the member returns, and its value:
the attribute itself if ``None``."""


def adapt_earlier_declarations(cls: type[Any]) -> None:
    """Give a modifier class the members that its earlier declarations stand for."""
    of_parents = {one for base in cls.__bases__ if hasattr(base, "rules") for one in base.__mro__}
    own = {name for one in cls.__mro__ if one not in of_parents for name in vars(one)}
    own |= inspect.get_annotations(cls).keys()
    if given := {name for name in _RULES if name in own}:
        values = {
            name: one.get_default(call_default_factory=True, validated_data={})
            for name, one in cls.model_fields.items()
            if name in given
        }
        values |= {name: getattr(cls, name) for name in given - values.keys()}
        cls.rules = replace(cls.rules, **values)
    if "rules" in own:
        for name in _RULES:
            setattr(cls, name, getattr(cls.rules, name))
    _adapt_traits(cls, own)
    for member, table in _METHODS.items():
        found = [name for name in table if name in own]
        if found and member not in own:
            setattr(cls, member, _member_of_methods(cls, member, found))
    if "check_data" in own and "check" not in own:
        cls.check = cls.check_data
    takes_names = len(inspect.signature(cls.report).parameters) > 1
    if "report_of" in own or ("report" in own and not takes_names):
        cls.report = _report_of_names(cls.report, getattr(cls, "report_of", None))


def _adapt_traits(cls: type[Any], own: Container[str]) -> None:
    given = [name for name in _TRAITS if name in own]
    if "traits" in own:
        # an earlier property may ask its parent's: that reads this class's traits, not the last's
        declared: property = inspect.getattr_static(cls, "traits")
        for name in _TRAITS.keys() - set(given):
            read = _TRAITS[name][0]
            reader = partial(lambda read, one: read(declared.__get__(one)), read)
            setattr(cls, name, readable_on_instances(name, reader))
    elif given:

        def traits(modifier: Any) -> Traits:
            found: Traits = super(cls, modifier).traits
            for name in given:
                found = replace(found, **_TRAITS[name][1](found, getattr(modifier, name)))
            return found

        cls.traits = property(traits)


def _member_of_methods(cls: type[Any], member: str, names: list[str]) -> Callable[..., Any]:
    """A member of the contract whose result has what the earlier attributes ``names`` say."""

    def declare(modifier: Any, *state: Any) -> Any:
        given = {}
        for name in names:
            field, call = _METHODS[member][name]
            value = getattr(modifier, name)
            given[field] = value if call is None else call(value, *state)
        return replace(getattr(super(cls, modifier), member)(*state), **given)

    return declare


def _report_of_names(
    whole: Callable[..., dict[str, Any]], part: Callable[..., dict[str, Any]] | None
) -> Callable[..., dict[str, Any]]:
    """``report(names)`` of a class whose own takes no names."""

    def report(modifier: Any, names: Container[str] | None = None) -> dict[str, Any]:
        if names is not None and part is not None:
            return part(modifier, names)
        found = whole(modifier)
        return {key: one for key, one in found.items() if names is None or key in names}

    return report
