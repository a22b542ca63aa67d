# SPDX-License-Identifier: Apache-2.0
"""Smoothing over ranks, and what follows it, gives what it gives in one process."""

from __future__ import annotations

from tests.support.rank_runs import LINEARS

W4A16 = {**LINEARS, "scheme": "W4A16"}
W8A8 = {**LINEARS, "scheme": "W8A8"}


def test_smoothquant_is_the_same_to_the_last_bit(runs):
    runs.check({"SmoothQuantModifier": {}, "QuantizationModifier": W8A8}, most=0)


def test_smoothquant_observes_as_many_batches(runs):
    smoothing = {"num_calibration_steps": 5}
    runs.check({"SmoothQuantModifier": smoothing, "QuantizationModifier": W8A8}, most=0)


def test_awq(runs):
    runs.check({"AWQModifier": {"n_grid": 6}, "QuantizationModifier": W4A16})


def test_awq_that_reruns_parents(runs):
    awq = {"loss": "output", "n_grid": 5, "clip": False}
    runs.check({"AWQModifier": awq, "QuantizationModifier": W4A16})
