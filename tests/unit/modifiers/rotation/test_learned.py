# SPDX-License-Identifier: Apache-2.0
"""Learned rotations: the right gradient, a lower loss, and the same bytes block by block."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as mixtures
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan, verify
from llmcompressor.core import create_session
from llmcompressor.errors import DatasetError
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.rotation import learned
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.numerics.straight_through import fake_quantize_matrix
from llmcompressor.planning.trial import count_memory
from llmcompressor.quantization.parameters import min_max_parameters
from llmcompressor.schemes.bridge import grid_of, partition_of

STEPS, BLOCKS = 2, 2


def spin(**more: Any) -> SpinQuantModifier:
    fields = {"rotations": ["R1", "R2"], "learnable": True, "learning_steps": STEPS}
    return SpinQuantModifier(**{**fields, **more})


def rounded(scheme: str) -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])


def gptq() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "rounded": lambda: [spin(), rounded("W8A8")],
    "one staying": lambda: [spin(rotations=["R1", "R2", "R4"]), rounded("W4A16")],
    "heads alone": lambda: [spin(rotations=["R2"]), rounded("W4A16")],
    "static": lambda: [spin(), rounded("FP8")],
    "solved": lambda: [spin(), gptq()],
    "a pass before": lambda: [SmoothQuantModifier(), spin(), gptq()],
}


def with_gains(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def written(folder: Path, **changes: Any) -> Path:
    with_gains(tiny.llama(torch.bfloat16, **changes)).save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def recorded(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "compression_report.json").read_text())
    return dict(report["modifiers"]["SpinQuantModifier"][""])


def compressed(
    model: Any, recipe: list[Any], output: Path, *, compared: int = 3, **more: Any
) -> Any:
    """Learned from one sample in each step, and compared on others."""
    ids = torch.cat([batch["input_ids"] for batch in tiny.batches(tokens=8)])
    rows = [{"input_ids": row} for row in ids[: STEPS + compared].tolist()]
    more = {"verify": False, **more}
    return oneshot(model=model, recipe=recipe, dataset=rows, output_dir=output, **more)


class Learning:
    """What is learned on a tiny model, and the same in one graph over all of it."""

    def __init__(self, model: Any, scheme: str, *, budget: int = 10**9) -> None:
        self.model, self.spin = model, spin()
        (self.batch,) = learned._training_batches(model, tiny.batches()[:1], use_loss_mask=False)
        with create_session() as session:
            session.initialize(model=model, recipe=[self.spin, rounded(scheme)])
        self.plan: Any = self.spin._plan
        start = {name: self.spin._made[name] for name in self.spin._learnable}
        self.shelf = TensorStore(budget)
        self.way = learned._RotationOptimizer(
            model, self.plan, start, lambda block, then: None, self.shelf, None
        )
        self.names = {id(rotation): name for name, rotation in start.items()}

    def by_block(self) -> tuple[float, dict[str, Tensor]]:
        """The loss and its gradients as they are used."""
        leaves = self._leaves()
        with (
            learned._fake_quantized_inputs(self.model),
            contextlib.closing(self.shelf),
            self.way._rotating(leaves),
        ):
            loss = learned._loss(self.model, self.batch)
            found = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, found, strict=True))

    def in_one_graph(self) -> tuple[float, dict[str, Tensor]]:
        """As the formulas say it: all weights at once, as functions of the matrices."""
        leaves = self._leaves()
        inputs = {name: one for name, one in self.batch.items() if name != "labels"}
        with learned._fake_quantized_inputs(self.model):
            logits = functional_call(
                self.model, self._weights(leaves), kwargs=inputs, tie_weights=False
            ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), self.batch["labels"][:, 1:].flatten()
        )
        found = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, found, strict=True))

    def _leaves(self) -> dict[str, Tensor]:
        return {name: one.float().requires_grad_() for name, one in self.way._matrices.items()}

    def _weights(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = {module: name for name, module in named_modules(self.model)}
        found = {f"{names[one]}.weight": torch.ones(64) for one in self.plan.norms}
        for module, fusion in self.plan.fusions.items():
            weight = module.weight.detach()
            if fusion.norm is not None:
                weight = weight * fusion.norm.module.weight.detach()
            for rotation in fusion.inputs:
                weight = weight @ self._whole(rotation, leaves, weight.shape[1])
            for rotation in fusion.outputs:
                weight = self._whole(rotation, leaves, weight.shape[0]).T @ weight
            found[f"{names[module]}.weight"] = self._rounded(module, weight)
            bias = getattr(module, "bias", None)
            if bias is not None:
                turned = bias.detach()
                for rotation in fusion.outputs:
                    turned = turned @ self._whole(rotation, leaves, len(turned))
                found[f"{names[module]}.bias"] = turned
        return found

    def _whole(self, rotation: Any, leaves: Mapping[str, Tensor], width: int) -> Tensor:
        one = leaves[self.names[id(rotation)]]
        return torch.block_diag(*[one] * (width // rotation.order))

    @staticmethod
    def _rounded(module: Module, weight: Tensor) -> Tensor:
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is None:
            return weight
        found = min_max_parameters(weight, scheme.weights)
        zero = None if scheme.weights.symmetric else found.zero_point
        way = grid_of(scheme.weights), partition_of(scheme.weights)
        return fake_quantize_matrix(weight, found.effective_scale, zero, *way)


@pytest.mark.parametrize(
    ("scheme", "biases"), [("W8A8", True), ("W4A16_ASYM", False), ("W4A8", True)]
)
def test_the_gradient_is_that_of_one_graph(scheme: str, biases: bool) -> None:
    model = with_gains(tiny.llama(attention_bias=biases, mlp_bias=biases))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    learning = Learning(model, scheme)
    (loss, found), (expected, gradients) = learning.by_block(), learning.in_one_graph()
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in found.items():
        assert (gradient - gradients[name]).norm() < 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0


def test_the_loss_falls_and_matrices_stay_orthogonal() -> None:
    """With weights of 4 bits, on one batch: from 6.05 to 5.71."""
    learning = Learning(with_gains(tiny.llama()), "W4A16")
    before = learning.way.mean_loss([learning.batch])
    for step in range(15):
        learning.way.step(learning.batch, 0.1 * (1 - step / 15))
    assert learning.way.mean_loss([learning.batch]) < before - 0.2
    every = learning.way._matrices.values()
    errors = [float((one @ one.T - torch.eye(len(one))).abs().max()) for one in every]
    assert max(errors) < 1e-10


def test_what_was_kept_and_read_again_goes_on_with_the_same_bits() -> None:
    """Also in how it lies in memory, by which products are summed in one order or another."""
    straight, again = (Learning(with_gains(tiny.llama(torch.bfloat16)), "W4A16") for _ in "ab")
    for learning in (straight, again):
        learning.way.step(learning.batch, 1.5)
    again.way._source = Kept()
    again.way.keep()
    assert again.way.resume()
    for learning in (straight, again):
        learning.way.step(learning.batch, 1.0)
    for kind in ("_matrices", "_momenta"):
        expected = getattr(straight.way, kind)
        for name, one in getattr(again.way, kind).items():
            assert torch.equal(one, expected[name])
            assert one.is_contiguous()


class Kept:
    """A journal of one entry."""

    def remember(self, name: str, tensors: Any, figures: Any) -> None:
        """Keep the entry as bytes."""
        self.entry = save(tensors), figures

    def recall(self, name: str) -> Any:
        """Read it."""
        return load(self.entry[0]), self.entry[1]


@pytest.mark.parametrize("is_folder", [True, False])
def test_data_with_nothing_to_predict_is_refused(is_folder: bool, tmp_path: Path) -> None:
    source: Any = str(written(tmp_path / "source"))
    source = source if is_folder else AutoModelForCausalLM.from_pretrained(source)
    before = {} if is_folder else {key: one.clone() for key, one in source.state_dict().items()}
    masked = {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 0]}
    for row, more in (({"input_ids": [5]}, {}), (masked, {"use_loss_mask": True})):
        recipe = [SmoothQuantModifier(), spin(), rounded("W8A8")]
        (problem,) = plan(source, recipe, [row], measure=False, **more).problems
        with pytest.raises(DatasetError, match="no sample has one to predict") as caught:
            oneshot(source, recipe=recipe, dataset=[row], output_dir=tmp_path / "short", **more)
        assert (problem.where, problem.error) == ("dataset", "DatasetError")
        assert (problem.message, problem.remedy) == (caught.value.problem, caught.value.remedy)
        assert not list(tmp_path.glob("short*"))
    assert is_folder or all(torch.equal(source.state_dict()[key], before[key]) for key in before)


def test_a_step_holds_one_block_however_many_there_are() -> None:
    """Bytes of all tensors that come and go, those among them that are mapped to files."""

    def peak(blocks: int) -> int:
        model = with_gains(tiny.llama(num_hidden_layers=blocks))
        learning = Learning(model, "W4A16", budget=0)
        with count_memory() as counter:
            learning.way.step(learning.batch, 0.1)
        learning.shelf.close()
        return counter.peak

    shallow, deep = peak(2), peak(5)
    waiting = 2 * 24 * 64 * 4  # what goes into a block, in a file
    heads = 16 * 16 * 8 * 4  # a block's own matrix, the next one, its momentum and so on
    assert deep - shallow <= 3 * (waiting + heads)


@pytest.fixture
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On random weights what a few steps have learned may be no better; it is kept all the same."""
    measure = learned._RotationOptimizer.mean_loss

    def falling(self: Any, batches: Any) -> float:
        return measure(self, batches) - self.steps

    monkeypatch.setattr(learned._RotationOptimizer, "mean_loss", falling)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one in ("static", "heads alone") else [])
        for one in RECIPES
    ],
)
def test_the_files_are_those_of_a_model_in_memory(
    recipe: str, tied: bool, tmp_path: Path, warned: list[str]
) -> None:
    source = written(tmp_path / "model", tie_word_embeddings=tied)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    compressed(whole, RECIPES[recipe](), tmp_path / "whole")
    returned = compressed(str(source), RECIPES[recipe](), tmp_path / "streamed")
    assert not any("whole model is loaded" in line for line in warned)
    for name in ("model.safetensors", "config.json"):
        one, other = ((tmp_path / kind / name).read_bytes() for kind in ("whole", "streamed"))
        assert one == other, name
    assert torch.equal(tiny.logits(returned, tiny.batches()), tiny.logits(whole, tiny.batches()))
    assert not [one for one in verify(tmp_path / "streamed").findings if one.severity == "error"]
    reports = [recorded(tmp_path / kind) for kind in ("whole", "streamed")]
    assert reports[0] == reports[1]
    assert {"weights", "loss_before", "loss_after"} == set(reports[1])


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_that_a_batch_does_not_reach_are_learned_around(
    family: str, tmp_path: Path
) -> None:
    """Of eight experts each of 8 tokens goes to two: the files are those of a model in memory."""
    mixtures.mixture(family).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    recipe = [spin(), rounded("W8A8")]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    compressed(whole, [one.model_copy() for one in recipe], tmp_path / "whole", compared=1)
    compressed(str(tmp_path / "model"), recipe, tmp_path / "streamed", compared=1)
    one, other = (tmp_path / kind / "model.safetensors" for kind in ("whole", "streamed"))
    assert one.read_bytes() == other.read_bytes()
