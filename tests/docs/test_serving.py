# SPDX-License-Identifier: Apache-2.0
"""The tables about servers are those of the rows that the benchmark keeps; nothing is run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmcompressor.schemes.presets import PRESETS
from llmcompressor.verification.catalogue import RULES

ROOT = Path(__file__).parents[2]


def _benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


PAGE, CASES = _benchmark("serving_page"), _benchmark("serving_cases")
ROWS = PAGE.latest()


@pytest.mark.parametrize("name", PAGE.PAGES)
def test_tables_are_those_of_the_rows(name: str) -> None:
    """``benchmarks/serving.py --write`` makes them."""
    text = PAGE.PAGES[name].read_text(encoding="utf-8")
    assert PAGE.filled(text, PAGE.tables(ROWS)) == text


def test_results_are_those_of_the_rows() -> None:
    assert PAGE.RESULTS.read_text(encoding="utf-8") == PAGE.results(ROWS)


def test_every_table_has_a_place() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGE.PAGES.values())
    for name in PAGE.tables(ROWS):
        assert text.count(f"<!-- runs: {name} -->") == 1


def test_a_figure_that_is_not_run_shows() -> None:
    text = PAGE.PAGES["serving_runs"].read_text(encoding="utf-8")
    other = [{**one, "kl": 0.5} if one.get("kl") is not None else one for one in ROWS]
    assert PAGE.filled(text, PAGE.tables(other)) != text


def test_every_preset_is_run_or_read() -> None:
    listed = {name for names, *_ in PAGE._SOURCE for name in names.split()}
    assert set(CASES.PRESETS) <= set(PRESETS)
    assert listed <= set(CASES.PRESETS)
    known = {(one["case"], one["engine"]) for one in ROWS if one["table"] == "presets"}
    assert known >= {(name, engine) for name in listed for engine in PAGE.ENGINES}


def test_rules_that_are_named_exist() -> None:
    assert {rule for one in ROWS for rule in one["told"]} <= set(RULES)
