# SPDX-License-Identifier: Apache-2.0
"""The typed keywords of the entrypoints are the fields of the dataclasses behind them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.house import ROOT

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    TrainingArguments,
    keywords,
)

IN_SIGNATURES = {"model", "recipe", "dataset", "output_dir", "dry_run"}
ONESHOT = (ModelArguments, RecipeArguments, DatasetArguments, RunArguments)
CASES = {"OneshotKeywords": ONESHOT, "TrainKeywords": (*ONESHOT, TrainingArguments)}


@pytest.mark.parametrize("name", CASES)
def test_keywords_are_the_fields(name: str) -> None:
    fields = {one.name for cls in CASES[name] for one in dataclasses.fields(cls) if one.init}
    assert set(getattr(keywords, name).__annotations__) == fields - IN_SIGNATURES


@pytest.mark.parametrize("cls", ONESHOT)
def test_keyword_types_are_those_of_the_fields(cls: type) -> None:
    """Spelled alike, but for paths and the marker of the command line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    typed = keywords.OneshotKeywords.__annotations__
    for one in body.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name = one.target.id
            if name not in typed:
                continue
            shown = typed[name].__forward_arg__.replace("str | os.PathLike[str]", "str")
            kinds = set(ast.unparse(one.annotation).split(" | ")) - {"Text", "Named"}
            assert shown == "Any" or set(shown.split(" | ")) <= kinds | {"str", "bool", "None"}


def test_type_checkers_see_keywords_and_results(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from llmcompressor import oneshot, plan, run_stages, train

        reveal_type(oneshot("m", "r", max_seq_length=4))
        reveal_type(oneshot("m", "r", dry_run=True))
        train("m", "r", num_train_epochs=1.0, batch_size=2)
        plan("m", max_memory="1GiB", tp=2)
        oneshot("m", max_seq_length="long")
        oneshot("m", maximum_length=4)
        train("m", learning_rates=1e-5)
        run_stages("m", "r", learning_rate="high")
        """)
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    ).stdout.splitlines()
    found = [line.partition("script.py:")[2] for line in checked if "script.py:" in line]
    assert ['4: note: Revealed type is "' in found[0], "PreTrainedModel" in found[0]] == [True] * 2
    assert "Plan" in found[1]
    wrong = sorted({int(line.split(":")[0]) for line in found if " error: " in line})
    assert wrong == [8, 9, 10, 11]
