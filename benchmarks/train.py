# SPDX-License-Identifier: Apache-2.0
"""What a step of training costs with each modifier, beside transformers' Trainer alone.

benchmarks/train.py [--model 32M] [--steps 12] [--rounds 3] [--output benchmarks/results/train.md]

All run in one process, one after another, several rounds; the median of the steps counts, so that
what else the machine does in a moment falls on all of them. A teacher is a copy of the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import SIZES, ModelSize, model_path, token_file
from tables import publish, table
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from llmcompressor import create_session
from llmcompressor.core.modifier_registry import ModifierFactory
from llmcompressor.training import Trainer as SessionTrainer

WARM_UP = 2
HEAD = ["lm_head"]
PRUNING = {"targets": ["Linear"]}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        modifiers: class name → fields; ``None`` for transformers' own Trainer.
        teaches: whether there is a teacher.
        most: the factor of the plain step that it may take, the teacher's forward left out.
    """

    modifiers: dict[str, dict[str, Any]] | None = field(default_factory=dict)
    teaches: bool = False
    most: float | None = None


def quantized(scheme: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """A recipe of training with fake quantization."""
    given = {"targets": ["Linear"], "ignore": HEAD, "scheme": scheme, **fields}
    return {"QuantizationModifier": given}


VARIANTS = {
    "transformers' Trainer": Variant(None),
    "no modifier": Variant(),
    "constant mask": Variant({"ConstantPruningModifier": {**PRUNING, "start": 0}}, most=1.05),
    "mask that grows every 4 steps": Variant(
        {
            "MagnitudePruningModifier": {
                **PRUNING,
                "init_sparsity": 0.1,
                "final_sparsity": 0.6,
                "start": 0,
                "end": 1000,
                "update": 4,
            }
        }
    ),
    "distillation of logits": Variant(
        {
            "OutputDistillationModifier": {
                "targets": ["re:.*lm_head"],
                "comparison": "kl_divergence",
                "start": 0,
            }
        },
        teaches=True,
        most=1.25,
    ),
    "distillation of every layer": Variant(
        {
            "OutputDistillationModifier": {
                "targets": [r"re:model\.layers\.\d+$"],
                "comparison": "square_head",
                "start": 0,
            }
        },
        teaches=True,
        most=1.25,
    ),
    "fake quantization, W4A16": Variant(quantized("W4A16", start=0)),
    "fake quantization, W8A8": Variant(quantized("W8A8", start=0)),
    "fake quantization, W4A4": Variant(quantized("W4A4", start=0)),
    "fake quantization, W4A16, learned scales": Variant(
        quantized("W4A16", start=0, learned_scales=True)
    ),
}


class Clock(TrainerCallback):
    """Takes the time from one optimizer step to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Before the first micro-batch of a step."""
        self._last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After the optimizer's step."""
        self.seconds.append(time.perf_counter() - self._last)


def run(variant: Variant, model: torch.nn.Module, rows: list, steps: int) -> list[float]:
    """Seconds of each step but the first ones."""
    student = copy.deepcopy(model)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, create_session():
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps + WARM_UP,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        common = {"model": student, "args": arguments, "train_dataset": rows, "callbacks": [clock]}
        if variant.modifiers is None:
            trainer = Trainer(**common)
        else:
            recipe = [
                ModifierFactory.create(name, **fields) for name, fields in variant.modifiers.items()
            ]
            teacher = copy.deepcopy(model).eval() if variant.teaches else None
            trainer = SessionTrainer(**common, recipe=recipe, teacher=teacher)
        trainer.train()
    return clock.seconds[WARM_UP:]


@torch.no_grad()
def forward_seconds(model: torch.nn.Module, rows: list, repeat: int) -> list[float]:
    """Of the teacher: one batch, but for the first time."""
    batch = torch.tensor([row["input_ids"] for row in rows[:4]], device=model.device)
    taken = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        model(input_ids=batch, use_cache=False)
        taken.append(time.perf_counter() - began)
    return taken[1:]


def measure(size: ModelSize, names: list[str], steps: int, rounds: int) -> tuple[dict, float]:
    """Seconds of a step by variant, and of the teacher's forward."""
    ids = json.loads(token_file(size, "calibration").read_text())
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = AutoModelForCausalLM.from_pretrained(model_path(size), dtype=torch.float32)
    taken: dict[str, list[float]] = {name: [] for name in names}
    forwards: list[float] = []
    for number in range(rounds):
        for name in names:
            taken[name] += run(VARIANTS[name], model, rows, steps)
            print(f"round {number + 1}: {name}", flush=True)
        forwards += forward_seconds(model.eval(), rows, steps)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    return seconds, statistics.median(forwards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SIZES), default="32M")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    size = SIZES[given.model]
    seconds, teacher = measure(size, given.variants, given.steps, given.rounds)
    plain = seconds[next(iter(VARIANTS))]
    rows = []
    for name, taken in seconds.items():
        variant = VARIANTS[name]
        own = taken - (teacher if variant.teaches else 0.0)
        holds = "" if variant.most is None else ("yes" if own <= variant.most * plain else "NO")
        rows.append(
            [
                name,
                f"{taken:.3f}",
                f"{taken / plain:.2f}",
                f"{own / plain:.2f}",
                "" if variant.most is None else f"{variant.most:.2f}",
                holds,
            ]
        )
    header = ["training", "s", "/ plain", "/ plain, without the teacher", "at most", "holds"]
    publish(
        "The cost of a step",
        f"{size.name} Llama in float32, batches of 4 x {size.length} tokens, AdamW; the median of "
        f"{given.steps * given.rounds} steps. The teacher's forward takes {teacher:.3f} s. Written "
        f"by `benchmarks/train.py`.\n\n{table(header, rows)}",
        given.output,
    )


if __name__ == "__main__":
    main()
