# SPDX-License-Identifier: Apache-2.0
"""A rank that cannot write ends the others with its error, and the same call goes on later."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import rank_faults
from tests.support.rank_group import Group
from tests.support.small_models import tree

FULL = "OutputError: The disk that holds"
CLOSED = "OutputError: The output directory"


@pytest.mark.parametrize(
    ("where", "rank", "said"),
    [("full", 0, FULL), ("full", 1, FULL), ("closed", 1, CLOSED)],
)
def test_a_rank_cannot_write(
    where: str, rank: int, said: str, groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    model, output, whole = str(llama_folder), tmp_path / "output", tmp_path / "whole"
    told = groups[2](rank_faults.failing, where, model, output, rank)
    assert told[rank].startswith(said)
    assert told[1 - rank] == f"ProcessError: Process {rank} has failed: {told[rank]}"
    kept = ["output.partial"] if where == "full" else []
    assert [path.name for path in tmp_path.iterdir()] == kept
    for folder in (output, whole):
        assert groups[2](rank_faults.failing, "", model, folder, rank) == ["none", "none"]
    assert files_of(output) == files_of(whole)


def files_of(folder: Path) -> dict[str, str]:
    """All but the report, which counts the bytes of this run."""
    return {name: one for name, one in tree(folder).items() if "report" not in name}
