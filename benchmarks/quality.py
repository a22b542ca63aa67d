# SPDX-License-Identifier: Apache-2.0
"""How much quality the embedded model loses, by scheme and algorithm.

benchmarks/quality.py [--reference] [--settings "W8A8" …] [--algorithms "GPTQ" …] [--seeds 0 1 2]

Held-out loss above the dense model's in nats per token, divergence from it (KL), and how often the
likeliest token is the same. Calibrated on 128 windows of 256 tokens; a seed chooses which. Each
checkpoint is written, and measured by transformers alone in another process. Figures are kept as
they come (``results/NAME.json``): a run that was broken off goes on, and ``--again`` measures anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from cases import BETTER, CASES, LIMITS, MAGNITUDE, Case
from jobs import HERE, Job, Worker, reference_python
from models import MODELS, PICO
from planted import planted, pruned_by_magnitude
from second import NAMES, second
from tables import machine, table
from text import calibration_files, held_out_file

SAMPLES = 128
MEASURED = ("loss", "divergence", "agreement")


class Bench:
    """Processes that compress and evaluate, and the files that they share."""

    def __init__(self, seeds: list[int], windows: int | None, reference: str | None) -> None:
        whole = held_out_file()
        self.text = whole.with_name(f"{whole.stem}-{windows or 'all'}.json")
        taken = json.loads(whole.read_text())[:windows]
        self.text.write_text(json.dumps(taken))
        self.predicted = sum(len(each) - 1 for each in taken)
        self.calibration = calibration_files(seeds, SAMPLES)
        self._planted = planted()
        self._reference = reference
        self._workers: dict[str, Worker] = {}
        self._losses: dict[Path, float] = {}

    def quality(self, checkpoint: Path, dense: Path = PICO) -> dict:
        """Loss of a checkpoint, and its distance from the dense model."""
        request = {"checkpoint": str(checkpoint), "tokens": str(self.text), "dense": str(dense)}
        return self._worker(sys.executable, "evaluate_one.py").ask(request)

    def model(self, case: Case) -> Path:
        """What is compressed."""
        return self._planted if case.model == "planted" else self.dense(case)

    def dense(self, case: Case) -> Path:
        """What is compared with: a planted copy computes what the embedded model does."""
        return second(case.model) if case.model in NAMES else PICO

    def measure(self, case: Case, seed: int) -> dict:
        """Compress as the case says, and measure what was written."""
        with tempfile.TemporaryDirectory(dir=MODELS, prefix="quality-") as scratch:
            folder = Path(scratch) / "compressed"
            report = self._compress(case, seed, folder)
            dense = self.dense(case)
            found = report["quality"] if case.in_memory else self.quality(folder, dense)
            seconds = report["oneshot_seconds"]
            return found | {"seconds": seconds, "dense": self._dense_loss(dense)}

    def _dense_loss(self, dense: Path) -> float:
        if dense not in self._losses:
            self._losses[dense] = self.quality(dense)["loss"]
        return self._losses[dense]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()

    def _compress(self, case: Case, seed: int, folder: Path) -> dict:
        if MAGNITUDE in case.recipe:
            pruned_by_magnitude(case.recipe[MAGNITUDE]["structure"], folder)
            return {"oneshot_seconds": None}
        python = str(reference_python(self._reference)) if case.by_reference else sys.executable
        tokens = str(self.calibration[seed]) if case.data else None
        job = Job(
            str(self.model(case)),
            case.recipe,
            tokens,
            str(folder),
            held_out=str(self.text) if case.in_memory else None,
            draw=seed if case.draws else None,
            unmasked=case.unmasked,
        )
        return self._worker(python, "run_one.py").ask(vars(job))

    def _worker(self, python: str, script: str) -> Worker:
        key = f"{python} {script}"
        if key not in self._workers:
            self._workers[key] = Worker(python, script)
        return self._workers[key]


def measure(cases: list[Case], seeds: list[int], bench: Bench, store: Path, *, again: bool) -> dict:
    """``{setting: {name: {seed: figures}}}`` below ``"found"``, and the dense model's figures."""
    results = json.loads(store.read_text()) if store.exists() else {"found": {}}
    # an earlier run may have had another number of windows
    if results.get("dense", {}).get("tokens") != bench.predicted:
        results["dense"] = bench.quality(PICO)
    print(f"dense: {results['dense']['loss']:.4f}", flush=True)
    for case in cases:
        entry = results["found"].setdefault(case.setting, {}).setdefault(case.name, {})
        for seed in seeds if case.seeded else seeds[:1]:
            if again or str(seed) not in entry:
                entry[str(seed)] = found = bench.measure(case, seed)
                store.write_text(json.dumps(results, indent=1) + "\n")
                above = _above(found, results)
                print(f"{case.setting}, {case.name}, seed {seed}: {above:.4f}", flush=True)
    return results


