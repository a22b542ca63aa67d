# SPDX-License-Identifier: Apache-2.0
"""Tables of what servers made of checkpoints, from the rows that ``serving.py`` keeps.

``tests/docs/test_serving.py`` holds the pages to the rows; so this imports Python's library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "serving.jsonl"
RESULTS = ROOT / "benchmarks" / "results" / "serving.md"
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("serving", "serving_runs")}
ENGINES = {"transformers": "transformers", "vllm": "vLLM"}
_SOURCE = (
    ("W4A16 W8A16", "from 75", "from 80"),
    ("W4A16_ASYM", "from 75", "type map allows it, from 80"),
    (
        "W8A16_ASYM",
        "from 90 with Machete; from 75 with the Humming kernels",
        "type map allows it, from 80",
    ),
    ("W2A16 W3A16 W5A16 W6A16 W7A16", "from 75 with the Humming kernels", "no"),
    ("W8A8 INT8", "from 75; not from 100 on unless Triton is forced", "from 80"),
    (
        "W4A8 W3A8 W6A8 W4A4",
        "from 75; activations are quantized by the Humming kernels only, else weight only",
        "no",
    ),
    (
        "W4AFP8",
        "device 90 exactly, groups of 128; refused elsewhere (S48)",
        "experts only, device 90",
    ),
    ("FP8 FP8_DYNAMIC", "from 89; from 75 weight only", "from 89; from 80 weight only"),
    ("FP8_BLOCK", "from 89, native from 90; from 75 weight only", "not determined"),
    ("NVFP4A16", "from 75", "from 80"),
    (
        "NVFP4",
        "native from 100; from 75 weight only",
        "native from 100; from 80 weight only",
    ),
    ("MXFP4A16 MXFP4", "native from 100; from 80 weight only", "experts only"),
    (
        "MXFP4XFP8",
        "as `MXFP4`: inputs are rounded to 4 bits, or left alone; experts may get theirs in 8 bits",
        "experts only",
    ),
    ("MXFP8A16 MXFP8", "native from 100; from 75 weight only", "no"),
    ("MXFP6A16 MXFP6A8", "no (S21)", "no"),
)
"""Presets, and what the sources of vLLM 0.33.0 and SGLang 0.5.23 say of them on NVIDIA devices."""
_TITLES = {
    "presets": "Presets on the embedded model",
    "techniques": "Techniques on the embedded model",
    "architectures": "Architectures",
    "held out": "Other combinations",
}
_SAID = 110
_FAILURES = ("refused", "failed", "differs")
_UNDECIDED = ("not run", "model refused", "not compared", "not written")

Row = Mapping[str, Any]


def latest() -> list[dict[str, Any]]:
    """The rows, of each checkpoint and engine the last one."""
    if not ROWS.exists():
        return []
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    return list({(one["model"], one["case"], one["engine"]): one for one in rows}.values())


def agrees(row: Row) -> bool:
    """True if the rules of ``verify`` had told what came of it.

    >>> agrees({"told": [], "status": "run"}), agrees({"told": [], "status": "refused"})
    (True, False)
    >>> agrees({"told": [], "status": "model refused"})  # which is no rule's subject
    True
    """
    if row["status"] in _UNDECIDED:
        return True
    return bool(row["told"]) == (row["status"] in _FAILURES)


def cell(row: Row | None) -> str:
    """What came of a checkpoint in an engine, in a few words."""
    if row is None:
        return ""
    status, told = row["status"], ", ".join(row["told"])
    if status in ("run", "loaded, not run"):
        figures = []
        if row.get("kl") is not None and status == "run":
            figures.append(f"KL {max(row['kl'], 0):.4f}, {row['top1']:.1%}")
        if row.get("modules"):
            figures.append(f"{row['error']:.4f}")
        word = "equal" if status == "run" else "loaded"
        rounding = "; inputs in 8 bits" if "E9" in row["rules"] else ""
        return f"{word}: {', '.join(figures)}{rounding}" + (f" ({told})" if told else "")
    if status == "not run":
        return "no kernel"
    if told:
        return f"{status} ({told})"
    return f"{status}: {_short(row.get('said', ''))}"


def _short(text: str) -> str:
    text = re.sub(r"^(The engine refuses it|Nothing was compared)[.:] ", "", text)
    text = text.replace(" No rule of verify has told it.", "").replace("|", "/")
    text = re.sub(r"/\S*/", "", text)
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return (
        "\n".join("| " + " | ".join(one) + " |" for one in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
        + "\n"
    )


def _releases(rows: Sequence[Row], engine: str) -> str:
    found = {
        one["versions"].get(engine)
        for one in rows
        if one["engine"] == engine and one.get("versions")
    }
    return " and ".join(sorted(filter(None, found)))


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Name → a table of the pages."""
    found = {}
    heads = [f"{shown} {_releases(rows, name)}".strip() for name, shown in ENGINES.items()]
    for table in ("presets", "techniques", "held out"):
        of_table = [one for one in rows if one["table"] == table]
        names = dict.fromkeys((one["model"], one["case"]) for one in of_table)
        by_key = {(one["model"], one["case"], one["engine"]): one for one in of_table}
        lines = [
            [
                f"`{case}`"
                if table == "presets"
                else case
                if model == "embedded"
                else f"{model}: {case}",
                *(cell(by_key.get((model, case, engine))) for engine in ENGINES),
            ]
            for model, case in names
        ]
        found[table] = _table(["checkpoint", *heads], lines)
    for engine, shown in ENGINES.items():
        of_engine = [
            one for one in rows if one["table"] == "architectures" and one["engine"] == engine
        ]
        by_key = {(one["model"], one["case"]): one for one in of_engine}
        schemes = list(dict.fromkeys(one["case"] for one in of_engine))
        lines = [
            [model, *(cell(by_key.get((model, scheme))) for scheme in schemes)]
            for model in dict.fromkeys(one["model"] for one in of_engine)
        ]
        found[f"architectures, {engine}"] = _table([shown, *schemes], lines)
    found["disagreements"] = _disagreements(rows)
    found["servers"] = _servers(rows)
    return found


