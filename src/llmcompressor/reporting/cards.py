# SPDX-License-Identifier: Apache-2.0
"""Cards that the page of one checkpoint and that of several share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmcompressor.reporting.charts import Dot, bars, over_depth
from llmcompressor.reporting.contents import Contents, Matrix, depth_of, kind_of
from llmcompressor.reporting.page import Card
from llmcompressor.runtime.progress import format_bytes

_MOST_BARS = 16

Sizes = Mapping[str, Mapping[str, int]]
"""Kind of layer → ``modules``, how many there are, and ``bytes``, those of their tensors."""


def size_card(sides: Mapping[str, Sizes], contents: Mapping[str, Contents]) -> Card:
    """Show sizes by kind of layer.

    Args:
        sides: name of a checkpoint → its sizes; one without any is left out.
        contents: name of a checkpoint → what it holds, for the schemes.
    """
    sides = {name: sizes for name, sizes in sides.items() if sizes}
    names = list(dict.fromkeys(name for sizes in sides.values() for name in sizes))
    rows = []
    for name in names:
        counts = dict.fromkeys(sizes[name]["modules"] for sizes in sides.values() if name in sizes)
        schemes = ("; ".join(sorted(one.schemes_of(name))) for one in contents.values())
        shown = (
            format_bytes(sizes[name]["bytes"]) if name in sizes else "" for sizes in sides.values()
        )
        rows.append((name, " / ".join(map(str, counts)), *shown, *schemes))
    largest = sorted(
        names,
        key=lambda name: -max(sizes.get(name, _NOTHING)["bytes"] for sizes in sides.values()),
    )
    series = {
        side: {
            short_kind(name): sizes.get(name, _NOTHING)["bytes"] / 1e6
            for name in largest[:_MOST_BARS]
        }
        for side, sizes in sides.items()
    }
    scheme = ["scheme"] if len(contents) == 1 else [f"scheme of {name}" for name in contents]
    return Card(
        "sizes",
        "Size by kind of layer",
        charts=[bars(series, "MB")],
        head=("layers", "number", *sides, *scheme),
        rows=rows,
        numbers=range(1, 2 + len(sides)),
        note=f"The chart shows the {_MOST_BARS} largest kinds." if largest[_MOST_BARS:] else "",
        wide=True,
    )


_NOTHING: Mapping[str, int] = {"modules": 0, "bytes": 0}


def depth_chart(
    matrices: Iterable[Matrix],
    value_of: Callable[[Matrix], float | None],
    what: str,
    *,
    log: bool = False,
) -> str:
    """Draw a value of matrices over depth, the largest one for each kind and layer."""
    series: dict[str, dict[int, Dot]] = {}
    for one in matrices:
        value, depth = value_of(one), depth_of(one.module)
        if value is None or depth is None:
            continue
        dots = series.setdefault(short_kind(kind_of(one.module)), {})
        if depth not in dots or dots[depth].y < value:
            dots[depth] = Dot(depth, value, one.module)
    return over_depth(
        {name: [dots[depth] for depth in sorted(dots)] for name, dots in series.items()},
        what,
        log=log,
    )


def short_kind(kind: str) -> str:
    """Return the kind of a layer without what precedes its place.

    >>> short_kind("model.layers.*.mlp.up_proj")
    'mlp.up_proj'
    """
    return kind.rpartition("*.")[2]


def number(value: Any, digits: int = 4) -> str:
    """Format a number for a cell; nothing for ``None``."""
    return "" if value is None else f"{value:.{digits}g}"