def _above(run: dict, results: dict) -> float:
    """Loss above the dense model's: the embedded one's where nothing else is said."""
    return run["loss"] - run.get("dense", results["dense"]["loss"])


def render(results: dict) -> str:
    """The markdown page."""
    dense = results["dense"]
    rows = []
    for setting, entries in results["found"].items():
        for name, by_seed in entries.items():
            runs = list(by_seed.values())
            mean = {key: statistics.mean(run[key] for run in runs) for key in MEASURED}
            above = [_above(run, results) for run in runs]
            spread = f"{min(above):.4f} to {max(above):.4f}" if len(above) > 1 else ""
            seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
            rows.append(
                [
                    setting,
                    name,
                    f"{statistics.mean(above):.4f}",
                    spread,
                    f"{math.exp(mean['loss']):.3f}",
                    f"{mean['divergence']:.4f}",
                    f"{mean['agreement']:.1%}",
                    f"{statistics.median(seconds):.1f}" if seconds else "",
                ]
            )
    header = ["setting", "algorithm", "above", "seeds", "perplexity", "KL", "top-1", "s"]
    return "\n\n".join(
        [
            "# Quality on the embedded model",
            f"{machine()}.",
            f"Held-out loss above the dense model's {dense['loss']:.4f} (nats per token, "
            f"{dense['tokens']} tokens), mean of the seeds and the lowest and highest of them; "
            f"perplexity ({dense['perplexity']:.3f} dense), divergence from the dense model and "
            "agreement of the likeliest token, means. What needs no data has one seed. "
            f"{SAMPLES} x 256 calibration tokens. Seconds are of `oneshot`, the median of the "
            "seeds, in a process that has imported everything; none where it ran beside other "
            "work. QuIP is measured in memory, since transformers, which measures the others, "
            "leaves its rotations of inputs out; the second model and the mixture are those of "
            "`benchmarks/second.py`. Written by `benchmarks/quality.py`.",
            table(header, rows),
            "## What must be below what",
            "Where the losses of each window were kept: how far it is above the other, window by "
            "window, and the standard error of that, which is of the text alone.",
            table(
                ["setting", "this", "at most", "found", "limit", "holds", "difference"],
                verdicts(results),
            ),
            "",
        ]
    )


def verdicts(results: dict) -> list[list[str]]:
    """A row for each claim whose figures were measured."""
    found = results["found"]
    mean = {
        (setting, name): statistics.mean(_above(run, results) for run in by_seed.values())
        for setting, entries in found.items()
        for name, by_seed in entries.items()
    }
    claims = [((s, name), f"{limit}", limit, "") for (s, name), limit in LIMITS.items()]
    for setting, better, worse, share in BETTER:
        if (setting, worse) in mean and (setting, better) in mean:
            label = worse if share == 1 else f"{share} x {worse}"
            apart = _difference(found[setting][better], found[setting][worse]) if share == 1 else ""
            claims.append(((setting, better), label, share * mean[setting, worse], apart))
    return [
        [*key, label, f"{mean[key]:.4f}", f"{limit:.4f}", "yes" if holds else "NO", apart]
        for key, label, limit, apart in claims
        if key in mean
        for holds in [round(mean[key], 4) <= round(limit, 4)]  # what is shown decides
    ]


def _difference(these: dict[str, dict], those: dict[str, dict]) -> str:
    """Mean of the windows' differences, each that of the seeds' means, with its standard error."""
    if not all("windows" in run for run in (*these.values(), *those.values())):
        return ""
    means = [
        [statistics.mean(losses) for losses in zip(*(r["windows"] for r in runs), strict=True)]
        for runs in (these.values(), those.values())
    ]
    apart = [this - that for this, that in zip(*means, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    return f"{statistics.mean(apart):+.4f} ± {error:.4f}"


def chosen(
    settings: list[str] | None, algorithms: list[str] | None, *, reference: bool
) -> list[Case]:
    """The cases to measure."""
    return [
        case
        for case in CASES
        if (reference or not case.by_reference)
        and (not settings or case.setting in settings)
        and (not algorithms or case.name in algorithms)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=sorted({c.setting for c in CASES}))
    parser.add_argument("--algorithms", nargs="+", choices=sorted({c.name for c in CASES}))
    parser.add_argument("--windows", type=int, help="to evaluate on; all 712 by default")
    parser.add_argument("--reference", action="store_true", help="run the reference too")
    parser.add_argument("--reference-python", help="interpreter with the reference installed")
    parser.add_argument("--again", action="store_true", help="measure what is there as well")
    parser.add_argument("--name", default="algorithms", help="stem of the files in results/")
    given = parser.parse_args()
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    MODELS.mkdir(exist_ok=True)
    bench = Bench(given.seeds, given.windows, given.reference_python)
    store = folder / f"{given.name}.json"
    try:
        cases = chosen(given.settings, given.algorithms, reference=given.reference)
        results = measure(cases, given.seeds, bench, store, again=given.again)
    finally:
        bench.close()
    (folder / f"{given.name}.md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
