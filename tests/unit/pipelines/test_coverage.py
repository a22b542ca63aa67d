# SPDX-License-Identifier: Apache-2.0
"""Modules that see few of the calibration tokens are named, once, after the calibration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, hooks_left, run_pipeline
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from llmcompressor.args import DatasetArguments
from llmcompressor.errors import ArgumentError

PIPELINES = ["basic", "sequential", "layer_sequential", "independent"]
ROUTED = 4


class Routed(LlamaMLP):
    """Sends four tokens of each forward through one more Linear."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.few = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.few(x.flatten(0, 1)[:ROUTED])
        output: Tensor = super().forward(x) + rows.sum() * 0
        return output


def routed_llama() -> Any:
    model: Any = tiny.build("llama")
    model.model.layers[1].mlp = Routed(model.config)
    return model.eval()


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("twin", [False, True])
def test_a_module_that_sees_few_tokens_is_named_once(
    pipeline: str, twin: bool, warned: list[str]
) -> None:
    model, batches = routed_llama(), tiny.text_batches()
    total = sum(int(batch["attention_mask"].sum()) for batch in batches)
    recorder = Recorder(twin=twin, round_to=2)
    run_pipeline(model, batches, recorder, pipeline, min_tokens_per_module=1.0)
    seen = ROUTED * len(recorder._inputs["model.layers.1.mlp.few"])
    assert seen < total
    count = len(recorder._names)
    assert len(warned) == 1, warned
    assert f"1 of {count} modules saw less than 1 of the {total}" in warned[0]
    assert f"model.layers.1.mlp.few ({seen})" in warned[0]
    assert not hooks_left(model)


@pytest.mark.parametrize("share", [None, 0, 0.01])
def test_enough_tokens_are_no_matter(share: float | None, warned: list[str]) -> None:
    run_pipeline(routed_llama(), tiny.text_batches(), Recorder(), min_tokens_per_module=share)
    assert not warned


@pytest.mark.parametrize("share", [-0.1, 1.1, 2, True, "much", float("nan")])
def test_what_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(ArgumentError, match="min_tokens_per_module"):
        DatasetArguments(min_tokens_per_module=share)
