# SPDX-License-Identifier: Apache-2.0
"""Data classes of a plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcompressor.runtime.progress import format_bytes

__all__ = [
    "Dense",
    "Estimate",
    "LearningPlan",
    "Match",
    "ModuleRow",
    "Operations",
    "PassPlan",
    "Phase",
    "Plan",
    "Problem",
    "Rates",
    "SchemeBytes",
    "ServingNote",
    "Sizes",
    "Tokens",
    "plan_text",
    "print_plan",
]


@dataclass(frozen=True)
class Match:
    """Matches of a pattern of the recipe.

    Attributes:
        modifier: the class of its modifier.
        role: ``target`` or ``ignore``.
        pattern: the pattern in the recipe.
        matched: number of matching modules of any class.
        decided: number of modules that it decides: they get their scheme by this target, are
            pruned or contain pruned modules, or are not quantized because of this ignore entry.
        first: the first few decided modules, or matching ones if none is decided.
        hint: suggestion for a pattern that matches nothing.
    """

    modifier: str
    role: str
    pattern: str
    matched: int
    decided: int
    first: Sequence[str] = ()
    hint: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """Modules with the same scheme, whose names differ only in numbers.

    Attributes:
        pattern: their names, with ``*`` for the numbers.
        scheme: description of their scheme.
        format: format of the stored tensors; empty for dense modules.
        modules: number of modules.
        weights: total number of weights.
        why: reason why they stay dense.
    """

    pattern: str
    scheme: str
    format: str
    modules: int
    weights: int
    why: str = ""


@dataclass(frozen=True)
class SchemeBytes:
    """Sizes of the modules of a scheme, before and after.

    Attributes:
        scheme: description of the scheme.
        format: format of the stored tensors.
        modules: number of modules.
        weights: total number of weights.
        bytes_before: bytes of their tensors in the model's dtype.
        bytes_after: bytes of their tensors as stored.
    """

    scheme: str
    format: str
    modules: int
    weights: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Dense:
    """Tensors that stay dense.

    Attributes:
        pattern: names of the tensors' modules, with ``*`` for numbers.
        bytes: bytes of their tensors as stored.
        why: the reason.
    """

    pattern: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Sizes:
    """Bytes of the input and of the output.

    Attributes:
        source: of the source's weight files; of the model's parameters if it is in memory.
        weights: of the weight files that will be written, exact.
        files: name → bytes, for each of these.
        others: of configuration, index, recipe, tokenizer and so on, without the run's report.
    """

    source: int
    weights: int
    files: Mapping[str, int]
    others: int

    @property
    def ratio(self) -> float:
        """Compression ratio of the weight files."""
        return self.source / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Phase:
    """The demands of one phase of the run.

    Attributes:
        name: ``load``, ``learn``, ``calibrate``, ``solve`` or ``save``.
        host: peak bytes resident in main memory, including Python and its libraries.
        device: peak bytes on the accelerator, 0 without one.
        disk: peak bytes on disk: output, scratch, and activations that exceed their budget.
        seconds: estimated time, without overlap with other phases.
    """

    name: str
    host: int
    device: int
    disk: int
    seconds: float


@dataclass(frozen=True)
class Operations:
    """Number of multiply-adds of a run.

    Attributes:
        forward: of all forwards over the calibration data.
        gram: of the second moments of inputs.
        cross: of the products between inputs and original inputs.
        solve: of the solvers.
        learn: of the learning before passes.
        rounded: number of weights that are rounded and packed.
    """

    forward: int = 0
    gram: int = 0
    cross: int = 0
    solve: int = 0
    rounded: int = 0
    learn: int = 0

    @property
    def total(self) -> int:
        """Total number of multiply-adds."""
        return self.forward + self.gram + self.cross + self.solve + self.learn


@dataclass(frozen=True)
class Rates:
    """Measured speed of the machine, and the spread of the measurements.

    Attributes:
        device: the device that computes.
        model_products: multiply-adds per second in the model's dtype.
        float32_products: multiply-adds per second in float32.
        memory: bytes per second that a pass over a large tensor reads and writes.
        disk_read: bytes per second.
        disk_write: bytes per second, including the flush to disk.
        spread: ratio of the largest to the smallest measured rate.
        attention: multiply-adds per second of attention; 0 to use that of other products.
        statistics: multiply-adds per second of second moments; 0 to use that of other products.
    """

    device: str
    model_products: float
    float32_products: float
    memory: float
    disk_read: float
    disk_write: float
    spread: float
    attention: float = 0.0
    statistics: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds with their expected range."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Tokens:
    """Size of the calibration data.

    Attributes:
        samples: number of samples.
        tokens: total number of positions, including padding.
        real: number of real tokens.
        longest: tokens of the longest sample.
        how: origin of these numbers.
        is_exact: whether they were counted.
    """

    samples: int
    tokens: int
    real: int
    longest: int
    how: str
    is_exact: bool


@dataclass(frozen=True)
class LearningPlan:
    """Learning before a pass, with forwards and backwards through all blocks.

    Attributes:
        steps: batches that run forward and backward.
        compared: batches that run forward only.
        tokens: tokens of a batch.
        activations: bytes of block inputs that wait for the backward.
        budget: bytes of them that may stay in memory.
        spilled: bytes that go to files.
        held: bytes of the learned parameters, held all the time.
        stepping: further bytes during an optimizer step.
        kept: bytes on disk for saved progress.
        read: bytes of weights that are read.
        forwards: multiply-adds of the model, including backwards.
        products: multiply-adds in float32, for computed weights and optimizer steps.
        visits: elementwise accesses to weights.
    """

    steps: int
    compared: int
    tokens: int
    activations: int
    budget: int
    spilled: int
    held: int
    stepping: int
    kept: int
    read: int
    forwards: int
    products: int
    visits: int


@dataclass(frozen=True)
class PassPlan:
    """A pass over the model.

    Attributes:
        modifiers: names of its modifiers.
        pipeline: its pipeline.
        level: where forwards are paused; empty without forwards.
        reason: reason for the level.
        streams: 1, or 2 with twin streams (the original model runs too).
        forwards: number of runs of every block on every token.
        activations: bytes that waiting forwards hold.
        budget: bytes of them that may stay in memory.
        spilled: bytes that are in files at once.
        learning: the learning before the pass, if any.
    """

    modifiers: Sequence[str]
    pipeline: str
    level: str = ""
    reason: str = ""
    streams: int = 1
    forwards: int = 0
    activations: int = 0
    budget: int = 0
    spilled: int = 0
    learning: LearningPlan | None = None


@dataclass(frozen=True)
class Problem:
    """An error that the run would raise.

    Attributes:
        where: the modifier or the argument.
        error: the class of the error.
        message: the problem.
        remedy: what to do about it.
    """

    where: str
    error: str
    message: str
    remedy: str


@dataclass(frozen=True)
class ServingNote:
    """A finding of the serving rules about the predicted checkpoint.

    Attributes:
        rule: number of the rule.
        severity: ``error``, ``warning`` or ``note``.
        server: the server that has the rule.
        module: the module concerned.
        message: the problem.
        remedy: what to do about it.
    """

    rule: str
    severity: str
    server: str
    module: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Plan:
    """Prediction of a run: its effects, resources and output, made without reading a weight.

    Attributes:
        model: folder, hub id or name of the model.
        architecture: the class of the model.
        parameters: number of weights.
        blocks: number of blocks.
        recipe: the recipe as YAML.
        residency: which parts of the model are in memory at a time.
        problems: errors that the run would raise.
        serving: findings of the serving rules.
        matches: matches of each target and ignore entry.
        modules: schemes of the weight matrices, by name pattern.
        schemes: scheme by name of the module, for quantized modules.
        scheme_bytes: bytes by scheme.
        dense: bytes of dense tensors.
        sizes: bytes of the output; ``None`` if the run would fail before.
        tokens: the calibration data; ``None`` if none is needed.
        passes: the passes over the model, in order.
        phases: memory, disk and time by phase.
        operations: number of multiply-adds.
        rates: measured speed of this machine.
        time: estimated time of the run.
        notes: further remarks.
    """

    model: str
    architecture: str
    parameters: int
    blocks: int
    recipe: str
    residency: str = ""
    problems: Sequence[Problem] = ()
    serving: Sequence[ServingNote] = ()
    matches: Sequence[Match] = ()
    modules: Sequence[ModuleRow] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    scheme_bytes: Sequence[SchemeBytes] = ()
    dense: Sequence[Dense] = ()
    sizes: Sizes | None = None
    tokens: Tokens | None = None
    passes: Sequence[PassPlan] = ()
    phases: Sequence[Phase] = ()
    operations: Operations = Operations()
    rates: Rates | None = None
    time: Estimate | None = None
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """True if the run would succeed and its output could be served."""
        return not self.problems and not any(one.severity == "error" for one in self.serving)

    @property
    def peak_host(self) -> int:
        """Peak bytes of main memory over all phases."""
        return max((phase.host for phase in self.phases), default=0)

    @property
    def peak_device(self) -> int:
        """Peak bytes of the accelerator's memory over all phases."""
        return max((phase.device for phase in self.phases), default=0)

    @property
    def peak_disk(self) -> int:
        """Peak bytes on disk over all phases."""
        return max((phase.disk for phase in self.phases), default=0)

    def __str__(self) -> str:
        """Return the plan as tables for reading."""
        return plan_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        content: dict[str, Any] = {"ok": self.ok, **_plain(self)}
        if self.sizes is not None:
            content["sizes"]["ratio"] = round(self.sizes.ratio, 4)
        content["peak"] = {
            "host": self.peak_host,
            "device": self.peak_device,
            "disk": self.peak_disk,
        }
        return content


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


