# SPDX-License-Identifier: Apache-2.0
"""Draws flow.svg, the picture of the README: ``python docs/images/flow.py``."""

from pathlib import Path
from xml.sax.saxutils import escape

STEPS = (
    ("plan", "what matches, what is written,", "memory, time, what servers say"),
    ("compress", "block by block, on your data;", "killed, it goes on where it was"),
    ("verify", "read again by other code,", "beside the original"),
    ("serve", "vLLM, transformers,", "SGLang"),
)
COLORS = ("#3366cc", "#109618", "#e67300", "#990099")
WIDTH, HEIGHT, GAP, TOP = 250, 96, 32, 12


def box(place: int) -> str:
    """One step, with an arrow to the next."""
    x, (name, *lines) = place * (WIDTH + GAP) + 4, STEPS[place]
    middle = x + WIDTH / 2
    parts = [
        f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff" '
        f'stroke="{COLORS[place]}" stroke-width="2.5"/>',
        f'<text x="{middle}" y="{TOP + 34}" font-size="22" font-weight="600" '
        f'fill="{COLORS[place]}">{escape(name)}</text>',
    ]
    for number, line in enumerate(lines):
        y = TOP + 58 + 19 * number
        parts.append(f'<text x="{middle}" y="{y}" font-size="14" fill="#334">{escape(line)}</text>')
    if place + 1 < len(STEPS):
        left, y = x + WIDTH, TOP + HEIGHT / 2
        parts.append(
            f'<path d="M{left + 4} {y}h{GAP - 12}m-7 -6l7 6l-7 6" fill="none" stroke="#667" '
            'stroke-width="2.5"/>'
        )
    return "\n".join(parts)


def picture() -> str:
    """The SVG."""
    width, height = len(STEPS) * (WIDTH + GAP) - GAP + 8, HEIGHT + 2 * TOP
    boxes = "\n".join(box(place) for place in range(len(STEPS)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" text-anchor="middle" role="img" '
        f'aria-label="plan, compress, verify, serve">\n{boxes}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
