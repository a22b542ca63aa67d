# SPDX-License-Identifier: Apache-2.0
"""Scale tuning in a training of a quantized model: codes stay, the loss falls, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import tiny_llama as tiny
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, run_stages, train
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.core import create_session
from llmcompressor.errors import CheckpointError, RecipeError, TargetError
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.modifiers.pruning import ConstantPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.scale_tuning import ScaleTuningModifier
from llmcompressor.recipe import Recipe, Stage

ROWS = [{"input_ids": row} for one in tiny.batches() for row in one["input_ids"].tolist()]

SETTINGS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "report_to": [],
    "verify": False,
}


def quantized(place: Path, scheme: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A quantized folder, beside the original."""
    original = place / "original"
    tiny.llama(dtype, hidden_size=128).save_pretrained(original)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **fields)
    data = {"dataset": ROWS} if fields else {}
    oneshot(model=str(original), recipe=recipe, output_dir=place / "start", verify=False, **data)
    return place / "start"


def trained(model: Any, output: Path, recipe: list[Any] | None = None, **more: Any) -> Any:
    recipe = [ScaleTuningModifier()] if recipe is None else recipe
    return train(
        model=model, recipe=recipe, dataset=ROWS, output_dir=output, **{**SETTINGS, **more}
    )


def loss_of(model: Any) -> float:
    ids = torch.tensor([one["input_ids"] for one in ROWS])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def read(folder: Path) -> Any:
    with loading_compressed():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8"])
def test_scales_and_norms_alone_are_trained(scheme: str, tmp_path: Path) -> None:
    start = quantized(tmp_path, scheme)
    model = trained(str(start), tmp_path / "out")
    before, after = (load_file(one / "model.safetensors") for one in (start, tmp_path / "out"))
    assert {name: (one.shape, one.dtype) for name, one in before.items()} == {
        name: (one.shape, one.dtype) for name, one in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith(("weight_scale", "norm.weight")) for name in changed)
    assert loss_of(read(tmp_path / "out")) < loss_of(read(start))
    assert loss_of(model.eval()) == pytest.approx(loss_of(read(tmp_path / "out")), rel=1e-5)


def test_a_teacher_is_come_nearer(tmp_path: Path) -> None:
    start = quantized(tmp_path, "W4A16")
    recipe = [ScaleTuningModifier(tune="scales"), OutputDistillationModifier(targets=["lm_head"])]
    teacher = tmp_path / "original"
    trained(str(start), tmp_path / "out", recipe, distill_teacher=str(teacher))
    dense, ids = read(teacher), torch.tensor([one["input_ids"] for one in ROWS])
    with torch.no_grad():
        wanted = dense(input_ids=ids).logits.log_softmax(-1)
        far, near = (
            torch.nn.functional.kl_div(
                read(one)(input_ids=ids).logits.log_softmax(-1),
                wanted,
                log_target=True,
                reduction="sum",
            )
            for one in (start, tmp_path / "out")
        )
    assert near < far


def test_a_training_that_broke_off_goes_on(tmp_path: Path) -> None:
    start = quantized(tmp_path, "W4A16")
    trained(str(start), tmp_path / "whole", save_strategy="steps", save_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        plain = ScaleTuningModifier.on_event

        def stopping(self: Any, state: Any, event: Any, **kwargs: Any) -> None:
            if event.global_step == 5:
                raise KeyboardInterrupt
            plain(self, state, event, **kwargs)

        patch.setattr(ScaleTuningModifier, "on_event", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(str(start), tmp_path / "parts", save_strategy="steps", save_steps=2)
    trained(str(start), tmp_path / "parts", save_strategy="steps", save_steps=2)
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    original = tmp_path / "original"
    tiny.llama().save_pretrained(original)
    with pytest.raises(TargetError, match="Give train the folder that oneshot has written"):
        trained(str(original), tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["original"]


def test_others_that_change_weights_are_refused(tmp_path: Path) -> None:
    start = quantized(tmp_path, "W4A16")
    names = {one.name for one in tmp_path.iterdir()}
    pruning = ConstantPruningModifier(targets=["re:.*q_proj.*"], start=0, end=1)
    other = QuantizationModifier(targets=["re:.*q_proj"], scheme="W8A8")
    for beside, told in (
        (pruning, "Constant"),
        (other, "Quantiz"),
        (ScaleTuningModifier(), "more than once"),
    ):
        with pytest.raises(RecipeError, match=told):
            trained(str(start), tmp_path / "out", [beside, ScaleTuningModifier()])
    with pytest.raises(RecipeError, match="codes stay"):
        run_stages(
            str(start),
            Recipe([Stage("train", (pruning, ScaleTuningModifier()))]),
            ROWS,
            tmp_path / "out",
        )
    with create_session() as session, pytest.raises(RecipeError, match="codes stay"):
        session.initialize(
            model=tiny.llama(), recipe=[pruning, ScaleTuningModifier()], steps_per_epoch=2
        )
    assert {one.name for one in tmp_path.iterdir()} == names


def test_a_stage_trains_what_the_one_before_has_quantized(tmp_path: Path) -> None:
    start = quantized(tmp_path, "W4A16")
    rounding = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    recipe = Recipe(
        [
            Stage("rounding", (rounding,), run_type="oneshot"),
            Stage("tuning", (ScaleTuningModifier(),), run_type="train"),
        ]
    )
    given = {**SETTINGS, "output_dir": tmp_path / "out"}
    model = run_stages(str(tmp_path / "original"), recipe, ROWS, **given)
    trained(str(start), tmp_path / "apart")
    files = [
        one / "model.safetensors" for one in (tmp_path / "out" / "stage_tuning", tmp_path / "apart")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert loss_of(model) < loss_of(read(start))


def test_a_training_has_no_false_warnings(tmp_path: Path, warned: list[str]) -> None:
    start = quantized(tmp_path, "W4A16", torch.bfloat16)
    warned.clear()
    trained(str(start), tmp_path / "out")
    assert warned == []


def test_a_quantized_cache_is_refused(tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    start = quantized(tmp_path, "W8A16", kv_cache_scheme=cache)
    with pytest.raises(TargetError, match="keys and values"):
        trained(str(start), tmp_path / "out")


def test_oneshot_of_a_quantized_folder_is_refused(tmp_path: Path) -> None:
    start = quantized(tmp_path, "W4A16")
    with pytest.raises(TargetError, match="quantized already"):
        oneshot(model=str(start), recipe=[ScaleTuningModifier()], dataset=ROWS, output_dir=None)


def test_other_recipes_are_refused_a_quantized_folder(tmp_path: Path) -> None:
    start, output = quantized(tmp_path, "W4A16"), tmp_path / "output"
    other = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    with pytest.raises(CheckpointError, match="already quantized"):
        trained(str(start), output, [other])
    assert not output.exists()
