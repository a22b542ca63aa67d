# SPDX-License-Identifier: Apache-2.0
"""Solving of rows that ranks divide; each rank calls the function here."""

from __future__ import annotations

from tests.support.rank_group import on_ranks

from llmcompressor.quantization.column_solver import Options, Problem, Solution, solve_divided
from llmcompressor.runtime.collectives import Ranks


def of_ranks(problems: list[Problem], options: Options) -> list[Solution]:
    def body(ranks: Ranks) -> list[Solution]:
        return solve_divided(problems, options, ranks, "rows")

    found: list[Solution] = on_ranks(body)
    return found
