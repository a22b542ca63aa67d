# SPDX-License-Identifier: Apache-2.0
"""What each rank of a launcher does; run by torchrun, or alone. No group is made here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from llmcompressor import evaluate, model_free_ptq, oneshot, run_stages

LINEARS = {"targets": "Linear", "ignore": ["lm_head"]}
GPTQ = {"GPTQModifier": {**LINEARS, "scheme": "W4A16"}}
FP8 = {"QuantizationModifier": {**LINEARS, "scheme": "FP8"}}
PRUNING = {"WandaPruningModifier": {**LINEARS, "sparsity": 0.5, "mask_structure": "2:4"}}
DATA = [[1 + (7 * row + place) % 60 for place in range(32)] for row in range(8)]


def join(environment: dict[str, str]) -> None:
    """Make this process look as a launcher would have started it."""
    os.environ.update(environment)
    torch.set_num_threads(1)


def compress(model: str, folder: str, recipe: dict[str, Any], **given: Any) -> Any:
    return oneshot(
        model=model, recipe={"modifiers": recipe}, dataset=DATA, output_dir=folder, **given
    )


def all_entrypoints(model: str, folder: Path) -> float:
    """Several runs one after another, a save, the two others; no group is left."""
    compress(model, f"{folder}/first", GPTQ)
    compress(model, f"{folder}/second", FP8).save_pretrained(f"{folder}/saved")
    model_free_ptq(model, f"{folder}/free", "FP8_DYNAMIC", ignore=["lm_head"])
    report = evaluate(f"{folder}/first", dataset=DATA, max_seq_length=32)
    assert not distributed.is_initialized()
    return report.perplexity


def stages(model: str, folder: str) -> str:
    recipe = {
        "sparse_stage": {"run_type": "oneshot", "sparse_modifiers": PRUNING},
        "quant_stage": {"run_type": "oneshot", "quant_modifiers": FP8},
    }
    run_stages(model, recipe, DATA, folder)
    return type(run_stages(model, recipe, DATA, folder)).__name__  # all is there already


def unlike(model: str, folder: str) -> list[str]:
    """Runs in which the ranks do not agree, then one in which they do."""
    is_first = os.environ["SLURM_PROCID"] == "0"
    wrong = {"QuantizationModifier": {**LINEARS, "scheme": "FP9"}}
    other = {"QuantizationModifier": {**LINEARS, "scheme": "W8A8"}}
    found = [
        _error(compress, model, folder, FP8 if is_first else wrong),
        _error(compress, model, folder, FP8 if is_first else other),
        _error(compress, model, folder if is_first else f"{folder}-other", FP8),
        _error(model_free_ptq, model, folder, "FP8_DYNAMIC" if is_first else "FP8_BLOCK"),
    ]
    assert not Path(folder).exists()
    return [*found, _error(compress, model, folder, FP8)]


def _error(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    line = f"{all_entrypoints(sys.argv[1], Path(sys.argv[2]))}\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: the ranks share a pipe
