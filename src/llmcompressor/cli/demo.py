# SPDX-License-Identifier: Apache-2.0
"""``demo``: the embedded model, compressed in two ways, reloaded and measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor.checkpoint.atomic_output import check_path_argument
from llmcompressor.datasets.stdlib_text import calibration_passages, held_out_texts
from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.errors import CheckpointError, OutputError
from llmcompressor.evaluation import reader
from llmcompressor.evaluation.measure import PeakMemory, compare
from llmcompressor.evaluation.metrics import Report
from llmcompressor.evaluation.sources import cut_windows, sample_windows, tokenize
from llmcompressor.runtime.progress import hide_tqdm_bars
from llmcompressor.utils import dispatch_for_generation

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "W4A16 GPTQ": "GPTQModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}",
        "FP8_DYNAMIC": (
            "QuantizationModifier: {targets: [Linear], scheme: FP8_DYNAMIC, ignore: [lm_head]}"
        ),
    }
)
"""Name of a row → the one modifier of its recipe, in YAML."""

_WINDOW = 256
_BATCH = 16
_DTYPE = torch.float32  # bfloat16 takes five times as long where the processor lacks it
_PROMPT = "    try:\n        return self._data[key]\n    except"
_COMPLETION_TOKENS = 12


@dataclass(frozen=True)
class DemoRow:
    """Results for a compressed checkpoint.

    Attributes:
        name: the recipe.
        size_bytes: total size of the checkpoint's files.
        report: quality compared with the original.
        seconds: time of ``oneshot``, including loading and saving.
        peak_bytes: peak memory of the process meanwhile.
    """

    name: str
    size_bytes: int
    report: Report
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo.

    Attributes:
        text: description of the evaluation text.
        tokens: number of predicted tokens.
        original_bytes: total size of the original's files.
        original_perplexity: of the original on the same text.
        rows: the compressed checkpoints.
        prompt: the prompt for the completions.
        completions: completion by name of checkpoint, loaded by transformers in a new process.
        folder: the folder of the checkpoints, if they were kept.
    """

    text: str
    tokens: int
    original_bytes: int
    original_perplexity: float
    rows: tuple[DemoRow, ...]
    prompt: str
    completions: Mapping[str, str]
    folder: Path | None


def demo(
    output_dir: str | Path | None = None,
    *,
    num_calibration_samples: int = 128,
    num_windows: int = 128,
    seed: int = 0,
) -> DemoResult:
    """Compress the embedded model by each of :data:`RECIPES` and measure what was written.

    Calibration text and evaluation text are disjoint modules of the running Python's standard
    library. No network is used.

    Args:
        output_dir: keep the checkpoints in this folder; by default they are removed.
        num_calibration_samples: number of passages of 256 tokens to calibrate on.
        num_windows: number of windows of 256 tokens to evaluate on.
        seed: selects the passages and windows.

    Returns:
        Sizes, quality, times and memory.
    """
    with ExitStack() as stack:
        stack.enter_context(hide_tqdm_bars())
        original = stack.enter_context(as_file(files("llmcompressor") / "data" / "pico-stdlib"))
        folder = _output_folder(output_dir, stack)
        passages = calibration_passages(num_calibration_samples, seed=seed)
        jobs = {
            name: _compress(original, recipe, folder / _slug(name), passages, seed)
            for name, recipe in RECIPES.items()
        }
        reports = _measure(original, {name: folder / _slug(name) for name in jobs}, num_windows)
        checkpoints = {"original": original, **{name: folder / _slug(name) for name in jobs}}
        rows = tuple(
            DemoRow(name, _size(folder / _slug(name)), reports[name], seconds, peak)
            for name, (seconds, peak) in jobs.items()
        )
        first = rows[0].report
        return DemoResult(
            text="the standard library that the model never saw",
            tokens=first.tokens,
            original_bytes=_size(original),
            original_perplexity=first.reference_perplexity or 0.0,
            rows=rows,
            prompt=_PROMPT,
            completions=_generate_isolated(checkpoints),
            folder=None if output_dir is None else folder,
        )


def _output_folder(output_dir: str | Path | None, stack: ExitStack) -> Path:
    if output_dir is None:
        return Path(stack.enter_context(TemporaryDirectory(prefix="llmcompressor-demo-")))
    check_path_argument("output_dir", output_dir)
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is there already.", "Give a new folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compress(
    original: Path, modifier: str, target: Path, passages: list[str], seed: int
) -> tuple[float, int]:
    """Run ``oneshot``, and return its time in seconds and its peak memory."""
    start = time.perf_counter()
    with PeakMemory() as peak:
        oneshot(
            model=str(original),
            recipe=f"modifiers:\n  {modifier}\n",
            dataset=passages,
            max_seq_length=_WINDOW,
            batch_size=_BATCH,
            num_calibration_samples=len(passages),
            output_dir=str(target),
            seed=seed,
        )
    return time.perf_counter() - start, peak.bytes


def _measure(
    original: Path, checkpoints: Mapping[str, Path], num_windows: int
) -> dict[str, Report]:
    tokenizer = AutoTokenizer.from_pretrained(str(original))
    windows = sample_windows(
        cut_windows(tokenize(held_out_texts(), tokenizer), _WINDOW), num_windows, seed=0
    )
    models = {
        name: dispatch_for_generation(AutoModelForCausalLM.from_pretrained(str(path), dtype=_DTYPE))
        for name, path in {"original": original, **checkpoints}.items()
    }
    reference = models.pop("original")
    return compare(models, windows, reference=reference, batch_size=_BATCH)


def _generate_isolated(checkpoints: Mapping[str, Path]) -> dict[str, str]:
    """Generate with each checkpoint, loaded by transformers in a process without this package."""
    request = {
        "prompt": _PROMPT,
        "tokens": _COMPLETION_TOKENS,
        "checkpoints": {name: str(path) for name, path in checkpoints.items()},
    }
    # -I: the process sees installed packages only, and no environment variables of this one.
    process = subprocess.run(
        [sys.executable, "-I", str(reader.__file__)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise CheckpointError(
            f"transformers could not read what was written: {process.stderr.strip()[-2000:]}"
        )
    completions: dict[str, str] = json.loads(process.stdout)
    return completions


def _slug(name: str) -> str:
    """Folder name for a recipe's name.

    >>> _slug("W4A16 GPTQ")
    'w4a16-gptq'
    """
    return name.lower().replace(" ", "-")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
