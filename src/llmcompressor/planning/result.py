# SPDX-License-Identifier: Apache-2.0
"""Data classes of a plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcompressor.runtime.progress import format_bytes


@dataclass(frozen=True)
class Match:
    """Matches of a pattern of the recipe.

    Attributes:
        role: ``target`` or ``ignore``.
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
        format: format of the stored tensors; empty for dense modules.
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
class BudgetPoint:
    """The best choice of schemes for one size.

    Attributes:
        bits: bits for each weight of the modules that are quantized, with their scales.
        bytes: of the weight files.
        loss: expected rise of the loss of a token, in nats; ``None`` if it was not measured.
        counts: candidate → number of sets of modules that get it.
        is_chosen: it is the choice for the budget.
    """

    bits: float
    bytes: int
    loss: float | None
    counts: Mapping[str, int]
    is_chosen: bool = False


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
    """Number of multiply-adds of a run; passes over values that are no products count as 16 each.

    Attributes:
        forward: of all forwards over the calibration data.
        solve: of the modifiers: statistics, solvers, and changes without data.
        rounded: number of weights that are rounded and packed.
        learn: of the learning before passes.
    """

    forward: int = 0
    solve: int = 0
    rounded: int = 0
    learn: int = 0

    @property
    def total(self) -> int:
        """Total number of multiply-adds."""
        return self.forward + self.solve + self.learn


@dataclass(frozen=True)
class Rates:
    """Measured speed of the machine, and the spread of the measurements.

    Attributes:
        device: the device that computes.
        model_products: multiply-adds per second in the model's dtype.
        float32_products: multiply-adds per second in float32.
        disk_read: bytes per second.
        disk_write: bytes per second, including the flush to disk.
        spread: ratio of the largest to the smallest measured rate.
    """

    device: str
    model_products: float
    float32_products: float
    disk_read: float
    disk_write: float
    spread: float


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
        tokens: total number of positions, including padding.
        real: number of tokens that are no padding.
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
class PassPlan:
    """A pass over the model.

    Attributes:
        level: where forwards are paused; empty without forwards.
        reason: reason for the level.
        streams: 1, or 2 with twin streams (the original model runs too).
        forwards: number of runs of every block on every token.
        activations: bytes that waiting forwards hold.
        budget: bytes of them that may stay in memory.
        spilled: bytes that are in files at once.
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


@dataclass(frozen=True)
class Links:
    """Speed of the connections between ranks in bytes per second, each way.

    Attributes:
        within: of a rank to the others of its node.
        between: of a node to the others.
    """

    within: float
    between: float


@dataclass(frozen=True)
class RankLoad:
    """Work and traffic of one rank.

    Attributes:
        batches: number of calibration batches that it runs.
        forward: multiply-adds of their forwards and statistics.
        solving: multiply-adds of solving what it owns.
        written: bytes of the output that it writes.
        reduce_sent: bytes of statistics to the owners.
        reduce_received: bytes of statistics of what it owns.
        broadcast_sent: bytes of solved tensors to the ranks below it in the trees.
        broadcast_received: bytes of what others have solved.
    """

    rank: int
    batches: int
    forward: int
    solving: int
    written: int
    reduce_sent: int
    reduce_received: int
    broadcast_sent: int
    broadcast_received: int


@dataclass(frozen=True)
class RankCount:
    """The run on a number of ranks.

    Attributes:
        host: peak bytes in main memory of one rank.
        device: peak bytes on its accelerator, 0 without one.
        sent: bytes that a rank sends at most.
        received: bytes that a rank receives at most.
        seconds: estimated time by phase; empty if not measured.
        time: their sum; ``None`` if not measured.
        speedup: how many times faster than one rank.
    """

    ranks: int
    nodes: int
    host: int
    device: int
    sent: int
    received: int
    seconds: Mapping[str, float]
    time: float | None
    speedup: float | None


@dataclass(frozen=True)
class RankPlan:
    """The run on several ranks.

    Attributes:
        links: between the ranks.
        loads: of each rank.
        counts: the run on 1, 2, 4 and so on of the ranks, and last on all of them.
        pays_to: the first number of ranks that the double number is not 10 % faster than; ``None``
            if there is none, or if no time is estimated.
    """

    ranks: int
    nodes: int
    links: Links
    loads: Sequence[RankLoad]
    counts: Sequence[RankCount]
    pays_to: int | None


@dataclass(frozen=True)
class Problem:
    """An error that the run would raise: at a modifier or an argument, of a class."""

    where: str
    error: str
    message: str
    remedy: str


@dataclass(frozen=True)
class ServingNote:
    """A finding about the predicted checkpoint: ``error``, ``warning`` or ``note``."""

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
        time: estimated time of the run, by one rank.
        ranks: the run on several ranks; ``None`` for one.
        notes: further remarks.
        budget: the choices that the recipe's budget could make, by rising size.
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
    ranks: RankPlan | None = None
    notes: Sequence[str] = ()
    budget: Sequence[BudgetPoint] = ()

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
        """Return the plan as JSON data; what earlier releases counted apart is ``None``."""
        content: dict[str, Any] = {"ok": self.ok, **_plain(self)}
        content["operations"] |= {"gram": None, "cross": None}
        content["passes"] = [{**one, "learning": None} for one in content["passes"]]
        if self.rates is not None:
            content["rates"] |= {"memory": None, "attention": None, "statistics": None}
        if self.sizes is not None:
            content["sizes"]["ratio"] = round(self.sizes.ratio, 4)
        peaks = {"host": self.peak_host, "device": self.peak_device, "disk": self.peak_disk}
        return {**content, "peak": peaks}


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


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan, with the most important part last.

    Args:
        plan: the plan to print.
        console: the console; standard output by default.
    """
    console = console or Console()
    title = f"{plan.model}: {plan.architecture}, {_count(plan.parameters)} parameters"
    _print(console, f"{title}, {plan.blocks} blocks")
    _print_matches(plan, console)
    _print_bytes(plan, console)
    _print_budget(plan, console)
    _print_run(plan, console)
    _print_phases(plan, console)
    if plan.ranks is not None:
        _print_ranks(plan.ranks, console)
    _print(console, *(f"Note: {note}" for note in plan.notes))
    _print_serving(plan, console)
    counts = Counter(one.severity for one in plan.serving)
    lines = [
        f"It would fail. {one.where}: {one.message} {one.remedy}".rstrip() for one in plan.problems
    ]
    if counts["error"]:
        lines.append(f"Its output could not be served: {counts['error']} error(s) above.")
    _print(console, "", *lines, *(["Nothing was found that would stop it."] if plan.ok else []))


