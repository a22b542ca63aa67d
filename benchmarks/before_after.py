# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of another checkout of this project beside this one.

    benchmarks/before_after.py CHECKOUT [--reference-python PYTHON] [--repeat 5]
    benchmarks/before_after.py --no-report  # beside runs that write no report.html

Each run is a process of its own; the tools take turns, so that what else happens on the machine
meets all of them.  Times are the least of ``--repeat`` runs, peaks the highest.  A model comes
from its folder, and is written there, or is an object in memory, and is saved afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from models import ROOT, SIZES, model_path, token_file
from run_one import build_dataset, build_recipe, resident
from tables import publish, table

FIELDS = {"targets": ["Linear"], "ignore": ["lm_head"]}
JOBS = {
    "RTN W4A16": ({"QuantizationModifier": FIELDS | {"scheme": "W4A16"}}, False),
    "FP8_DYNAMIC": ({"QuantizationModifier": FIELDS | {"scheme": "FP8_DYNAMIC"}}, False),
    "GPTQ W4A16": ({"GPTQModifier": FIELDS | {"scheme": "W4A16"}}, True),
    "AWQ W4A16_ASYM": (
        {"AWQModifier": {}, "QuantizationModifier": FIELDS | {"scheme": "W4A16_ASYM"}},
        True,
    ),
}
WITHOUT = "without report.html"
FIGURES = ("oneshot", "save", "process", "peak")


def run(job: dict) -> dict[str, float]:
    """Do one job in this process; its seconds and its peak in MiB."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from llmcompressor import oneshot  # noqa: PLC0415

    given = {"recipe": build_recipe(job)}
    if job["tokens"]:
        data = build_dataset(job["tokens"])
        given |= {"dataset": data, "num_calibration_samples": len(data), "max_seq_length": 512}
    model = job["model"]
    if job["in_memory"]:
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks" / ".models") as folder:
        started = time.perf_counter()
        if job["in_memory"]:
            oneshot(model=model, **given)
        else:
            oneshot(model=model, output_dir=folder, **given)
        seconds = {"oneshot": time.perf_counter() - started}
        if job["in_memory"]:
            started = time.perf_counter()
            model.save_pretrained(folder)
            seconds["save"] = time.perf_counter() - started
    return seconds | {"peak": resident()["peak"]}


def run_apart(python: str, source: Path | None, job: dict) -> dict[str, float]:
    """Do one job in a process of an interpreter that finds the package in ``source``."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    environment["LLM_COMPRESSOR_REPORT"] = "1" if job["report"] else "0"
    if source is not None:
        environment["PYTHONPATH"] = str(source / "src")
    started = time.perf_counter()
    command = [python, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - started}


def lines(name: str, where: str, found: dict[str, dict[str, float]]) -> list[list[str]]:
    """One line per tool: each figure, and in brackets this checkout's share of the tool's."""
    here = found["this"]
    made = []
    for tool, own in found.items():
        cells = [""] * len(FIGURES)
        for column, figure in enumerate(FIGURES):
            if figure in own:
                cells[column] = (
                    f"{own[figure]:.0f} MiB" if figure == "peak" else f"{own[figure]:.3f} s"
                )
                cells[column] += "" if tool == "this" else f" ({here[figure] / own[figure]:.2f})"
        made.append([name, where, tool, *cells])
    return made


def compared(given: argparse.Namespace) -> dict[str, tuple[str, Path | None]]:
    """The tools: name → interpreter, and the checkout that it finds the package in."""
    tools: dict[str, tuple[str, Path | None]] = {"this": (sys.executable, ROOT)}
    if given.no_report:
        tools[WITHOUT] = tools["this"]
    if given.checkout:
        tools["before"] = (sys.executable, given.checkout.resolve())
    if given.reference_python:
        tools["reference"] = (given.reference_python, None)
    return tools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--reference-python", help="interpreter with the reference installed")
    parser.add_argument("--no-report", action="store_true", help="beside runs without a page")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["32M"])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(run(json.loads(given.job))))
        return
    tools = compared(given)
    rows = []
    for size in (SIZES[name] for name in given.models):
        for name, (recipe, calibrated) in ((name, JOBS[name]) for name in given.jobs):
            tokens = str(token_file(size, "calibration")) if calibrated else None
            for in_memory in (False,) if given.no_report else (False, True):
                job = {"model": str(model_path(size)), "recipe": recipe, "tokens": tokens}
                found: dict[str, dict[str, float]] = {}
                for _ in range(given.repeat):
                    for tool, (python, source) in tools.items():
                        own = {"in_memory": in_memory, "report": tool != WITHOUT}
                        one = run_apart(python, source, job | own)
                        best = found.setdefault(tool, one)
                        for figure, value in one.items():
                            pick = max if figure == "peak" else min
                            best[figure] = pick(best[figure], value)
                where = f"{size.name}, {'object' if in_memory else 'folder'}"
                new = lines(name, where, found)
                print(*(" | ".join(cells) for cells in new), sep="\n", flush=True)
                rows += new
    body = [
        "Written by `benchmarks/before_after.py`. In brackets: this, divided by it.",
        table(("recipe", "model", "tool", "`oneshot`", "save", "process", "peak"), rows),
    ]
    name = "report_cost" if given.no_report else "before_after"
    place = given.output or ROOT / "benchmarks" / "results" / f"{name}.md"
    publish(name.replace("_", " ").capitalize(), "\n\n".join(body), place)


if __name__ == "__main__":
    main()
