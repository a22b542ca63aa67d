# SPDX-License-Identifier: Apache-2.0
"""Charts of a report as SVG, drawn by pygal.

Each dot has a title, which browsers show under the pointer: no chart needs a script.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

_COLORS = (
    *("#3366cc", "#dc3912", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00"),
    *("#b82e2e", "#316395", "#994499", "#22aa99", "#aaaa11", "#6633cc", "#e67300"),
)
_WIDTH, _HEIGHT, _FRAME, _ROW = 440, 280, 120, 22
_COLUMNS = 2
"""Of a legend."""
_MOST_SERIES = len(_COLORS)
_MOST_LABELS = 20
"""Of an axis, about."""


class Dot(NamedTuple):
    """A dot of a chart, and the title that is shown for it."""

    x: float
    y: float
    title: str


def over_depth(series: Mapping[str, Sequence[Dot]], what: str, *, log: bool = False) -> str:
    """Draw values over the depth of a model, a line for each kind of layer.

    Args:
        series: name → dots, by rising depth.
        what: what the vertical axis shows.
        log: the vertical axis is logarithmic; what is not positive is left out.
    """
    shown = dict(sorted(series.items())[:_MOST_SERIES])
    digits = _digits([dot.y for dots in shown.values() for dot in dots])
    chart = _pygal().XY(
        **_common(what, _HEIGHT + _ROW * (math.ceil(len(shown) / _COLUMNS) + 2)),
        x_title="layer",
        dots_size=2.5,
        x_value_formatter=lambda value: f"{value:g}",
        value_formatter=lambda value: _short(
            10.0**value if log and value is not None else value, digits
        ),
        legend_at_bottom=True,
        legend_at_bottom_columns=_COLUMNS,
        truncate_legend=-1,
        x_labels=_depths([dot.x for dots in shown.values() for dot in dots]),
    )
    for name, dots in shown.items():
        every = [dot for dot in dots if not log or dot.y > 0]
        values = [(dot.x, math.log10(dot.y) if log else dot.y) for dot in every]
        titles = [dot.title for dot in every]
        pairs = zip(values, titles, strict=True)
        chart.add(name, [{"value": value, "label": title} for value, title in pairs])
    return _svg(chart)


def along_sizes(
    line: Sequence[Dot], dots: Mapping[str, Sequence[Dot]], what: str, *, name: str
) -> str:
    """Draw a line over sizes of weight files, and dots that may lie beside it.

    Args:
        line: by rising size, in MB; the vertical axis is logarithmic, and what is not positive is
            left out.
        dots: name → dots of their own.
        what: what the vertical axis shows.
        name: of the line.
    """
    every = [*line, *(dot for one in dots.values() for dot in one)]
    chart = _pygal().XY(
        **_common(what, _HEIGHT + _ROW * (math.ceil((len(dots) + 1) / _COLUMNS) + 2)),
        x_title="MB of weight files",
        dots_size=3.5,
        x_value_formatter=lambda value: _short(value, _digits([dot.x for dot in every])),
        value_formatter=lambda value: _short(None if value is None else 10.0**value),
        legend_at_bottom=True,
        legend_at_bottom_columns=_COLUMNS,
        truncate_legend=-1,
    )
    for title, own in {name: line, **dots}.items():
        values = [
            {"value": (dot.x, math.log10(dot.y)), "label": dot.title} for dot in own if dot.y > 0
        ]
        chart.add(title, values, stroke=title == name)
    return _svg(chart)


def bars(values: Mapping[str, Mapping[str, float]], what: str) -> str:
    """Draw horizontal bars: series → label → value; all series have the same labels."""
    labels = list(dict.fromkeys(label for found in values.values() for label in found))
    chart = _pygal().HorizontalBar(
        **_common(what, _FRAME + _ROW * len(labels) * max(len(values), 1)),
        value_formatter=_short,
        legend_at_bottom=True,
        show_legend=len(values) > 1,
        max_scale=5,
        truncate_label=-1,
        margin_left=10,
    )
    chart.x_labels = labels[::-1]  # bars begin at the bottom
    for name, found in values.items():
        chart.add(name, [{"value": found.get(one), "label": one} for one in labels[::-1]])
    return _svg(chart)


@cache
def _pygal() -> Any:
    """Import pygal, without its hook for old plugins, of which each later import would warn."""
    import pygal  # noqa: PLC0415  # most calls of the package draw nothing

    hooks = (one for one in sys.meta_path if type(one).__module__ == pygal.__name__)
    for hook in list(hooks):
        sys.meta_path.remove(hook)
    return pygal


@cache
def _style() -> Any:
    return _pygal().style.Style(
        background="transparent",
        plot_background="transparent",
        foreground="#445",
        foreground_strong="#112",
        foreground_subtle="#99a",
        font_family="system-ui, sans-serif",
        label_font_size=13,
        major_label_font_size=13,
        legend_font_size=13,
        title_font_size=15,
        no_data_font_size=15,
        stroke_width=1.5,
        colors=_COLORS,
    )


def _common(what: str, height: int) -> dict[str, Any]:
    return {
        "title": what,
        "width": _WIDTH,
        "height": height,
        "legend_box_size": 11,
        "style": _style(),
        "js": [],
        "disable_xml_declaration": True,
        "explicit_size": False,
        "print_values": False,
    }


def _depths(xs: Sequence[float]) -> list[int]:
    """Return at most nine whole numbers for an axis."""
    if not xs:
        return []
    first, last = math.floor(min(xs)), math.ceil(max(xs))
    step = max(1, math.ceil((last - first) / 8))
    return list(range(first, last + 1, step))


def _digits(values: Sequence[float]) -> int:
    """Return how many digits tell the labels of an axis apart.

    >>> _digits([0.1, 0.2]), _digits([31.4, 31.7]), _digits([2.0, 2.0]), _digits([])
    (3, 5, 3, 3)
    """
    reach = max(values, default=0.0) - min(values, default=0.0)
    if not 0 < reach < math.inf:
        return 3
    step = reach / _MOST_LABELS
    largest = max(map(abs, values))
    return min(max(3, math.ceil(math.log10(largest / step)) + 1), 12)


def _short(value: Any, digits: int = 3) -> str:
    """Format a number with some digits.

    >>> _short(0.00123456), _short(1234567.0), _short(12), _short(31.65, 5)
    ('0.00123', '1.23e+06', '12', '31.65')
    """
    return "" if value is None else f"{value:.{digits}g}"


def _svg(chart: Any) -> str:
    config = repr((chart.config.title, chart.raw_series))
    chart.uuid = f"{zlib.crc32(config.encode()):08x}"  # else another at every call
    chart.add_xml_filter(_with_titles)
    return str(chart.render(is_unicode=True))


def _with_titles(root: Any) -> Any:
    """Give dots and bars titles in the place of what pygal's script reads."""
    for parent in root.iter():
        for one in [one for one in parent if callable(one.tag) or one.tag == "script"]:
            parent.remove(one)  # the date, and what pygal's script would read
        told = {one.get("class", ""): one for one in parent if one.tag == "desc"}
        if "value" not in told:
            continue
        words = [told[name].text or "" for name in ("label", "value") if name in told]
        for one in told.values():
            parent.remove(one)
        title = Element("title")
        title.text = ": ".join(filter(None, words))
        parent.insert(0, title)
    return root
