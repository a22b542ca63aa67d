# SPDX-License-Identifier: Apache-2.0
"""Why a model's tokenizer was not loaded is said where the data needs it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmcompressor import oneshot, plan, train
from llmcompressor.errors import DatasetError

GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
TEXTS = ["def one():\n    return 1\n"] * 4


def truncated(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version":"1.0"')


def own_code(folder: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_own.Own", None]}
    settings = {"tokenizer_class": "Own", "auto_map": code}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenization_own.py").write_text("class Own: pass\n")


REASONS = {
    "truncated": (truncated, r"AutoTokenizer: Expecting ',' delimiter"),
    "own code": (own_code, r"AutoTokenizer: it brings its own code.*trust_remote_code_model=True"),
}


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.parametrize("entrypoint", ["oneshot", "plan", "train", "conversations"])
def test_the_reason_is_in_the_error(
    short_pico: Path, tmp_path: Path, case: str, entrypoint: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(short_pico, folder)
    change, reason = REASONS[case]
    change(folder)
    given: dict[str, Any] = {"model": str(folder), "recipe": GPTQ, "dataset": TEXTS}
    needed = "is not tokenized, and there is no tokenizer"
    if entrypoint == "conversations":
        turns = [{"role": "user", "content": "Hello"}]
        given["dataset"] = [{"messages": turns}] * 4
        needed = "holds conversations, and there is no tokenizer to render them"
    if entrypoint == "train":
        del given["recipe"]
        given |= {"max_steps": 1, "output_dir": str(tmp_path / "out")}
    run = train if entrypoint == "train" else oneshot
    loaded = rf"No tokenizer or processor could be loaded from {re.escape(str(folder))}"
    expected = rf"{needed}\. {loaded} \({reason}.*\)\. Give the model's tokenizer"
    if entrypoint == "plan":
        said = " ".join(f"{one.message} {one.remedy}" for one in plan(**given).problems)
    else:
        with pytest.raises(DatasetError) as caught:
            run(**given)
        said = str(caught.value)
    assert re.search(expected, said)
    assert "Unrecognized processing class" not in said
