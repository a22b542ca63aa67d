# SPDX-License-Identifier: Apache-2.0
"""Pruning over ranks gives what it gives in one process."""

from __future__ import annotations

from typing import Any

from tests.support.rank_runs import LINEARS

HALF = {**LINEARS, "sparsity": 0.5}
OWL = {"sparsity_profile": "owl", "owl_m": 3, "owl_lmbda": 0.08}


def test_wanda_with_a_profile_that_all_ranks_have(runs):
    runs.check({"WandaPruningModifier": {**HALF, **OWL}})


def test_sparsegpt(runs):
    runs.check({"SparseGPTModifier": {**HALF, "mask_structure": "2:4"}})


def test_gptq_right_after_sparsegpt(runs):
    pruning: dict[str, Any] = {**HALF, "mask_structure": "2:4", "asymmetric": True}
    quantization = {**LINEARS, "scheme": "W4A16"}
    runs.check({"SparseGPTModifier": pruning, "GPTQModifier": quantization}, most=0.004)
