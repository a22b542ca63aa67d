# SPDX-License-Identifier: Apache-2.0
"""Plan and run say before any work which towers the data cannot calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from llmcompressor import oneshot, plan
from llmcompressor.errors import TargetError
from llmcompressor.pipelines.sequential import SequentialPipeline

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
IMAGE = 5
TEXT = [{"input_ids": list(range(10, 30))}] * 2
TOWER = "'re:.*vision_tower.*'"
PROJECTOR = "'re:.*multi_modal.*'"


def recipe(modifiers: str, *ignored: str) -> str:
    fields = f"targets: [Linear], ignore: [{', '.join(['lm_head', *ignored])}]"
    return f"modifiers: {{{modifiers}, {fields}}}}}"


GPTQ = "GPTQModifier: {scheme: W8A16"
SPARSE = "SparseGPTModifier: {sparsity: 0.5"
ROUNDED = "QuantizationModifier: {scheme: W8A16"
AWQ = "AWQModifier: {n_grid: 2}, QuantizationModifier: {scheme: W4A16"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES, num_hidden_layers=1, num_key_value_heads=2, vocab_size=64),
        vision_config=CLIPVisionConfig(**SIZES, num_hidden_layers=2, image_size=8, patch_size=4),
        image_token_id=IMAGE,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def images() -> list[dict[str, Any]]:
    ids = [*[IMAGE] * 4, *range(10, 30)]
    return [{"input_ids": ids, "pixel_values": torch.rand(3, 8, 8).tolist()}] * 2


@pytest.mark.parametrize("modifier", [GPTQ, SPARSE, AWQ])
def test_a_tower_without_images_stands_against_the_run(
    llava: Path, modifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(llava, recipe(modifier), TEXT, measure=False)
    [problem] = found.problems
    assert not found.ok
    assert problem.where == "dataset"
    assert "model.vision_tower" in problem.message
    assert "no sample holds images" in problem.message
    assert "ignore list" in problem.remedy

    def work(*_: Any) -> None:
        raise AssertionError("calibration has begun")

    monkeypatch.setattr(SequentialPipeline, "__call__", work)
    for output in (None, tmp_path / "out"):
        with pytest.raises(TargetError, match="No calibration batch reaches") as caught:
            oneshot(llava, recipe=recipe(modifier), dataset=TEXT, output_dir=output)
        assert caught.value.problem == problem.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (recipe(GPTQ, TOWER, PROJECTOR), TEXT),
        (recipe(AWQ, TOWER, PROJECTOR), TEXT),
        (recipe(ROUNDED), TEXT),
        (recipe(ROUNDED), None),
    ],
)
def test_what_needs_no_images(llava: Path, text: str, data: Any) -> None:
    found = plan(llava, text, data, measure=False)
    assert found.ok, found.problems


def test_images_reach_it(llava: Path) -> None:
    found = plan(llava, recipe(GPTQ), images(), measure=False)
    assert not [one for one in found.problems if "reaches" in one.message]


class _OneEncoder(LlavaForConditionalGeneration):
    """What has one encoder names it whatever is asked for, as translators of speech do."""

    main_input_name = "pixel_values"

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.model.vision_tower


def test_one_encoder_for_every_modality_is_reached_by_any(llava: Path) -> None:
    model = _OneEncoder.from_pretrained(llava)
    oneshot(model, recipe=recipe(GPTQ), dataset=images())
    with pytest.raises(TargetError, match="No calibration batch reaches"):
        oneshot(_OneEncoder.from_pretrained(llava), recipe=recipe(GPTQ), dataset=TEXT)


class _Rows(LlamaForCausalLM):
    """A model of something else than tokens, which its class has a word for."""

    main_input_name = "rows"

    def forward(self, rows: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs_embeds=rows)


def test_rows_with_the_main_input_of_the_model_are_samples() -> None:
    model = _Rows(LlamaConfig(**SIZES, num_hidden_layers=1, num_key_value_heads=2, vocab_size=64))
    oneshot(model, recipe=recipe(GPTQ), dataset=[{"rows": torch.rand(4, 32).tolist()}] * 2)
    assert hasattr(model.model.layers[0].mlp.up_proj, "weight_scale")
