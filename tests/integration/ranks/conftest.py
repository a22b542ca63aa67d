# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and one process alone, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.rank_group import Group, group_of
from tests.support.rank_runs import Runs
from tests.support.small_models import mixture


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Group]]:
    """Number of ranks → a function that runs another one on all of them."""
    with ExitStack() as stack:
        folders = {count: tmp_path_factory.mktemp("group") for count in (1, 2, 4)}
        yield {
            count: stack.enter_context(group_of(count, folder)) for count, folder in folders.items()
        }


@pytest.fixture(scope="module")
def runs(
    groups: dict[int, Group], llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """Runs of a random two-layer Llama."""
    return Runs(groups, llama_folder, tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def mixture_runs(groups: dict[int, Group], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of a block with eight experts."""
    model = tmp_path_factory.mktemp("mixture")
    mixture(blocks=1).save_pretrained(model)
    return Runs(groups, model, tmp_path_factory.mktemp("outputs"))
