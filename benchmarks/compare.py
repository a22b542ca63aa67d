# SPDX-License-Identifier: Apache-2.0
"""Time, peak memory and quality beside the reference, on the same model, data and recipe.

Every run is a process of its own; the tools take turns.  Each figure is stored as soon as it is
known, so a run can be continued, or repeated in part: what is measured again replaces what was.
Times are the least of ``--repeat`` runs, peak memory the highest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from floor import floor, import_seconds, rates
from jobs import HERE, JobError, busy_core, compress_and_evaluate, evaluate, reference_python
from models import SIZES, ModelSize, model_path, token_file
from tables import machine, table

RESULTS = HERE / "results" / "compare.json"
TOOLS = ("reference", "one forward", "as it comes")
RATES = ("bfloat16 Linear", "float32 Gram, half", "cross product")
STATIC_W8A8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    },
}


@dataclass(frozen=True)
class Row:
    """One recipe of the table.

    Attributes:
        name: What the table calls it.
        parts: Class name of each modifier → its fields.
        calibrated: Whether the job needs data.
        limits: Tool → the share of the reference's time that it may take: of ``oneshot`` where
            there is data, else of the whole process.
        sizes: Models that it is run on.
        streams: How many forwards it takes as it comes.
    """

    name: str
    parts: dict[str, dict]
    calibrated: bool = True
    limits: dict[str, float] = field(default_factory=lambda: dict(GPTQ_LIMITS))
    sizes: tuple[str, ...] = tuple(SIZES)
    streams: int = 2

    @property
    def tools(self) -> tuple[str, ...]:
        """Who runs it; without data there is one way for us to do it."""
        return ("reference", *self.limits)

    def recipe(self, tool: str) -> dict[str, dict]:
        """Class name of each modifier → all its fields."""
        twins = {"GPTQModifier", "SparseGPTModifier"} if tool == "one forward" else ()
        return {
            name: fields | ({"asymmetric": False} if name in twins else {})
            for name, fields in self.parts.items()
        }


def quantizer(name: str, **fields: Any) -> dict[str, dict]:
    """A modifier that quantizes all but the head."""
    return {name: {"ignore": ["lm_head"], **fields}}


def rounding(scheme: str) -> dict[str, dict]:
    """Round-to-nearest of every Linear by a preset."""
    return quantizer("QuantizationModifier", scheme=scheme, targets=["Linear"])


def gptq(scheme: str) -> dict[str, dict]:
    """GPTQ of every Linear by a preset."""
    return quantizer("GPTQModifier", scheme=scheme, targets=["Linear"])


def two_of_four(name: str) -> dict[str, dict]:
    """Half of the weights of every Linear, two in each four."""
    return quantizer(name, sparsity=0.5, mask_structure="2:4", targets=["Linear"])


GPTQ_LIMITS = {"one forward": 0.5, "as it comes": 1.0}
NO_DATA: dict[str, Any] = {"calibrated": False, "limits": {"as it comes": 0.5}}
SMALL = ("32M",)
SMOOTH = {"SmoothQuantModifier": {"smoothing_strength": 0.8}}
ROWS = {
    row.name: row
    for row in (
        Row("RTN W4A16", rounding("W4A16"), **NO_DATA),
        Row("FP8_DYNAMIC", rounding("FP8_DYNAMIC"), **NO_DATA),
        Row("NVFP4A16", rounding("NVFP4A16"), **NO_DATA),
        Row("GPTQ W4A16", gptq("W4A16")),
        Row(
            "GPTQ W8A8 static",
            quantizer("GPTQModifier", config_groups={"group_0": STATIC_W8A8}),
            streams=1,
        ),
        Row(
            "AWQ W4A16_ASYM",
            {"AWQModifier": {}, **rounding("W4A16_ASYM")},
            limits={"as it comes": 0.25},
            sizes=SMALL,
        ),
        Row(
            "SmoothQuant, GPTQ W8A8",
            SMOOTH | gptq("W8A8"),
            limits={"one forward": 0.5, "as it comes": 0.5},
            sizes=SMALL,
        ),
        Row(
            "SparseGPT 2:4",
            two_of_four("SparseGPTModifier"),
            limits={"one forward": 0.5, "as it comes": 0.5},
            sizes=SMALL,
        ),
        Row(
            "Wanda 2:4",
            two_of_four("WandaPruningModifier"),
            limits={"as it comes": 0.5},
            sizes=SMALL,
        ),
    )
}
BUSY_ROW = "GPTQ W4A16"


class Store:
    """Results by key in a JSON file that is written after every addition."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, value: dict, *key: str) -> None:
        """Store a result; a run's key is (model, row, tool)."""
        self.data["/".join(key)] = value
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n")

    def get(self, *key: str) -> dict | None:
        """The result, if there is one."""
        return self.data.get("/".join(key))


