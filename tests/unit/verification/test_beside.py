# SPDX-License-Identifier: Apache-2.0
"""Files beside the weights, and static scales beside those of other layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import Sample, dense, made

from llmcompressor import verify
from llmcompressor.verification import Severity

TOKENIZER = json.dumps({"version": "1.0", "model": {"vocab": {"a": 0, "b": 1}}, "padding": None})
GENERATION = json.dumps({"do_sample": True, "temperature": 0.6, "transformers_version": "5.0"})


def findings(checkpoint: Path, reference: Path) -> list[tuple[str, Severity]]:
    found = verify(checkpoint, reference, tp=1).findings
    return [(one.module, one.severity) for one in found if one.rule == "R6"]


@pytest.mark.parametrize(
    ("name", "changed", "severity"),
    [
        ("tokenizer.json", TOKENIZER[:-20], Severity.ERROR),
        ("tokenizer.json", TOKENIZER.replace('"b": 1', '"b": 2'), Severity.WARNING),
        ("generation_config.json", GENERATION.replace("0.6", "1.6"), Severity.WARNING),
        ("chat_template.jinja", "{{ other }}", Severity.WARNING),
        # written again, and the same to readers
        ("tokenizer.json", json.dumps({**json.loads(TOKENIZER), "padding": {}}, indent=2), None),
        ("generation_config.json", GENERATION.replace("5.0", "5.22"), None),
    ],
)
def test_changed_files_beside_the_weights_are_told(
    name: str, changed: str, severity: Severity | None, tmp_path: Path
) -> None:
    files = {
        "tokenizer.json": TOKENIZER.encode(),
        "generation_config.json": GENERATION.encode(),
        "chat_template.jinja": b"{{ messages }}",
    }
    source = made(dense(), "W8A16", only=lambda name: False)
    del source.config["quantization_config"]
    checkpoint = made(dense(), "W8A16")
    source.files |= files
    checkpoint.files |= files
    reference = source.write(tmp_path / "source")
    checkpoint.files[name] = changed.encode()
    found = findings(checkpoint.write(tmp_path / "checkpoint"), reference)
    assert found == ([] if severity is None else [(name, severity)])


@pytest.mark.parametrize("own", ["mlp.up_proj.input_scale", "self_attn.k_scale"])
def test_a_static_scale_of_another_size_is_told(
    own: str, good: Callable[[str], Sample], tmp_path: Path
) -> None:
    sample = good("FP8")
    if own.endswith("k_scale"):
        for layer in range(2):
            sample.tensors[f"model.layers.{layer}.{own}"] = torch.tensor([0.02])
    name = f"model.layers.1.{own}"

    def told() -> set[str]:
        report = verify(sample.write(tmp_path / "checkpoint"), tp=1)
        return {one.module for one in report.findings if one.rule == "V5"}

    assert name not in told()
    sample.tensors[name] *= 1000
    assert name in told()
