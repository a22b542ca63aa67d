# SPDX-License-Identifier: Apache-2.0
"""Recipes of several modifiers, from YAML to a checkpoint that transformers reads alone.

How often the model ran over the data is what the modifiers' declarations ask for, and no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_models as small
import torch
from test_read_back import READER
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmcompressor import oneshot, verify
from llmcompressor.logger import logger


@dataclass(frozen=True)
class Case:
    """A recipe, the pipeline, the forwards of each pass that needs data, and of which model."""

    recipe: str
    forwards: list[int]
    pipeline: str = "independent"
    model: str = "dense"


SMOOTHED = """
modifiers:
  SmoothQuantModifier: {smoothing_strength: 0.8}
  GPTQModifier: {targets: Linear, scheme: W8A8, ignore: [lm_head]}
"""
TWO_GRIDS = """
modifiers:
  GPTQModifier: {targets: ["re:.*mlp.*"], scheme: W4A16}
  QuantizationModifier: {targets: ["re:.*self_attn.*"], scheme: FP8}
"""
ALL_THREE = """
modifiers:
  SmoothQuantModifier: {smoothing_strength: 0.5}
  SparseGPTModifier:
    {sparsity: 0.5, mask_structure: "2:4", targets: Linear, ignore: [lm_head], asymmetric: true}
  GPTQModifier: {targets: Linear, scheme: W8A8, ignore: [lm_head]}
"""
CASES = {
    "smoothed and solved": Case(SMOOTHED, [1, 1]),
    "smoothed, solved with both streams": Case(
        SMOOTHED.replace("scheme: W8A8", "scheme: W8A8, asymmetric: true"), [1, 2]
    ),
    "two grids": Case(TWO_GRIDS, [2, 1]),
    "two grids, one calibration": Case(TWO_GRIDS, [2], "sequential"),
    "three, the last two from one calibration": Case(ALL_THREE, [1, 2]),
    "pruned and solved, what is left of each module at once": Case(
        """
modifiers:
  SparseGPTModifier: {sparsity: 0.5, mask_structure: "2:4", targets: Linear, ignore: [lm_head]}
  GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}
""",
        [2],
    ),
    "scaled and rounded": Case(
        """
modifiers:
  AWQModifier: {n_grid: 4}
  QuantizationModifier: {targets: Linear, scheme: W4A16_ASYM, ignore: [lm_head]}
""",
        [1],
    ),
    "scaled and solved": Case(
        """
modifiers:
  AWQModifier: {n_grid: 4}
  GPTQModifier: {targets: Linear, scheme: W4A16_ASYM, ignore: [lm_head], asymmetric: false}
""",
        [1, 1],
    ),
    "pruned and rounded": Case(
        """
modifiers:
  WandaPruningModifier: {sparsity: 0.5, mask_structure: "2:4", targets: Linear, ignore: [lm_head]}
  QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}
""",
        [1],
    ),
    "four, and the cache": Case(
        """
modifiers:
  SmoothQuantModifier: {smoothing_strength: 0.5}
  WandaPruningModifier: {sparsity: 0.5, mask_structure: "2:4", targets: ["re:.*mlp.*"]}
  GPTQModifier: {targets: ["re:.*self_attn.*"], scheme: W4A16, asymmetric: false}
  QuantizationModifier:
    targets: ["re:.*mlp.*"]
    scheme: W8A16
    kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false}
""",
        [1, 1, 1],
    ),
    "rotated and solved": Case(
        """
modifiers:
  SpinQuantModifier: {rotations: [R1, R2], transform_type: hadamard}
  GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}
""",
        [2],
    ),
    "smoothed and descended": Case(
        """
modifiers:
  SmoothQuantModifier: {smoothing_strength: 0.5}
  AutoRoundModifier: {targets: Linear, scheme: W8A8, ignore: [lm_head], iters: 2}
""",
        [1, 3],
        "sequential",
    ),
    "half-quadratic, and solved": Case(
        """
modifiers:
  HQQModifier: {targets: ["re:.*mlp.*"], scheme: W4A16_ASYM}
  GPTQModifier: {targets: ["re:.*self_attn.*"], scheme: W4A16}
""",
        [2],
    ),
    "fewer experts, scaled and solved": Case(
        """
modifiers:
  REAPPruningModifier: {sparsity: 0.5}
  AWQModifier: {n_grid: 4}
  GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head], asymmetric: false}
""",
        [2, 1, 1],  # what is left of each mixture runs once more
        model="mixture",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What was written, said and read."""

    folder: Path
    said: list[str]
    written: Tensor
    read: Tensor
    left: list[str]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("composed")
    for name, model in {"dense": small.llama(), "mixture": small.mixture()}.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in ("dense", "mixture")}


@pytest.fixture(scope="module")
def outcomes(
    sources: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    read_alone: Callable[..., None],
) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("composed-out")
    written: dict[str, Tensor] = {}
    said: dict[str, list[Any]] = {}
    for name, case in CASES.items():
        said[name] = lines = []
        sink = logger.add(lines.append, format="{message}")
        written[name] = small.logits(_compressed(case, sources[case.model], root / "out" / name))
        logger.remove(sink)
    torch.save(small.probe(), root / "tokens.pt")
    read_alone(READER, root / "out", root / "tokens.pt", root / "found.pt")
    found = torch.load(root / "found.pt")
    return {
        name: Outcome(
            root / "out" / name,
            said[name],
            written[name],
            found[name]["logits"],
            found[name]["missing_keys"] + found[name]["unexpected_keys"],
        )
        for name in CASES
    }


def _compressed(case: Case, source: Path, output: Path) -> torch.nn.Module:
    return oneshot(
        model=str(source),
        recipe=case.recipe,
        dataset=small.token_rows(),
        pipeline=case.pipeline,
        output_dir=str(output),
    )


@pytest.mark.parametrize("name", CASES)
def test_it_runs_the_model_as_often_as_it_must(name: str, outcomes: dict[str, Outcome]) -> None:
    forwards = re.findall(r"(\d) forward\(s\)", "\n".join(outcomes[name].said))
    assert [int(one) for one in forwards] == CASES[name].forwards


@pytest.mark.parametrize("name", CASES)
def test_it_is_served(name: str, outcomes: dict[str, Outcome]) -> None:
    """By verify, and by transformers in a process without this package, with the same logits."""
    outcome = outcomes[name]
    assert outcome.left == []
    assert torch.equal(outcome.read, outcome.written)
    assert verify(str(outcome.folder)).ok


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # it says so, and does it
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "2:4" in case.recipe])
def test_pruned_weights_stay_pruned(name: str, outcomes: dict[str, Outcome]) -> None:
    """In the weights that a reader decodes."""
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        outcomes[name].folder, quantization_config=config, dtype=torch.float32
    )
    mlps = [
        module
        for path, module in model.named_modules()
        if "mlp" in path and isinstance(module, torch.nn.Linear)
    ]
    assert len(mlps) == 3 * model.config.num_hidden_layers
    for module in mlps:
        of_four = (module.weight.reshape(-1, 4) == 0).sum(-1)
        assert int(of_four.min()) >= 2
