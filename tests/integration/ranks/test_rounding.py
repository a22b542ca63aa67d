# SPDX-License-Identifier: Apache-2.0
"""Weights that are rounded for what ranks observe together, or for nothing, are the same."""

from __future__ import annotations

from tests.support.rank_runs import LINEARS

BY_IMPORTANCE = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "observer": "imatrix_mse",
    },
}


def test_an_observer_that_weighs_errors_by_inputs(runs):
    schemes = {"config_groups": {"group_0": BY_IMPORTANCE}, "ignore": ["lm_head"]}
    runs.check({"QuantizationModifier": schemes})


def test_hqq_after_a_technique_that_needs_data(runs):
    hqq = {**LINEARS, "scheme": "W4A16_ASYM", "iters": 4}
    runs.check({"SmoothQuantModifier": {}, "HQQModifier": hqq}, most=0)


def test_hqq_with_activation_scales_of_data(runs):
    grid = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True},
        "input_activations": grid,
    }
    schemes = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "iters": 4}
    runs.check({"HQQModifier": schemes}, most=0)


def test_gptq_with_gradients_at_outputs(runs):
    runs.check({"GPTQModifier": {**LINEARS, "scheme": "W4A16", "gradient_samples": 8}}, most=0.004)
