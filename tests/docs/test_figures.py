# SPDX-License-Identifier: Apache-2.0
"""The figures that pages give are those that the benchmarks stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from llmcompressor.verification.catalogue import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measured.md").read_text()
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"

SPEED = {
    "GPTQ W4A16": "32M/GPTQ W4A16",
    "GPTQ W8A8, static": "32M/GPTQ W8A8 static",
    "SmoothQuant, then GPTQ W8A8": "32M/SmoothQuant, GPTQ W8A8",
    "SparseGPT 2:4": "32M/SparseGPT 2:4",
    "GPTQ W4A16, 386M": "386M/GPTQ W4A16",
    "GPTQ W8A8, static, 386M": "386M/GPTQ W8A8 static",
    "AWQ W4A16_ASYM": "32M/AWQ W4A16_ASYM",
    "Wanda 2:4": "32M/Wanda 2:4",
}
LOSS = {
    "GPTQ, 4 bits, groups of 128: as it comes, with one forward": [
        ("4 bits, group 128", "GPTQ, as it comes"),
        ("4 bits, group 128", "GPTQ, one forward"),
    ],
    "GPTQ, 3 bits, groups of 64: as it comes, with one forward": [
        ("3 bits, group 64", "GPTQ, as it comes"),
        ("3 bits, group 64", "GPTQ, one forward"),
    ],
    "AWQ, W4A16_ASYM": [("W4A16_ASYM", "AWQ")],
    "AutoRound, 4 bits, groups of 128": [("4 bits, group 128", "AutoRound")],
    "SparseGPT, 2:4": [("2:4", "SparseGPT")],
    "Wanda, 2:4": [("2:4", "Wanda")],
    "SmoothQuant, then GPTQ, W8A8": [("W8A8", "SmoothQuant and GPTQ")],
    "with outlier channels: SmoothQuant W8A8; AWQ W4A16": [
        ("planted, W8A8", "SmoothQuant"),
        ("planted, W4A16", "AWQ"),
    ],
    "GPTQ, NVFP4A16": [("NVFP4A16", "GPTQ")],
}


def _cells(label: str) -> list[list[str]]:
    """The figures of each cell of the line that begins with the label."""
    (line,) = re.findall(rf"^\| {re.escape(label)} \|(.+)\|$", PAGE, re.MULTILINE)
    return [re.findall(r"\d+\.\d+", cell) for cell in line.split("|")]


@pytest.mark.parametrize("label", SPEED)
def test_times_are_those_of_the_pages(label: str) -> None:
    size = SPEED[label].partition("/")[0]
    page = "compare.json" if size == "32M" else f"compare-{size}.json"
    runs = json.loads((RESULTS / page).read_text())
    reference = runs[f"{SPEED[label]}/reference"]["oneshot_seconds"]
    for tool, figures in zip(("one forward", "as it comes"), _cells(label), strict=True):
        run = runs.get(f"{SPEED[label]}/{tool}")
        expected = [f"{run['oneshot_seconds'] / reference:.2f}"] if run else []
        assert figures == expected, f"{label}, {tool}: {expected} in benchmarks/results/{page}"


@pytest.mark.parametrize("label", LOSS)
def test_losses_are_those_of_the_page(label: str) -> None:
    stored = json.loads((RESULTS / "algorithms.json").read_text())

    def above(case: str, algorithm: str) -> str:
        runs = stored["found"][case][algorithm].values()
        return f"{fmean(run['loss'] for run in runs) - stored['dense']['loss']:.4f}"

    def of_reference(case: str, algorithm: str) -> str:
        return above(case, "reference, " + re.sub(", (one forward|as it comes)$", "", algorithm))

    ours, reference = _cells(label)
    assert ours == [above(*place) for place in LOSS[label]]
    assert reference == list(dict.fromkeys(of_reference(*place) for place in LOSS[label]))


def _reason(name: str) -> list[list[str]]:
    """The figures of a reason, ours and the reference's."""
    (line,) = re.findall(rf"^\| \*\*{name}\.\*\* [^|]*\|(.+)\|$", README, re.MULTILINE)
    return [re.findall(r"\d+(?:\.\d+)?", cell) for cell in line.split("|")]


def test_reasons_are_those_of_the_pages() -> None:
    runs = json.loads((RESULTS / "compare.json").read_text())
    cases = ("32M/GPTQ W4A16", "one forward"), ("32M/AWQ W4A16_ASYM", "as it comes")
    ours = [f"{runs[f'{case}/{tool}']['oneshot_seconds']:.1f}" for case, tool in cases]
    theirs = [f"{runs[f'{case}/reference']['oneshot_seconds']:.1f}" for case, _ in cases]
    assert _reason("Time") == [ours, theirs]
    losses = ("GPTQ, 4 bits, groups of 128: as it comes, with one forward", "SparseGPT, 2:4")
    cells = [_cells(label) for label in losses]
    assert _reason("Quality") == [[one[side][0] for one in cells] for side in (0, 1)]
    large = json.loads((RESULTS / "compare-386M.json").read_text())
    peaks = [large[f"386M/GPTQ W4A16/{tool}"]["peak_mib"] for tool in ("as it comes", "reference")]
    assert _reason("Checked")[0][0] == str(len(RULES))
    assert _reason("Memory") == [[f"{peak:.0f}"] for peak in peaks]


def _rows(page: str, kind: str) -> dict[str, list[str]]:
    """First cell → the others, of the lines of a manual whose first cell has one of the names."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in lines if "|" in line]
    return {first: others for first, *others in cells if re.search(kind, first)}


def test_budgets_are_those_of_the_pages() -> None:
    pages = [json.loads((RESULTS / f"budget{one}.json").read_text()) for one in ("", "-smollm2")]
    found = {}
    for name in sorted(set().union(*pages)):
        runs = [list(page.get(name, {}).values()) for page in pages]
        sizes = [f"{fmean(one['bytes'] for one in own):,.0f}" if own else "" for own in runs]
        losses = [f"{fmean(one['divergence'] for one in own):.4f}" if own else "" for own in runs]
        found[name] = [cell for pair in zip(sizes, losses, strict=True) for cell in pair]
    assert _rows("budget.md", r"^(all|budget of|AutoScheme of) [\d.]+ bits") == found


def test_kept_statistics_are_those_of_the_page() -> None:
    stored = json.loads((RESULTS / "kept_statistics.json").read_text())
    digits = {"loss": ".4f", "divergence": ".4f", "seconds": ".1f"}
    expected = {
        name: [format(own[side][key], how) for key, how in digits.items() for side in own]
        for name, own in stored["rows"].items()
    }
    rows = _rows("statistics.md", r"^(GPTQ|AWQ|SparseGPT|Wanda|`imatrix_mse`), ")
    assert rows == expected
    collected = f"Collecting took {stored['seconds']:.1f} s and {stored['bytes'] / 1e6:.1f} MB."
    assert collected in " ".join((ROOT / "docs" / "statistics.md").read_text().split())
