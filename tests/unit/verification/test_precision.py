# SPDX-License-Identifier: Apache-2.0
"""Weights that were converted before they were rounded are near what was converted (R3, R4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.checkpoint_samples import Sample
from tests.support.thinned import thinned

from llmcompressor import verify
from llmcompressor.modifiers.quantization import QuantizationModifier

Run = Callable[..., Path]

PRESETS = ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4"]
UP = "model.layers.0.mlp.up_proj"


def recipe(preset: str) -> QuantizationModifier:
    if preset == "embedding":
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        group = {"targets": ["Embedding"], "weights": weights}
        return QuantizationModifier(config_groups={"group_0": group})
    return QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The random Llama in a dtype, with values that no narrower dtype has."""
    known: dict[str, Path] = {}

    def get(dtype: str) -> Path:
        if dtype not in known:
            known[dtype] = tmp_path_factory.mktemp("stored") / dtype
            model = small.llama(num_key_value_heads=4).to(getattr(torch, dtype))
            torch.manual_seed(1)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0, 0.02)
            model.config.dtype = getattr(torch, dtype)
            model.save_pretrained(known[dtype])
        return known[dtype]

    return get


def of_reference(folder: Path, source: Path) -> list[str]:
    found = verify(folder, source, tp=1).findings
    return [f"{one.rule} {one.module}: {one.message}" for one in found if one.rule[0] == "R"]


DTYPES = [
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
    ("bfloat16", "float32"),
]


@pytest.mark.parametrize(("preset", "before", "after"), thinned([*PRESETS, "embedding"], DTYPES))
def test_a_run_in_another_dtype_is_no_fault(
    preset: str, before: str, after: str, stored: Callable[[str], Path], compressed: Run
) -> None:
    source = stored(before)
    folder = compressed(source, recipe(preset), precision=after)
    assert not of_reference(folder, source)


@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC", "MXFP4"])
def test_a_file_that_is_read_in_another_dtype(
    preset: str, stored: Callable[[str], Path], compressed: Run, tmp_path: Path
) -> None:
    source = Sample.read(stored("float32"))
    source.config["dtype"] = "bfloat16"
    folder = compressed(source.write(tmp_path / "source"), recipe(preset))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert not of_reference(folder, tmp_path / "source")


def _code_off(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"].view(torch.uint8)[3, 5] ^= 1


def _scale_off(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"] *= 1.02


@pytest.mark.parametrize(("preset", "spoil"), [("W4A16", _code_off), ("W8A8", _scale_off)])
@pytest.mark.parametrize("after", ["bfloat16", "float16"])
def test_faults_are_seen_all_the_same(
    preset: str,
    spoil: Any,
    after: str,
    stored: Callable[[str], Path],
    compressed: Run,
    tmp_path: Path,
) -> None:
    source = stored("float32")
    sample = Sample.read(compressed(source, recipe(preset), precision=after))
    spoil(sample)
    found = of_reference(sample.write(tmp_path / "model"), source)
    assert [line.partition(":")[0] for line in found] == [f"R3 {UP}"]
