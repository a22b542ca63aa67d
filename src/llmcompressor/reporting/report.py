# SPDX-License-Identifier: Apache-2.0
"""The page of one checkpoint: sizes, errors, experts, time and memory, warnings, findings."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.reporting.cards import depth_chart, number, size_card
from llmcompressor.reporting.charts import Dot, along_sizes, bars, over_depth
from llmcompressor.reporting.contents import Contents, Matrix, contents_of, depth_of
from llmcompressor.reporting.page import Card, Figure, data_of, render
from llmcompressor.runtime.durable import replace
from llmcompressor.runtime.progress import format_bytes
from llmcompressor.runtime.run_record import RunRecord, run_record

PAGE_FILE = "report.html"
_WANTED = "LLM_COMPRESSOR_REPORT"
"""An environment variable: with 0 no run writes a page."""
_MOST_ROWS = 300
_LONGEST = 600
"""Characters of a passage."""
_EVALUATIONS_SHOWN = ContextVar("_EVALUATIONS_SHOWN", default=True)
_VERSIONS = ("llmcompressor", "torch", "transformers", "compressed-tensors")


def write_run_page(folder: Path, source: Path | None) -> None:
    """Write the page of the run that goes on, beside its checkpoint.

    A page that cannot be made is told of, and the checkpoint is kept.

    Args:
        folder: where all else of the checkpoint is written.
        source: the model that it was made of, if that is a folder.
    """
    if not _is_wanted():
        return
    try:
        data = {"name": _name_of(folder), **data_of_run(run_record()), "before": _before(source)}
        text = page_of(folder, data)
    except Exception as error:  # of any kind: it must not discard the written files
        logger.error(f"No {PAGE_FILE} could be made: {error!r:.500}")
        return
    (folder / PAGE_FILE).write_text(text, encoding="utf-8")


def show_evaluation(folder: Path, found: Mapping[str, Any] | None = None) -> None:
    """Show an evaluation, and what the report says by now, on a checkpoint's page if it has one."""
    wanted = _EVALUATIONS_SHOWN.get() and _is_wanted()
    if not wanted or not (folder / PAGE_FILE).is_file():
        return
    try:
        write_page(folder, evaluation=found)
    except Exception as error:  # of any kind: it must not discard the figures
        logger.error(f"The {PAGE_FILE} of {folder} does not show the evaluation: {error!r:.500}")


@contextmanager
def evaluations_not_shown() -> Iterator[None]:
    """Leave the pages of checkpoints as they are while these are evaluated."""
    before = _EVALUATIONS_SHOWN.set(False)
    try:
        yield
    finally:
        _EVALUATIONS_SHOWN.reset(before)


def write_page(
    folder: Path,
    source: Path | None = None,
    *,
    errors: Mapping[str, float] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of a checkpoint anew; what its page had of the run stays.

    Args:
        folder: its folder.
        source: the folder of the model that it was made of; what the page had of it if ``None``.
        errors: as for :func:`page_of`.
        evaluation: what ``evaluate`` found.

    Returns:
        The page.

    Raises:
        CheckpointError: a folder holds no checkpoint, or half of one.
    """
    page = folder / PAGE_FILE
    data = {"name": folder.resolve().name, **data_of(page)}
    if source is not None:
        data["before"] = _before(source)
    if evaluation is not None:
        data["evaluation"] = _joined(data.get("evaluation") or {}, evaluation)
    replace(page, page_of(folder, data, errors).encode())
    return page


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation with what an earlier one measured and this one did not: text or tasks.

    >>> _joined({"loss": 2.0, "tokens": 8, "tasks": []}, {"loss": None, "tasks": [{"task": "x"}]})
    {'loss': 2.0, 'tokens': 8, 'tasks': [{'task': 'x'}]}
    """
    of_text = before if now.get("loss") is None and before else now
    return {**of_text, "tasks": now.get("tasks") or before.get("tasks") or []}


def _is_wanted() -> bool:
    return os.environ.get(_WANTED, "").lower() not in {"0", "false"}


def _before(source: Path | None) -> dict[str, Any]:
    """Return the kinds of layers of the model that a checkpoint was made of, as plain data."""
    try:
        return {} if source is None else contents_of(source).sizes
    except CheckpointError:  # its weights are not safetensors, or it is gone
        return {}


def _name_of(folder: Path) -> str:
    """Return the name that an output will have, of which this is the work folder.

    >>> _name_of(Path("my-model.partial/files")), _name_of(Path("my-model.partial-12-0"))
    ('my-model', 'my-model')
    """
    own = folder.parent if ".partial" in folder.parent.name else folder
    return own.name.partition(".partial")[0]


def page_of(
    folder: Path, data: Mapping[str, Any], errors: Mapping[str, float] | None = None
) -> str:
    """Return the page of a checkpoint.

    Args:
        folder: its folder.
        data: of the run: its time, memory and warnings, the sizes before, an evaluation.
        errors: module → relative error of its weight; those of ``compression_report.json`` if not
            given.

    Raises:
        CheckpointError: the folder holds no checkpoint, or half of one.
    """
    contents = contents_of(folder)
    matrices = [
        one if errors is None else dataclasses.replace(one, error=errors.get(one.module))
        for one in contents.matrices.values()
    ]
    before = data.get("before") or {}
    verdict = contents.report.get("verification") or {}
    gates = contents.report.get("gates") or {}
    place = data.get("name") or contents.folder.name
    name = shlex.quote(place if gates.get("passed", True) else f"{place}.rejected")
    cards = [
        size_card({"before": before, "after": contents.sizes}, {"": contents}),
        *_errors(matrices),
        *_experts(contents.report.get("experts") or {}),
        *_budget(contents.report.get("budget") or {}),
        *_gates(gates),
        *_evaluation(data.get("evaluation")),
        *_phases(data.get("phases") or {}),
        _findings(verdict),
        *_warnings(data.get("warnings") or [], contents.report.get("left_behind") or []),
        Card("next", "What next", code="\n".join(next_commands(name, verdict))),
        *_table_of(matrices),
    ]
    title = f"{contents.architecture}, compressed" if matrices else contents.architecture
    return render(
        title, _subtitle(contents, data), figures_of(contents, matrices, data), cards, data
    )


def data_of_run(record: RunRecord | None) -> dict[str, Any]:
    """Return the versions, phases and warnings of a run as plain data."""
    if record is None:
        return {}
    phases = {name: asdict(one) for name, one in record.phases.items()}
    return {
        "versions": _versions(),
        "phases": phases,
        "warnings": list(record.warnings),
        "data": record.data,
    }


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _VERSIONS}  # each reads a file of some kilobytes