def _disagreements(rows: Sequence[Row]) -> str:
    wrong = [one for one in rows if not agrees(one)]
    if not wrong:
        return "None: of every checkpoint above `verify` had told what came of it.\n"
    lines = [
        [
            f"{one['model']}: {one['case']}",
            ENGINES[one["engine"]],
            ", ".join(one["told"]) or "good",
            f"{one['status']}: {_short(one.get('said', ''))}".rstrip(": "),
        ]
        for one in wrong
    ]
    return _table(["checkpoint", "engine", "`verify` said", "outcome"], lines)


def _servers(rows: Sequence[Row]) -> str:
    """Who reads a preset: by runs, and by the servers' sources."""
    release = _releases(rows, "vllm")
    by_key = {(one["case"], one["engine"]): one for one in rows if one["table"] == "presets"}
    lines = []
    for names, vllm, sglang in _SOURCE:
        presets = names.split()
        outcomes = {name: _outcome(by_key.get((name, "vllm"))) for name in presets}
        kinds = dict.fromkeys(outcomes.values())
        run = "; ".join(
            kind
            if len(kinds) == 1
            else f"{', '.join(f'`{name}`' for name in presets if outcomes[name] == kind)} {kind}"
            for kind in kinds
        )
        lines.append([", ".join(f"`{name}`" for name in presets), run, vllm, sglang])
    header = ["presets", f"vLLM {release} on a CPU, run", "vLLM, source", "SGLang, source"]
    return _table(header, lines)


def _outcome(row: Row | None) -> str:
    if row is None:
        return "not run"
    words = {"run": "equal", "loaded, not run": "loaded"}
    told = f" ({', '.join(row['told'])})" if row["told"] else ""
    return words.get(row["status"], row["status"]) + told


def filled(page: str, made: Mapping[str, str]) -> str:
    """A page with each table in the place that it has for it."""
    for name, table in made.items():
        begin, end = f"<!-- runs: {name} -->", f"<!-- end of runs: {name} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text = f"{begin}\n{table}{end}"
        page = re.sub(pattern, lambda _, text=text: text, page, flags=re.DOTALL)
    return page


def results(rows: Sequence[Row]) -> str:
    """The page of results: all tables."""
    made = tables(rows)
    parts = ["# Checkpoints in servers\n"]
    for table, title in _TITLES.items():
        parts.append(f"## {title}\n")
        parts += [one for name, one in made.items() if name.split(",")[0] == table]
    parts += ["## Where verify had said otherwise\n", made["disagreements"]]
    return "\n".join(parts)


def write_pages() -> None:
    """Write the results, and the tables of the pages."""
    rows = latest()
    RESULTS.write_text(results(rows), encoding="utf-8")
    for page in PAGES.values():
        page.write_text(filled(page.read_text(encoding="utf-8"), tables(rows)), encoding="utf-8")
