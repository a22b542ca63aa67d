# SPDX-License-Identifier: Apache-2.0
"""What recipes lose that work from kept statistics, beside the same recipes on the data.

benchmarks/kept_statistics.py [--seed 0] [--rows "SparseGPT, 2:4" …]

Loss above the dense model's in nats per token and KL from it, of the embedded model, calibrated on
128 windows of 256 tokens and measured on 64 held-out windows. Seconds are of the process, as other
work may be done beside it. Figures are kept as they come (``results/kept_statistics.json``), and a
page beside them has their table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import AWQ, grid, rounded, solved, sparse
from evaluate_one import load, lost, read
from jobs import HERE, scratch
from models import PICO
from quality import SAMPLES
from tables import machine, table
from text import WINDOW, calibration_files, held_out_file

STORE = HERE / "results" / "kept_statistics.json"
WINDOWS = 64
BATCH = 8
RECIPES = {
    "GPTQ, 4 bits, groups of 128": solved(grid(4, 128)),
    "GPTQ, 3 bits, groups of 64": solved(grid(3, 64)),
    "GPTQ, 2 bits, groups of 64": solved(grid(2, 64)),
    "AWQ, 4 bits, groups of 128": AWQ | rounded(grid(4, 128)),
    "AWQ, then GPTQ of 4 bits": AWQ | solved(grid(4, 128)),
    "SparseGPT, 2:4": sparse("SparseGPTModifier", "2:4"),
    "Wanda, 2:4": sparse("WandaPruningModifier", "2:4"),
    "`imatrix_mse`, 4 bits, groups of 128": rounded(grid(4, 128), weight_observer="imatrix_mse"),
}
"""Name of a row → class name and fields of each modifier, in order."""
HEADER = (
    "recipe",
    "loss: data",
    "statistics",
    "KL: data",
    "statistics",
    "time: data",
    "statistics",
)
SIDES = ("data", "statistics")


class Bench:
    """The dense model, the texts and the statistics of one of them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._folder = folder
        self._held_out = read(held_out_file())[:WINDOWS]
        calibration = json.loads(calibration_files([seed], SAMPLES)[seed].read_text())
        self._data = {
            "dataset": [{"input_ids": one} for one in calibration],
            "num_calibration_samples": SAMPLES,
            "max_seq_length": WINDOW,
        }
        self._dense = load(str(PICO))
        self._loss = lost(self._dense, None, self._held_out, BATCH)["loss"]
        self._statistics = folder / "statistics"

    def collect(self) -> float:
        """Keep the statistics; seconds of the process."""
        return _seconds(lambda: _oneshot(save_statistics=self._statistics, **self._data))

    @property
    def kept_bytes(self) -> int:
        """Size of the statistics."""
        return sum(one.stat().st_size for one in self._statistics.iterdir())

    def measure(self, name: str, recipe: dict[str, dict], how: dict[str, Any]) -> dict[str, float]:
        """Loss above the dense model's, divergence from it, and seconds of the process.

        Args:
            name: of the folder to write.
            recipe: class name → fields of each modifier.
            how: other arguments of the run.
        """
        output = self._folder / name
        taken = _seconds(lambda: _oneshot(recipe=_yaml(recipe), output_dir=output, **how))
        found = lost(load(str(output)), self._dense, self._held_out, BATCH)
        above = found["loss"] - self._loss
        print(f"{name}: {above:.4f}, KL {found['divergence']:.4f}, {taken:.1f} s", flush=True)
        return {"loss": above, "divergence": found["divergence"], "seconds": taken}

    def row(self, name: str, recipe: dict[str, dict]) -> dict[str, dict[str, float]]:
        """What the recipe loses and takes with the data, and from statistics."""
        own = "".join(one if one.isalnum() else "_" for one in name)
        sources = {"data": self._data, "statistics": {"statistics": self._statistics}}
        return {side: self.measure(f"{own}-{side}", recipe, sources[side]) for side in SIDES}


def render(stored: dict[str, Any]) -> str:
    """The markdown page."""
    digits = {"loss": ".4f", "divergence": ".4f", "seconds": ".1f"}
    rows = [
        [name, *(format(own[side][key], how) for key, how in digits.items() for side in SIDES)]
        for name, own in stored["rows"].items()
    ]
    about = (
        f"The embedded model, {SAMPLES} x {WINDOW} calibration tokens; loss above the dense one's "
        f"and KL from it on {WINDOWS} held-out windows, seconds of the process, one thread. "
        f"Collecting took {stored['seconds']:.1f} s and {stored['bytes'] / 1e6:.1f} MB. Written by "
        "`benchmarks/kept_statistics.py`."
    )
    return f"# Kept statistics\n\n{machine()}.\n\n{about}\n\n{table(HEADER, rows)}\n"


def _yaml(recipe: dict[str, dict]) -> str:
    return json.dumps({"modifiers": recipe})  # JSON is YAML


def _oneshot(**given: Any) -> None:
    from llmcompressor import oneshot  # noqa: PLC0415  # after the arguments are read

    writes = {"verify": False, "report": False} if "output_dir" in given else {}
    oneshot(model=str(PICO), **given, **writes)


def _seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", choices=RECIPES, metavar="NAME", default=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads(STORE.read_text()) if STORE.exists() else {"rows": {}}
    with scratch() as folder:
        bench = Bench(given.seed, folder)
        stored |= {"seconds": bench.collect(), "bytes": bench.kept_bytes}
        for name in given.rows:
            stored["rows"][name] = bench.row(name, RECIPES[name])
            STORE.write_text(json.dumps(stored, indent=1) + "\n")
            STORE.with_suffix(".md").write_text(render(stored))


if __name__ == "__main__":
    main()