def plan_text(plan: Plan, width: int = 100) -> str:
    """Return the plan as text without colours.

    Args:
        plan: the plan to print.
        width: width of the tables in characters.
    """
    file = StringIO()
    print_plan(plan, Console(file=file, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *headings: str, left: Collection[int] = (0,)) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for position, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if position in left else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def _print_matches(plan: Plan, console: Console) -> None:
    headings = ("Pattern", "In", "Decides", "Matches", "For example")
    table = _table("What the patterns match", *headings, left=(0, 1, 4))
    for one in plan.matches:
        example = one.hint if not one.matched else (one.first[0] if one.first else "")
        table.add_row(
            Text(one.pattern, style="" if one.matched else "yellow"),
            f"{one.modifier}.{'targets' if one.role == 'target' else 'ignore'}",
            str(one.decided),
            str(one.matched),
            Text(example),
        )
    if plan.matches:
        console.print(table)


def _print_bytes(plan: Plan, console: Console) -> None:
    sizes = plan.sizes
    if sizes is None:
        return
    table = _table("What is written", "Scheme", "Modules", "Before", "After")

    def add(name: str, modules: str, before: int | None, after: int) -> None:
        table.add_row(
            Text(name), modules, "" if before is None else format_bytes(before), format_bytes(after)
        )

    for one in plan.scheme_bytes:
        add(f"{one.scheme} ({one.format})", str(one.modules), one.bytes_before, one.bytes_after)
    ordered = sorted(plan.dense, key=lambda one: -one.bytes)
    shown, rest = ordered[:_MOST_ROWS], ordered[_MOST_ROWS:]
    if rest:
        shown.append(Dense(f"{len(rest)} others", sum(one.bytes for one in rest), ""))
    for row in shown:
        why = f", {row.why}" if row.why else ""
        add(f"as it is: {row.pattern}{why}", "", None, row.bytes)
    files = "1 file" if len(sizes.files) == 1 else f"{len(sizes.files)} files"
    add(f"weights, {files}", "", sizes.source, sizes.weights)
    console.print(table)
    ratio = f", {sizes.ratio:.2f} times smaller" if sizes.weights else ""
    _print(console, f"Weights: {sizes.weights:,} bytes exactly{ratio}.")


def _print_budget(plan: Plan, console: Console) -> None:
    if not plan.budget:
        return
    names = list(plan.budget[0].counts)
    headings = ("Bits", "Weight files", "Expected loss", *names, "")
    table = _table("What a budget buys: sets of modules by scheme", *headings, left=())
    for one in plan.budget:
        loss = "" if one.loss is None else f"{one.loss:.4g}"
        counts = (str(one.counts[name]) for name in names)
        told = "the budget" if one.is_chosen else ""
        table.add_row(f"{one.bits:.4f}", f"{one.bytes:,}", loss, *counts, told)
    console.print(table)


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
        elif each.activations:
            text += ", after learning"
        lines.append(f"{text}.")
    if plan.operations.total:
        lines.append(f"Operations: {_count(plan.operations.total)} multiply-adds.")
    _print(console, *lines)


def _print_phases(plan: Plan, console: Console) -> None:
    if not plan.phases:
        return
    cells = {
        "Phase": [one.name for one in plan.phases],
        "Memory": [format_bytes(one.host) for one in plan.phases],
        "Device": [format_bytes(one.device) for one in plan.phases],
        "Disk": [format_bytes(one.disk) for one in plan.phases],
        "Waited for": [_time(one.seconds) for one in plan.phases],
    }
    if not plan.peak_device:
        del cells["Device"]
    if plan.time is None:
        del cells["Waited for"]
    _print_columns("What it needs, at most", cells, console, left=(0,))
    if plan.time is not None:
        about, low, high = map(_time, (plan.time.seconds, plan.time.low, plan.time.high))
        _print(console, f"Time on this machine: about {about} ({low} to {high}).")


def _print_ranks(plan: RankPlan, console: Console) -> None:
    counts = plan.counts
    numbers = {"Ranks": [str(one.ranks) for one in counts]}
    cells = numbers | {
        "Nodes": [str(one.nodes) for one in counts],
        "Memory": [format_bytes(one.host) for one in counts],
        "Device": [format_bytes(one.device) for one in counts],
        "Sent": [format_bytes(one.sent) for one in counts],
        "Received": [format_bytes(one.received) for one in counts],
    }
    if not any(one.device for one in counts):
        del cells["Device"]
    _print_columns("On several ranks, each of them at most", cells, console)
    if counts[0].time is not None:
        phases = {
            name.capitalize(): [_time(one.seconds.get(name, 0.0)) for one in counts]
            for name in counts[-1].seconds
        }
        whole = [_time(one.time or 0.0) for one in counts]
        faster = [f"{one.speedup or 0.0:.2f}" for one in counts]
        cells = {**numbers, **phases, "Together": whole, "Times faster": faster}
        _print_columns("Time of several ranks", cells, console)
    _print_loads(plan, console)
    within, between = plan.links.within / 1e9, plan.links.between / 1e9
    lines = [
        f"Links: {within:g} GB/s within a node, {between:g} GB/s between nodes. Each rank is taken "
        "to be as fast as this process."
    ]
    if plan.pays_to is not None:
        lines.append(f"Twice {plan.pays_to} ranks gain less than 10 %.")
    _print(console, *lines)


def _print_columns(
    title: str, cells: Mapping[str, Sequence[str]], console: Console, *, left: Collection[int] = ()
) -> None:
    table = _table(title, *cells, left=left)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def _print_loads(plan: RankPlan, console: Console) -> None:
    """Print the least and the most that a rank does and moves."""
    table = _table(f"Shares of {plan.ranks} ranks", "", "Least", "Most")

    def add(name: str, values: Sequence[int], written: Callable[[int], str]) -> None:
        table.add_row(name, written(min(values)), written(max(values)))

    loads = plan.loads
    add("calibration batches", [one.batches for one in loads], str)
    add("multiply-adds of forwards and statistics", [one.forward for one in loads], _count)
    add("multiply-adds of solving", [one.solving for one in loads], _count)
    add("bytes written", [one.written for one in loads], format_bytes)
    add("statistics sent", [one.reduce_sent for one in loads], format_bytes)
    add("statistics received", [one.reduce_received for one in loads], format_bytes)
    add("solved tensors sent", [one.broadcast_sent for one in loads], format_bytes)
    add("solved tensors received", [one.broadcast_received for one in loads], format_bytes)
    console.print(table)


def _print_serving(plan: Plan, console: Console) -> None:
    """Print findings of the serving rules; those with the same message share a row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in plan.serving:
        text = f"{one.message} {one.remedy}".strip()
        rule = f"{one.rule} {one.server}".strip()
        found.setdefault((one.severity, rule, text), []).append(one.module)
    headings = ("", "Rule", "Where", "What, and what to do")
    table = _table("What servers say", *headings, left=range(4))
    for (severity, rule, text), modules in found.items():
        where = modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
        table.add_row(Text(severity, style=_STYLES[severity]), rule, Text(where), Text(text))
    if found:
        console.print(table)


def _count(number: int) -> str:
    """Format a large number in words.

    >>> _count(8_030_261_248), _count(3_700_000), _count(512)
    ('8.03 billion', '3.7 million', '512')
    """
    words = {1e18: "quintillion", 1e15: "quadrillion", 1e12: "trillion", 1e9: "billion"}
    for value, word in {**words, 1e6: "million"}.items():
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
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