def measure(size: ModelSize, row: Row, tool: str, python: Path | str) -> dict:
    """One run of one tool."""
    tokens = token_file(size, "calibration") if row.calibrated else None
    held_out = token_file(size, "held-out")
    return compress_and_evaluate(python, str(model_path(size)), row.recipe(tool), tokens, held_out)


def merged(runs: list[dict]) -> dict:
    """The last run's report with the least times and the highest peak of all."""
    times = ("oneshot_seconds", "oneshot_processor_seconds", "process_seconds", "import_seconds")
    least = {name: min(run[name] for run in runs) for name in times}
    peak = max(run["after_oneshot"]["peak"] for run in runs)
    return runs[-1] | least | {"peak_mib": peak, "runs": len(runs)}


def compare(store: Store, given: argparse.Namespace) -> None:
    """Measure what the command line asks for. A run that fails is shown, and the next begins."""
    pythons = {"reference": reference_python(given.reference_python)}
    for size in (SIZES[name] for name in given.models):
        dense = evaluate(str(model_path(size)), token_file(size, "held-out"))
        store.put({"quality": dense}, size.name, "dense")
        for row in (ROWS[name] for name in given.rows if size.name in ROWS[name].sizes):
            runs: dict[str, list[dict]] = {}
            for tool in [tool for tool in row.tools if tool in given.tools] * given.repeat:
                with _failure_shown(size.name, row.name, tool):
                    run = measure(size, row, tool, pythons.get(tool, sys.executable))
                    runs.setdefault(tool, []).append(run)
                    _say(size.name, row.name, tool, run)
                    store.put(merged(runs[tool]), size.name, row.name, tool)
        for tool in given.tools if given.busy else []:
            with _failure_shown("busy", size.name, BUSY_ROW, tool), busy_core():
                run = measure(size, ROWS[BUSY_ROW], tool, pythons.get(tool, sys.executable))
                _say(f"busy {size.name}", BUSY_ROW, tool, run)
                store.put(merged([run]), "busy", size.name, BUSY_ROW, tool)


@contextlib.contextmanager
def _failure_shown(*what: str) -> Iterator[None]:
    try:
        yield
    except JobError as error:
        print(f"{' '.join(what)}: {error}", file=sys.stderr, flush=True)


def _say(size: str, row: str, tool: str, run: dict) -> None:
    print(
        f"{size} {row} {tool}: oneshot {run['oneshot_seconds']:.2f} s, process "
        f"{run['process_seconds']:.2f} s, peak {run['after_oneshot']['peak']:.0f} MiB",
        flush=True,
    )


def measure_floors(store: Store, names: list[str]) -> None:
    """Floors of the models, with the rates that they rest on."""
    for name in names:
        found = floor(SIZES[name])
        sums = {"one forward": found.one_forward, "as it comes": found.twin_streams}
        store.put({**asdict(found), **sums, "rates": rates(SIZES[name])}, name, "floor")
    store.put({"seconds": import_seconds()}, "imports")


def run_cells(store: Store, size: str, row: Row, tool: str) -> list[str] | None:
    """One line of the main table."""
    run = store.get(size, row.name, tool)
    if run is None:
        return None
    reference = store.get(size, row.name, "reference") or {}
    quality = run["quality"]
    who = tool if tool == "reference" or row.calibrated else "this"
    return [
        size,
        row.name,
        who if tool == "reference" or not row.calibrated else f"this, {who}",
        f"{run['oneshot_seconds']:.2f}{_ratio(run, reference, 'oneshot_seconds')}",
        f"{run['process_seconds']:.2f}{_ratio(run, reference, 'process_seconds')}",
        f"{run['peak_mib']:.0f}{_ratio(run, reference, 'peak_mib')}",
        over_floor(store, size, row, tool),
        f"{quality['perplexity']:.0f}",
        f"{quality['divergence']:.5f}",
        f"{quality['agreement']:.1%}",
    ]


def over_floor(store: Store, size: str, row: Row, tool: str) -> str:
    """Our time as a multiple of the floor, where that is known: of the process without data."""
    way = "one forward" if row.streams == 1 else tool
    if row.calibrated:
        bound = (store.get(size, "floor") or {}).get(way) if row.name.startswith("GPTQ") else None
        spent = "oneshot_seconds"
    else:
        bound, spent = (store.get("imports") or {}).get("seconds"), "process_seconds"
    run = store.get(size, row.name, tool)
    return f"{run[spent] / bound:.1f}" if run and bound and tool != "reference" else ""


def import_lines(store: Store, sizes: list[str]) -> list[list[str]]:
    """What imports alone are of the reference's process, for each job without data."""
    imports = store.get("imports")
    found = [
        (size, row.name, run["process_seconds"])
        for size in sizes
        for row in ROWS.values()
        if not row.calibrated and (run := store.get(size, row.name, "reference"))
    ]
    return [
        [size, name, f"{imports['seconds']:.2f}", f"{imports['seconds'] / seconds:.2f}"]
        for size, name, seconds in found
        if imports
    ]


