# SPDX-License-Identifier: Apache-2.0
"""Scale tuning: its gradient, codes that stay, a model that comes nearer, and what is refused."""

from __future__ import annotations

import json
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from tests.support import tiny_llama as tiny
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan, verify
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.core import create_session
from llmcompressor.errors import LifecycleError, RecipeError, TargetError
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.scale_tuning import ScaleTuningModifier, tune
from llmcompressor.modifiers.scale_tuning.model import TunedModel, moved_gain
from llmcompressor.modifiers.scale_tuning.tune import (
    TuningOptions,
    split_batches,
    step_batches,
)
from llmcompressor.modifiers.sparsity import WandaPruningModifier
from llmcompressor.pipelines.batches import calibration_mode
from llmcompressor.runtime import durable

HEAD = ["lm_head"]
IDS = torch.cat([one["input_ids"] for one in tiny.batches(tokens=24, number=7)]).tolist()
ROWS = [{"input_ids": row[: 24 - place // 2]} for place, row in enumerate(IDS)]
"""Of seven lengths, so that two are run as one: too few batches to hold one out."""


def low(bits: int = 3, *, symmetric: bool = True, **fields: Any) -> QuantizationModifier:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 32,
    }
    group = QuantizationScheme(targets=["Linear"], weights=weights, **fields)
    return QuantizationModifier(config_groups={"group_0": group}, ignore=HEAD)


def preset(name: str, **fields: Any) -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme=name, **{"ignore": HEAD, **fields})


RECIPES: dict[str, Any] = {
    "symmetric": lambda: [low()],
    "asymmetric": lambda: [low(symmetric=False)],
    "solved": lambda: [GPTQModifier(targets="Linear", scheme="W4A16", ignore=HEAD)],
    "static": lambda: [preset("FP8")],
    "dynamic": lambda: [preset("W8A8")],
    "head too": lambda: [preset("W4A16", ignore=[])],
    "blocks": lambda: [preset("FP8_BLOCK")],
    "pruned": lambda: [
        WandaPruningModifier(sparsity=0.5, mask_structure="2:4", ignore=HEAD),
        low(4),
    ],
}


def tuning(**fields: Any) -> ScaleTuningModifier:
    return ScaleTuningModifier(**{"epochs": 6, "learning_rate": 0.001, "batch_size": 14, **fields})


def folder_of(place: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    tiny.llama(dtype, **{"hidden_size": 128, **changes}).save_pretrained(place)
    return place


def run(model: Any, recipe: list[Any], output: Path | None, **more: Any) -> Any:
    in_order: dict[str, Any] = {"shuffle_calibration_samples": False, "verify": False}
    return oneshot(model=model, recipe=recipe, dataset=ROWS, output_dir=output, **in_order, **more)


@torch.no_grad()
def divergence(model: Any, dense: Any) -> float:
    """KL from the dense model's predictions, the mean over all tokens of the data."""
    total = tokens = 0.0
    for row in ROWS:
        ids = torch.tensor([row["input_ids"]])
        own, other = (one(input_ids=ids).logits.float().log_softmax(-1) for one in (model, dense))
        total += float((other.exp() * (other - own)).sum())
        tokens += ids.numel()
    return total / tokens


def recorded(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "compression_report.json").read_text())
    return dict(report["modifiers"]["ScaleTuningModifier"][""])


# --------------------
# The objective and its gradient.


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_the_gradient_is_that_of_one_graph(scheme: str) -> None:
    model, dense = tiny.llama(), tiny.llama()
    modifier = tuning(epochs=0)
    run(model, [*RECIPES[scheme](), modifier], None)
    tensors = modifier._tensors
    batch = tiny.padded(tiny.batches()[:1], 3)[0]
    mask = batch["attention_mask"].bool()
    shelf = TensorStore(10**9)
    with torch.no_grad(), calibration_mode(model):
        tuned = TunedModel(model, tensors, model.lm_head, lambda block, then: None, shelf)
        original = TunedModel(dense, tensors, dense.lm_head, lambda block, then: None, shelf)
        (ticket,) = original.store_hidden_states([(batch, mask)], store := TensorStore(10**9))
        leaves = {
            name: torch.randn(one.shape).mul(0.01).requires_grad_()
            for name, one in tensors.starts().items()
        }
        hidden = store.peek(ticket, torch.device("cpu"))
        head = (dense.lm_head.weight, None)
        with torch.enable_grad():
            loss = tuned.divergence((batch, mask), hidden, head, leaves)

        weights: dict[str, Tensor] = {}
        others = {name: one.detach().requires_grad_() for name, one in leaves.items()}
        with torch.enable_grad():
            for module in tensors.weights:
                name = str(tensors.name(module))
                weights[name.removesuffix("_scale")] = tensors.coded(module).decoded(others[name])
            for module in tensors.norms:
                name = str(tensors.name(module))
                weights[name] = moved_gain(module.get_parameter("weight"), others[name])
            own = functional_call(model, weights, kwargs=dict(batch)).logits.log_softmax(-1)[mask]
            other = dense(**batch).logits.log_softmax(-1)[mask].detach()
            expected = (other.exp() * (other - own)).sum(-1).mean()
            found = torch.autograd.grad(expected, list(others.values()))
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-4)
    for leaf, gradient in zip(leaves.values(), found, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-3, atol=1e-6)


