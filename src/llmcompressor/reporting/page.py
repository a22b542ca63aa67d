# SPDX-License-Identifier: Apache-2.0
"""A page of cards: one HTML file with all that it shows, which needs no network and no script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from llmcompressor.runtime.limits import parse_json

_DATA = '<script type="application/json" id="run">'
_END = "</script>"


@dataclass(frozen=True)
class Card:
    """A part of a page.

    Attributes:
        id: its anchor.
        title: its heading.
        charts: SVG, from :mod:`llmcompressor.reporting.charts`.
        lines: paragraphs.
        code: lines to type.
        head: names of the columns of its table.
        rows: the cells.
        numbers: columns whose cells are numbers.
        note: a remark below.
        wide: it takes the whole width.
    """

    id: str
    title: str
    charts: Sequence[str] = ()
    lines: Sequence[str] = ()
    code: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    numbers: Sequence[int] = ()
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Figure:
    """A large number at the top of a page; ``tone`` is ``good``, ``bad`` or nothing."""

    name: str
    value: str
    tone: str = ""


def render(
    title: str,
    subtitle: str,
    figures: Sequence[Figure],
    cards: Sequence[Card],
    data: Mapping[str, Any],
) -> str:
    """Return the page as HTML; every text in it is escaped.

    Args:
        title: the heading.
        subtitle: the line below.
        figures: shown first.
        cards: the parts, in order.
        data: kept in the page, for :func:`data_of`.
    """
    # a text in the data must not end the element that holds it
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return _template().render(
        title=title,
        subtitle=subtitle,
        figures=[(one.name, one.value, one.tone) for one in figures],
        cards=cards,
        data=text,
    )


@cache
def _template() -> Template:
    loader = PackageLoader("llmcompressor", "reporting")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("page.html")


def data_of(page: Path) -> dict[str, Any]:
    """Return the data that :func:`render` kept in a page; empty if it has none."""
    try:
        text = page.read_text(encoding="utf-8")
        found = parse_json(text.rpartition(_DATA)[2].partition(_END)[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
