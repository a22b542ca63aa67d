# SPDX-License-Identifier: Apache-2.0
"""What a bit budget is worth, beside schemes that all modules share and another tool's choice.

benchmarks/budget.py [--model smollm2] [--seeds 0 1 2] [--bits 3.5 4.25 5] [--again]

GPTQ with its defaults on windows that a seed chooses; divergence (KL) from the dense model on
held-out windows, by transformers alone. Sizes are those of the files. Rows of AutoScheme are this
project's GPTQ with the bits that AutoRound's search gives each Linear, from 16 of the same windows
and for as many bytes. Figures are kept as they come (``results/budget.json``, of SmolLM2
``results/budget-smollm2.json``), and a page beside them has their table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smollm2
from evaluate_one import load, lost, read
from jobs import HERE, execute, made_environment, scratch
from models import PICO
from quality import SAMPLES
from tables import machine, table
from text import WINDOW, calibration_files, held_out_file
from torch.nn import Linear

from llmcompressor.schemes.budget import DEFAULT_SAMPLES

AUTO_ROUND = "auto-round==0.16.1"
OTHER = "AutoScheme"
GRADIENTS = 16
"""Samples that AutoScheme's search takes."""
BITS = (3, 4, 5, 6, 8)
SCALE_BITS = 16
SHAPE_BITS = 128
"""Of a packed weight: two int64."""
HALF = smollm2.SAMPLES // 2
TOKENS = 2048
"""Of a batch when it is measured."""


@dataclass(frozen=True)
class Subject:
    """A model that budgets are measured on.

    Attributes:
        title: What the page calls it.
        store: Stem of the files in results/.
        model: Makes the checkpoint; its folder.
        calibration: Makes a token file for each seed.
        held_out: Makes the token file to measure on.
        samples: Calibration windows.
        length: Tokens of each.
        windows: Windows to measure on.
        group: Group size of the candidates.
        groups: Bits → the group sizes of schemes that all modules share.
    """

    title: str
    store: str
    model: Callable[[], Path]
    calibration: Callable[[list[int]], dict[int, Path]]
    held_out: Callable[[], Path]
    samples: int
    length: int
    windows: int
    group: int
    groups: dict[int, tuple[int, ...]]


SUBJECTS = {
    "embedded": Subject(
        title="the embedded model",
        store="budget",
        model=lambda: PICO,
        calibration=lambda seeds: calibration_files(seeds, SAMPLES),
        held_out=held_out_file,
        samples=SAMPLES,
        length=WINDOW,
        windows=128,
        group=128,
        groups={3: (128, 64, 32), 4: (128, 64, 32), 5: (128,)},
    ),
    "smollm2": Subject(
        title="SmolLM2-135M-Instruct",
        store="budget-smollm2",
        model=smollm2.model_path,
        calibration=lambda seeds: smollm2.calibration_files(seeds, HALF),
        held_out=lambda: smollm2.held_out_file(HALF),
        samples=HALF,
        length=smollm2.LENGTH,
        windows=HALF,
        group=64,
        groups={3: (64, 32), 4: (64, 32), 5: (64,)},
    ),
}


def weights(bits: int, group: int) -> dict[str, Any]:
    """A scheme of symmetric integers in groups."""
    own = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    return {"weights": {**own, "group_size": group}}


def uniform(subject: Subject) -> dict[str, dict]:
    """Name → the fields of a scheme that all modules share."""
    return {
        f"all {bits} bits, groups of {size}": {"targets": "Linear", "scheme": weights(bits, size)}
        for bits, sizes in subject.groups.items()
        for size in sizes
    }


def budgets(subject: Subject, bits: list[float]) -> dict[str, dict]:
    """Name → the fields of a budget."""
    candidates = [weights(each, subject.group) for each in BITS]
    fields = {"targets": "Linear", "candidates": candidates}
    return {f"budget of {one:g} bits": {**fields, "budget": {"bits": one}} for one in bits}


def chosen_by(choice: dict[str, int], group: int) -> dict:
    """The fields of a choice of bits by module."""
    return {
        "config_groups": {
            f"bits_{bits}": {
                "targets": sorted(name for name, own in choice.items() if own == bits),
                **weights(bits, group),
            }
            for bits in sorted(set(choice.values()))
        }
    }


