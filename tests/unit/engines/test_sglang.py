# SPDX-License-Identifier: Apache-2.0
"""The runner of SGLang, with a stand-in that answers as its interface says."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from llmcompressor.engines.compare import divergence
from llmcompressor.engines.runner import of_sglang

VOCABULARY = 40
LOGITS = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0))


class _Engine:
    def __init__(self, **named: Any) -> None:
        self.lacks = 0

    def generate(self, input_ids: list[int], top_logprobs_num: int, **named: Any) -> Any:
        top = LOGITS.log_softmax(-1).topk(top_logprobs_num)
        rows = [
            [(float(value), int(token), None) for value, token in zip(*row, strict=True)]
            for row in zip(top.values, top.indices, strict=True)
        ]
        known = [None, *rows[: len(input_ids) - 1 - self.lacks]]  # of the first token none
        return {"meta_info": {"input_top_logprobs": known}}

    def shutdown(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("sglang")
    module.Engine, module.__version__ = _Engine, "0"
    monkeypatch.setitem(sys.modules, "sglang", module)
    assert of_sglang.prepare({})["sglang"] == "0"
    return of_sglang.load({"model": "model", "dtype": "bfloat16"})


def test_likeliest_tokens_are_placed(engine: Any) -> None:
    found, _ = of_sglang.run(engine, {"prompts": [[1] * 6], "vocabulary": VOCABULARY})
    assert found["logits/0"].shape == (5, VOCABULARY)
    assert divergence(found, {"logits/0": LOGITS}).agreement == 1
    assert int(found["logits/0"].isfinite().sum()) == 5 * 32


def test_tokens_without_an_answer_are_told(engine: Any) -> None:
    engine.lacks = 1
    with pytest.raises(RuntimeError, match="4 tokens for a prompt of 6"):
        of_sglang.run(engine, {"prompts": [[1] * 6], "vocabulary": VOCABULARY})
