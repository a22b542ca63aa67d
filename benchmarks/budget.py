# SPDX-License-Identifier: Apache-2.0
"""What a bit budget is worth on the embedded model, beside schemes that all modules share.

benchmarks/budget.py [--seeds 0 1 2] [--bits 3.5 4.25 5] [--again]

GPTQ with its defaults, calibrated on 128 windows of 256 tokens that a seed chooses; divergence (KL)
from the dense model on held-out windows, by transformers alone. Sizes are those of the files.
Figures are kept as they come (``results/budget.json``), and ``results/budget.md`` is their table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from evaluate_one import load, lost, read
from models import PICO
from quality import SAMPLES
from tables import machine, table
from text import calibration_files, held_out_file

HERE = Path(__file__).resolve().parent
STORE = HERE / "results" / "budget.json"
WINDOWS = 128
CANDIDATES = ["W3A16", "W4A16", "W5A16", "W6A16", "W8A16"]
GROUPS = {"3": (128, 64, 32), "4": (128, 64, 32), "5": (128,)}


def uniform() -> dict[str, dict]:
    """Name → the fields of a scheme that all modules share."""
    found = {}
    for bits, sizes in GROUPS.items():
        for size in sizes:
            weights = {"num_bits": int(bits), "type": "int", "strategy": "group"}
            found[f"all {bits} bits, groups of {size}"] = {
                "scheme": {"weights": {**weights, "symmetric": True, "group_size": size}}
            }
    return found


def budgets(bits: list[float]) -> dict[str, dict]:
    """Name → the fields of a budget."""
    fields = {f"budget of {one:g} bits": {"budget": {"bits": one}} for one in bits}
    return {name: {**one, "candidates": CANDIDATES} for name, one in fields.items()}


class Bench:
    """The dense model and the texts."""

    def __init__(self, seeds: list[int]) -> None:
        self._held_out = read(held_out_file())[:WINDOWS]
        self._calibration = calibration_files(seeds, SAMPLES)
        self._dense = load(str(PICO))

    def measure(self, fields: dict, seed: int) -> dict:
        """Bytes of the weight files, and the distance from the dense model."""
        from llmcompressor import oneshot  # noqa: PLC0415  # after the arguments are read
        from llmcompressor.modifiers.quantization import GPTQModifier  # noqa: PLC0415

        tokens = json.loads(self._calibration[seed].read_text())
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "out"
            oneshot(
                model=str(PICO),
                recipe=GPTQModifier(targets="Linear", ignore=["lm_head"], **fields),
                dataset=[{"input_ids": one} for one in tokens],
                num_calibration_samples=SAMPLES,
                output_dir=folder,
                verify=False,
                report=False,
            )
            size = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
            found = lost(load(str(folder)), self._dense, self._held_out, 8)
        return {"bytes": size, "divergence": found["divergence"], "loss": found["loss"]}


def render(results: dict) -> str:
    """The markdown page."""
    rows = []
    for name, by_seed in results.items():
        runs = list(by_seed.values())
        values = [run["divergence"] for run in runs]
        size = statistics.mean(run["bytes"] for run in runs)
        spread = f"{min(values):.4f} to {max(values):.4f}"
        rows.append((size, [name, f"{size:,.0f}", f"{statistics.mean(values):.4f}", spread]))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    return "\n\n".join(
        [
            "# A bit budget on the embedded model",
            f"{machine()}.",
            f"GPTQ with its defaults, {SAMPLES} x 256 calibration tokens, 16 of the samples for "
            f"the budget's gradients, candidates {', '.join(CANDIDATES)} with groups of 128. KL "
            f"from the dense model on {WINDOWS} held-out windows: mean of the seeds, and the "
            "lowest and highest of them. By rising bytes of the weight files, embeddings "
            "included. Written by `benchmarks/budget.py`.",
            table(["all Linears but the head", "bytes", "KL", "seeds"], ordered),
            "",
        ]
    )


def main() -> None:
    """Measure what is asked for and not known yet, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bits", type=float, nargs="+", default=[3.5, 4.25, 5.0])
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    results = json.loads(STORE.read_text()) if STORE.exists() else {}
    bench = Bench(given.seeds)
    settings = {**budgets(given.bits), **uniform()}
    for seed, (name, fields) in itertools.product(given.seeds, settings.items()):
        entry = results.setdefault(name, {})
        if given.again or str(seed) not in entry:
            entry[str(seed)] = found = bench.measure(fields, seed)
            STORE.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}, seed {seed}: {found['bytes']} {found['divergence']:.5f}", flush=True)
    STORE.with_suffix(".md").write_text(render(results))


if __name__ == "__main__":
    main()
