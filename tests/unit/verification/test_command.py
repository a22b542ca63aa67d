# SPDX-License-Identifier: Apache-2.0
"""``llmcompressor verify``: exit codes, the table, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.checkpoint_samples import Sample, dense, made
from typer.testing import CliRunner, Result

from llmcompressor.cli.app import app


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def sample() -> Sample:
    return made(dense(), "W4A16")


def test_a_good_checkpoint_leaves_with_zero(sample: Sample, tmp_path: Path) -> None:
    result = run(sample.write(tmp_path / "checkpoint"), "--serve", "vllm", "--tp", 1)
    assert result.exit_code == 0
    assert "good" in result.stdout
    assert "14 of 16 matrices quantized" in result.stdout
    assert "0 errors, 0 warnings, 0 notes" in result.stdout


def test_a_bad_one_leaves_with_one_and_names_the_rule(sample: Sample, tmp_path: Path) -> None:
    bad = sample.copy()
    bad.tensors["model.layers.0.mlp.up_proj.weight_scale"][3] = float("nan")
    result = run(bad.write(tmp_path / "checkpoint"), "--tp", 1)
    assert result.exit_code == 1
    assert "NOT good" in result.stdout
    assert "S72" in result.stdout
    assert "Traceback" not in result.output


def test_json(sample: Sample, tmp_path: Path) -> None:
    folder = sample.write(tmp_path / "checkpoint")
    result = run(folder, "--json", "--tp", 4)
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert content["ok"] is False
    assert {one["rule"] for one in content["findings"] if one["severity"] == "error"} == {"S39"}


def test_a_reference_is_compared(sample: Sample, tmp_path: Path) -> None:
    source = made(dense(), only=lambda name: False)
    del source.config["quantization_config"]
    reference = source.write(tmp_path / "source")
    result = run(sample.write(tmp_path / "checkpoint"), "--reference", reference, "--tp", 1)
    assert result.exit_code == 0
    assert "relative error of weights" in result.stdout


@pytest.mark.parametrize(
    "more",
    [
        ["--serve", "triton"],
        ["--gpu", "x1"],
        ["--tp", "0"],
        ["--dtype", "foo"],
        ["--dtype", "int8"],
    ],
)
def test_unusable_facts_leave_with_two(sample: Sample, tmp_path: Path, more: list[str]) -> None:
    assert run(sample.write(tmp_path / "checkpoint"), *more).exit_code == 2


def test_a_dtype_that_is_not_served_is_a_finding(sample: Sample, tmp_path: Path) -> None:
    result = run(sample.write(tmp_path / "checkpoint"), "--dtype", "float64", "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert {one["rule"] for one in findings if one["severity"] == "error"} == {"S10"}


def test_no_checkpoint_leaves_with_two(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "There is no checkpoint folder" in result.output
