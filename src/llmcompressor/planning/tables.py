# SPDX-License-Identifier: Apache-2.0
"""Rendering of a plan as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcompressor.planning.result import Dense, Plan, ServingNote
from llmcompressor.units import in_bytes

__all__ = ["plan_text", "print_plan"]

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_MOST_ROWS = 12
_LEFT: Literal["left"] = "left"


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan, with the most important part last.

    Args:
        plan: the plan to print.
        console: the console; standard output by default.
    """
    console = console or Console()
    _print(
        console,
        f"{plan.model}: {plan.architecture}, {_count(plan.parameters)} parameters, "
        f"{plan.blocks} blocks",
    )
    _print_matches(plan, console)
    _print_bytes(plan, console)
    _print_run(plan, console)
    _print_phases(plan, console)
    _print_findings(plan, console)
    _print(console, *_verdict(plan))


def plan_text(plan: Plan, width: int = 100) -> str:
    """Return the plan as text without colours.

    Args:
        plan: the plan to print.
        width: width of the tables in characters.
    """
    console = Console(file=StringIO(), width=width, color_system=None)
    print_plan(plan, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    return "\n".join(line.rstrip() for line in text.splitlines())


def _print(console: Console, *lines: str) -> None:
    console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *headings: str, left: int = 1) -> Table:
    table = Table(
        title=f"\n{title}", title_justify=_LEFT, box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for position, heading in enumerate(headings):
        table.add_column(heading, justify=_LEFT if position < left else "right", overflow="fold")
    return table


def _print_matches(plan: Plan, console: Console) -> None:
    if not plan.matches:
        return
    table = _table("What the patterns match", "Pattern", "In", "Decides", "Matches", "For example")
    table.columns[1].justify = table.columns[4].justify = _LEFT
    for one in plan.matches:
        example = one.hint if not one.matched else (one.first[0] if one.first else "")
        table.add_row(
            Text(one.pattern, style="" if one.matched else "yellow"),
            f"{one.modifier}.{'targets' if one.role == 'target' else 'ignore'}",
            str(one.decided),
            str(one.matched),
            Text(example),
        )
    console.print(table)


def _print_bytes(plan: Plan, console: Console) -> None:
    if plan.sizes is None:
        return
    table = _table("What is written", "Scheme", "Modules", "Before", "After")
    for one in plan.scheme_bytes:
        name = f"{one.scheme} ({one.format})"
        table.add_row(
            Text(name), str(one.modules), in_bytes(one.bytes_before), in_bytes(one.bytes_after)
        )
    for row in _largest(plan.dense):
        why = f", {row.why}" if row.why else ""
        table.add_row(Text(f"as it is: {row.pattern}{why}"), "", "", in_bytes(row.bytes))
    sizes = plan.sizes
    files = "1 file" if len(sizes.files) == 1 else f"{len(sizes.files)} files"
    table.add_row(Text(f"weights, {files}"), "", in_bytes(sizes.source), in_bytes(sizes.weights))
    console.print(table)
    ratio = f", {sizes.ratio:.2f} times smaller" if sizes.weights else ""
    _print(console, f"Weights: {sizes.weights:,} bytes exactly{ratio}.")


def _largest(dense: Sequence[Dense]) -> list[Dense]:
    """Return the largest rows, and a row that sums up all others."""
    ordered = sorted(dense, key=lambda one: -one.bytes)
    shown, rest = ordered[:_MOST_ROWS], ordered[_MOST_ROWS:]
    if rest:
        shown.append(Dense(f"{len(rest)} others", sum(one.bytes for one in rest), ""))
    return shown


def _print_run(plan: Plan, console: Console) -> None:
    lines = [""]
    if plan.tokens is not None:
        one = plan.tokens
        lines.append(f"Calibration: {one.samples} samples, {one.tokens:,} tokens ({one.how}).")
    if plan.residency:
        lines.append(f"In memory: {plan.residency}.")
    for number, each in enumerate(plan.passes, start=1):
        text = f"Pass {number}: {', '.join(each.modifiers)}, {each.pipeline} pipeline"
        if each.level:
            runs = f"{each.forwards} forward{'s' if each.forwards > 1 else ''}"
            text += f", paused at {each.level} level, {runs} ({each.reason})"
        if each.learning is not None:
            tokens = each.learning.tokens
            text += f", behind {each.learning.steps} steps of learning on {tokens:,} tokens each"
        lines.append(f"{text}.")
    total = plan.operations.total
    if total:
        lines.append(f"Operations: {_count(total)} multiply-adds.")
    _print(console, *lines)


def _print_phases(plan: Plan, console: Console) -> None:
    if not plan.phases:
        return
    has_device = plan.peak_device > 0
    headings = ["Phase", "Memory", *(["Device"] if has_device else []), "Disk"]
    has_time = plan.time is not None
    table = _table("What it needs, at most", *headings, *(["Waited for"] if has_time else []))
    for one in plan.phases:
        cells = [one.name, in_bytes(one.host), *([in_bytes(one.device)] if has_device else [])]
        cells += [in_bytes(one.disk), *([_time(one.seconds)] if has_time else [])]
        table.add_row(*cells)
    console.print(table)
    if plan.time is not None:
        low, high = _time(plan.time.low), _time(plan.time.high)
        _print(
            console, f"Time on this machine: about {_time(plan.time.seconds)} ({low} to {high})."
        )


def _print_findings(plan: Plan, console: Console) -> None:
    for note in plan.notes:
        _print(console, f"Note: {note}")
    if not plan.serving:
        return
    table = _table("What servers say", "", "Rule", "Where", "What, and what to do", left=4)
    for (severity, rule, server, text), where in _joined(plan.serving):
        table.add_row(
            Text(severity, style=_STYLES[severity]),
            f"{rule} {server}".strip(),
            Text(where),
            Text(text),
        )
    console.print(table)


def _joined(
    notes: Iterable[ServingNote],
) -> list[tuple[tuple[str, str, str, str], str]]:
    """Merge findings with the same message into one row."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for one in notes:
        key = (one.severity, one.rule, one.server, f"{one.message} {one.remedy}".strip())
        found.setdefault(key, []).append(one.module)
    return [
        (key, modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else ""))
        for key, modules in found.items()
    ]


def _verdict(plan: Plan) -> list[str]:
    lines = [""]
    for one in plan.problems:
        lines.append(f"It would fail. {one.where}: {one.message} {one.remedy}".rstrip())
    counts = Counter(one.severity for one in plan.serving)
    if counts["error"]:
        lines.append(f"Its output could not be served: {counts['error']} error(s) above.")
    if plan.ok:
        lines.append("Nothing was found that would stop it.")
    return lines


def _count(number: int) -> str:
    """Format a large number in words.

    >>> _count(8_030_261_248), _count(3_700_000), _count(512)
    ('8.03 billion', '3.7 million', '512')
    """
    for value, word in (
        (1e18, "quintillion"),
        (1e15, "quadrillion"),
        (1e12, "trillion"),
        (1e9, "billion"),
        (1e6, "million"),
    ):
        if number >= value:
            return f"{number / value:.3g} {word}"
    return str(number)


def _time(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> _time(12.4), _time(600), _time(86400)
    ('12 s', '10 min', '24 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