def _subtitle(contents: Contents, data: Mapping[str, Any]) -> str:
    made = ", ".join(f"{name} {one}" for name, one in (data.get("versions") or {}).items())
    used = data.get("data")
    told = (data.get("name") or contents.folder.name, made, used and f"calibrated with: {used}")
    return " · ".join(filter(None, told))


def figures_of(
    contents: Contents,
    matrices: list[Matrix],
    data: Mapping[str, Any],
) -> list[Figure]:
    """Return the figures that stand first on a page: size, errors, verdict, time, memory.

    Args:
        contents: what the checkpoint holds.
        matrices: its quantized modules.
        data: as for :func:`page_of`.
    """
    found = [Figure("size", format_bytes(contents.file_bytes))]
    before = sum(one["bytes"] for one in (data.get("before") or {}).values())
    if before:
        share = contents.bytes / before
        found.append(Figure("of the original", f"{100 * share:.1f} %"))
    errors = [one.error for one in matrices if one.error is not None]
    found.append(Figure("matrices quantized", str(len(matrices))))
    if errors:
        found.append(Figure("mean error of weights", f"{sum(errors) / len(errors):.4f}"))
    evaluation = data.get("evaluation") or {}
    if evaluation.get("perplexity") is not None:
        found.append(Figure("perplexity", f"{evaluation['perplexity']:.4g}"))
    if gates := contents.report.get("gates"):
        kept = bool(gates.get("passed"))
        found.append(Figure("gates", "kept" if kept else "NOT kept", "good" if kept else "bad"))
    verdict = contents.report.get("verification")
    if verdict:
        good = bool(verdict.get("ok"))
        found.append(Figure("verify", "good" if good else "NOT good", "good" if good else "bad"))
    phases = data.get("phases") or {}
    if phases:
        seconds = sum(one["seconds"] for one in phases.values())
        found.append(Figure("time", _duration(seconds)))
        found.append(Figure("memory", format_bytes(max(one["bytes"] for one in phases.values()))))
    return found


def _errors(matrices: Iterable[Matrix]) -> list[Card]:
    every = list(matrices)
    known = [one for one in every if one.error is not None]
    if not known:
        return []
    cards = [
        Card(
            "errors",
            "Error of the weights",
            charts=[
                depth_chart(known, lambda one: one.error, "relative error ‖W - Q‖ / ‖W‖"),
                depth_chart(known, lambda one: one.snr, "signal to noise, dB"),
            ],
            note="A dot for each layer and kind; of several, such as experts, the largest value. "
            "W has the scales and rotations that were moved into it before it was rounded.",
        )
    ]
    if any(one.spread for one in known):
        cards.append(
            Card(
                "scales",
                "Spread of scales",
                charts=[
                    depth_chart(known, lambda one: one.spread, "largest scale / least", log=True),
                    depth_chart(known, _median_scale, "median scale", log=True),
                ],
                note="Where the largest scale of a weight is far above its least, a few rows or "
                "groups hold much larger weights than the rest.",
            )
        )
    return cards


