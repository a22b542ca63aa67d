# SPDX-License-Identifier: Apache-2.0
"""The embedded model, text that it never saw, and its loss there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor.datasets.stdlib_text import calibration_passages, held_out_texts
from llmcompressor.evaluation.sources import cut_windows, sample_windows, tokenize

TOKENS = 256


def model(folder: Path) -> Any:
    """In the dtype that it is stored in."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@cache
def calibration(folder: Path, number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """``number`` windows of 256 tokens, four in a batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    passages = calibration_passages(number, seed=seed, characters=8 * TOKENS)
    rows = [tokenizer(passage)["input_ids"][:TOKENS] for passage in passages]
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for ids in torch.tensor(rows).split(4)
    ]


@cache
def held_out(folder: Path, number: int) -> Tensor:
    """``number`` windows of 256 tokens, ``[number, 256]``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = cut_windows(tokenize(held_out_texts(), tokenizer), TOKENS)
    return torch.tensor(sample_windows(windows, number, seed=0))


@torch.no_grad()
def loss(model: Any, ids_BT: Tensor) -> float:
    """Mean cross-entropy, computed in float32; the model stays in it."""
    model.float()
    losses = [float(model(part, labels=part).loss) * len(part) for part in ids_BT.split(8)]
    return sum(losses) / len(ids_BT)
