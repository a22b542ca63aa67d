# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcompressor.datasets import stdlib_text
from llmcompressor.errors import ArgumentError, DatasetError
from llmcompressor.evaluation.sources import cut_windows, padded_batches, sample_windows

EXCLUDED = {"site-packages", "idlelib", "lib2to3", "test", "ensurepip", "turtledemo", "encodings"}


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9),
    st.integers(min_value=2, max_value=6),
)
def test_windows_are_the_documents_one_after_another(
    documents: list[list[int]], length: int
) -> None:
    stream = [token for document in documents for token in document]
    windows = cut_windows(documents, length)
    joined = [token for window in windows for token in window]
    assert joined == stream[: len(joined)]
    assert len(stream) - len(joined) <= 1  # a single token left over predicts nothing
    assert all(len(window) == length for window in windows[:-1])


def test_windows_are_drawn_by_seed_and_stay_in_order() -> None:
    windows = [[number, number] for number in range(100)]
    drawn = sample_windows(windows, 10, seed=1)
    assert drawn == sample_windows(windows, 10, seed=1) == sorted(drawn)
    assert drawn != sample_windows(windows, 10, seed=2)
    assert sample_windows(windows, None, seed=1) == sample_windows(windows, 1000, seed=1) == windows
    with pytest.raises(ArgumentError, match="num_samples is 0"):
        sample_windows(windows, 0, seed=1)


def test_batches_pad_on_the_right() -> None:
    [(ids, mask), (last_ids, last_mask)] = padded_batches([[1, 2, 3], [4, 5], [6, 7]], 2)
    assert ids.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert mask.tolist() == [[True] * 3, [True, True, False]]
    assert last_ids.tolist() == [[6, 7]]
    assert last_mask.dtype == torch.bool
    assert last_mask.all()


def test_held_out_is_the_rule_of_the_model_page() -> None:
    files = stdlib_text.source_files()
    assert [file.name for file in files if file.held_out]
    for file in files:
        digest = hashlib.sha256(file.name.encode()).hexdigest()
        assert file.held_out == (int(digest, 16) % 20 == 0)
        assert file.name.split("/")[0] not in EXCLUDED


def test_calibration_and_evaluation_are_disjoint() -> None:
    held_out = set(stdlib_text.held_out_texts())
    calibration = set(stdlib_text.calibration_texts())
    assert held_out
    assert calibration
    assert not {text for text in held_out & calibration if text.strip()}
    together = "\0".join(held_out)
    assert not [p for p in stdlib_text.calibration_passages(64, seed=3) if p in together]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name in ("b/one.py", "a.py", "test/two.py", "site-packages/x.py", "b/test/three.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\n".encode() * 40 + b"\xff\n")
    return tmp_path


def test_a_python_without_its_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no source"):
        stdlib_text.source_files(tmp_path)
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(DatasetError, match="characters"):
        stdlib_text.calibration_passages(1, library=tmp_path)
