# SPDX-License-Identifier: Apache-2.0
"""What learning rotations takes: memory as it was counted, and all of it in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor import plan
from llmcompressor.core import create_session
from llmcompressor.core.contract import DataSize
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import learned
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.planning.subject import REST, Part
from llmcompressor.planning.trial import count_memory

BLOCKS, STEPS = 3, 4


def spin(**more: Any) -> SpinQuantModifier:
    return SpinQuantModifier(learnable=True, learning_steps=STEPS, **more)


def rounded() -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])


def llama(hidden: int, intermediate: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_hidden_layers=BLOCKS,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return model.requires_grad_(False)


def parts_of(model: Any) -> list[Part]:
    blocks = find_blocks(model)
    inside = {name: dict(block.named_modules(prefix=name)) for block, name in blocks.items()}
    known = {name for one in inside.values() for name in one}
    inside[REST] = {name: one for name, one in model.named_modules() if name not in known}
    return [Part(name, modules, 0, 0, 0) for name, modules in inside.items()]


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ((128, 512, 500), 64),  # weights
        ((128, 512, 500), 256),  # activations
        ((128, 256, 8000), 64),  # logits
        pytest.param((256, 1024, 500), 512, marks=pytest.mark.slow),
        pytest.param((256, 512, 8000), 256, marks=pytest.mark.slow),
        pytest.param((512, 1024, 500), 64, marks=pytest.mark.slow),  # the step of a matrix
    ],
)
def test_what_a_step_holds_is_what_was_counted(sizes: tuple[int, int, int], tokens: int) -> None:
    model, modifier = llama(*sizes), spin()
    with create_session() as session:
        session.initialize(model=model, recipe=[modifier, rounded()])
    parts = parts_of(model)
    data = DataSize(tokens=tokens, batch=tokens, on_device=True)
    groups = [list(part.modules.values()) for part in parts if part.name != REST]
    groups += [[one] for one in parts[-1].modules.values()]
    orders = modifier._learnable.values()
    plan_ = modifier._plan
    assert plan_ is not None
    costs = [learned.learning_cost(plan_, group, orders, 1, data) for group in groups]
    waiting = BLOCKS * tokens * sizes[0] * 2
    planned = waiting + 24 * tokens + max(one.held_bytes + one.peak_bytes for one in costs)

    start = {name: modifier._made[name] for name in modifier._learnable}
    shelf = TensorStore(10**9)
    way = learned._RotationOptimizer(model, modifier._plan, start, lambda block, then: None, shelf)  # type: ignore[arg-type]
    batch = learned._with_labels(model, {"input_ids": torch.randint(3, sizes[2], (1, tokens))})
    with learned._fake_quantized_inputs(model), count_memory() as counter:
        way.step(batch, 0.1)
    before = costs[0].held_bytes * 2 // 3  # matrices and momenta were there before
    assert planned - before == pytest.approx(counter.peak, rel=0.25)


def test_the_plan_of_a_run_that_learns(tmp_path: Path) -> None:
    llama(128, 256, 200).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [5] * 16}] * 3
    found = plan(tmp_path / "model", [spin(), rounded()], rows, measure=False)
    assert found.ok, found.problems
    [one] = found.passes
    assert one.pipeline == "datafree"
    assert one.activations == BLOCKS * 16 * 128 * 2
    assert [phase.name for phase in found.phases] == ["load", "learn", "save"]
    assert found.residency.startswith("one block")
    assert found.operations.learn > 0
    assert "after learning" in str(found)
    with_disk = next(phase for phase in found.phases if phase.name == "learn").disk
    plain = plan(tmp_path / "model", [rounded()], measure=False)
    assert plain.sizes is not None
    matrices = 128**2 + BLOCKS * 64**2  # R1, and R2 of each block
    assert with_disk == plain.sizes.weights + 2 * 24 * matrices


def test_what_goes_into_blocks_and_does_not_fit_is_on_the_disk(tmp_path: Path) -> None:
    llama(128, 256, 200).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [5] * 16}] * 3
    roomy, tight = (
        plan(tmp_path / "model", [spin(), rounded()], rows, measure=False, activation_budget=budget)
        for budget in ("1GiB", "1KiB")
    )
    (learning,) = tight.passes
    assert learning.spilled == learning.activations - 1024
    disks = [{phase.name: phase.disk for phase in one.phases} for one in (tight, roomy)]
    assert disks[0]["learn"] == disks[1]["learn"] + learning.spilled
    assert disks[0]["save"] == disks[1]["save"]


@pytest.mark.parametrize("rotations", [["R1", "R2"], ["R1", "R4"]])
def test_parameters_are_those_of_the_model_that_is_given(
    rotations: list[str], tmp_path: Path
) -> None:
    """Not a head that is untied to be rotated, nor the matrices that stay in forwards."""
    model = llama(128, 256, 200)
    own = sum(one.numel() for one in model.parameters())
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "tied")
    rows = [{"input_ids": [5] * 16}] * 3
    found = plan(tmp_path / "tied", [spin(rotations=rotations)], rows, measure=False)
    assert found.parameters == own - 128 * 200
