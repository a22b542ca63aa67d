# SPDX-License-Identifier: Apache-2.0
"""Models with adapters: a teacher teaches them; what changes weights is refused before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import tiny_training as tiny
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from llmcompressor import evaluate, oneshot, plan, train, verify
from llmcompressor.core import CompressionSession
from llmcompressor.errors import ArgumentError, CheckpointError, TargetError
from llmcompressor.modeling.patches import modules_with_adapters
from llmcompressor.training import Trainer

peft = pytest.importorskip("peft", reason="peft is an optional companion")

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")

WEIGHTS = {
    "constant": "ConstantPruningModifier: {targets: Linear, start: 0}",
    "gradual": "MagnitudePruningModifier: "
    "{targets: Linear, init_sparsity: 0, final_sparsity: 0.5, end: 1}",
    "quantized": "QuantizationModifier: {targets: Linear, ignore: ['re:.*head'], scheme: W8A8}",
    "learned": "QuantizationModifier: {targets: Linear, scheme: W8A16, learned_scales: true}",
    "one shot": "WandaPruningModifier: {targets: Linear, sparsity: 0.5}",
    "smoothed": "SmoothQuantModifier: {}",
    "rotated": "QuIPModifier: {}",
}
DISTILL = r"""
modifiers:
  OutputDistillationModifier:
    targets: [['re:.*model\.layers\.1$', 're:.*model\.layers\.1$']]
    comparison: l2_distance
"""


def lora() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])


def wrapped() -> Any:
    return peft.get_peft_model(tiny.tiny_model(), lora())


def added() -> Any:
    """By transformers alone: the model's class stays."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as refused:
        pytest.skip(f"transformers does not take PEFT {peft.__version__}: {refused}")
    model = tiny.tiny_model()
    model.add_adapter(lora())
    return model


def prompted() -> Any:
    """Learns an input; no module of the model has an adapter."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(tiny.tiny_model(), config)


def trainer(model: Any, folder: Path, recipe: str, **changed: Any) -> Trainer:
    return Trainer(
        model=model,
        args=tiny.arguments(folder, **changed),
        train_dataset=tiny.Rows(8),
        recipe=recipe,
        teacher=tiny.tiny_model(seed=1),
    )


WHERE = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (tiny.tiny_model, []),
        (added, WHERE),
        (wrapped, [f"base_model.model.{name}" for name in WHERE]),
        (prompted, ["PeftModelForCausalLM"]),
        (lambda: wrapped().merge_and_unload(), []),
    ],
    ids=["none", "added", "wrapped", "prompted", "merged"],
)
def test_where_adapters_are(make: Callable[[], Any], expected: list[str]) -> None:
    assert modules_with_adapters(make()) == expected


@pytest.mark.parametrize("make", [wrapped, added, prompted])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_changes_weights_is_refused(
    session: CompressionSession, make: Callable[[], Any], kind: str
) -> None:
    model = make()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(TargetError, match=r"adapters \(PEFT\) at .*merge_and_unload"):
        session.initialize(recipe=f"modifiers: {{{WEIGHTS[kind]}}}", model=model)
    assert before.keys() == model.state_dict().keys(), "nothing was registered"
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_a_trainer_refuses_before_the_first_step(tmp_path: Path) -> None:
    made = trainer(wrapped(), tmp_path, f"modifiers: {{{WEIGHTS['gradual']}}}")
    with pytest.raises(TargetError, match="MagnitudePruningModifier changes weights"):
        made.train()
    assert made.state.global_step == 0


@pytest.mark.parametrize("make", [wrapped, added])
@pytest.mark.parametrize("run", [oneshot, train])
def test_entry_points_refuse(make: Callable[[], Any], run: Callable[..., Any], tmp_path: Path):
    """They write whole checkpoints, which would have the adapters' names in them."""
    data = {"dataset": [{"input_ids": [3, 4, 5]}] * 4} if run is train else {}
    recipe = f"modifiers: {{{WEIGHTS['quantized']}}}"
    with pytest.raises(ArgumentError, match=r"adapters \(PEFT\) at .*merge_and_unload"):
        run(model=make(), recipe=recipe, output_dir=tmp_path / "out", **data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [wrapped, added])
def test_a_teacher_teaches_adapters(make: Callable[[], Any], tmp_path: Path) -> None:
    """The base stays, the loss has its part, only adapters are saved, a resumed run is the same."""
    model = make()
    base = {name: each.clone() for name, each in model.named_parameters() if "lora" not in name}
    whole = trainer(model, tmp_path / "a", DISTILL, save_strategy="steps", save_steps=2)
    whole.train()
    assert all("distill_loss" in entry for entry in whole.state.log_history if "loss" in entry)
    assert all(torch.equal(dict(model.named_parameters())[name], base[name]) for name in base)
    whole.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved
    assert all("lora" in name for name in saved)
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    if make is added:  # transformers' trainer does not load what it has saved of it
        return
    again = trainer(make(), tmp_path / "a", DISTILL, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for ours, theirs in zip(again.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_that_would_not_be_saved_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """transformers loads adapters with any PEFT, and saves them with a PEFT that it takes."""
    wrapped().save_pretrained(tmp_path / "adapter")
    model = tiny.tiny_model()
    model.load_adapter(str(tmp_path / "adapter"), is_trainable=True)
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.9")
    made = trainer(model, tmp_path / "run", DISTILL)
    with pytest.raises(ArgumentError, match=r"not saved.* 99\.9.*PeftModel\.from_pretrained"):
        made.train()
    assert made.state.global_step == 0
    remedy = peft.PeftModel.from_pretrained(
        tiny.tiny_model(), tmp_path / "adapter", is_trainable=True
    )
    made = trainer(remedy, tmp_path / "run", DISTILL, max_steps=1)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("make", [wrapped, added, prompted])
def test_a_plan_refuses_them_as_the_run_does(make: Callable[[], Any], tmp_path: Path) -> None:
    recipe = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC}}"
    with pytest.raises(ArgumentError, match="merge_and_unload") as planned:
        plan(make(), recipe, measure=False)
    with pytest.raises(ArgumentError) as caught:
        oneshot(make(), recipe=recipe, output_dir=tmp_path / "out")
    assert str(planned.value) == str(caught.value)


def test_a_model_with_adapters_is_measured() -> None:
    windows = [{"input_ids": [[3, 4, 5, 6, 7, 8]]}]
    plain = evaluate(tiny.tiny_model(), dataset=windows[0], max_seq_length=6)
    found = evaluate(wrapped(), dataset=windows[0], max_seq_length=6)
    assert found.loss == pytest.approx(plain.loss)  # what it adds is zero at first


def test_a_folder_with_an_adapter_alone(tmp_path: Path) -> None:
    wrapped().save_pretrained(tmp_path / "adapter")
    tiny.tiny_model().save_pretrained(tmp_path / "model")
    for refused in (
        lambda: verify(tmp_path / "adapter"),
        lambda: verify(tmp_path / "model", reference=tmp_path / "adapter"),
        lambda: train(
            str(tmp_path / "model"),
            DISTILL,
            tiny.Rows(8),
            tmp_path / "out",
            distill_teacher=str(tmp_path / "adapter"),
            max_steps=1,
        ),
    ):
        with pytest.raises(CheckpointError, match="holds an adapter") as caught:
            refused()
        assert "merge_and_unload" in str(caught.value)
