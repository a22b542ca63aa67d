# SPDX-License-Identifier: Apache-2.0
"""A recipe has one result: from a folder and from the model in memory, with every pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.thinned import thinned
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier
from llmcompressor.verification import Severity

WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def of(place: str) -> dict[str, Any]:
    return {"group_0": {"targets": [f"re:.*{place}.*_proj$"], "weights": WEIGHTS}}


def rtn() -> Modifier:
    return QuantizationModifier(config_groups=of("self_attn"))


def gptq() -> Modifier:
    return GPTQModifier(config_groups=of("mlp"))


def cache() -> Modifier:
    return QuantizationModifier(kv_cache_scheme=CACHE)


def owl() -> Modifier:
    layers = {"targets": [r"re:.*layers\.\d+$"], "owl_m": 3, "owl_lmbda": 0.1}
    return WandaPruningModifier(sparsity=0.5, sparsity_profile="owl", **layers)


def sparse() -> Modifier:
    return SparseGPTModifier(sparsity=0.5, ignore=["lm_head"])


RECIPES = {
    "rtn, gptq": lambda: [rtn(), gptq()],
    "hqq, gptq": lambda: [HQQModifier(config_groups=of("self_attn")), gptq()],
    "rtn, cache": lambda: [rtn(), cache()],
    "smoothquant, rtn, cache": lambda: [SmoothQuantModifier(), rtn(), cache()],
    "sparsegpt, rtn, gptq": lambda: [sparse(), rtn(), gptq()],
    "spinquant, owl, gptq, rtn": lambda: [
        SpinQuantModifier(rotations=["R1", "R2"]),
        owl(),
        gptq(),
        rtn(),
    ],
    "quip, owl": lambda: [QuIPModifier(), owl()],
}


def run(folder: Path, output: Path, recipe: Any, pipeline: str, *, loaded: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder) if loaded else str(folder)
    reset_session()
    return oneshot(
        model=model,
        recipe=recipe,
        dataset=small.token_rows(),
        pipeline=pipeline,
        output_dir=output,
        verify=False,
    )


@pytest.mark.parametrize(
    ("recipe", "pipeline"), thinned(RECIPES, ["independent", "sequential", "layer_sequential"])
)
def test_a_folder_and_its_model_give_the_same_weights(
    recipe: str, pipeline: str, llama_folder: Path, tmp_path: Path
) -> None:
    for loaded in (False, True):
        run(llama_folder, tmp_path / str(loaded), RECIPES[recipe](), pipeline, loaded=loaded)
    files = [tmp_path / str(loaded) / "model.safetensors" for loaded in (False, True)]
    assert files[0].read_bytes() == files[1].read_bytes()


CELLS = [{"strategy": "group", "group_size": 16}, {"strategy": "group", "group_size": 128}]


@pytest.mark.parametrize(
    ("cells", "modifier"),
    thinned([*CELLS, {"strategy": "channel"}], [QuantizationModifier, GPTQModifier]),
    ids=str,
)
def test_equal_codes_are_told_apart_in_one_way(
    cells: dict[str, Any], modifier: Any, tmp_path: Path
) -> None:
    """Of 8 bits and a zero point: their distance from it needs nine, and bfloat16 has eight."""
    model = small.llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:  # rows whose mean is not zero: their zero points are far from it
                weight.add_(torch.randn(len(weight), 1).to(weight.dtype) * 0.03)
    model.save_pretrained(tmp_path / "source")
    weights = {"num_bits": 8, "symmetric": False, **cells}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    for loaded in (False, True):
        recipe = modifier(config_groups=groups, ignore=["lm_head"])
        out = tmp_path / str(loaded)
        returned = run(tmp_path / "source", out, recipe, "independent", loaded=loaded)
        with loading_compressed():
            read = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert torch.equal(small.logits(read), small.logits(returned))
        found = verify(out, reference=tmp_path / "source").findings
        assert {one.rule for one in found if one.severity is Severity.ERROR} <= {"L9"}
    files = [tmp_path / str(loaded) / "model.safetensors" for loaded in (False, True)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("pipeline", ["independent", "sequential", "layer_sequential", "basic"])
def test_a_profile_is_followed_with_every_pipeline(pipeline: str, warned: list[str]) -> None:
    model, modifier = small.llama(), owl()
    reset_session()
    oneshot(model=model, recipe=modifier, dataset=small.token_rows(), pipeline=pipeline)
    zeros = [
        float((parameter == 0).float().mean())
        for name, parameter in model.named_parameters()
        if name.endswith("_proj.weight")
    ]
    assert sum(zeros) / len(zeros) == pytest.approx(0.5, abs=0.05)
    assert len(modifier.report()) == len(zeros)
    assert not any("pruned nothing" in line for line in warned)
