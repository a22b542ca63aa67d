# SPDX-License-Identifier: Apache-2.0
"""What training gains: gradual against at once, with a teacher against without, QAT against PTQ.

benchmarks/training.py [--steps 300] [--seeds 0 1 2] [--output benchmarks/results/training.md]

On the embedded model. All that are compared see the same batches for as many steps, with the same
optimizer. Each checkpoint is written, and measured by transformers alone on the modules of the
standard library that the model was not trained on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import evaluate
from models import PICO
from tables import publish, table
from text import calibration_files, held_out_file

BATCH = 8
HEAD = ["lm_head"]


@dataclass(frozen=True)
class Way:
    """One way to come to a compressed model.

    Attributes:
        recipe: class name → fields of a modifier.
        steps: whether it trains.
        teaches: whether the dense model is the teacher.
        calibrates: whether ``oneshot`` gets data.
    """

    recipe: dict[str, Any]
    steps: bool = True
    teaches: bool = False
    calibrates: bool = False


def pruned(*, gradual: bool, structure: str, final: float) -> dict[str, Any]:
    """Magnitude pruning during two thirds of the one epoch, or before its first step."""
    return {
        "MagnitudePruningModifier": {
            "targets": ["Linear"],
            "ignore": HEAD,
            "init_sparsity": 0.05 if gradual else final,
            "final_sparsity": final,
            "mask_structure": structure,
            "start": 0,
            "end": 2 / 3 if gradual else 0,
            "update": 0.02,
        }
    }


def taught() -> dict[str, Any]:
    """Learning from the logits of the dense model."""
    return {
        "OutputDistillationModifier": {
            "targets": ["re:.*lm_head"],
            "comparison": "kl_divergence",
            "orig_scale": 0.0,
            "distill_scale": 1.0,
            "start": 0,
        }
    }


def quantized(name: str, scheme: str, **fields: Any) -> dict[str, Any]:
    """A quantizing modifier."""
    return {name: {"targets": ["Linear"], "ignore": HEAD, "scheme": scheme, **fields}}


def sparse(structure: str = "unstructured", *, gradual: bool) -> dict[str, Any]:
    """60 % of the weights of every Linear."""
    return pruned(gradual=gradual, structure=structure, final=0.6)


TWO_OF_FOUR = pruned(gradual=True, structure="2:4", final=0.5)

WAYS = {
    "60 % at once, then trained": Way(sparse(gradual=False)),
    "60 % gradually": Way(sparse(gradual=True)),
    "60 % of outputs at once, then trained": Way(sparse("filter", gradual=False)),
    "60 % of outputs gradually": Way(sparse("filter", gradual=True)),
    "2:4": Way(TWO_OF_FOUR),
    "2:4, with a teacher": Way(TWO_OF_FOUR | taught(), teaches=True),
    "W4A4, round to nearest": Way(quantized("QuantizationModifier", "W4A4"), steps=False),
    "W4A4, GPTQ": Way(quantized("GPTQModifier", "W4A4"), steps=False, calibrates=True),
    "W4A4, trained": Way(quantized("QuantizationModifier", "W4A4", start=0)),
    "W4A4, trained, scales learned": Way(
        quantized("QuantizationModifier", "W4A4", start=0, learned_scales=True)
    ),
}
# What must end with a lower loss than what.
BETTER = [
    ("60 % gradually", "60 % at once, then trained"),
    ("60 % of outputs gradually", "60 % of outputs at once, then trained"),
    ("2:4, with a teacher", "2:4"),
    ("W4A4, trained", "W4A4, round to nearest"),
    ("W4A4, trained", "W4A4, GPTQ"),
]


def compress(
    way: Way, steps: int, rate: float, rows: list[dict[str, Any]], seed: int, output: Path
) -> float:
    """Write the checkpoint; the seconds that it took."""
    from datasets import Dataset  # noqa: PLC0415

    from llmcompressor import oneshot, train  # noqa: PLC0415

    recipe = {"stage_modifiers": way.recipe}
    began = time.perf_counter()
    if way.steps:
        train(
            model=str(PICO),
            recipe=recipe,
            dataset=Dataset.from_list(rows),
            output_dir=output,
            precision="float32",
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            seed=seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            distill_teacher=str(PICO) if way.teaches else None,
        )
    else:
        oneshot(
            model=str(PICO),
            recipe=recipe,
            dataset=Dataset.from_list(rows[:128]) if way.calibrates else None,
            num_calibration_samples=128,
            output_dir=output,
            seed=seed,
        )
    return time.perf_counter() - began


def held_out(windows: int) -> Path:
    """JSON file with the first windows of the held-out modules."""
    whole = held_out_file()
    part = whole.with_name(f"{whole.stem}-{windows}.json")
    part.write_text(json.dumps(json.loads(whole.read_text())[:windows]))
    return part


def measure(
    ways: list[str], steps: int, rate: float, seeds: list[int], text: Path
) -> dict[str, dict[str, list[float]]]:
    """Name → loss on held-out text and seconds, by seed."""
    files = calibration_files(seeds, max(steps * BATCH, 128))
    found: dict[str, dict[str, list[float]]] = {}
    for name in ways:
        way = WAYS[name]
        for seed in seeds:
            ids = json.loads(files[seed].read_text())
            rows = [{"input_ids": row, "labels": row} for row in ids]
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "compressed"
                seconds = compress(way, steps, rate, rows, seed, output)
                quality = evaluate(str(output), text)
            entry = found.setdefault(name, {"loss": [], "seconds": []})
            entry["loss"].append(quality["loss"])
            entry["seconds"].append(seconds)
            print(f"{name}, seed {seed}: {quality['loss']:.4f}, {seconds:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-4, help="the highest learning rate")
    parser.add_argument("--windows", type=int, default=712, help="to evaluate on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    text = held_out(given.windows)
    dense = evaluate(str(PICO), text)["loss"]
    found = measure(given.ways, given.steps, given.rate, given.seeds, text)
    mean = {name: statistics.mean(entry["loss"]) for name, entry in found.items()}
    rows = [
        [
            name,
            f"{mean[name]:.4f}",
            f"{mean[name] - dense:+.4f}",
            " ".join(f"{loss - dense:+.4f}" for loss in entry["loss"]),
            f"{statistics.mean(entry['seconds']):.0f}",
        ]
        for name, entry in found.items()
    ]
    compared = [
        [
            better,
            worse,
            f"{mean[better] - mean[worse]:+.4f}",
            "yes" if mean[better] < mean[worse] else "NO",
        ]
        for better, worse in BETTER
        if better in mean and worse in mean
    ]
    body = [
        f"Loss on {given.windows} held-out windows of 256 tokens in nats per token; the dense "
        f"model's is {dense:.4f}. "
        f"{given.steps} steps of {BATCH} windows of 256 tokens, AdamW at {given.rate:g}, in "
        f"float32; mean of the seeds {given.seeds}. Written by `benchmarks/training.py`.",
        table(["way", "loss", "above dense", "by seed", "s"], rows),
        "## What must be below what",
        table(["this", "below this", "by", "holds"], compared),
    ]
    publish("What training gains", "\n\n".join(body), given.output)


if __name__ == "__main__":
    main()
