# SPDX-License-Identifier: Apache-2.0
"""Runs that ranks make, and make again; all of them call each function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.rank_faults import GPTQ
from tests.support.shared_runs import error_of
from tests.support.small_models import token_rows

from llmcompressor import oneshot, reproduce
from llmcompressor.logger import logger


def made(model: str, output: Path) -> str:
    """The error of a run."""
    return error_of(oneshot, model, {"modifiers": GPTQ}, token_rows(8, 16), output_dir=output)


def again(checkpoint: Path, **given: Any) -> tuple[bool, tuple[str, ...], list[str]]:
    """Whether a checkpoint has come out the same, why not, and what was told before."""
    told: list[str] = []
    handler = logger.add(lambda line: told.append(line.record["message"]), level="WARNING")
    try:
        found = reproduce(checkpoint, **{"dataset": token_rows(8, 16), **given})
    finally:
        logger.remove(handler)
    return found.same, found.reasons, [one for one in told if one.startswith("It differs")]
