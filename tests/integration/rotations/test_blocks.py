# SPDX-License-Identifier: Apache-2.0
"""Rotated block by block, from folder to folder, a model gets the bytes that it gets in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from tests.support.thinned import few
from torch.nn import Module
from transformers import AutoModelForCausalLM, BitNetConfig, BitNetForCausalLM

from llmcompressor import oneshot, plan, verify
from llmcompressor.checkpoint.block_reader import BlockWeights
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier

STAYING = ["R1", "R2", "R3", "R4"]


def gptq() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


def static() -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])


def some_readers() -> QuIPModifier:
    """k and v get a rotated input, and q, beside them, the plain one."""
    return QuIPModifier(rotations=["v"], ignore=["lm_head", "re:.*q_proj"])


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "nothing else": lambda: [SpinQuantModifier(rotations=["R1", "R2"])],
    "rounded": lambda: [
        SpinQuantModifier(rotations=STAYING, transform_type="random-hadamard"),
        QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
    ],
    "solved": lambda: [SpinQuantModifier(rotations=STAYING), gptq()],
    "QuIP": lambda: [QuIPModifier(rotations=["v", "u"], randomize=True), static()],
    "two passes": lambda: [SmoothQuantModifier(), SpinQuantModifier(rotations=STAYING), gptq()],
    "some readers, solved": lambda: [some_readers(), gptq()],
    "some readers, observed": lambda: [some_readers(), static()],
    "one behind another": lambda: [
        SpinQuantModifier(rotations=["R1", "R2"]),
        QuIPModifier(rotations=["v"], ignore=["lm_head", "re:.*mlp.*"]),
        gptq(),
    ],
}


TURNING = {"rounded", "solved", "two passes"}
"""Recipes that turn queries and keys (R3), which vLLM has no place for."""
HELD = {"rounded", "solved", "some readers, observed"}
"""Recipes of which others have each part."""


def model_of(folder: Path, *, tied: bool = False) -> Path:
    model = tiny.llama(torch.bfloat16, tie_word_embeddings=tied)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    model.save_pretrained(folder)
    return folder


def compressed(model: Any, recipe: str, output: Path, **more: Any) -> Any:
    ids = torch.cat([batch["input_ids"] for batch in tiny.batches(number=2)])
    rows = [{"input_ids": row} for row in ids.tolist()]
    return oneshot(model=model, recipe=RECIPES[recipe](), dataset=rows, output_dir=output, **more)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", few(RECIPES, *(RECIPES.keys() - HELD)))
def test_the_files_are_those_of_a_model_in_memory(
    recipe: str, tied: bool, tmp_path: Path, warned: list[str]
) -> None:
    source = model_of(tmp_path / "model", tied=tied)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    # servers that join q, k and v rotate the inputs of all of them: none computes what is meant
    is_served = not recipe.startswith("some readers")
    compressed(whole, recipe, tmp_path / "whole", verify=False)
    returned = compressed(str(source), recipe, tmp_path / "streamed", verify=False)
    assert not any("whole model is loaded" in line for line in warned)
    for name in ("model.safetensors", "config.json"):
        one, other = ((tmp_path / kind / name).read_bytes() for kind in ("whole", "streamed"))
        assert one == other, name
    assert torch.equal(tiny.logits(returned, tiny.batches()), tiny.logits(whole, tiny.batches()))
    wrong = {one.rule for one in verify(tmp_path / "streamed").findings if one.severity == "error"}
    assert wrong == ({"S73"} if recipe in TURNING else set() if is_served else {"S75"})
    if not is_served:
        with pytest.raises(RecipeError, match="No server would serve"):
            compressed(str(source), recipe, tmp_path / "refused")


def test_one_block_is_there_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is seen whether the rotated model computes what it did."""
    source = model_of(tmp_path / "model")
    loaded: set[str] = set()
    most: list[int] = []
    load, release = BlockWeights.load, BlockWeights.release

    def loading(self: BlockWeights, block: str) -> None:
        load(self, block)
        loaded.update([block] if block else [])
        most.append(len(loaded))

    def releasing(self: BlockWeights, block: str) -> None:
        release(self, block)
        loaded.discard(block)

    monkeypatch.setattr(BlockWeights, "load", loading)
    monkeypatch.setattr(BlockWeights, "release", releasing)
    compressed(str(source), "rounded", tmp_path / "out")
    assert max(most) == 1
    assert not loaded


def test_what_would_compute_something_else_is_refused(tmp_path: Path) -> None:
    """BitNet has a norm between values and outputs: a head cannot be turned through it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = BitNetConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=4, vocab_size=128, pad_token_id=0
    )
    model: Module = BitNetForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    with pytest.raises(TargetError, match=r"R2 BitNetForCausalLM computes something else"):
        oneshot(
            model=str(tmp_path / "model"),
            recipe=SpinQuantModifier(rotations=["R2"]),
            output_dir=tmp_path / "out",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("rotation", ["R2", "R4"])
def test_a_server_that_makes_no_rotations_is_told_of(rotation: str, tmp_path: Path) -> None:
    source = model_of(tmp_path / "model")
    groups = {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}}
    recipe = [
        SpinQuantModifier(rotations=[rotation]),
        QuantizationModifier(config_groups=groups, ignore=["lm_head"]),
    ]
    found = plan(source, recipe, serve="sglang", measure=False)
    oneshot(model=str(source), recipe=recipe, output_dir=tmp_path / "out")
    report = verify(tmp_path / "out", serve="sglang")
    stays = rotation == "R4"
    for findings in (found.serving, report.findings):
        told = [one for one in findings if one.rule == "G5" and one.module == "transform_config"]
        assert len(told) == stays
        assert all(one.severity == "error" for one in told)
    assert report.ok != stays
