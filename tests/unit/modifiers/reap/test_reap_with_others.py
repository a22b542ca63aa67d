# SPDX-License-Identifier: Apache-2.0
"""REAP with those behind it in one recipe: the same as a stage for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as small
from transformers import AutoModelForCausalLM

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier

GROUPS = {
    "all": {
        "targets": ["re:.*experts\\.\\d+\\..*", "re:.*self_attn.o_proj$"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 8},
    }
}
EXPERTS = ["re:.*experts.*"]
LINEARS = [r"re:.*experts\.\d+\..*"]
IGNORE = ["lm_head", "re:.*gate$"]


def reap(sparsity: float = 0.5) -> REAPPruningModifier:
    return REAPPruningModifier(sparsity=sparsity)


def one_of_four() -> REAPPruningModifier:
    """Three are left, of which each token still goes to two."""
    return reap(0.25)


BEHIND: dict[str, Callable[[], list[Modifier]]] = {
    "rtn": lambda: [QuantizationModifier(config_groups=GROUPS)],
    "fp8": lambda: [QuantizationModifier(targets="Linear", scheme="FP8", ignore=IGNORE)],
    "gptq": lambda: [GPTQModifier(config_groups=GROUPS)],
    "awq": lambda: [AWQModifier(), QuantizationModifier(config_groups=GROUPS)],
    "smooth_gptq": lambda: [SmoothQuantModifier(), GPTQModifier(config_groups=GROUPS)],
    "rotated": lambda: [SpinQuantModifier(rotations=["R1"]), GPTQModifier(config_groups=GROUPS)],
    "sparse": lambda: [SparseGPTModifier(sparsity=0.5, targets=EXPERTS)],
    "wanda_gptq": lambda: [
        WandaPruningModifier(sparsity=0.5, mask_structure="2:4", targets=EXPERTS),
        GPTQModifier(config_groups=GROUPS),
    ],
}


def compressed(
    model: Any, recipe: Sequence[Modifier], folder: Path, *, verify: bool = False
) -> None:
    given: Any = str(model) if isinstance(model, Path) else model
    rows = tiny.batches(number=4)
    tiny.run(given, *recipe, output_dir=folder, data=rows, verify=verify)


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def settings_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


FAMILIES = list(small.FAMILIES)
# Three recipes, each on a family of its own; the others take two seconds and more each.
QUICK = {"rtn": "deepseek_v3", "awq": "qwen3_moe", "sparse": "mixtral"}
TURNS = [
    pytest.param(family, behind, marks=[] if is_quick else [pytest.mark.slow])
    for behind in BEHIND
    for family in FAMILIES
    for is_quick in [QUICK.get(behind) == family]
]


@pytest.mark.parametrize(("family", "behind"), TURNS)
def test_one_recipe_is_as_good_as_two_stages(family: str, behind: str, tmp_path: Path) -> None:
    """To the byte, from folder to folder and in memory."""
    small.mixture(family, experts=4).save_pretrained(tmp_path / "model")
    compressed(tmp_path / "model", [one_of_four()], tmp_path / "pruned")
    compressed(tmp_path / "pruned", BEHIND[behind](), tmp_path / "staged")
    compressed(
        tmp_path / "model", [one_of_four(), *BEHIND[behind]()], tmp_path / "streamed", verify=True
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    compressed(whole, [one_of_four(), *BEHIND[behind]()], tmp_path / "whole")
    for name in ("streamed", "whole"):
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "staged"), name
        assert settings_of(tmp_path / name) == settings_of(tmp_path / "staged"), name


IN_FRONT: dict[str, Callable[[], list[Modifier]]] = {
    "smooth": lambda: [SmoothQuantModifier()],
    "sparse": lambda: [SparseGPTModifier(sparsity=0.5, targets=EXPERTS)],
}


@pytest.mark.parametrize("before", IN_FRONT)
def test_what_stands_before_it_works_on_all_experts(before: str, tmp_path: Path) -> None:
    small.mixture("qwen3_moe", experts=4).save_pretrained(tmp_path / "model")
    stages = [IN_FRONT[before](), [one_of_four()], BEHIND["gptq"]()]
    folder = tmp_path / "model"
    for number, stage in enumerate(stages):
        folder, given = tmp_path / f"stage-{number}", folder
        compressed(given, stage, folder)
    recipe = [*IN_FRONT[before](), one_of_four(), *BEHIND["gptq"]()]
    compressed(tmp_path / "model", recipe, tmp_path / "streamed", verify=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    recipe = [*IN_FRONT[before](), one_of_four(), *BEHIND["gptq"]()]
    compressed(whole, recipe, tmp_path / "whole")
    for name in ("streamed", "whole"):
        assert weights_of(tmp_path / name) == weights_of(folder), name


@pytest.mark.parametrize("streamed", [False, True])
def test_rotations_before_it_are_kept(streamed: bool, tmp_path: Path) -> None:
    """In the weights of experts that are left, wherever these come to stand."""
    folder, models = tmp_path / "model", []
    small.mixture("qwen3_moe").save_pretrained(folder)
    for front in ([], [SpinQuantModifier(rotations=["R1"])]):
        weights = {"num_bits": 8, "strategy": "group", "group_size": 8}
        groups = {"g": {"targets": EXPERTS, "weights": weights}}
        rounding = QuantizationModifier(config_groups=groups)
        given = str(folder) if streamed else AutoModelForCausalLM.from_pretrained(folder)
        out = tmp_path / str(len(front)) if streamed else None
        models.append(tiny.run(given, *front, reap(), rounding, output_dir=out))
    one, other = (tiny.logits(model, tiny.batches()) for model in models)
    assert not torch.equal(one, other)
    # a token whose router hesitates may go elsewhere
    assert float(((one - other).abs() < 0.1).double().mean()) > 0.99


@pytest.mark.parametrize("pipeline", ["sequential", "basic", "layer_sequential"])
def test_every_pipeline_drops_first(pipeline: str) -> None:
    models = []
    for name in ("independent", pipeline):
        modifier = reap()
        recipe = [SmoothQuantModifier(), modifier, QuantizationModifier(config_groups=GROUPS)]
        model = tiny.run(small.mixture("qwen3_moe"), *recipe, pipeline=name)
        assert {len(one["kept"]) for one in modifier.report().values()} == {4}
        assert {one.experts.num_experts for one in small.blocks(model)} == {4}
        models.append(model)
    one, other = (tiny.logits(model, tiny.batches()) for model in models)
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


FIXED: dict[str, Callable[[], Modifier]] = {
    "quantized": lambda: QuantizationModifier(config_groups=GROUPS),
    "R4": lambda: SpinQuantModifier(rotations=["R4"]),
    "QuIP": lambda: QuIPModifier(targets=LINEARS, randomize=True),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fixed", FIXED)
def test_experts_with_something_of_their_own_cannot_be_dropped(
    fixed: str, streamed: bool, tmp_path: Path
) -> None:
    """Codes, and matrices that stay in the forward; put behind, they do no harm."""
    model = small.mixture("qwen3_moe", experts=4, moe_intermediate_size=32)
    model.save_pretrained(tmp_path / "model")
    given, out = (str(tmp_path / "model"), tmp_path / "out") if streamed else (model, None)
    behind = QuantizationModifier(targets=LINEARS, scheme="W8A16")
    with pytest.raises(RecipeError, match="stands before REAPPruningModifier") as caught:
        tiny.run(given, FIXED[fixed](), reap(), behind, output_dir=out)
    assert caught.value.remedy == "Put REAPPruningModifier before it."
    assert not (tmp_path / "out").exists()
    others = [behind] if fixed == "quantized" else [FIXED[fixed](), behind]
    made = tiny.run(given, reap(), *others, output_dir=out, verify=fixed == "quantized")
    assert torch.isfinite(tiny.logits(made, tiny.batches())).all()
