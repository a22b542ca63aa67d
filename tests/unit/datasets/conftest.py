# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the embedded model, what it logs, and a shorter way to ask for batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llmcompressor
from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import load_calibration
from llmcompressor.logger import logger

MODEL = Path(llmcompressor.__file__).parent / "data" / "pico-stdlib"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What is logged at WARNING and above while the test runs."""
    lines: list[str] = []
    sink = logger.add(
        lambda message: lines.append(str(message)), level="WARNING", format="{message}"
    )
    yield lines
    logger.remove(sink)


@pytest.fixture
def batches(tokenizer) -> Callable[..., list[Any]]:
    """batches(data, argument=value, ...) → the calibration batches as a list."""

    def make(data: Any = None, *, processor: Any = tokenizer, **arguments: Any) -> list[Any]:
        given = {
            key: arguments.pop(key)
            for key in ("vocab_size", "model_input_names", "main_inputs", "model_max_length")
            if key in arguments
        }
        loader = load_calibration(
            DatasetArguments(dataset=data, **arguments), processor=processor, **given
        )
        assert loader is not None
        return list(loader)

    return make


@pytest.fixture
def texts(batches, tokenizer) -> Callable[..., list[str]]:
    """As ``batches``, but each sample's text, special tokens left out."""

    def make(data: Any = None, **arguments: Any) -> list[str]:
        return [
            tokenizer.decode(row, skip_special_tokens=True)
            for batch in batches(data, **arguments)
            for row in batch["input_ids"]
        ]

    return make
