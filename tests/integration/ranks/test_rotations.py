# SPDX-License-Identifier: Apache-2.0
"""Rotations that all ranks make, and what solves the rotated weights, over ranks and in one."""

from __future__ import annotations

import pytest
from tests.support.rank_runs import LINEARS

GPTQ = {"GPTQModifier": {**LINEARS, "scheme": "W4A16", "asymmetric": False}}


@pytest.mark.parametrize(
    "rotation",
    [
        {"QuIPModifier": {"rotations": ["v"], "transform_block_size": 64}},
        {"SpinQuantModifier": {"rotations": ["R1", "R2"]}},
    ],
    ids=lambda one: next(iter(one)),
)
def test_rotated_weights_are_solved_alike(runs, rotation):
    runs.check({**rotation, **GPTQ})


def test_learned_rotations_take_the_gradients_of_all_samples(runs):
    learned = {"learnable": True, "learning_steps": 3}
    rounding = {"QuantizationModifier": {**LINEARS, "scheme": "W4A16"}}
    # the sums of gradients are rounded in another order, and each step carries that on
    runs.check({"SpinQuantModifier": learned, **rounding}, batch_size=4, most=0.004)
