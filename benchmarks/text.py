# SPDX-License-Identifier: Apache-2.0
"""Windows of the embedded model's text: to calibrate on, and held out from its training."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from models import MODELS, PICO

WINDOW = 256


def windows(texts: Sequence[str], model: Path = PICO, length: int = WINDOW) -> list[list[int]]:
    """The texts' tokens one after another, cut into windows; the last, short one is dropped.

    Each file begins with the token that the tokenizer puts there, as in the model's training.

    Args:
        texts: Whole files.
        model: Folder with the tokenizer.
        length: Tokens per window.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
    return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]


def held_out_file() -> Path:
    """JSON file with the windows of the modules that the model was not trained on."""
    from llmcompressor.datasets.stdlib_text import held_out_texts  # noqa: PLC0415

    return write("pico-held-out", windows(held_out_texts()))


def calibration_files(seeds: Sequence[int], samples: int) -> dict[int, Path]:
    """For each seed a JSON file with windows drawn from the modules of the training.

    Args:
        seeds: What the draws depend on.
        samples: Windows per draw.
    """
    from llmcompressor.datasets.stdlib_text import calibration_texts  # noqa: PLC0415

    every = windows(calibration_texts())
    return {
        seed: write(f"pico-calibration-{seed}", random.Random(seed).sample(every, samples))
        for seed in seeds
    }


def write(name: str, ids: list[list[int]]) -> Path:
    """The path of a JSON file with token ids in the benchmarks' folder."""
    path = MODELS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(ids))
    return path
