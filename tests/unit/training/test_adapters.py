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
from tests.support.pairs import each
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from llmcompressor import oneshot, train
from llmcompressor.core import CompressionSession
from llmcompressor.errors import ArgumentError, TargetError
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


@each(make=[wrapped, added, prompted], kind=WEIGHTS)
def test_what_changes_weights_is_refused(
    session: CompressionSession, make: Callable[[], Any], kind: str
) -> None:
    model = make()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(TargetError, match=r"adapters \(PEFT\) at .*merge_and_unload"):
        session.initialize(recipe=f"modifiers: {{{WEIGHTS[kind]}}}", model=model)
    assert before.keys() == model.state_dict().keys(), "nothing was registered"
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


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