def _median_scale(one: Matrix) -> float | None:
    return None if one.scales is None else one.scales[1]


def _experts(records: Mapping[str, Any]) -> list[Card]:
    """Show the calibration tokens of experts: module of a mixture → ``tokens``, ``starved``."""
    rows, least, most = [], [], []
    for module, record in records.items():
        tokens, starved = record.get("tokens") or [], record.get("starved") or {}
        if not tokens:
            continue
        depth = depth_of(module) or 0
        least.append(Dot(depth, min(tokens), f"{module}, the least"))
        most.append(Dot(depth, max(tokens), f"{module}, the most"))
        rows.append((module, len(tokens), min(tokens), max(tokens), len(starved)))
    if not rows:
        return []
    return [
        Card(
            "experts",
            "Tokens of experts",
            charts=[over_depth({"least": least, "most": most}, "calibration tokens")],
            head=("mixture", "experts", "least", "most", "starved"),
            rows=rows,
            numbers=(1, 2, 3, 4),
            note="An expert is starved if it got too few tokens for statistics of its own.",
        )
    ]


def _budget(found: Mapping[str, Any]) -> list[Card]:
    """Show the curve of a budget, what was chosen, and the rounds that were measured."""
    curve = [one for one in found.get("curve") or [] if one["loss"] is not None]
    if not curve:
        return []
    chosen, made = found["chosen"], found.get("rounds") or []
    dots = {"chosen": [_dot(chosen, "loss", "the choice")]}
    if made:
        dots["measured"] = [
            _dot(one, "kl", f"round {number}")
            for number, one in enumerate(made, 1)
            if one["kl"] is not None
        ]
    limit, kind = found["limit"], found["kind"]
    lines = [
        f"Budget: {int(limit):,} bytes." if kind == "size" else f"Budget: {limit:g} {kind}.",
        "Sets of modules: "
        + ", ".join(f"{count} in {name}" for name, count in chosen["sets"].items())
        + f"; {chosen['bits']:.4f} bits a weight.",
    ]
    rows = [
        (
            number,
            f"{one['bytes']:,}",
            f"{one['loss']:.4g}",
            "no number" if one["kl"] is None else f"{one['kl']:.4g}",
            "kept" if one["kept"] else "NOT kept",
        )
        for number, one in enumerate(made, 1)
    ]
    line = [_dot(one, "loss", "the best choice of its size") for one in curve]
    return [
        Card(
            "budget",
            "What a budget buys",
            charts=[along_sizes(line, dots, "nats a token", name="expected")],
            lines=lines,
            head=("round", "bytes", "expected", "measured KL", ""),
            rows=rows,
            numbers=(0, 1, 2, 3),
            note="The line is the expected loss of the best choice of each size.",
        )
    ]


def _dot(point: Mapping[str, Any], what: str, title: str) -> Dot:
    return Dot(point["bytes"] / 1e6, point[what] or 0.0, f"{title}, {point['bytes']:,} bytes")


def _gates(found: Mapping[str, Any]) -> list[Card]:
    """Show the gates: name → ``value``, ``limit`` and whether it is ``passed``."""
    rows = [
        (
            name,
            *(
                ""
                if one[which] is None
                else f"{one[which]:,.6g}"
                if name != "size"
                else f"{one[which]:,}"
                for which in ("value", "limit")
            ),
            "kept" if one["passed"] else "NOT kept",
        )
        for name, one in (found.get("measured") or {}).items()
    ]
    if not rows:
        return []
    note = f"Measured on {found['text']}, {found['tokens']} tokens." if found.get("text") else ""
    head = ("gate", "measured", "limit", "")
    return [Card("gates", "Gates", head=head, rows=rows, numbers=(1, 2), note=note)]


def _evaluation(found: Mapping[str, Any] | None) -> list[Card]:
    if not found:
        return []
    names = {
        "perplexity": "perplexity",
        "loss": "loss, nats a token",
        "reference_loss": "loss of the original",
        "kl_divergence": "KL divergence from the original, nats a token",
        "top1_agreement": "same first choice as the original",
        "tokens": "tokens measured",
    }
    rows = [
        (text, f"{found[name]:.5g}") for name, text in names.items() if found.get(name) is not None
    ]
    cards = _tasks(found.get("tasks") or [])
    if found.get("loss") is None:
        return cards
    cards.append(Card("evaluation", "Evaluation", head=("", ""), rows=rows, numbers=(1,)))
    worst = found.get("worst") or []
    if worst:
        cards.append(
            Card(
                "worst",
                "Worst passages",
                head=("nats a token", "passage"),
                rows=[(f"{one['value']:.4g}", _cut(one["text"])) for one in worst],
                note="Where the model is furthest from the original, or without one where its loss "
                "is the largest.",
            )
        )
    return cards


