# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of recipes, by which editors complete and check them.

It is made from the pydantic models of the package's own modifiers and from the grammar of
:mod:`~llmcompressor.recipe.grammar`. The package holds it as a file, ``data/recipe.schema.json``,
and a copy lies beside each recipe that is written.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from pydantic.json_schema import PydanticJsonSchemaWarning

from llmcompressor.args.gates import GATES
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.modifier_registry import builtin_modifiers
from llmcompressor.recipe.grammar import DERIVED_FIELDS, METADATA_KEYS
from llmcompressor.schemes import PRESETS

_DRAFT = "http://json-schema.org/draft-07/schema#"
_EXPRESSION = {"type": "string", "pattern": r"eval\("}
_BY_NAME = {
    "config_groups": {
        "anyOf": [
            {
                "type": "object",
                "additionalProperties": {
                    "anyOf": [
                        {"$ref": "#/definitions/Group"},
                        {"type": ["array", "string"], "description": "Targets of a preset."},
                    ]
                },
            },
            {"type": "null"},
        ]
    },
    "scheme": {
        "anyOf": [{"enum": sorted(PRESETS)}, {"type": ["string", "object", "array", "null"]}]
    },
    "kv_cache_scheme": {
        "anyOf": [{"$ref": "#/definitions/QuantizationArgs"}, {"type": ["string", "null"]}]
    },
}
"""Fields whose annotation says less than what they take."""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of recipes.

    Fields may hold ``eval(...)`` in place of a value. Modifiers of other packages are allowed, with
    any fields.
    """
    definitions = _definitions(QuantizationScheme.model_json_schema())
    definitions["Group"] = definitions.pop("QuantizationScheme")
    classes, quantizers = {}, []
    for name, cls in builtin_modifiers().items():
        with warnings.catch_warnings():  # of defaults that are no JSON
            warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
            own = cls.model_json_schema()
        definitions |= _definitions({"$defs": own.get("$defs", {})})
        classes[name] = {"$ref": f"#/definitions/{cls.__name__}"}
        definitions[cls.__name__] = _fields(own, cls)
        if cls.from_fields.__func__ is not Modifier.from_fields.__func__:  # type: ignore[attr-defined]  # methods have it
            quantizers.append(cls.__name__)
    for name in quantizers:  # they take those of the quantizer that follows them as well
        further = definitions["QuantizationModifier"]["properties"]
        definitions[name]["properties"] = {**further, **definitions[name]["properties"]}
    fields = {"type": ["object", "null"]}
    named = {"type": "object", "properties": classes, "additionalProperties": fields}
    listed = {"type": "array", "items": {**named, "minProperties": 1, "maxProperties": 1}}
    definitions["modifiers"] = {"anyOf": [named, listed, {"type": "null"}]}
    definitions["gates"] = {
        "type": ["object", "null"],
        "description": "Limits that the checkpoint has to keep to get its name.",
        "properties": {
            name: {"type": ["number", "string"], "description": one.expected}
            for name, one in GATES.items()
        },
        "additionalProperties": False,
    }
    parts = {
        "args": {"type": "object", "description": "Names and values for eval(...)."},
        "gates": {"$ref": "#/definitions/gates"},
        "modifiers": {"$ref": "#/definitions/modifiers"},
        **{name: {} for name in sorted(METADATA_KEYS)},
    }
    groups = {r".+_modifiers(_\d+)?$": {"$ref": "#/definitions/modifiers"}}
    definitions["stage"] = {
        "type": "object",
        "properties": {**parts, "run_type": {"enum": ["oneshot", "train"]}},
        "patternProperties": groups,
        "additionalProperties": False,
    }
    stage = {"$ref": "#/definitions/stage"}
    return {
        "$schema": _DRAFT,
        "title": "Recipe of llmcompressor",
        "type": "object",
        "properties": {**parts, "stages": {"type": "object", "additionalProperties": stage}},
        "patternProperties": {**groups, r".+_stage(_\d+)?$": stage},
        "additionalProperties": False,
        "definitions": dict(sorted(definitions.items())),
    }


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of a pydantic schema, and itself by its title, in our form."""
    every = dict(schema.get("$defs", {}))
    if "title" in schema:
        every[schema["title"]] = {name: one for name, one in schema.items() if name != "$defs"}
    found = {name: _lenient(one) for name, one in every.items()}
    for one in found.values():
        if "description" in one:
            one["description"] = _first_paragraph(one["description"])
    return found


def _fields(schema: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return the schema of a modifier's fields, with what its docstring says of each."""
    told = dict(described_fields(cls))
    found: dict[str, Any] = _lenient({k: v for k, v in schema.items() if k != "$defs"})
    for name, field in found["properties"].items():
        if name in _BY_NAME:
            field.update(_BY_NAME[name])
        if name in told:
            field["description"] = told[name]
    for name in DERIVED_FIELDS:
        found["properties"].setdefault(name, {})
    about = _first_paragraph(inspect.getdoc(cls) or "")
    return {**found, "type": ["object", "null"], "description": about}


def _first_paragraph(text: str) -> str:
    """Return what an editor shows of a docstring, on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a pydantic schema: its references, no titles, and expressions where values stand."""
    properties = {
        name: _with_expression(_rewritten(field))
        for name, field in schema.get("properties", {}).items()
        if not name.endswith("_")
    }
    rest = {name: one for name, one in schema.items() if name not in ("required", "properties")}
    found: dict[str, Any] = _rewritten(rest)
    return {**found, "properties": properties} if properties else found


def _with_expression(field: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {
        name: field.pop(name) for name in ("default", "description") if name in field
    }
    if not field:
        return kept
    options = field["anyOf"] if set(field) == {"anyOf"} else [field]
    return {**kept, "anyOf": [*options, _EXPRESSION]}


def _rewritten(value: Any) -> Any:
    if isinstance(value, list):
        return [_rewritten(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, one in value.items():
        if name == "$ref":
            found[name] = one.replace("#/$defs/QuantizationScheme", "#/definitions/Group").replace(
                "#/$defs/", "#/definitions/"
            )
        elif name != "title":
            found[name] = _rewritten(one)
    return found


def described_fields(cls: type) -> Iterator[tuple[str, str]]:
    """Yield field and meaning, of a class and its bases: their docstrings' ``Attributes``."""
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = text.partition("Attributes:\n")[2].split("\n\n")[0]
        entry: list[str] = []
        for line in [*section.splitlines(), "    end: "]:
            if re.match(r"    \w", line) and ":" in line:
                yield from _entry(" ".join(entry))
                entry = []
            entry.append(line.strip())


def _entry(text: str) -> Iterator[tuple[str, str]]:
    names, _, meaning = text.partition(":")
    for name in filter(None, names.split(", ")):
        yield name, re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", meaning.strip()).replace("``", "`")
