# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in installed servers: what ``verify`` says of them before, and what comes of them.

    benchmarks/serving.py [--engine transformers vllm] [--vllm-python ENV/bin/python]
                          [--table presets …] [--only TEXT …] [--again] [--write]

Presets and techniques on the embedded model, three presets on tiny models of many architectures,
and combinations that no list has. Each is compressed and verified, and then run by
``verify --with``, beside its decoded weights in the same engine. A row is kept in
``results/serving.jsonl`` as soon as it is known, so that a run which was broken off goes on.
``--write`` makes ``results/serving.md`` and the tables of ``docs/serving.md`` and
``docs/serving_runs.md`` of the rows, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from forked import forked
from models import MODELS, PICO
from serving_cases import Case, all_cases
from serving_models import ARCHITECTURES, saved
from serving_page import ROWS, latest, write_pages

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.errors import CompressorError
from llmcompressor.verification.facts import Severity

ENGINES = ("transformers", "vllm")
_SECONDS = 300.0
"""For one model in an engine."""
_DATA = {"dataset": "python_stdlib", "num_calibration_samples": 8, "max_seq_length": 128}
_MOST = 300
_NEUTRAL = {"E4", "E6", "E7", "E9", "E10"}
"""Findings by which nothing is wrong with a checkpoint."""


def make(case: Case, folder: Path) -> None:
    """Compress as a case says, and let servers that refuse it be warnings."""
    reset_session()
    model = PICO if case.model == "embedded" else saved(case.model)
    data = _DATA if case.data else {}
    recipe = json.dumps({"modifiers": case.recipe})
    oneshot(
        model=str(model), recipe=recipe, output_dir=str(folder), verify=False, report=False, **data
    )


def run(case: Case, folder: Path, engine: str, python: str) -> dict[str, Any]:
    """What is said of a checkpoint before, and what comes of it in an engine."""
    report = verify(folder, serve=engine, tp=1, engine=engine, python=python, timeout=_SECONDS)
    errors = [one for one in report.findings if one.severity is Severity.ERROR]
    found = report.engine
    assert found is not None
    told = sorted({*(one.rule for one in errors if one.rule[0] != "E"), *found.overruled})
    of_engine = [one for one in report.findings if one.rule[0] == "E"]
    wrong = [one for one in of_engine if one.rule not in _NEUTRAL]
    status = "differs" if wrong and found.status in ("run", "loaded, not run") else found.status
    if found.alike and not told:
        status = "model refused"
    if any(one.rule == "E7" for one in of_engine):
        status = "not compared"
    row = {
        "told": told,
        "status": status,
        "rules": sorted({one.rule for one in of_engine}),
        "said": " ".join((wrong or of_engine)[0].message.split())[:_MOST] if of_engine else "",
        "versions": dict(found.versions),
        "modules": found.modules,
        "error": round(found.error, 5) if found.error < float("inf") else None,
        "worst": found.worst,
    }
    if found.decoded is not None and found.decoded.kl == found.decoded.kl:
        row |= {"kl": round(found.decoded.kl, 5), "top1": round(found.decoded.agreement, 4)}
    return row


def rows_of(case: Case, engines: list[str], python: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of one checkpoint; one that is not written has a row too."""
    MODELS.mkdir(exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory(dir=MODELS, prefix="serving-") as scratch:
        folder = Path(scratch) / "compressed"
        try:
            make(case, folder)
            refused = ""
        except CompressorError as error:
            refused = " ".join(str(error).split())[:_MOST]
        for engine in engines:
            row = {"table": case.table, "model": case.model, "case": case.name, "engine": engine}
            if refused:
                row |= {"status": "not written", "said": refused, "told": []}
            else:
                row |= run(case, folder, engine, python[engine])
            found.append(row)
    return found


def main() -> None:
    """Run what is not known yet, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--vllm-python", default=os.environ.get("PYTHON_VLLM"))
    parser.add_argument("--table", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[], help="texts in the names of cases")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--write", action="store_true", help="write the pages, and run nothing")
    given = parser.parse_args()
    if given.write:
        write_pages()
        return
    if "vllm" in given.engine and not given.vllm_python:
        parser.error("Give --vllm-python, the Python of an environment with vLLM.")
    python = {"transformers": sys.executable, "vllm": given.vllm_python}
    with forked({name: python[name] for name in given.engine}):
        run_all(given, python)


def run_all(given: argparse.Namespace, python: dict[str, str]) -> None:
    """Run each case that is meant and not known."""
    known = {(one["model"], one["case"], one["engine"]) for one in latest()}
    for case in all_cases(list(ARCHITECTURES)):
        is_meant = not given.table or case.table in given.table
        name = f"{case.model} {case.name}"
        if not is_meant or (given.only and not any(one in name for one in given.only)):
            continue
        left = [one for one in given.engine if given.again or (*case.key, one) not in known]
        if not left:
            continue
        try:
            found = rows_of(case, left, python)
        except Exception:  # of any kind: the others are run all the same
            print(f"{case.model}: {case.name}: FAILED", flush=True)
            traceback.print_exc()
            continue
        with ROWS.open("a", encoding="utf-8") as file:
            for row in found:
                file.write(json.dumps(row) + "\n")
        for row in found:
            figures = {key: row[key] for key in ("told", "kl", "error", "said") if row.get(key)}
            print(f"{name}: {row['engine']}: {row['status']} {figures}", flush=True)


if __name__ == "__main__":
    main()
