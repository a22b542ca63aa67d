# SPDX-License-Identifier: Apache-2.0
"""Techniques that work on the experts of a mixture, over ranks and in one process."""

from __future__ import annotations

from tests.support.rank_runs import LINEARS

ROUNDING = {**LINEARS, "ignore": ["lm_head", "re:.*mlp.gate$"], "scheme": "W4A16"}


def test_reap_drops_the_same_experts(mixture_runs):
    reap = {"REAPPruningModifier": {"sparsity": 0.5}}
    mixture_runs.check({**reap, "QuantizationModifier": ROUNDING}, most=0)


def test_awq_scales_experts_of_which_a_rank_may_have_no_token(mixture_runs):
    mixture_runs.check({"AWQModifier": {"n_grid": 4}, "QuantizationModifier": ROUNDING})