def _tasks(scores: Sequence[Mapping[str, Any]]) -> list[Card]:
    if not scores:
        return []
    better = {True: "higher", False: "lower"}
    rows = [
        (
            one["task"],
            one["metric"],
            better.get(one["higher_is_better"], ""),
            *("" if one[name] is None else str(one[name]) for name in ("num_fewshot", "samples")),
            *(number(one[name]) for name in ("value", "stderr", "reference", "reference_stderr")),
        )
        for one in scores
    ]
    head = ("task", "metric", "better", "examples", "samples")
    return [
        Card(
            "tasks",
            "Benchmarks",
            head=(*head, "score", "±", "original", "±"),
            rows=rows,
            numbers=range(3, 9),
            note="Measured by lm-eval. ± is the standard error.",
            wide=True,
        )
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _phases(phases: Mapping[str, Any]) -> list[Card]:
    if not phases:
        return []
    rows = [
        (name, _duration(one["seconds"]), format_bytes(one["bytes"]))
        for name, one in phases.items()
    ]
    return [
        Card(
            "phases",
            "Time and memory",
            charts=[
                bars({"": {name: one["seconds"] for name, one in phases.items()}}, "seconds"),
                bars({"": {name: one["bytes"] / 1e6 for name, one in phases.items()}}, "MB held"),
            ],
            head=("phase", "time", "memory"),
            rows=rows,
            numbers=(1, 2),
            note="Of this call alone, if the run was continued. Memory is main memory, looked at "
            "twenty times a second; reading and writing go on beside the other phases.",
        )
    ]


def _findings(verdict: Mapping[str, Any]) -> Card:
    found = verdict.get("findings") or []
    rows = [
        (
            one.get("severity", ""),
            one.get("rule", ""),
            one.get("server", ""),
            _some(one.get("modules") or []),
            f"{one.get('message', '')} {one.get('remedy', '')}".strip(),
        )
        for one in found[:_MOST_ROWS]
    ]
    lines = []
    if not verdict:
        lines = [
            "This checkpoint was not verified when it was written. `llmcompressor verify` does."
        ]
    elif not rows:
        lines = ["Nothing was found."]
    return Card(
        "verify",
        "What verify found",
        lines=lines,
        head=("", "rule", "server", "where", "what"),
        rows=rows,
        wide=True,
    )


def _some(modules: list[str]) -> str:
    more = len(modules) - 1
    return "" if not modules else f"{modules[0]} and {more} more" if more else modules[0]


def _warnings(warnings: Iterable[str], left: Iterable[str]) -> list[Card]:
    rows = [(one,) for one in warnings]
    lines = [f"Left behind, of the original's files and tensors: {one}" for one in left]
    if not rows and not lines:
        return []
    return [Card("warnings", "Warnings", lines=lines, head=("",), rows=rows, wide=True)]


def next_commands(name: str, verdict: Mapping[str, Any]) -> list[str]:
    """Return the commands to type after a run: how to serve the checkpoint, and how to measure it.

    Args:
        name: of the checkpoint.
        verdict: what ``verify`` found; vLLM is left out where it would refuse the checkpoint.
    """
    findings = [one for one in verdict.get("findings") or [] if one.get("severity") == "error"]
    if any(one.get("server") == "vllm" for one in findings):
        serve, verify = [], ""
    else:
        serve, verify = [f"vllm serve {name}"], " --serve vllm"
    rest = f"{name} --reference ORIGINAL"
    return [*serve, f"llmcompressor evaluate {rest}", f"llmcompressor verify {rest}{verify}"]


def _table_of(matrices: list[Matrix]) -> list[Card]:
    if not matrices:
        return []
    worst = sorted(matrices, key=lambda one: -(one.error or 0.0))[:_MOST_ROWS]
    rows = [
        (
            one.module,
            one.scheme,
            "" if one.error is None else f"{one.error:.4f}",
            "" if one.snr is None else f"{one.snr:.1f}",
            *("" if one.scales is None else f"{value:.3g}" for value in one.scales or ("",) * 3),
        )
        for one in worst
    ]
    more = len(matrices) - len(worst)
    return [
        Card(
            "matrices",
            "Quantized matrices, the largest error first",
            head=("module", "scheme", "error", "dB", "least scale", "median", "largest"),
            rows=rows,
            numbers=(2, 3, 4, 5, 6),
            note=f"{more} more are in compression_report.json." if more else "",
            wide=True,
        )
    ]


def _duration(seconds: float) -> str:
    """Format seconds for a person.

    >>> _duration(0.234), _duration(83.2), _duration(7260)
    ('0.23 s', '1 min 23 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
