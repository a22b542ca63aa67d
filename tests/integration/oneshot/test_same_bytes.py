# SPDX-License-Identifier: Apache-2.0
"""One seed, one result: every file of two runs is the same, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import small_models as small

from llmcompressor import active_session, oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.pipelines import sequential

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
from tests.integration.oneshot.test_same_bytes import RECIPES, run
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


@pytest.fixture(scope="module")
def here(short_pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this process writes, a folder for each recipe."""
    folder = tmp_path_factory.mktemp("here")
    for name in RECIPES:
        run(short_pico, name, folder / name)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_two_runs_write_the_same_bytes(
    name: str, here: Path, short_pico: Path, tmp_path: Path
) -> None:
    run(short_pico, name, tmp_path / "second")
    first = small.tree(here / name)
    assert first == small.tree(tmp_path / "second")
    assert {"config.json", "model.safetensors", "recipe.yaml", "tokenizer.json"} <= set(first)
    report = json.loads((here / name / "compression_report.json").read_text())
    records = [one for found in report["modifiers"].values() for one in found.values()]
    assert all(("loss" in one) == (name == "gptq") for one in records)
    assert report["verification"]["ok"]


def test_pages_of_files_change_no_byte(
    here: Path, short_pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for activations that wait there, nor for embeddings that all passes have read."""
    monkeypatch.setattr(sequential, "LITTLE", -1)
    run(short_pico, "gptq", tmp_path / "in memory")
    assert small.tree(here / "gptq") == small.tree(tmp_path / "in memory")


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(here: Path, short_pico: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", ALONE, str(short_pico), str(tmp_path), "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert small.tree(here) == small.tree(tmp_path)


def test_another_seed_takes_other_samples(here: Path, short_pico: Path, tmp_path: Path) -> None:
    run(short_pico, "gptq", tmp_path / "other", seed=1)
    first, second = small.tree(here / "gptq"), small.tree(tmp_path / "other")
    assert first["model.safetensors"] != second["model.safetensors"]
    assert {name for name in first if first[name] != second[name]} == {
        "model.safetensors",
        "compression_report.json",
        "manifest.json",
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
