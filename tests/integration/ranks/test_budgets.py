# SPDX-License-Identifier: Apache-2.0
"""The search for a budget is shared by ranks, and finds what one process finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import rank_budgets
from tests.support.small_models import llama, mixture

MODELS = {"GPTQModifier": llama, "QuantizationModifier": mixture}


@pytest.mark.parametrize("technique", MODELS)
def test_ranks_share_the_samples_of_the_search(technique: str, groups: Any, tmp_path: Path) -> None:
    """Sums in another order: the same choice, and losses that agree but for their last digits."""
    MODELS[technique]().save_pretrained(tmp_path / "model")
    found = {}
    for count, each in {1: [6], 2: [3, 3], 4: [2, 2, 1, 1]}.items():
        output = tmp_path / str(count)
        assert groups[count](rank_budgets.compress, tmp_path / "model", output, technique) == each
        found[count] = json.loads((output / "compression_report.json").read_text())["budget"]
    for count in (2, 4):
        assert found[count]["chosen"]["sets"] == found[1]["chosen"]["sets"]
        for one, other in zip(found[count]["curve"], found[1]["curve"], strict=True):
            assert one["bytes"] == other["bytes"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    recipes = {(tmp_path / str(count) / "recipe.yaml").read_text() for count in found}
    assert len(recipes) == 1
    if technique == "QuantizationModifier":  # its scales are of the weights alone
        files = [(tmp_path / str(count) / "model.safetensors").read_bytes() for count in found]
        assert files[0] == files[1] == files[2]


def test_more_ranks_than_samples_run_all_of_them(groups: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    fields = {**rank_budgets.FIELDS, "budget": {"bits": 5, "samples": 3}}
    given = (rank_budgets.compress, tmp_path / "model", tmp_path / "out", "GPTQModifier")
    assert groups[4](*given, fields=fields) == [3] * 4
