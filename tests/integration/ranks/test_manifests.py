# SPDX-License-Identifier: Apache-2.0
"""Ranks write the manifest of what they wrote together, and make it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import manifests, rank_manifests
from tests.support.rank_group import Group

from llmcompressor import model_free_ptq, verify


@pytest.fixture(scope="module")
def made(
    groups: dict[int, Group], llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What two ranks have made."""
    output = tmp_path_factory.mktemp("made") / "output"
    assert groups[2](rank_manifests.made, str(llama_folder), output) == ["none", "none"]
    return output


def test_a_manifest_of_ranks_says_what_was_written(
    made: Path, groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    assert manifests.check_written(made)["run"]["ranks"] == 2
    assert not [one for one in verify(made).findings if one.rule.startswith("M")]
    groups[2](rank_manifests.made, str(llama_folder), tmp_path / made.name)
    assert manifests.decided(made) == manifests.decided(tmp_path / made.name)


def test_ranks_make_it_again(made: Path, groups: dict[int, Group]) -> None:
    beside = sorted(made.parent.iterdir())
    found = groups[2](rank_manifests.again, made)
    assert [(same, reasons) for same, reasons, _ in found] == [(True, ()), (True, ())], found
    assert [told for *_, told in found] == [[], []]
    assert sorted(made.parent.iterdir()) == beside, "what was made is removed"


def test_another_number_of_ranks_is_told_before(made: Path, groups: dict[int, Group]) -> None:
    first, *others = groups[4](rank_manifests.again, made)
    told = "It differs from the run that made output: ranks: 2 then, 4 now."
    assert told in first[2], first
    assert [told for *_, told in others] == [[]] * 3


@pytest.mark.parametrize("how", ["kept", "failing"])
def test_ranks_make_one_without_a_class_again(
    how: str, groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    model_free_ptq(llama_folder, output, scheme="FP8_DYNAMIC", ignore=["lm_head"])
    given: dict[str, Any] = {"dataset": None}
    if how == "kept":
        given["output_dir"] = tmp_path / "again"
    if how == "failing":
        (output / manifests.MANIFEST).unlink()
    found = groups[2](rank_manifests.again, output, **given)
    if how == "failing":
        assert all("manifest" in str(one) for one in found), found
    else:
        assert [one[0] for one in found] == [True, True], found
    left = ["again", "output"] if how == "kept" else ["output"]
    assert sorted(one.name for one in tmp_path.iterdir()) == left
