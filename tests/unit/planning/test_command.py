# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: its exit codes, its table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import published_models as published
from typer.testing import CliRunner, Result

from llmcompressor import plan
from llmcompressor.cli.app import app

RECIPE = (
    "modifiers:\n  QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}\n"
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["plan", *arguments], prog_name="llmcompressor", color=False, env={"COLUMNS": "160"}
    )


@pytest.fixture(autouse=True)
def _log_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.logger.configure_logger", lambda *_: None)


def test_the_table_says_what_matters(llama_folder: Path) -> None:
    result = run(str(llama_folder), "--recipe", RECIPE)

    assert result.exit_code == 0, result.output
    for words in (
        "LlamaForCausalLM",
        "lm_head",
        "int4 group 128 (pack-quantized)",
        "bytes exactly",
        "one block at a time",
        "Time on this machine",
        "Nothing was found that would stop it.",
    ):
        assert words in result.output


def test_a_plan_prints_itself(llama_folder: Path) -> None:
    text = str(plan(llama_folder, RECIPE, measure=False))

    assert "What is written" in text
    assert "Nothing was found that would stop it." in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_json_is_the_plan(llama_folder: Path) -> None:
    result = run(str(llama_folder), "--recipe", RECIPE, "--json", "--no-measure")
    content = json.loads(result.output)

    assert result.exit_code == 0
    assert content["ok"] is True
    assert len(content["schemes"]) == 14
    assert content["time"] is None


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_recipe_that_would_fail(llama_folder: Path, form: list[str]) -> None:
    wrong = RECIPE.replace("Linear]", "Linaer]")
    result = run(str(llama_folder), "--recipe", wrong, "--no-measure", *form)

    assert result.exit_code == 1
    assert "Linaer" in result.output
    assert "Did you mean 'Linear'?" in result.output


def test_an_output_that_could_not_be_served(llama_folder: Path) -> None:
    call = [str(llama_folder), "--recipe", RECIPE, "--no-measure", "--serve", "vllm"]

    assert run(*call, "--tp", "1").exit_code == 0
    result = run(*call, "--tp", "64")
    assert result.exit_code == 1
    assert "could not be served" in result.output


def test_what_cannot_be_used(tmp_path: Path) -> None:
    result = run(str(tmp_path), "--recipe", RECIPE)
    assert result.exit_code == 2
    assert "config.json" in result.output


def test_headers_of_a_large_model_in_a_table(tmp_path: Path) -> None:
    config = published.MIXTRAL_8X7B
    source = published.write_headers(tmp_path / "m", config, published.tensors_of(config))
    result = run(str(source), "--recipe", RECIPE, "--no-measure")

    assert "46.7 billion parameters, 32 blocks" in result.output
    assert "stacks of matrices" not in result.output
    assert "hold headers and no data" in result.output
