# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.killed_runs import RECIPES, Job, run, tree, write_mixture, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_mixture(folder / "mixture")
    return write_model(folder / "model")


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """The files of a run that nothing interrupted, by recipe."""
    found: dict[str, dict[str, str]] = {}

    def of(recipe: str) -> dict[str, str]:
        assert recipe in RECIPES
        if recipe not in found:
            output = tmp_path_factory.mktemp("whole") / "output"
            ended = run(Job(model, recipe, output))
            assert ended.code == 0, ended.said
            found[recipe] = tree(output)
        return found[recipe]

    return of
