# SPDX-License-Identifier: Apache-2.0
"""Parts of pages that are made of the code when the site is built.

A page holds ``<!-- generated: commands -->``, which becomes the options of all commands, or
``<!-- generated: fields -->``, which becomes the fields of all modifiers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_CODE_OR_BAR = re.compile(r"(`[^`]*`)|\|")
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; cells hold Markdown, and bars in them are escaped, but for code."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[_CODE_OR_BAR.sub(lambda m: m[1] or r"\|", cell) for cell in line] for line in lines]
    return "\n".join(f"| {' '.join(' | '.join(line).split())} |" for line in cells)


def code(text: str) -> str:
    """A text as code, or nothing for an empty one."""
    return f"`{text}`" if text else ""


# --------------------------------------------------------------------------- commands


def commands() -> str:
    """Every command with its arguments and options, as the help has them."""
    import click
    import typer

    from llmcompressor.cli.app import app

    group = typer.main.get_command(app)
    parts = []
    for name, command in sorted(group.commands.items()):
        context = click.Context(command, info_name=f"llmcompressor {name}")
        usage = " ".join([context.info_name, *command.collect_usage_pieces(context)])
        parts += [f"## llmcompressor {name}", inspect.cleandoc(command.help or "")]
        parts += [f"```text\n{usage}\n```"]
        for heading, records in _sections(command, context).items():
            kind = "argument" if heading == "Arguments" else "option"
            rows = ([code(left), _plain(right)] for left, right in records)
            parts += [f"**{heading}**", table((kind, "meaning"), rows)]
    return "\n\n".join(parts)


def _sections(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for one in command.get_params(context):
        record = one.get_help_record(context)
        if record is not None:
            panel = getattr(one, "rich_help_panel", None) or "Options"
            heading = "Arguments" if one.param_type_name == "argument" else panel
            found.setdefault(heading, []).append(record)
    return found


def _plain(text: str) -> str:
    """A help text as Markdown: nothing in it is markup, and options are code."""
    text = re.sub(r"([\\*_<>\[\]])", r"\\\1", text)
    return re.sub(r"(?<![\w-])--[a-z][\w-]*(?:\\_[\w-]+)*", lambda m: code(m[0]), text)


# ----------------------------------------------------------------------------- fields


def fields() -> str:
    """The fields of every modifier: name, type, default and meaning."""
    from llmcompressor.core.modifier import Modifier
    from llmcompressor.core.modifier_registry import builtin_modifiers

    names: dict[type[Modifier], list[str]] = {}
    for name, cls in builtin_modifiers().items():
        names.setdefault(cls, []).append(name)
    parts = ["## Of every modifier", _fields_of(Modifier, leave_out=set())]
    for cls, called in sorted(names.items(), key=lambda one: one[0].__name__):
        others = [name for name in called if name != cls.__name__]
        parts += [f"## {cls.__name__}"]
        parts += [f"Also called {', '.join(map(code, others))}."] if others else []
        parts += [(inspect.getdoc(cls) or "").partition("\n\n")[0]]
        parts += [_fields_of(cls, leave_out=set(Modifier.model_fields))]
    return "\n\n".join(parts)


def _fields_of(cls: Any, *, leave_out: set[str]) -> str:
    from llmcompressor.recipe.schema import described_fields

    said = dict(described_fields(cls))
    rows = [
        [code(name), code(_kind(info.annotation)), code(_default(info)), said.get(name, "")]
        for name, info in cls.model_fields.items()
        if name not in leave_out
    ]
    return table(("field", "type", "default", "meaning"), rows)


def _default(info: Any) -> str:
    if info.is_required():
        return ""
    return repr(info.get_default(call_default_factory=True)).replace("'", '"')


def _kind(annotation: Any) -> str:
    """A type as text: without modules, and without what only a validator reads.

    >>> _kind(Annotated[int, "positive"] | None)
    'int | None'
    """
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(members[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, members))}]".replace("'", '"')
    if origin in (Union, UnionType):
        return " | ".join(map(_kind, members))
    if members:
        return f"{origin.__name__}[{', '.join(map(_kind, members))}]"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


MAKERS: dict[str, Callable[[], str]] = {"commands": commands, "fields": fields}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what the page's marks ask for."""
    return MARK.sub(lambda match: MAKERS[match[1]](), markdown)