def test_each_epoch_takes_every_batch_once() -> None:
    options = TuningOptions(epochs=3, rate=1.0, samples=4, seed=0)
    epochs = step_batches([0, 1, 2, 3, 4], [2, 2, 2, 2, 2], options)
    assert [[len(one) for one in steps] for steps in epochs] == [[2, 2, 1]] * 3
    assert [sorted(chain(*steps)) for steps in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert epochs[0] != epochs[1]


def test_every_epoch_is_compared_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [1, 1, 3, 1, 2, 1, 4, 2]
    options = TuningOptions(epochs=6, rate=1.0, samples=4, seed=0)
    epochs = step_batches(range(7), rows, options)
    lengths = [len(steps) for steps in epochs]
    assert len(set(lengths)) > 1  # epochs of unequal lengths
    compared: list[int] = []

    class Counted:
        steps, before, least = 0, 1.0, 1.0

        def __init__(self, *given: Any) -> None: ...

        def resume(self) -> bool:
            return True

        def compare(self, indices: list[int]) -> None:
            compared.append(self.steps)

        def keep_if_due(self, *, last: bool) -> None: ...

        def step(self, picked: list[int], rate: float) -> float:
            self.steps += 1
            return 0.0

    monkeypatch.setattr(tune, "_Training", Counted)
    original: Any = SimpleNamespace(batches=rows, rows=rows.__getitem__)
    tune.tune_scales(None, {}, original, options, None)  # type: ignore[arg-type]
    assert compared == list(accumulate(lengths))


def test_batches_to_compare_with_are_held_out() -> None:
    training, compared = split_batches(40)
    assert not set(training) & set(compared)
    assert len(compared) == 5
    assert split_batches(3) == ([0, 1, 2], [0, 1, 2])


# --------------------
# What is written.


@pytest.mark.parametrize("scheme", RECIPES)
def test_codes_stay_and_the_model_comes_nearer(scheme: str, tmp_path: Path) -> None:
    # float32: in bfloat16 the steps between scales are too coarse for few steps of training
    source = folder_of(tmp_path / "source", torch.float32, tie_word_embeddings=False)
    run(str(source), [*RECIPES[scheme](), tuning(epochs=0)], tmp_path / "plain")
    model = run(str(source), [*RECIPES[scheme](), tuning()], tmp_path / "tuned")
    plain, tuned = (load_file(tmp_path / one / "model.safetensors") for one in ("plain", "tuned"))
    assert {name: (one.shape, one.dtype) for name, one in plain.items()} == {
        name: (one.shape, one.dtype) for name, one in tuned.items()
    }
    changed = {name for name in plain if not torch.equal(plain[name].cpu(), tuned[name])}
    assert changed
    assert all(name.endswith(("weight_scale", "norm.weight")) for name in changed)
    found = recorded(tmp_path / "tuned")
    assert found["divergence_after"] < found["divergence_before"]
    dense = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    assert divergence(model, dense) == pytest.approx(found["divergence_after"], rel=1e-4)
    verify(tmp_path / "tuned", reference=str(source))
    with loading_compressed():
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="auto").eval()
    batch = tiny.batches()[0]
    with torch.no_grad():
        torch.testing.assert_close(read(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("scheme", ["symmetric", "solved", "head too"])
def test_files_are_those_of_a_model_in_memory(scheme: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    run(str(source), [*RECIPES[scheme](), tuning()], tmp_path / "streamed")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    run(model, [*RECIPES[scheme](), tuning()], tmp_path / "held")
    one, other = (tmp_path / name / "model.safetensors" for name in ("streamed", "held"))
    assert one.read_bytes() == other.read_bytes()


def test_no_epochs_are_the_same_bytes_as_without(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    run(str(source), [*RECIPES["solved"](), tuning(epochs=0)], tmp_path / "none")
    run(str(source), RECIPES["solved"](), tmp_path / "without")
    one, other = (tmp_path / name / "model.safetensors" for name in ("none", "without"))
    assert one.read_bytes() == other.read_bytes()


def test_what_is_no_better_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = folder_of(tmp_path / "source")
    run(str(source), RECIPES["symmetric"](), tmp_path / "without")
    monkeypatch.setattr(
        tune.AdamState,
        "step",
        lambda self, gradient, rate, number: self.value.add_(gradient.sign(), alpha=0.1),
    )
    run(str(source), [*RECIPES["symmetric"](), tuning()], tmp_path / "worse")
    one, other = (tmp_path / name / "model.safetensors" for name in ("worse", "without"))
    assert one.read_bytes() == other.read_bytes()
    found = recorded(tmp_path / "worse")
    assert found["divergence_after"] == found["divergence_before"]


@pytest.mark.parametrize("which", ["scales", "norms"])
def test_one_kind_alone_is_tuned(which: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    run(str(source), RECIPES["symmetric"](), tmp_path / "without")
    run(str(source), [*RECIPES["symmetric"](), tuning(tune=which)], tmp_path / "tuned")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("tuned", "without"))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert changed
    assert all(name.endswith("scale" if which == "scales" else "norm.weight") for name in changed)


def test_a_run_that_broke_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "source")
    run(str(source), [*RECIPES["solved"](), tuning()], tmp_path / "whole")
    plain, taken = tune._Training.step, list[int]()

    def stopped(self: Any, picked: Any, rate: float) -> float:
        if self.steps == 3:
            raise KeyboardInterrupt
        return plain(self, picked, rate)

    def counted(self: Any, picked: Any, rate: float) -> float:
        taken.append(self.steps)
        return plain(self, picked, rate)

    monkeypatch.setattr(tune._Training, "step", stopped)
    monkeypatch.setattr(durable, "SHARE_OF_SAVING", 1e9)  # keep every step
    with pytest.raises(KeyboardInterrupt):
        run(str(source), [*RECIPES["solved"](), tuning()], tmp_path / "parts")
    monkeypatch.setattr(tune._Training, "step", counted)
    run(str(source), [*RECIPES["solved"](), tuning()], tmp_path / "parts")
    assert taken[0] == 3
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
    assert recorded(tmp_path / "whole") == recorded(tmp_path / "parts")


def test_a_plan_counts_it(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    rows = [{"input_ids": list(range(3, 40))}] * 8
    shared: dict[str, Any] = {"model": str(source), "dataset": rows, "output_dir": tmp_path / "out"}
    without = plan(recipe=RECIPES["solved"](), **shared)
    found = plan(recipe=[*RECIPES["solved"](), tuning(epochs=50)], **shared)
    assert len(found.passes) == 2
    assert found.operations.learn > 50 * without.operations.forward


# --------------------
# What is refused before any work.


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (lambda: [tuning()], "no modifier before it quantizes any"),
        (lambda: [tuning(), low()], "no modifier before it quantizes any"),
        (lambda: [preset("NVFP4A16"), tuning()], "8-bit floats or powers of two"),
        (lambda: [preset("MXFP4A16"), tuning()], "8-bit floats or powers of two"),
        (lambda: [low(), tuning(targets=["lm_head"])], "matches is quantized"),
        (lambda: [low(), tuning(targets=["nowhere"])], "nowhere"),
    ],
)
def test_what_has_nothing_to_tune_is_refused(recipe: Any, told: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    with pytest.raises(TargetError, match=told):
        run(str(source), recipe(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_norms_alone_are_tuned_under_any_scheme(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    recipe = [preset("MXFP4A16"), tuning(tune=["norms"])]
    run(str(source), recipe, tmp_path / "out")
    found = recorded(tmp_path / "out")
    assert found["divergence_after"] < found["divergence_before"]


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": 0.0},
        {"learning_rate": -1e-3},
        {"epochs": -1},
        {"batch_size": 0},
        {"tune": []},
        {"tune": ["biases"]},
        {"tune": ["norms", "norms"]},
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        ScaleTuningModifier(**fields)


def test_a_pipeline_that_shows_no_original_is_told() -> None:
    modifier = tuning()
    with create_session() as session:
        session.initialize(model=tiny.llama(), recipe=[low(), modifier])
        with pytest.raises(LifecycleError, match="not shown"):
            modifier.on_calibration_start(session.state, None)  # type: ignore[arg-type]
