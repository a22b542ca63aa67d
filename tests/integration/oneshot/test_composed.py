# SPDX-License-Identifier: Apache-2.0
"""Recipes of several modifiers, from YAML to a checkpoint that transformers reads alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.integration.oneshot.test_read_back import (
    READER,
    is_of_unknown_attention,
    read_by_the_package,
)
from tests.support import small_models as small
from tests.support.caches import as_read
from tests.support.releases import refuses_packed_zero_points
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.logger import logger


@dataclass(frozen=True)
class Case:
    """A recipe, the pipeline, the forwards of each pass that needs data, and of which model."""

    recipe: str
    forwards: list[int]
    pipeline: str = "independent"
    model: str = "dense"
    turned: str = ""


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
        model="one block",
    ),
    "half-quadratic, and solved": Case(
        """
modifiers:
  HQQModifier: {targets: ["re:.*mlp.*"], scheme: W4A16_ASYM}
  GPTQModifier: {targets: ["re:.*self_attn.*"], scheme: W4A16}
""",
        [2],
        model="one block",
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
    "pruned by profile, and rounded by what comes in": Case(
        """
modifiers:
  WandaPruningModifier:
    {sparsity: 0.5, sparsity_profile: owl, owl_m: 5, owl_lmbda: 0.08, targets: ["re:.*mlp.*"]}
  QuantizationModifier:
    {targets: Linear, scheme: W3A16, ignore: [lm_head], weight_observer: imatrix_mse}
""",
        [1, 1, 1],  # the profile is a look at all layers
    ),
    "pruned, and half-quadratic": Case(
        """
modifiers:
  SparseGPTModifier: {sparsity: 0.5, mask_structure: "2:4", targets: Linear, ignore: [lm_head]}
  HQQModifier: {targets: Linear, scheme: W4A16_ASYM, ignore: [lm_head]}
""",
        [1],
        model="one block",
    ),
    "scaled and descended": Case(
        """
modifiers:
  AWQModifier: {n_grid: 4}
  AutoRoundModifier: {targets: Linear, scheme: W4A16_ASYM, ignore: [lm_head], iters: 2}
""",
        [1, 3],
        model="one block",
    ),
    "incoherent, on two grids and none": Case(
        """
modifiers:
  QuIPModifier: {rotations: [u, v], transform_type: random-hadamard}
  GPTQModifier: {targets: ["re:.*mlp.*"], scheme: W4A16}
  QuantizationModifier: {targets: ["re:.*[qkv]_proj"], scheme: W8A16}
""",
        [2],
        turned="u, v stay",
        model="one block",
    ),
    "rotated in the forward too, and solved": Case(
        """
modifiers:
  SpinQuantModifier: {rotations: [R1, R2, R4], transform_type: hadamard}
  GPTQModifier: {targets: Linear, scheme: W4A8, ignore: [lm_head]}
""",
        [2],
        turned="R4 stays",
        model="one block",
    ),
}
TURNED = [name for name, case in CASES.items() if case.turned]


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
    models = {
        "dense": small.llama(),
        "one block": small.one_block(),
        "mixture": small.mixture(blocks=1),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    """One case, for all tests that look at it before the next one."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def outcome(
    name: str,
    sources: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    read_alone: Callable[..., None],
) -> Outcome:
    root, case, said = tmp_path_factory.mktemp("composed"), CASES[name], list[str]()
    sink = logger.add(lambda line: said.append(str(line)), format="{message}")
    model = _compressed(case, sources[case.model], root / "out")
    logger.remove(sink)
    with as_read(model):
        written = small.logits(model)
    torch.save(small.probe(), root / "tokens.pt")
    read_alone(READER, root / "out", root / "tokens.pt", root / "found.pt")
    found = torch.load(root / "found.pt")
    if "error" in found:
        assert refuses_packed_zero_points(), "it is these that some releases refuse"
        found = read_by_the_package(root / "out")
    left = found["missing_keys"] + found["unexpected_keys"]
    return Outcome(root / "out", said, written, found["logits"], left)


def _compressed(case: Case, source: Path, output: Path) -> torch.nn.Module:
    return oneshot(
        model=str(source),
        recipe=case.recipe,
        dataset=small.token_rows(),
        pipeline=case.pipeline,
        output_dir=str(output),
    )


@pytest.mark.parametrize("name", CASES, indirect=True)
def test_it_runs_the_model_as_often_as_it_must(name: str, outcome: Outcome) -> None:
    forwards = re.findall(r"(\d) forward\(s\)", "\n".join(outcome.said))
    assert [int(one) for one in forwards] == CASES[name].forwards


@pytest.mark.parametrize("name", [name for name in CASES if name not in TURNED], indirect=True)
def test_it_is_served(outcome: Outcome) -> None:
    """By verify, and by transformers in a process without this package, with the same logits."""
    assert [one for one in outcome.left if not is_of_unknown_attention(one)] == []
    assert torch.equal(outcome.read, outcome.written)
    assert verify(str(outcome.folder)).ok


PRUNED = [name for name, case in CASES.items() if "2:4" in case.recipe]


@pytest.mark.parametrize("name", PRUNED, indirect=True)
def test_pruned_weights_stay_pruned(outcome: Outcome) -> None:
    """In the weights that a reader decodes."""
    with loading_compressed():
        model = AutoModelForCausalLM.from_pretrained(outcome.folder, dtype=torch.float32)
    small.logits(model)  # the first forward unpacks
    mlps = [
        module
        for path, module in model.named_modules()
        if "mlp" in path and isinstance(module, torch.nn.Linear)
    ]
    assert len(mlps) == 3 * model.config.num_hidden_layers
    for module in mlps:
        of_four = (module.weight.reshape(-1, 4) == 0).sum(-1)
        assert int(of_four.min()) >= 2
