# SPDX-License-Identifier: Apache-2.0
"""What config.json says of tied embeddings against the matrices that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint_samples import Sample, dense, made

from llmcompressor.verification import Severity
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.values import equal

CONFIG, HEAD = ("R5", "config.json"), ("R5", "lm_head.weight")
EMBEDDING = "model.embed_tokens.weight"
Bad = set[tuple[str, str]]


def sample(**config: Any) -> tuple[Sample, Sample]:
    """A checkpoint and its original, untied and with a head of its own."""
    theirs = made(dense(), "W8A16", only=lambda name: False, **config)
    del theirs.config["quantization_config"]
    return made(dense(), "W8A16", **config), theirs


def bad(ours: Sample, folder: Path, theirs: Sample | None = None) -> Bad:
    reference = None if theirs is None else theirs.write(folder / "original")
    report = verify_files(ours.write(folder / "checkpoint"), reference, workers=1)
    assert {one.severity for one in report.findings if one.module == HEAD[1]} <= {Severity.WARNING}
    found = (one for one in report.findings if one.severity is Severity.ERROR or one.rule == "R5")
    return {(one.rule, one.module) for one in found}


def test_a_head_that_would_not_be_used(tmp_path: Path) -> None:
    ours, theirs = sample()
    assert not bad(ours, tmp_path / "good", theirs)
    ours.config["tie_word_embeddings"] = True
    assert bad(ours, tmp_path / "alone") == {HEAD}
    assert bad(ours, tmp_path / "both", theirs) == {HEAD, CONFIG}


def test_the_same_matrix_twice_is_tied(tmp_path: Path) -> None:
    ours, theirs = sample()
    for each in (ours, theirs):
        each.tensors["lm_head.weight"] = each.tensors[EMBEDDING].clone()
    ours.config["tie_word_embeddings"] = True
    assert not bad(ours, tmp_path, theirs)


def test_a_run_may_untie_them(tmp_path: Path) -> None:
    ours, theirs = sample()
    theirs.config["tie_word_embeddings"] = True
    theirs.drop("lm_head.")
    ours.tensors["lm_head.weight"] = ours.tensors[EMBEDDING].clone()
    assert not bad(ours, tmp_path / "both", theirs)
    ours.drop("lm_head.")
    assert bad(ours, tmp_path / "none", theirs) == {CONFIG}


@pytest.mark.parametrize("said", [None, False])
def test_an_original_that_says_nothing_is_judged_by_its_head(
    said: bool | None, tmp_path: Path
) -> None:
    ours, theirs = sample()
    del theirs.config["tie_word_embeddings"]
    if said is None:
        ours.config["tie_word_embeddings"] = True
        assert CONFIG in bad(ours, tmp_path, theirs)
    else:
        assert not bad(ours, tmp_path, theirs)


def test_single_numbers_are_compared_as_others_are():
    """Buffers of batch norms and scales of activations have no dimension."""
    one, other = torch.tensor(1.5), torch.tensor(2.5)
    assert equal(one, one.clone())
    assert equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not equal(one, other)
    assert not equal(one, torch.tensor([1.5, 1.5]))
