# SPDX-License-Identifier: Apache-2.0
"""The beginning of the embedded model: its tokenizer and first block."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

__all__ = ["write_short_pico"]


def write_short_pico(
    pico: Path, folder: Path, *, blocks: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """Write it in float32: 16 bits take several times as long where the processor lacks them."""
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=dtype, num_hidden_layers=blocks)
    model.save_pretrained(folder)
    for file in pico.glob("*token*"):
        shutil.copy(file, folder)
    return folder
