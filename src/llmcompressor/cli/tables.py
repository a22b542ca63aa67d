# SPDX-License-Identifier: Apache-2.0
"""Rendering of results as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from llmcompressor.cli.demo import DemoResult, DemoRow
    from llmcompressor.evaluation.metrics import Report
    from llmcompressor.reporting.compare import Comparison
    from llmcompressor.verification.report import VerificationReport

_NONE = "-"
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def print_report(report: Report, console: Console | None = None) -> None:
    """Print an evaluation: one line per metric of the text, then one per metric of each task."""
    console = console or Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    if report.loss is not None:
        table.add_row("Tokens", f"{report.tokens} in {report.windows} windows")
        table.add_row("Loss", f"{report.loss:.4f}")
        table.add_row("Perplexity", f"{report.perplexity:.4f}")
    if report.reference_loss is not None:
        table.add_row("Reference's loss", f"{report.reference_loss:.4f}")
        table.add_row("Reference's perplexity", f"{report.reference_perplexity:.4f}")
        table.add_row("Loss increase", f"{report.loss_increase:+.4f}")
        table.add_row("KL(reference || checkpoint)", f"{report.kl_divergence:.5f}")
        table.add_row("Top-1 agreement", f"{report.top1_agreement:.2%}")
    for one in (table, _of_tasks(report)):
        if one.row_count:
            console.print(one)


_BETTER = {True: "higher", False: "lower", None: ""}


def _of_tasks(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    beside = any(one.reference is not None for one in report.tasks)
    for heading in ("Task", "Metric", "Better"):
        table.add_column(heading, overflow="fold")
    for heading in ("Samples", "Checkpoint", *(["Reference"] if beside else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in report.tasks:
        table.add_row(
            Text(one.task),
            Text(one.metric),
            _BETTER[one.higher_is_better],
            _NONE if one.samples is None else str(one.samples),
            _with_stderr(one.value, one.stderr),
            *([_with_stderr(one.reference, one.reference_stderr)] if beside else []),
        )
    return table


def _with_stderr(value: float | None, stderr: float | None) -> str:
    """Format a value with its standard error.

    >>> _with_stderr(0.5, 0.0123), _with_stderr(12.0, None), _with_stderr(None, None)
    ('0.5000 ± 0.0123', '12.0000', '-')
    """
    if value is None:
        return _NONE
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"


def print_demo(result: DemoResult, console: Console | None = None) -> None:
    """Print the demo's result: a row per checkpoint, then the completion of each."""
    console = console or Console()
    table = Table(title=f"{result.tokens} tokens of {result.text}")
    table.add_column("Checkpoint")
    for heading in ("Size", "Perplexity", "KL", "Top-1", "Seconds", "Peak memory"):
        table.add_column(heading, justify="right")
    table.add_row("original", _mb(result.original_bytes), f"{result.original_perplexity:.3f}")
    for row in result.rows:
        table.add_row(*_cells(row))
    console.print(table)
    lines = [
        "Reloaded by transformers alone, in a process of its own, each goes on after",
        f"  {result.prompt!r}",
        "with:",
        *(f"  {name:<12} {text!r}" for name, text in result.completions.items()),
    ]
    console.print(*lines, sep="\n", markup=False, highlight=False)
    if result.folder is not None:
        console.print(f"The checkpoints are in {result.folder}.", markup=False, highlight=False)


def print_verification(report: VerificationReport, console: Console | None = None) -> None:
    """Print the figures, then a row per finding; findings with equal text share a row."""
    console = console or Console()
    console.print(*report.figures(), sep="\n", markup=False, highlight=False, soft_wrap=True)
    rows = report.rows()
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "Rule", "Where", "What, and what to do"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("", "Rule"))
    for row in rows:
        table.add_row(
            Text(row.severity, style=_STYLES[row.severity]),
            row.rule,
            Text(row.where),
            Text(row.text),
        )
    console.print(table)


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print a row per checkpoint, and how many modules are quantized differently."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("Checkpoint", "Size", "Quantized", "Mean error", "Perplexity", "KL"):
        table.add_column(heading, justify="left" if heading == "Checkpoint" else "right")
    for name, one in found.contents.items():
        errors = list(found.errors.get(name, {}).values())
        measured = found.evaluations.get(name, {})
        figures = (
            sum(errors) / len(errors) if errors else None,
            measured.get("perplexity"),
            measured.get("kl_divergence"),
        )
        shown = (_NONE if value is None else f"{value:.4g}" for value in figures)
        table.add_row(Text(name), _mb(one.bytes), str(len(one.matrices)), *shown)
    console.print(table)
    console.print(f"{len(found.different_schemes())} modules are quantized differently.")


def _cells(row: DemoRow) -> list[str]:
    report = row.report
    return [
        row.name,
        _mb(row.size_bytes),
        f"{report.perplexity:.3f}",
        _NONE if report.kl_divergence is None else f"{report.kl_divergence:.4f}",
        _NONE if report.top1_agreement is None else f"{report.top1_agreement:.1%}",
        f"{row.seconds:.1f}",
        _mb(row.peak_bytes),
    ]


def _mb(size: int) -> str:
    """Format bytes as megabytes.

    >>> _mb(7_348_736)
    '7.3 MB'
    """
    return f"{size / 1e6:.1f} MB"
