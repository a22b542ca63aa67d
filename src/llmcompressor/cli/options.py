# SPDX-License-Identifier: Apache-2.0
"""Command line options from the fields of an argument dataclass.

An option is named after its field, ``--num-calibration-samples`` for ``num_calibration_samples``,
and has the field's help; ``--no-name`` has the help of turning it off. Options that were not given
are left out of the call, so that each default is defined once. By the type of the field:

=====================  =========================================================================
``bool``               ``--name``, or ``--no-name`` where it is true by default
``int``, ``float``     a number; ``none`` where the field may be ``None`` and by default is not
a list                 repeated, or in one value with commas; ``re:`` patterns keep theirs
a text, list or dict   repeated as it is; one alone is a text, where a list is not named first
a dict                 ``key=value``, repeated; the value as JSON if it is JSON
anything else          a text
=====================  =========================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from llmcompressor.args.checks import FieldHelp
from llmcompressor.runtime.limits import parse_json

Convert = Callable[[Any], Any]
_as_is: Convert = lambda value: value  # noqa: E731


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The command line type of a field, and the conversion of its value."""

    typed: Any
    convert: Convert
    metavar: str | None = None


def option_parameters(
    arguments: type, *, panel: str, skip: Sequence[str] = (), required: Sequence[str] = ()
) -> list[inspect.Parameter]:
    """Return a keyword parameter with a ``typer.Option`` for each field of a dataclass.

    Args:
        arguments: the dataclass.
        panel: heading of these options in the help.
        skip: fields without an option.
        required: fields that must be given.
    """
    hints = _hints(arguments)
    parameters = []
    for field in dataclasses.fields(arguments):
        if field.name in skip:
            continue
        kind = _kind(hints[field.name], field.default)
        text = field.metadata.get("help") or ""
        name = getattr(text, "option", None) or field.name
        if kind.typed is bool and field.default is True and isinstance(text, FieldHelp):
            text = text.off or ""
        elif kind.typed is not bool and field.default not in (None, dataclasses.MISSING):
            text = f"{text} (default: {field.default})"
        option = typer.Option(
            # a flag has only the form that changes its default
            dashed(f"no-{name}" if kind.typed is bool and field.default is True else name),
            help=text,
            metavar=kind.metavar,
            rich_help_panel=panel,
            show_default=False,
        )
        must = field.name in required
        typed, default = (
            (kind.typed, inspect.Parameter.empty) if must else (kind.typed | None, None)
        )
        parameters.append(parameter(field.name, typed, option, default=default))
    return parameters


def parameter(
    name: str, typed: Any, option: Any = None, *, default: Any = None
) -> inspect.Parameter:
    """Return a keyword parameter of a command."""
    annotation = typed if option is None else Annotated[typed, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def call_arguments(given: Mapping[str, Any], *dataclass_types: type) -> dict[str, Any]:
    """Return the entrypoint's arguments from the given command line options.

    Raises:
        typer.BadParameter: a value does not have the form that its field needs.
    """
    converters: dict[str, Convert] = {}
    for arguments in dataclass_types:
        hints = _hints(arguments)
        for field in dataclasses.fields(arguments):
            converters[field.name] = _kind(hints[field.name], field.default).convert
    call = {}
    for name, value in given.items():
        if value is None or value == []:
            continue
        try:
            call[name] = converters[name](value) if name in converters else value
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=dashed(name)) from error
    return call


class GroupedCommand(TyperCommand):
    """A command that lists its options under their headings (``rich_help_panel``) as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then each heading in the order of its first option."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                panel = getattr(one, "rich_help_panel", None) or "Options"
                heading = "Arguments" if one.param_type_name == "argument" else panel
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def flag_defaults(arguments: type) -> dict[str, bool]:
    """Return the fields of a dataclass whose options take no value, with their defaults."""
    hints = _hints(arguments)
    return {
        field.name: bool(field.default)
        for field in dataclasses.fields(arguments)
        if _kind(hints[field.name], field.default).typed is bool
    }


def output_folder(given: Mapping[str, Any]) -> str:
    """Return the folder of the result; a stage of a recipe has a subfolder of its own.

    >>> output_folder({"output_dir": "out", "stage": "quant"})
    'out/quant'
    """
    folder, stage = str(given["output_dir"]), given.get("stage")
    return str(Path(folder) / stage) if stage else folder


@functools.cache  # commands share options, and evaluating hints is slow
def _hints(arguments: type) -> dict[str, Any]:
    return get_type_hints(arguments)


def _kind(hint: Any, default: Any) -> _Kind:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = {get_origin(member) or member for member in members}
    says_none = type(None) in plain and default is not None
    if bool in plain:
        if str in plain:
            truths = {"true": True, "false": False}
            return _Kind(str, lambda value: truths.get(value.strip().lower(), value))
        return _Kind(bool, operator.not_ if default is True else _as_is)
    if plain & {int, float} and str not in plain:
        number = int if int in plain else float
        if not says_none:
            return _Kind(number, _as_is)
        metavar = f"<{number.__name__}|none>"
        return _Kind(str, lambda value: None if _is_none(value) else number(value), metavar)
    if plain & {list, dict}:
        return _list_kind(plain, is_listed=get_origin(members[0]) is list)
    return _Kind(str, (lambda value: None if _is_none(value) else value) if says_none else _as_is)


def _list_kind(plain: set[Any], *, is_listed: bool) -> _Kind:
    if list not in plain:
        return _Kind(list[str], parse_pairs, "<key=value>")
    if dict not in plain:
        return _Kind(list[str], _split, "<str,...>")
    return _Kind(list[str], lambda values: values if is_listed or values[1:] else values[0])


def dashed(name: str) -> str:
    """Return the option for an argument's name.

    >>> dashed("max_seq_length")
    '--max-seq-length'
    """
    return "--" + name.replace("_", "-")


def _is_none(value: str) -> bool:
    return value.strip().lower() in {"none", "null"}


def _split(values: Sequence[str]) -> list[str]:
    """Split values at commas, except patterns.

    >>> _split(["a,b", "re:.*q_proj{1,2}"])
    ['a', 'b', 're:.*q_proj{1,2}']
    """
    parts: list[str] = []
    for value in values:
        parts += [value] if value.startswith("re:") else value.split(",")
    return [part.strip() for part in parts if part.strip()]


def parse_pairs(values: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` items into a dict.

    >>> parse_pairs(["name=a", "depth=2"])
    {'name': 'a', 'depth': 2}
    """
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise ValueError(f"{value!r} is not of the form key=value.")
        try:
            pairs[key] = parse_json(text)
        except json.JSONDecodeError:
            pairs[key] = text
    return pairs
