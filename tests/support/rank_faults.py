# SPDX-License-Identifier: Apache-2.0
"""Calls of ``oneshot`` that ranks make with bad input; each runs on all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from datasets import Dataset
from tests.support.rank_runs import LINEARS
from tests.support.shared_runs import error_of
from tests.support.small_models import token_rows

from llmcompressor import oneshot
from llmcompressor.checkpoint import shared_output
from llmcompressor.entrypoints import fingerprints
from llmcompressor.runtime.processes import rank_and_world_size


def refused(how: str, model: str, other: str, output: Path, batch_size: int = 1) -> str:
    """The error of a run in which the second rank is unlike the first, or all lack samples."""
    is_unlike = rank_and_world_size()[0] == 1
    rows = token_rows(8, 16).to_dict()["input_ids"]
    scheme = "W4A16"
    fault: AbstractContextManager[Any] = nullcontext()
    if how == "few samples":
        rows = rows[:1]
    elif is_unlike and how == "other token":
        rows[3][5] = 3 if rows[3][5] != 3 else 4
    elif is_unlike and how == "other order":
        rows.reverse()
    elif is_unlike and how == "other recipe":
        scheme = "W8A16"
    elif is_unlike and how == "other version":
        fault = patch.object(fingerprints, "_version", lambda name: f"0.0 of {name}")
    elif is_unlike and how == "other output":
        # its files are those of a folder with the same name on another machine
        fault = patch.object(shared_output, "Path", lambda path: Path(f"{path}.away"))
    with fault:
        return error_of(
            oneshot,
            model=other if is_unlike and how.endswith("model") else model,
            recipe={"modifiers": {"GPTQModifier": {**LINEARS, "scheme": scheme}}},
            dataset=Dataset.from_dict({"input_ids": rows}),
            output_dir=str(output),
            batch_size=batch_size,
            verify=False,
            report=False,
        )
