# SPDX-License-Identifier: Apache-2.0
"""Serialization of a recipe as YAML that any YAML loader reads back unchanged.

Only plain types are written. Every field with a value is, not only those that differ from their
default, so that a later change of a default does not change what a saved recipe means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.modifier_registry import ModifierFactory
from llmcompressor.logger import logger
from llmcompressor.recipe.arguments import escape_expressions
from llmcompressor.recipe.document import add_number_resolvers
from llmcompressor.recipe.stages import Stage, infer_run_type, unique_name

WIDTH = 88
_BREAKS = frozenset("\t\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\ufeff")
_LABELS = frozenset({"group"})


class _RecipeDumper(yaml.SafeDumper):
    """The safe dumper; quotes texts that YAML 1.1 or our loader would read as numbers."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Write each value in full, without anchors."""
        return True


def _represent_text(dumper: _RecipeDumper, text: str) -> yaml.ScalarNode:
    """Represent a text; double-quoted if it has line breaks, which other styles may lose."""
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if _BREAKS.intersection(text) else None
    )


add_number_resolvers(_RecipeDumper)
_RecipeDumper.add_representer(str, _represent_text)


def to_yaml(stages: Iterable[Stage]) -> str:
    """Serialize stages as YAML.

    Args:
        stages: with unique names.
    """
    text: str = yaml.dump(
        to_mapping(stages), Dumper=_RecipeDumper, width=WIDTH, sort_keys=False, allow_unicode=True
    )
    return text


def to_mapping(stages: Iterable[Stage]) -> dict[str, Any]:
    """``{NAME_stage: {run_type?, gates?, GROUP_modifiers: {CLASS: fields}}}`` of plain types.

    Texts that look like expressions are escaped.
    """
    mapping: dict[str, Any] = _escape_all(
        {f"{stage.name}_stage": _stage_mapping(stage) for stage in stages}
    )
    return mapping


def modifier_fields(modifier: Modifier) -> dict[str, Any]:
    """The fields of a modifier in plain types, as in a recipe; without its group.

    A field that is ``None`` is left out if that is its default. So is a field of an earlier release
    without effect that has its default: read back, it would count as given.
    """

    def spelled(value: Any) -> Any:
        plain = _plain_form(value)
        if plain is None:
            _warn_of_loss(modifier, value)
        return plain

    try:
        dumped = modifier.model_dump(mode="json", fallback=spelled)
    except Exception:  # bytes that are no text, or whatever a serializer of a user's raises
        dumped = _dump_fields_singly(modifier, spelled)
    fields: dict[str, Any] = _restore_dropped(modifier, dumped)
    known, without_effect = type(modifier).model_fields, modifier.rules.moved
    return {
        name: value
        for name, value in fields.items()
        if name not in _LABELS
        and not name.endswith("_")
        and not (name in without_effect and getattr(modifier, name) == known[name].default)
    }


def _warn_of_loss(modifier: Modifier, value: Any) -> None:
    logger.warning(
        f"A field of {type(modifier).__name__} holds {value!r:.80}, which no recipe can hold: "
        "recipe.yaml is written without it."
    )


def _dump_fields_singly(modifier: Modifier, spelled: Callable[[Any], Any]) -> dict[str, Any]:
    """Serialize fields one by one; one that cannot be serialized logs a warning and is ``None``."""
    dumped: dict[str, Any] = {}
    for name in type(modifier).model_fields:
        try:
            dumped.update(modifier.model_dump(mode="json", include={name}, fallback=spelled))
        except Exception:  # of any kind; hours of work must not be lost by it
            value = getattr(modifier, name)
            try:
                dumped[name] = to_jsonable_python(value, fallback=spelled)  # not by its serializer
            except Exception:  # of any kind, as above
                _warn_of_loss(modifier, value)
                dumped[name] = None
    return dumped


