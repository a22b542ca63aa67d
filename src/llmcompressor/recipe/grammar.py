# SPDX-License-Identifier: Apache-2.0
"""The grammar of recipes: a mapping parsed into stages of modifiers.

::

    recipe    := { args?, gates?, stages?, NAME_stage*, GROUP_modifiers*, modifiers?, metadata* }
    stages    := { NAME: stage }
    stage     := { args?, run_type?, gates?, GROUP_modifiers*, modifiers?, metadata* }
    modifiers := { CLASS: fields } | [ { CLASS: fields } ]
    fields    := { FIELD: value } | null
    gates     := { GATE: limit } | null

Groups outside a stage belong to the stage ``default``, gates outside to the last one. The list
form may hold several modifiers of one class. Metadata, which is ignored: ``version``,
``metadata``, ``name``, ``title``, ``description``, ``author``, ``authors``, ``license``, ``date``
and ``tags``. Every other key is an error. A recipe or stage without modifiers is one too, unless
one of its ``modifiers`` says so with ``{}`` or ``[]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.args.gates import parse_gates
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.modifier_registry import ModifierFactory
from llmcompressor.errors import ArgumentError, RecipeError, did_you_mean
from llmcompressor.recipe.arguments import Arguments, names_used
from llmcompressor.recipe.stages import DEFAULT_STAGE, Stage, parse_run_type, stage_name

METADATA_KEYS = frozenset(
    {"author", "authors", "date", "description", "license"}
    | {"metadata", "name", "tags", "title", "version"}
)
TOP_KEYS = frozenset({"args", "gates", "stages", "modifiers"})
STAGE_KEYS = frozenset({"args", "gates", "run_type", "modifiers"})
DERIVED_FIELDS = frozenset({"requires_calibration_data"})
"""What other tools write among the fields although it follows from them."""

_GROUP_KEY = re.compile(r"(?P<name>.+)_modifiers(?:_\d+)?$")
_STAGE_KEY = re.compile(r".+_stage(_\d+)?$")
_EXPECTED = (
    "A recipe has `modifiers`, `GROUP_modifiers`, `NAME_stage` or `stages`, `args` and `gates`; "
    "under `modifiers` stand class names with their fields."
)
_EXPECTED_IN_STAGE = "A stage has `modifiers` or `GROUP_modifiers`, `run_type`, `args` and `gates`."


@dataclass(frozen=True)
class ParsedRecipe:
    """The stages and arguments that a recipe's mapping describes.

    Args:
        stages: in order.
        args: the values of the arguments that were used or overridden, of all stages.
    """

    stages: tuple[Stage, ...]
    args: Mapping[str, object]


@dataclass
class _StageDraft:
    """A stage while it is parsed."""

    name: str
    run_type: Any = None
    modifiers: list[Modifier] = field(default_factory=list)
    empty_on_purpose: bool = False
    gates: Mapping[str, float] = field(default_factory=dict)

    def finish(self) -> Stage:
        run_type = parse_run_type(self.run_type, self.name)
        return Stage(self.name, tuple(self.modifiers), run_type, self.gates)


def _is_group_key(key: str) -> bool:
    return key == "modifiers" or bool(_GROUP_KEY.match(key))


def declared_names(document: object) -> frozenset[str]:
    """The arguments that a document declares or uses, at any level."""
    if not isinstance(document, Mapping):
        return frozenset()
    names = names_used({k: v for k, v in document.items() if k not in METADATA_KEYS})
    bodies = [document, *document.values()]
    nested = [value for value in document.values() if isinstance(value, Mapping)]
    bodies += [body for value in nested for body in value.values()]
    for body in bodies:
        if isinstance(body, Mapping) and isinstance(body.get("args"), Mapping):
            names |= frozenset(body["args"])
    return names


def parse_document(document: Any, overrides: Mapping[str, object], source: str) -> ParsedRecipe:
    """Build the modifiers that a document describes.

    Args:
        document: a mapping, as read from text or given by the user; it is not changed.
        overrides: values that take precedence over ``args``.
        source: name of the document in error messages.

    Raises:
        RecipeError: the document does not follow the grammar, a modifier or field is unknown, or
            there is no modifier in it.
    """
    if document in ({}, []):
        return ParsedRecipe((), {})
    _require_mapping(document, source)
    return _RecipeParser(overrides, source).read(document)


class _RecipeParser:
    """Parses one document; ``args`` holds the values for its expressions."""

    def __init__(self, overrides: Mapping[str, object], source: str) -> None:
        self._overrides = overrides
        self._source = source
        self._top: Mapping[str, object] = {}
        self._drafts: dict[str, _StageDraft] = {}
        self._args: list[Arguments] = []

    def read(self, document: Mapping[str, Any]) -> ParsedRecipe:
        _check_keys(document, TOP_KEYS, f"{self._source} has", _EXPECTED)
        self._top = self._mapping(document.get("args"), "args")
        args = self._arguments({})
        for key, value in document.items():
            if _is_group_key(key):
                draft = self._drafts.setdefault(DEFAULT_STAGE, _StageDraft(DEFAULT_STAGE))
                self._read_group(draft, key, value, args)
            elif _STAGE_KEY.match(key):
                self._read_stage(key, value)
            elif key == "stages":
                for name, body in self._mapping(value, "stages").items():
                    self._read_stage(name, body)
        drafts = self._drafts.values()
        if not any(draft.modifiers or draft.empty_on_purpose for draft in drafts):
            raise RecipeError(
                f"{self._source} has no modifiers: its keys are {_format_keys(document)}.",
                f"{_EXPECTED} Write `modifiers: {{}}` for a recipe that does nothing.",
            )
        *_, last = drafts
        last.gates = {**self._gates(document.get("gates"), args, self._source), **last.gates}
        stages = tuple(draft.finish() for draft in drafts)
        used = {name: value for args in self._args for name, value in args.used.items()}
        return ParsedRecipe(stages, {**used, **self._overrides})

    def _read_stage(self, key: Any, value: Any) -> None:
        name = stage_name(key) if isinstance(key, str) else ""
        where = f"the stage {key!r} of the recipe"
        if not name or name in self._drafts:
            problem = "stands there twice" if name else "needs a text for its name"
            raise RecipeError(f"{where[0].upper()}{where[1:]} {problem}.", _EXPECTED)
        body = self._mapping(value, where)
        _check_keys(body, STAGE_KEYS, f"{where[0].upper()}{where[1:]} has", _EXPECTED_IN_STAGE)
        args = self._arguments(self._mapping(body.get("args"), f"`args` of {where}"))
        draft = self._drafts[name] = _StageDraft(name, args.resolve(body.get("run_type")))
        draft.gates = self._gates(body.get("gates"), args, f"{where[0].upper()}{where[1:]}")
        for group, modifiers in body.items():
            if _is_group_key(group):
                self._read_group(draft, group, modifiers, args)
        if not draft.modifiers and not draft.empty_on_purpose:
            raise RecipeError(
                f"{where[0].upper()}{where[1:]} has no modifiers.",
                f"{_EXPECTED_IN_STAGE} Write `modifiers: {{}}` if it is meant to have none.",
            )

    def _arguments(self, own: Mapping[str, object]) -> Arguments:
        self._args.append(Arguments({**self._top, **own, **self._overrides}))
        return self._args[-1]

    def _gates(self, value: Any, args: Arguments, where: str) -> dict[str, float]:
        try:
            return parse_gates("gates", self._mapping(args.resolve(value), "`gates`"))
        except ArgumentError as error:
            raise RecipeError(f"{where} has a wrong gate. {error.problem}", error.remedy) from error

    def _read_group(self, draft: _StageDraft, key: str, value: Any, args: Arguments) -> None:
        match = _GROUP_KEY.match(key)
        group = match["name"] if match else draft.name
        for class_name, fields in self._entries(key, value):
            resolved = args.resolve(fields).items()
            given = {key: one for key, one in resolved if key not in DERIVED_FIELDS}
            for field_name in given:
                if not isinstance(field_name, str):
                    raise RecipeError(f"{field_name!r} is no field of the modifier {class_name}.")
            own = given.pop("group", None) or group
            draft.modifiers += ModifierFactory.create_all(class_name, group=own, **given)
        if value in ({}, []):
            draft.empty_on_purpose = True

    def _entries(self, key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The (class name, fields) pairs of a group, given as a mapping or a list."""
        if not isinstance(value, (Mapping, list, tuple)):
            raise RecipeError(
                f"`{key}` in the recipe is {_describe_value(value)} where modifiers are expected.",
                "Write class names with their fields below it, indented; or `{}` for none.",
            )
        for item in [value] if isinstance(value, Mapping) else value:
            if not isinstance(item, Mapping):
                raise RecipeError(
                    f"An item of `{key}` in the recipe is {_describe_value(item)}, not a modifier.",
                    "Write each as `- ClassName: {field: value}`.",
                )
            for class_name, fields in item.items():
                if not isinstance(class_name, str):
                    raise RecipeError(
                        f"{class_name!r} under `{key}` in the recipe is no class name.", _EXPECTED
                    )
                yield class_name, self._mapping(fields, f"the modifier {class_name}")

    def _mapping(self, value: Any, what: str) -> Mapping[Any, Any]:
        """A mapping as given; ``{}`` for null."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise RecipeError(
                f"In the recipe, {what} is {_describe_value(value)} where a mapping is expected.",
                "Write `name: value` lines below it, indented.",
            )
        return value


def _require_mapping(document: Any, source: str) -> None:
    if isinstance(document, Mapping):
        return
    if isinstance(document, list):
        raise RecipeError(
            f"{source} is a list.", "Put the list under the key `modifiers`: `modifiers: [...]`."
        )
    what = "neither a recipe nor a file" if isinstance(document, str) else "not a recipe"
    raise RecipeError(f"{source} is {_describe_value(document)}: {what}.", _EXPECTED)


def _check_keys(body: Mapping[Any, Any], known: frozenset[str], has: str, expected: str) -> None:
    """Raise for keys outside of the grammar, with suggestions."""
    top = known is TOP_KEYS
    named = known | METADATA_KEYS
    unknown = [
        key
        for key in body
        if not isinstance(key, str)
        or not (key in named or _is_group_key(key) or (top and _STAGE_KEY.match(key)))
    ]
    if unknown:
        keys = "an unrecognized key" if len(unknown) == 1 else "unrecognized keys"
        hints = [hint for key in unknown if (hint := _suggest(str(key), known, top=top))]
        raise RecipeError(f"{has} {keys}: {_format_keys(unknown)}.", " ".join([*hints, expected]))


def _suggest(key: str, known: frozenset[str], *, top: bool) -> str:
    if _is_modifier(key):
        return f"Put {key} under `modifiers`."
    prefix = key.rpartition("_")[0]
    options = {*known, *METADATA_KEYS}
    if prefix:
        options |= {f"{prefix}_modifiers", *([f"{prefix}_stage"] if top else [])}
    hint = did_you_mean(key, options)
    return hint if hint.startswith("Did") else ""


def _is_modifier(name: str) -> bool:
    try:
        ModifierFactory.find(name)
    except RecipeError:
        return name.endswith("Modifier")
    return True


def _format_keys(keys: Any) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _describe_value(value: object) -> str:
    kinds = {str: "the text", list: "the list", int: "the number", float: "the number"}
    return "empty" if value is None else f"{kinds.get(type(value), 'the value')} {value!r:.60}"