# --------------------
# Rendering of a plan as tables.

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
            Text(name),
            str(one.modules),
            format_bytes(one.bytes_before),
            format_bytes(one.bytes_after),
        )
    ordered = sorted(plan.dense, key=lambda one: -one.bytes)
    shown, rest = ordered[:_MOST_ROWS], ordered[_MOST_ROWS:]
    if rest:
        shown.append(Dense(f"{len(rest)} others", sum(one.bytes for one in rest), ""))
    for row in shown:
        why = f", {row.why}" if row.why else ""
        table.add_row(Text(f"as it is: {row.pattern}{why}"), "", "", format_bytes(row.bytes))
    sizes = plan.sizes
    files = "1 file" if len(sizes.files) == 1 else f"{len(sizes.files)} files"
    table.add_row(
        Text(f"weights, {files}"), "", format_bytes(sizes.source), format_bytes(sizes.weights)
    )
    console.print(table)
    ratio = f", {sizes.ratio:.2f} times smaller" if sizes.weights else ""
    _print(console, f"Weights: {sizes.weights:,} bytes exactly{ratio}.")


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
        cells = [
            one.name,
            format_bytes(one.host),
            *([format_bytes(one.device)] if has_device else []),
        ]
        cells += [format_bytes(one.disk), *([_time(one.seconds)] if has_time else [])]
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
