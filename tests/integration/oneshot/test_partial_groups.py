# SPDX-License-Identifier: Apache-2.0
"""Rows that end within a group, where the recipe says that this is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

COLUMNS = 216
"""Of a down projection: a multiple of none of the groups."""


def of_integers(bits: int, *, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": "group", "group_size": 80, "symmetric": symmetric}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


SCHEMES: dict[str, dict[str, Any]] = {
    "int4": of_integers(4),
    "int4 with zero points": of_integers(4, symmetric=False),
    "int8": of_integers(8),
    **{f"int{bits}": of_integers(bits) for bits in (2, 3, 5, 6, 7)},
    "int3 with zero points": of_integers(3, symmetric=False),
    "NVFP4A16": {"targets": "Linear", "scheme": "NVFP4A16"},
    "MXFP4A16": {"targets": "Linear", "scheme": "MXFP4A16"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    small.llama(intermediate_size=COLUMNS, num_hidden_layers=1).save_pretrained(folder)
    return folder


SOLVED = ("int4 with zero points", "int3")
"""That both modifiers are shown with; the others with one, if not all cases are asked for."""


@pytest.mark.parametrize(
    ("scheme", "modifier"),
    [
        *((scheme, QuantizationModifier) for scheme in SCHEMES),
        *((scheme, GPTQModifier) for scheme in SOLVED),
        *(
            pytest.param(scheme, GPTQModifier, marks=pytest.mark.slow)
            for scheme in SCHEMES
            if scheme not in SOLVED
        ),
    ],
)
def test_a_returned_folder_run_computes_as_in_memory(
    scheme: str, modifier: Any, folder: Path, tmp_path: Path
) -> None:
    """Its weights are read from the checkpoint when they are looked at."""
    logits, weights, files = [], [], []
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, source in {"folder": folder, "model": loaded}.items():
        model = oneshot(
            source,
            modifier(ignore=["lm_head"], bypass_divisibility_checks=True, **SCHEMES[scheme]),
            small.token_rows(),
            output_dir=tmp_path / name,
            verify=name == "folder",  # the files are the same
        )
        files.append((tmp_path / name / "model.safetensors").read_bytes())
        logits.append(small.logits(model))
        weights.append({name: one.detach() for name, one in model.named_parameters()})
        model.save_pretrained(tmp_path / f"{name} again")
    assert torch.equal(*logits)
    assert weights[0].keys() == weights[1].keys()
    for name, one in weights[0].items():
        assert torch.equal(one, weights[1][name]), name
    assert files[0] == files[1]


def test_a_format_of_whole_groups_is_refused_when_asked_for(folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    recipe = QuantizationModifier(
        ignore=["lm_head"], bypass_divisibility_checks=True, **SCHEMES["int8"]
    )
    model = oneshot(loaded, recipe)
    out = tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"int-quantized holds whole groups of 80, .* 128 col"):
        model.save_pretrained(out, quantization_format="int-quantized")
    assert not out.exists()
    model.save_pretrained(out, quantization_format="pack-quantized")


@pytest.mark.parametrize("columns", [201, 203])
def test_an_odd_number_of_columns_is_packed(columns: int, tmp_path: Path) -> None:
    """They fill no word: the last one of a row is partial, and so is the last group."""
    model = small.llama(intermediate_size=columns, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    packed = QuantizationModifier(
        ignore=["lm_head"], bypass_divisibility_checks=True, **of_integers(8, symmetric=False)
    )
    logits = [
        small.logits(oneshot(source, packed, output_dir=tmp_path / name))
        for name, source in {
            "folder": tmp_path / "model",
            "loaded": AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto"),
        }.items()
    ]
    assert torch.equal(*logits)
