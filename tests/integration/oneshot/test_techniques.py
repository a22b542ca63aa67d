# SPDX-License-Identifier: Apache-2.0
"""From checkpoint to checkpoint with each technique: as in memory, and readable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.small_models import llama, logits, token_rows, tree
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.imatrix import IMatrixGatherer

FIELDS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}


def recipe(name: str) -> list[Any]:
    if name == "smoothquant, gptq":
        return [SmoothQuantModifier(), GPTQModifier(scheme="W8A8", **FIELDS)]
    if name == "smoothquant, rounding":
        return [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", **FIELDS)]
    if name == "awq, static activations":
        return [AWQModifier(scheme="FP8", n_grid=4, duo_scaling=False, **FIELDS)]
    loss = "output" if name == "awq by outputs" else "statistics"
    return [AWQModifier(scheme="W4A16_ASYM", n_grid=4, loss=loss, **FIELDS)]


NAMES = [
    "smoothquant, gptq",
    "smoothquant, rounding",
    "awq",
    "awq by outputs",
    "awq, static activations",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_written_by_blocks_it_is_the_same_and_reads_back(
    name: str, llama_folder: Path, tmp_path: Path
) -> None:
    data: dict[str, Any] = {"dataset": small.token_rows(), "shuffle_calibration_samples": False}
    streamed = oneshot(
        model=str(llama_folder), recipe=recipe(name), output_dir=tmp_path / "streamed", **data
    )
    whole = AutoModelForCausalLM.from_pretrained(llama_folder)
    oneshot(model=whole, recipe=recipe(name), output_dir=tmp_path / "whole", **data)
    files = [load_file(tmp_path / run / "model.safetensors") for run in ("streamed", "whole")]
    assert files[0].keys() == files[1].keys()
    for key, tensor in files[0].items():
        assert torch.equal(tensor, files[1][key]), key
    assert verify(tmp_path / "streamed").ok
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed").eval()
    assert torch.equal(small.logits(read), small.logits(streamed))
    before = load_file(llama_folder / "model.safetensors")
    norms = [key for key in before if "layernorm" in key]
    # a search may find that some Linears are better left alone
    assert any(not torch.equal(files[0][norm], before[norm]) for norm in norms)


@pytest.mark.slow
def test_a_mapping_across_blocks_is_refused_if_streamed(llama_folder: Path, tmp_path: Path) -> None:
    mapping = [["re:.*layers.1.*[qkv]_proj$"], "re:.*layers.0.mlp.up_proj$"]
    with pytest.raises(ValueError, match="joins nothing: no block"):
        oneshot(
            model=str(llama_folder),
            recipe=[SmoothQuantModifier(mappings=[mapping])],
            dataset=small.token_rows(),
            output_dir=tmp_path / "out",
        )


PAIRS: dict[str, Any] = {"sparsity": 0.5, "mask_structure": "2:4", "ignore": ["lm_head"]}


OWL: dict[str, Any] = {
    "sparsity": 0.5,
    "sparsity_profile": "owl",
    "owl_m": 3,
    "owl_lmbda": 0.1,
    "targets": "LlamaDecoderLayer",
}


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "sparsegpt": lambda: [SparseGPTModifier(**PAIRS)],
    "wanda": lambda: [WandaPruningModifier(**PAIRS)],
    "profile": lambda: [SparseGPTModifier(**OWL)],
    "then rounded": lambda: [
        SparseGPTModifier(**PAIRS),
        QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    ],
    "profile, then GPTQ": lambda: [
        WandaPruningModifier(**OWL),
        GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    ],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "model"
    llama().save_pretrained(folder)
    return folder


def compressed(source: Path, recipe: str, target: Path, **arguments: Any) -> Any:
    return oneshot(
        model=arguments.pop("model", str(source)),
        recipe=RECIPES[recipe](),
        dataset=token_rows(),
        output_dir=str(target),
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_checkpoint_is_served_without_us(recipe: str, source: Path, tmp_path: Path) -> None:
    model = compressed(source, recipe, tmp_path / "out")
    assert verify(str(tmp_path / "out")).ok
    found = logits(model)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    torch.testing.assert_close(logits(read), found)
    pruned = json.loads((tmp_path / "out" / "compression_report.json").read_text())["modifiers"]
    records = next(each for name, each in pruned.items() if name.startswith(("Sparse", "Wanda")))
    assert len(records) == 14
    if "the" not in recipe:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "quantization_config" not in config
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert {one.dtype for one in tensors.values()} == {torch.bfloat16}
        for name, record in records.items():
            weight = tensors[f"{name}.weight"]
            assert int((weight == 0).sum()) / weight.numel() == record["sparsity"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_same_streamed_as_in_memory(recipe: str, source: Path, tmp_path: Path) -> None:
    compressed(source, recipe, tmp_path / "streamed")
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    compressed(source, recipe, tmp_path / "whole", model=whole)
    streamed, in_memory = tree(tmp_path / "streamed"), tree(tmp_path / "whole")
    assert streamed["model.safetensors"] == in_memory["model.safetensors"]
    assert streamed["compression_report.json"] == in_memory["compression_report.json"]


RTN = (
    "QuantizationModifier: "
    "{targets: Linear, scheme: W4A16, ignore: [lm_head], weight_observer: imatrix_mse}"
)


AS_TEXT = f"quant_stage: {{quant_modifiers: {{IMatrixGatherer: {{ignore: [lm_head]}}, {RTN}}}}}"


def as_objects() -> list[Any]:
    quantizing = QuantizationModifier(
        targets="Linear", scheme="W4A16", ignore=["lm_head"], weight_observer="imatrix_mse"
    )
    return [IMatrixGatherer(ignore=["lm_head"]), quantizing]


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_observer_gathers_alone(one_block: Path, tmp_path: Path, in_memory: bool) -> None:
    recipes = {"without": f"quant_stage: {{quant_modifiers: {{{RTN}}}}}", "with": AS_TEXT}
    for name, recipe in {**recipes, "objects": as_objects()}.items():
        oneshot(
            model=small.one_block() if in_memory else str(one_block),
            recipe=recipe,
            dataset=small.token_rows(),
            shuffle_calibration_samples=False,
            output_dir=tmp_path / name,
        )
    made = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("without", "with", "objects")
    }
    assert made["with"] == made["objects"] == made["without"]


COLUMNS = 216


"""Of a down projection: a multiple of none of the groups."""


def of_integers(bits: int, *, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": "group", "group_size": 80, "symmetric": symmetric}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


SCHEMES: dict[str, dict[str, Any]] = {
    "int4": of_integers(4),
    "int4 with zero points": of_integers(4, symmetric=False),
    "int8": of_integers(8),
    **{f"int{bits}": of_integers(bits) for bits in (2, 3, 5, 6, 7)},
    "int3 with zero points": of_integers(3, symmetric=False),
    "NVFP4A16": {"targets": "Linear", "scheme": "NVFP4A16"},
    "MXFP4A16": {"targets": "Linear", "scheme": "MXFP4A16"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    small.llama(intermediate_size=COLUMNS, num_hidden_layers=1).save_pretrained(folder)
    return folder


SOLVED = ("int4 with zero points", "int3")


"""That both modifiers are shown with; the others with one, if not all cases are asked for."""


@pytest.mark.parametrize(
    ("scheme", "modifier"),
    [
        *((scheme, QuantizationModifier) for scheme in SCHEMES),
        *((scheme, GPTQModifier) for scheme in SOLVED),
        *(
            pytest.param(scheme, GPTQModifier, marks=pytest.mark.slow)
            for scheme in SCHEMES
            if scheme not in SOLVED
        ),
    ],
)
def test_a_returned_folder_run_computes_as_in_memory(
    scheme: str, modifier: Any, folder: Path, tmp_path: Path
) -> None:
    """Its weights are read from the checkpoint when they are looked at."""
    logits, weights, files = [], [], []
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, source in {"folder": folder, "model": loaded}.items():
        model = oneshot(
            source,
            modifier(ignore=["lm_head"], bypass_divisibility_checks=True, **SCHEMES[scheme]),
            small.token_rows(),
            output_dir=tmp_path / name,
            verify=name == "folder",  # the files are the same
        )
        files.append((tmp_path / name / "model.safetensors").read_bytes())
        logits.append(small.logits(model))
        weights.append({name: one.detach() for name, one in model.named_parameters()})
        model.save_pretrained(tmp_path / f"{name} again")
    assert torch.equal(*logits)
    assert weights[0].keys() == weights[1].keys()
    for name, one in weights[0].items():
        assert torch.equal(one, weights[1][name]), name
    assert files[0] == files[1]


def test_a_format_of_whole_groups_is_refused_when_asked_for(folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    recipe = QuantizationModifier(
        ignore=["lm_head"], bypass_divisibility_checks=True, **SCHEMES["int8"]
    )
    model = oneshot(loaded, recipe)
    out = tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"int-quantized holds whole groups of 80, .* 128 col"):
        model.save_pretrained(out, quantization_format="int-quantized")
    assert not out.exists()
    model.save_pretrained(out, quantization_format="pack-quantized")


@pytest.mark.parametrize("columns", [201, 203])
def test_an_odd_number_of_columns_is_packed(columns: int, tmp_path: Path) -> None:
    """They fill no word: the last one of a row is partial, and so is the last group."""
    model = small.llama(intermediate_size=columns, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    packed = QuantizationModifier(
        ignore=["lm_head"], bypass_divisibility_checks=True, **of_integers(8, symmetric=False)
    )
    logits = [
        small.logits(oneshot(source, packed, output_dir=tmp_path / name))
        for name, source in {
            "folder": tmp_path / "model",
            "loaded": AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto"),
        }.items()
    ]
    assert torch.equal(*logits)
