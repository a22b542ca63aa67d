# SPDX-License-Identifier: Apache-2.0
"""A run without data says what to give, and ``dataset="default"`` is data on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import tree
from tests.support.short_pico import write_short_pico

from llmcompressor import oneshot, plan, train
from llmcompressor.checkpoint import tensor_files
from llmcompressor.cli import main
from llmcompressor.errors import ArgumentError, DatasetError
from llmcompressor.reporting.page import data_of

GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
STATIC = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8, ignore: [lm_head]}}"
SURVEY = (
    "modifiers: {SparseGPTModifier: {sparsity: 0.5, sparsity_profile: owl, owl_m: 5, "
    "owl_lmbda: 0.08}}"
)
CHOICES = ('dataset="default"', "--dataset default", "ultrachat_200k", '["...", "..."]', ".jsonl")


@pytest.fixture(scope="module")
def model(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_pico(pico, tmp_path_factory.mktemp("model"), blocks=2)


class TestWithoutData:
    @pytest.mark.parametrize(
        ("recipe", "technique", "why"),
        [
            (GPTQ, "GPTQModifier", "it measures what goes through the layers"),
            (STATIC, "QuantizationModifier", "it measures what goes through the layers"),
            (SURVEY, "SparseGPTModifier", "it measures what goes through all layers"),
        ],
        ids=["gptq", "static scales", "a survey first"],
    )
    def test_the_error_says_who_why_and_what_to_give(
        self, recipe: str, technique: str, why: str, tmp_path: Path
    ) -> None:
        with pytest.raises(DatasetError) as caught:  # the model is not even looked for
            oneshot(model="./none", recipe=recipe, output_dir=tmp_path / "output")
        told = str(caught.value)
        assert told.startswith(f"{technique} needs calibration data, and no dataset was given: ")
        assert all(one in told for one in (why, *CHOICES))
        assert not list(tmp_path.iterdir())

    def test_the_command_and_the_plan_say_the_same(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(GPTQ)
        command = ["oneshot", str(model), "--recipe", str(recipe), "--output", str(tmp_path / "o")]
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert all(one in error for one in CHOICES)
        (problem,) = plan(model, GPTQ, measure=False).problems
        assert problem.where == "dataset"
        assert all(one in str(problem) for one in CHOICES)


class TestOffline:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def run(self, model: Path, output: Path, **arguments: Any) -> None:
        oneshot(
            model=model,
            recipe=GPTQ,
            dataset="default",
            max_seq_length=64,
            num_calibration_samples=6,
            output_dir=output,
            **arguments,
        )

    def test_the_page_tells_what_was_used(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LLM_COMPRESSOR_REPORT", raising=False)
        self.run(model, tmp_path / "output")
        data = data_of(tmp_path / "output" / "report.html")
        assert data["data"] == "The data set default, 6 samples"
        (warning,) = (one for one in data["warnings"] if "dataset='default'" in one)
        assert "standard library" in warning
        page = (tmp_path / "output" / "report.html").read_text("utf-8")
        assert "calibrated with: The data set default, 6 samples" in page

    def test_a_run_that_was_stopped_goes_on_with_the_same_data(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.run(model, tmp_path / "whole")
        write, left = tensor_files._write_all, iter(range(40))

        def failing(*arguments: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(tensor_files, "_write_all", failing)
            with pytest.raises(KeyboardInterrupt):
                self.run(model, tmp_path / "output")
        self.run(model, tmp_path / "output", resume="must")
        assert tree(tmp_path / "output") == tree(tmp_path / "whole")

    def test_the_plan_counts_it_and_notes_what_it_is(self, model: Path) -> None:
        options: dict[str, Any] = {"max_seq_length": 64, "num_calibration_samples": 6}
        found = plan(model, GPTQ, "default", measure=False, **options)
        assert not found.problems
        assert any("standard library" in note for note in found.notes)

    def test_a_training_on_it_needs_a_number(self, model: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {
            "model": model,
            "recipe": "modifiers: {ConstantPruningModifier: {targets: ['re:.*up_proj.weight']}}",
            "dataset": "default",
            "max_seq_length": 32,
            "output_dir": tmp_path / "output",
        }
        with pytest.raises(ArgumentError, match=r"is a stream.*max_steps"):
            train(**options)
        train(**options, max_steps=1, per_device_train_batch_size=2)
        assert (tmp_path / "output" / "model.safetensors").is_file()