def _ratio(run: dict, reference: dict, name: str) -> str:
    if run is reference or name not in reference:
        return ""
    return f" ({run[name] / reference[name]:.2f})"


def targets(store: Store, sizes: list[str]) -> list[list[str]]:
    """What is promised, what was found, and whether it holds."""
    lines = []
    for size in sizes:
        for row in ROWS.values():
            reference = store.get(size, row.name, "reference")
            for tool in row.tools[1:]:
                run = store.get(size, row.name, tool)
                if run is None or reference is None:
                    continue
                figure = "oneshot_seconds" if row.calibrated else "process_seconds"
                limit = row.limits[tool]
                for name, bound in ((figure, limit), ("peak_mib", 1.0)):
                    found = run[name] / reference[name]
                    what = f"{size} {row.name} {tool}: {name} / the reference's"
                    lines.append([what, f"{found:.2f}", bound, "yes" if found <= bound else "NO"])
    for size in sizes:
        for tool in TOOLS[1:]:
            ratio = busy_ratio(store, size, tool)
            if ratio is not None:
                what = f"{size} {BUSY_ROW} {tool}: busy / quiet seconds"
                lines.append([what, f"{ratio:.2f}", 2.5, "yes" if ratio <= 2.5 else "NO"])
    return lines


def busy_ratio(store: Store, size: str, tool: str) -> float | None:
    """How much longer GPTQ takes beside another busy process."""
    busy, quiet = store.get("busy", size, BUSY_ROW, tool), store.get(size, BUSY_ROW, tool)
    return busy["oneshot_seconds"] / quiet["oneshot_seconds"] if busy and quiet else None


def floor_lines(store: Store, sizes: list[str]) -> list[list[str]]:
    """One line of the floor's table per model."""
    lines = []
    for name in sizes:
        found = store.get(name, "floor")
        if found:
            seconds = ("forward", "gram", "cross", "one forward", "as it comes")
            cells = [f"{found[part]:.1f}" for part in seconds]
            # by name: the file has them in another order than they were measured in
            lines.append([name, *cells, *(f"{found['rates'][kind]:.0f}" for kind in RATES)])
    return lines


def render(store: Store) -> str:
    """The markdown page from everything that is stored."""
    sizes = list(SIZES)
    every = [
        run_cells(store, size, row, tool)
        for size in sizes
        for row in ROWS.values()
        for tool in row.tools
    ]
    busy = [
        [size, tool, f"{found['oneshot_seconds']:.1f}", f"{ratio:.2f}"]
        for size in sizes
        for tool in TOOLS
        if (found := store.get("busy", size, BUSY_ROW, tool))
        if (ratio := busy_ratio(store, size, tool)) is not None
    ]
    dense = ", ".join(
        f"{size} {found['quality']['perplexity']:.0f}"
        for size in sizes
        if (found := store.get(size, "dense"))
    )
    header = ("model", "recipe", "tool", "`oneshot` s", "process s", "peak MiB", "time / floor")
    imports = ("model", "recipe", "imports s", "/ the reference's process")
    rate_names = ("Linear 10^9/s", "Gram 10^9/s", "cross 10^9/s")
    floors = ("model", "forward s", "Gram s", "cross s", "one forward s", "twin streams s")
    return "\n\n".join(
        [
            "# Beside the reference",
            f"{store.data['machine']['text']}. Written by `benchmarks/compare.py`.",
            "In brackets: divided by the reference's. Perplexity, divergence (mean KL, nats) and "
            "agreement of the best token are on held-out random tokens; perplexity of the dense "
            f"models: {dense}.",
            table((*header, "perplexity", "KL", "agreement"), [cells for cells in every if cells]),
            "## With one other process busy on one core",
            f"{BUSY_ROW}.",
            table(("model", "tool", "`oneshot` s", "/ quiet"), busy),
            "## The floor",
            "Matrix products only, at the rates measured on this machine (multiplications with "
            "addition per second).",
            table((*floors, *rate_names), floor_lines(store, sizes)),
            "Without data: a process that imports torch, compressed-tensors and the model's class, "
            "Python's search for unreachable cycles left out, and does nothing else.",
            table(imports, import_lines(store, sizes)),
            "## Targets",
            table(("", "found", "at most", "holds"), targets(store, sizes)) + "\n",
        ]
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the least time counts")
    parser.add_argument("--busy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reference-python", help="interpreter with the reference installed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file to add to")
    return parser.parse_args()


def main() -> None:
    given = parse()
    store = Store(given.results)
    store.put({"text": machine()}, "machine")
    measure_floors(store, given.models)
    with contextlib.suppress(KeyboardInterrupt):
        compare(store, given)
    given.results.with_suffix(".md").write_text(render(store))
    print(render(store))


if __name__ == "__main__":
    main()