def _class_name(modifier: Modifier) -> str:
    """The name of a modifier's class in a recipe: for third-party classes with their path."""
    owner = type(modifier)
    path = f"{owner.__module__}.{owner.__qualname__}"
    if ModifierFactory.is_builtin(owner) or owner.__module__ == "__main__":
        return owner.__name__
    module = sys.modules.get(owner.__module__)
    # a class defined within a function, or replaced since, is found by its name only
    return path if getattr(module, owner.__qualname__, None) is owner else owner.__name__


def _stage_mapping(stage: Stage) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    if stage.run_type != infer_run_type(stage.name):
        mapping["run_type"] = stage.run_type
    if stage.gates:
        mapping["gates"] = dict(stage.gates)
    for group, modifiers in _group_runs(stage).items():
        entries = [(_class_name(modifier), modifier_fields(modifier)) for modifier in modifiers]
        repeated = len({name for name, _ in entries}) < len(entries)
        key = f"{group}_modifiers"
        mapping[key] = [{name: fields} for name, fields in entries] if repeated else dict(entries)
    if not stage.modifiers:
        mapping[f"{stage.name}_modifiers"] = {}
    return mapping


def _group_runs(stage: Stage) -> dict[str, list[Modifier]]:
    """Consecutive modifiers of one group; a group that recurs gets a number."""
    runs: dict[str, list[Modifier]] = {}
    current = None
    for modifier in stage.modifiers:
        group = modifier.group or stage.name
        if group != current:
            current = group
            run = runs[unique_name(group, runs)] = []
        run.append(modifier)
    return runs


def _restore_dropped(value: Any, dumped: Any) -> Any:
    """Correct ``dumped``, the serialized form of ``value``.

    Models lose their empty fields and those without a plain form, and sets are sorted. Values that
    a serializer dropped are restored where they have a plain form: infinities within untyped
    values, dtypes that a format does not store.
    """
    if isinstance(value, BaseModel) and isinstance(dumped, dict):
        return {
            name: plain
            for name, info in type(value).model_fields.items()
            if (name in dumped or not info.exclude)
            and not (
                (plain := _plain_field(getattr(value, name), name, dumped)) is None
                and (getattr(value, name) is not None or _is_null_by_default(info))
            )
        }
    if dumped is None and value is not None:
        return _plain_form(value)
    if isinstance(value, (set, frozenset)):
        return sorted(dumped, key=repr)
    if isinstance(value, Mapping) and isinstance(dumped, dict) and len(value) == len(dumped):
        return {  # JSON has texts for keys, YAML has numbers too
            key if isinstance(key, int) else name: _restore_dropped(item, plain)
            for (key, item), (name, plain) in zip(value.items(), dumped.items(), strict=True)
        }
    if isinstance(value, (list, tuple)) and isinstance(dumped, list) and len(value) == len(dumped):
        return [_restore_dropped(item, plain) for item, plain in zip(value, dumped, strict=True)]
    return dumped


def _plain_field(value: Any, name: str, dumped: Mapping[str, Any]) -> Any:
    """A field of a model in plain types; the model's serializer may have dropped it.

    That of compressed-tensors' arguments drops fields that it fills in again when they are read, if
    they were not set; which these are depends on the release, and the spelling of a dtype must not.
    """
    if _is_of_torch(value, "dtype"):
        return str(value)
    item = dumped[name] if name in dumped else to_jsonable_python(value, fallback=_plain_form)
    return _restore_dropped(value, item)


def _plain_form(value: Any) -> str | float | None:
    """The plain form of a value that pydantic cannot serialize; ``None`` if it has none."""
    if _is_of_torch(value, "dtype", "device"):
        return str(value).removeprefix("torch.")
    if isinstance(value, Integral):  # numpy's numbers too
        return int(value)
    return float(value) if isinstance(value, Real) else None


def _is_of_torch(value: Any, *names: str) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in names


def _is_null_by_default(info: FieldInfo) -> bool:
    return not info.is_required() and info.default_factory is None and info.default is None


def _escape_all(value: Any) -> Any:
    """Escape texts that look like expressions, at any depth."""
    if isinstance(value, str):
        return escape_expressions(value)
    if isinstance(value, dict):
        return {key: _escape_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_all(item) for item in value]
    return value
