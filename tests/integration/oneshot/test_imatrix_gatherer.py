# SPDX-License-Identifier: Apache-2.0
"""A recipe with IMatrixGatherer gives what it gives without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import small_models as small

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.imatrix import IMatrixGatherer

RTN = (
    "QuantizationModifier: "
    "{targets: Linear, scheme: W4A16, ignore: [lm_head], weight_observer: imatrix_mse}"
)
AS_TEXT = f"quant_stage: {{quant_modifiers: {{IMatrixGatherer: {{ignore: [lm_head]}}, {RTN}}}}}"


def as_objects() -> list[Any]:
    quantizing = QuantizationModifier(
        targets="Linear", scheme="W4A16", ignore=["lm_head"], weight_observer="imatrix_mse"
    )
    return [IMatrixGatherer(ignore=["lm_head"]), quantizing]


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_observer_gathers_alone(one_block: Path, tmp_path: Path, in_memory: bool) -> None:
    recipes = {"without": f"quant_stage: {{quant_modifiers: {{{RTN}}}}}", "with": AS_TEXT}
    for name, recipe in {**recipes, "objects": as_objects()}.items():
        oneshot(
            model=small.one_block() if in_memory else str(one_block),
            recipe=recipe,
            dataset=small.token_rows(),
            shuffle_calibration_samples=False,
            output_dir=tmp_path / name,
        )
    made = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("without", "with", "objects")
    }
    assert made["with"] == made["objects"] == made["without"]
