# SPDX-License-Identifier: Apache-2.0
"""What is learned from the samples of all ranks is as good as in one process."""

from __future__ import annotations

from tests.support.rank_runs import LINEARS

STEPS = {**LINEARS, "scheme": "W4A16", "iters": 6, "batch_size": 16}
"""Each step is one on all samples, in whichever calls these are run."""


def test_autoround_learns_from_all_samples(runs):
    runs.check({"AutoRoundModifier": STEPS})


def test_autoround_with_experts_that_few_tokens_reach(mixture_runs):
    steps = {**STEPS, "ignore": ["lm_head", "re:.*mlp.gate$"]}
    mixture_runs.check({"AutoRoundModifier": steps})


def test_scales_are_tuned_by_the_first_rank_for_all(runs):
    tuning = {"epochs": 2, "batch_size": 2, "learning_rate": 0.005}
    rounding = {**LINEARS, "scheme": "W4A16"}
    runs.check_undivided({"QuantizationModifier": rounding, "ScaleTuningModifier": tuning})