class Bench:
    """The dense model and the texts."""

    def __init__(self, subject: Subject, seeds: list[int]) -> None:
        self.subject = subject
        self._model = subject.model()
        self._held_out = read(subject.held_out())[: subject.windows]
        self._calibration = subject.calibration(seeds)
        self._dense = load(str(self._model))
        own = [
            module.weight.numel()
            for name, module in self._dense.named_modules()
            if isinstance(module, Linear) and name != "lm_head"
        ]
        self._shape_bits = SHAPE_BITS * len(own) / sum(own)

    def tokens(self, seed: int) -> list[list[int]]:
        """Calibration windows."""
        return json.loads(self._calibration[seed].read_text())

    def measure(self, fields: dict, seed: int) -> dict:
        """Bytes of the weight files, and the distance from the dense model."""
        from llmcompressor import oneshot  # noqa: PLC0415  # after the arguments are read
        from llmcompressor.modifiers.quantization import GPTQModifier  # noqa: PLC0415

        with scratch() as own:
            folder = own / "out"
            oneshot(
                model=str(self._model),
                recipe=GPTQModifier(ignore=["lm_head"], **fields),
                dataset=[{"input_ids": one} for one in self.tokens(seed)],
                num_calibration_samples=self.subject.samples,
                max_seq_length=self.subject.length,
                output_dir=folder,
                verify=False,
                report=False,
            )
            size = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
            batch = TOKENS // self.subject.length
            found = lost(load(str(folder)), self._dense, self._held_out, batch)
        return {"bytes": size, "divergence": found["divergence"], "loss": found["loss"]}

    def search(self, python: str | None, bits: list[float], seed: int) -> dict[str, dict]:
        """Name → the fields of what AutoScheme chooses for as many bytes as each budget has."""
        from transformers import AutoTokenizer  # noqa: PLC0415

        subject = self.subject
        tokenizer = AutoTokenizer.from_pretrained(self._model)
        tokens = self.tokens(seed)
        beside = SCALE_BITS / subject.group + self._shape_bits
        averages = {one: one - beside for one in bits}
        with scratch() as folder:
            texts, job, report = (folder / f"{name}.json" for name in ("texts", "job", "report"))
            spread = tokens[:: len(tokens) // GRADIENTS][:GRADIENTS]
            texts.write_text(json.dumps([tokenizer.decode(one) for one in spread]))
            request = {
                "model": str(self._model),
                "texts": str(texts),
                "samples": GRADIENTS,
                # a window whose text gives some tokens less is still long enough
                "length": subject.length - 16,
                "bits": BITS,
                "group_size": subject.group,
                "averages": list(averages.values()),
            }
            job.write_text(json.dumps(request))
            interpreter = python or made_environment(".autoround", AUTO_ROUND)
            execute([str(interpreter), str(HERE / "autoscheme.py"), str(job), str(report)])
            choices = json.loads(report.read_text())["choices"]
        return {
            f"{OTHER} of {one:g} bits": chosen_by(choices[str(average)], subject.group)
            for one, average in averages.items()
        }


def render(results: dict, subject: Subject) -> str:
    """The markdown page."""
    rows = []
    for name, by_seed in results.items():
        runs = list(by_seed.values())
        values = [run["divergence"] for run in runs]
        size = statistics.mean(run["bytes"] for run in runs)
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
        cells = [name, f"{size:,.0f}", f"{statistics.mean(values):.4f}", len(values), spread]
        rows.append((size, cells))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    bits = ", ".join(str(one) for one in BITS)
    return "\n\n".join(
        [
            f"# A bit budget on {subject.title}",
            f"{machine()}.",
            f"GPTQ with its defaults, {subject.samples} x {subject.length} calibration tokens, "
            f"{DEFAULT_SAMPLES} of the samples for the budget's gradients, candidates of {bits} "
            f"bits with groups of {subject.group}. KL from the dense model on {subject.windows} "
            "held-out windows: mean of the seeds, and the lowest and highest of them. By rising "
            "bytes of the weight files, embeddings included. AutoScheme: the bits that the search "
            f"of {AUTO_ROUND.replace('==', ' ')} gives each Linear for as many bytes, from "
            f"{GRADIENTS} of the samples, with the same GPTQ. Written by `benchmarks/budget.py`.",
            table(["all Linears but the head", "bytes", "KL", "seeds", "spread"], ordered),
            "",
        ]
    )


def measure(bench: Bench, seed: int, given: argparse.Namespace, store: Path) -> dict:
    """All rows of a seed; those that are stored stay as they are, unless asked for again."""
    results = json.loads(store.read_text()) if store.exists() else {}
    shared = {**budgets(bench.subject, given.bits), **uniform(bench.subject)}
    rows = shared | {f"{OTHER} of {one:g} bits": one for one in given.bits}
    wanted = [
        name for name in given.rows or rows if given.again or str(seed) not in results.get(name, {})
    ]
    averages = [rows[name] for name in wanted if name not in shared]
    chosen = bench.search(given.autoround_python, averages, seed) if averages else {}
    for name in wanted:
        found = bench.measure((shared | chosen)[name], seed)
        results.setdefault(name, {})[str(seed)] = found
        store.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}, seed {seed}: {found['bytes']} {found['divergence']:.5f}", flush=True)
    return results


def main() -> None:
    """Measure what is asked for and not known yet, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SUBJECTS), default="embedded")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bits", type=float, nargs="+", default=[3.5, 4.25, 5.0])
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows, as in the table")
    parser.add_argument("--again", action="store_true", help="measure what is there as well")
    parser.add_argument("--autoround-python", help="interpreter with AutoRound installed")
    given = parser.parse_args()
    subject = SUBJECTS[given.model]
    store = HERE / "results" / f"{subject.store}.json"
    bench = Bench(subject, given.seeds)
    for seed in given.seeds:
        results = measure(bench, seed, given, store)
        store.with_suffix(".md").write_text(render(results, subject))


if __name__ == "__main__":
    main()
