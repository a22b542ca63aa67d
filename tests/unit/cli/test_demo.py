# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcompressor.cli import demo as page
from llmcompressor.cli.demo import DemoResult
from llmcompressor.datasets.stdlib_text import held_out_texts
from llmcompressor.errors import OutputError


@pytest.fixture(scope="module")
def calls() -> Iterator[list[dict[str, Any]]]:
    """In place of ``oneshot``, a copy: what is measured must then be the original."""
    made: list[dict[str, Any]] = []

    def copy(**given: Any) -> None:
        made.append(given)
        shutil.copytree(given["model"], given["output_dir"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "oneshot", copy)
        yield made


@pytest.fixture(scope="module")
def result(calls: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    folder = tmp_path_factory.mktemp("demo") / "kept"
    return page.demo(folder, num_calibration_samples=8, num_windows=2)


def test_copies_are_measured_as_the_original(result: DemoResult) -> None:
    assert [row.name for row in result.rows] == list(page.RECIPES)
    for row in result.rows:
        assert row.report.kl_divergence == 0
        assert row.report.top1_agreement == 1
        assert row.size_bytes == result.original_bytes
        assert row.peak_bytes > 0
    assert result.tokens == 2 * 255


def test_every_checkpoint_is_read_alone(result: DemoResult) -> None:
    assert set(result.completions) == {"original", *page.RECIPES}
    assert len(set(result.completions.values())) == 1


def test_calibration_keeps_to_its_modules(result: DemoResult, calls: list[dict[str, Any]]) -> None:
    held_out = "\0".join(held_out_texts())
    for call in calls[: len(page.RECIPES)]:
        assert call["num_calibration_samples"] == len(call["dataset"]) == 8
        assert not [passage for passage in call["dataset"] if passage in held_out]


def test_a_folder_in_use_is_refused_before_any_work(
    calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    before = len(calls)
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(OutputError, match="is there already"):
            page.demo(folder)
    assert len(calls) == before
