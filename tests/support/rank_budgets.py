# SPDX-License-Identifier: Apache-2.0
"""Runs with a budget over ranks; each rank calls the functions here."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.small_models import token_rows

from llmcompressor import oneshot
from llmcompressor.budget import sensitivity
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.pipelines.sampled_gradients import SampledGradients

FIELDS = {
    "targets": "Linear",
    "ignore": ["lm_head"],
    "candidates": ["W3A16", "W4A16", "W8A16"],
    "budget": {"bits": 5, "samples": 6},
}


def compress(
    model: Path, output: Path, technique: str, fields: dict[str, Any] = FIELDS, **given: Any
) -> int:
    """Compress a folder to another one; return how many samples of the search this rank ran."""
    made: list[CalibrationBatches] = []

    def watched(*args: Any, **kwargs: Any) -> SampledGradients:
        run = SampledGradients(*args, **kwargs)
        made.append(run._data)
        return run

    with patch.object(sensitivity, "SampledGradients", watched):
        oneshot(
            model=str(model),
            recipe={"modifiers": {technique: fields}},
            dataset=token_rows(8, 16),
            output_dir=str(output),
            **given,
        )
    return sum(sum(found.sizes(index)) for found in made for index in range(len(found)))
