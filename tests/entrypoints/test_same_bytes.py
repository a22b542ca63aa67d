# SPDX-License-Identifier: Apache-2.0
"""One seed, one result: every file of two runs is the same, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_models as small

from llmcompressor import active_session, oneshot
from llmcompressor.modifiers.quantization import GPTQModifier

RECIPES = {
    "rounding": (
        "modifiers: {QuantizationModifier: {scheme: FP8, targets: Linear, ignore: [lm_head]}}"
    ),
    "gptq": "modifiers: {GPTQModifier: {scheme: W4A16, targets: Linear, ignore: [lm_head]}}",
}
TEXTS = [f"def function_{n}(x):\n    return x * {n * n} + {n}\n" * 4 for n in range(24)]

# Also the processes' own ways of ordering and drawing differ: hashes, and numbers drawn before.
ALONE = """
import sys, random
import torch
from llmcompressor import oneshot
from test_same_bytes import RECIPES, run
from pathlib import Path

random.seed(int(sys.argv[3])); torch.manual_seed(int(sys.argv[3]))
for name in RECIPES:
    run(Path(sys.argv[1]), name, Path(sys.argv[2]) / name)
"""


def run(model: Path, name: str, output: Path, *, seed: int = 0) -> None:
    oneshot(
        model=str(model),
        recipe=RECIPES[name],
        dataset=TEXTS,
        num_calibration_samples=6,
        max_seq_length=48,
        output_dir=output,
        seed=seed,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_two_runs_write_the_same_bytes(name: str, pico: Path, tmp_path: Path) -> None:
    run(pico, name, tmp_path / "first")
    run(pico, name, tmp_path / "second")
    first = small.tree(tmp_path / "first")
    assert first == small.tree(tmp_path / "second")
    assert {"config.json", "model.safetensors", "recipe.yaml", "tokenizer.json"} <= set(first)
    report = json.loads((tmp_path / "first" / "compression_report.json").read_text())
    assert ("modifiers" in report) == (name == "gptq")
    assert report["verification"]["ok"]


def test_two_processes_write_the_same_bytes(pico: Path, tmp_path: Path) -> None:
    processes = []
    for number in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": number,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        command = [sys.executable, "-c", ALONE, str(pico), str(tmp_path / number), number]
        processes.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
    assert small.tree(tmp_path / "1") == small.tree(tmp_path / "2")


def test_another_seed_takes_other_samples(pico: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(pico, "gptq", tmp_path / str(seed), seed=seed)
    first, second = (small.tree(tmp_path / str(seed)) for seed in (0, 1))
    assert first["model.safetensors"] != second["model.safetensors"]
    assert {name for name in first if first[name] != second[name]} == {
        "model.safetensors",
        "compression_report.json",
    }


def test_the_order_of_modules_does_not_depend_on_where_they_lie(
    llama_folder: Path, tmp_path: Path
) -> None:
    """Sets of modules iterate by address: what is left in memory must not show in the result."""
    kept = []
    for name in ("first", "second"):
        oneshot(
            model=str(llama_folder),
            recipe=GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
            dataset=small.token_rows(),
            num_calibration_samples=8,
            output_dir=tmp_path / name,
        )
        kept.append([active_session(), small.llama()])
    assert small.tree(tmp_path / "first") == small.tree(tmp_path / "second")
