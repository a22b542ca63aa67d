# SPDX-License-Identifier: Apache-2.0
"""Mixtures that lost experts: each that is left is compared with the one that it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_mixtures as tiny
from tests.support.checkpoint_samples import Sample
from tests.support.thinned import thinned
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.verification import Severity

FAMILIES = [*tiny.FAMILIES, "granitemoe"]
ROUTERS = {"granitemoe": "block_sparse_moe.router.layer", "mixtral": "block_sparse_moe.gate"}


def granite() -> Any:
    """Experts in Linears of three dimensions."""
    torch.manual_seed(0)
    config = GraniteMoeConfig(**tiny.COMMON, num_local_experts=tiny.EXPERTS)
    return GraniteMoeForCausalLM(config)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A mixture and what is left of it when half of its experts are dropped."""
    known: dict[str, tuple[Path, Path]] = {}

    def run(family: str) -> tuple[Path, Path]:
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            model = granite() if family == "granitemoe" else tiny.mixture(family)
            model.bfloat16().save_pretrained(folder / "source")
            rows = [{"input_ids": torch.randint(3, 90, (16,)).tolist()} for _ in range(8)]
            oneshot(
                model=str(folder / "source"),
                recipe=REAPPruningModifier(sparsity=0.5),
                dataset=rows,
                output_dir=str(folder / "pruned"),
                max_seq_length=16,
                num_calibration_samples=8,
            )
            known[family] = folder / "source", folder / "pruned"
        return known[family]

    return run


def said(checkpoint: Path, reference: Path) -> set[tuple[str, str, str]]:
    """Errors, and warnings about the reference."""
    return {
        (one.rule, one.module, one.message)
        for one in verify(checkpoint, reference, tp=1).findings
        if one.severity is Severity.ERROR or one.rule.startswith("R")
    }


def experts_of(family: str, sample: Sample) -> list[str]:
    """Tensors that hold matrices of experts in the last layer."""
    words = ("input_linear",) if family == "granitemoe" else (".experts.",)
    layer = max(name.partition("layers.")[2].partition(".")[0] for name in sample.tensors)
    return [
        name
        for name in sample.tensors
        if f"layers.{layer}." in name and any(word in name for word in words)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_is_good(family: str, pruned: Callable[..., tuple[Path, Path]]) -> None:
    source, checkpoint = pruned(family)
    assert not said(checkpoint, source)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_expert_in_its_place_is_found(
    family: str, pruned: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = pruned(family)
    sample, original = Sample.read(checkpoint), Sample.read(source)
    name = experts_of(family, sample)[0]
    if family == "granitemoe":
        sample.tensors[name][1] = sample.tensors[name][2]
    else:
        other = name.replace(".experts.0.", ".experts.2.")
        sample.tensors[name] = sample.tensors[other].clone()
    # neither the experts that are left nor those that are gone may stand in its place
    assert {(rule, module) for rule, module, _ in said(sample.write(tmp_path / "bad"), source)} == {
        ("R4", name)
    }
    gone = original.tensors[name]
    if family == "granitemoe":
        record = json.loads((checkpoint / "compression_report.json").read_text())
        mixtures = list(record["modifiers"]["REAPPruningModifier"].values())
        sample.tensors[name][:] = gone[mixtures[-1]["kept"]]
        sample.tensors[name][0] = gone[mixtures[-1]["dropped"][0]]
        assert ("R4", name) in {one[:2] for one in said(sample.write(tmp_path / "gone"), source)}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_the_router_in_another_order_are_found(
    family: str, pruned: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = pruned(family)
    sample = Sample.read(checkpoint)
    name = f"model.layers.1.{ROUTERS.get(family, 'mlp.gate')}.weight"
    sample.tensors[name] = sample.tensors[name].flip(0)
    found = said(sample.write(tmp_path / "bad"), source)
    assert {one[:2] for one in found} == {("R4", name)}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_quantized_afterwards(
    family: str, pruned: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = pruned(family)
    oneshot(
        model=str(checkpoint),
        recipe=QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        output_dir=str(tmp_path / "both"),
    )
    sample = Sample.read(tmp_path / "both")
    assert not said(tmp_path / "both", source)
    assert not said(tmp_path / "both", checkpoint)
    first, second = (
        name.replace(".experts.0.", f".experts.{index}.")
        for name in [experts_of(family, sample)[0].rpartition(".")[0]]
        for index in (0, 1)
    )
    for own, tensor in sample.own(second).items():
        sample.tensors[f"{first}.{own}"] = tensor.clone()
    assert {one[:2] for one in said(sample.write(tmp_path / "bad"), source)} == {("R3", first)}


@pytest.mark.parametrize(
    ("family", "report"),
    thinned(FAMILIES, [None, b"{", b'{"modifiers": {"REAPPruningModifier": {"x": 1}}}']),
)
def test_without_a_record_one_finding_says_so(
    family: str,
    report: bytes | None,
    pruned: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    source, checkpoint = pruned(family)
    sample = Sample.read(checkpoint)
    del sample.files["compression_report.json"]
    if report is not None:
        sample.files["compression_report.json"] = report
    found = said(sample.write(tmp_path / "bad"), source)
    assert {one[:2] for one in found} == {("R1", "config.json")}
    assert any("Of 8 experts 4 are left" in message for _, _, message in found)
    # everything else is compared all the same
    name = "model.layers.0.self_attn.o_proj.weight"
    sample.tensors[name] += 1
    found = said(sample.write(tmp_path / "worse"), source)
    assert ("R4", name) in {one[:2] for one in found}


def test_an_expert_that_is_missing_was_not_dropped(
    pruned: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """Neither from the original nor from what is left."""
    source, checkpoint = pruned("mixtral")
    for folder, index in ((source, 7), (checkpoint, 3)):
        sample = Sample.read(folder)
        start = f"model.layers.1.block_sparse_moe.experts.{index}."
        sample.drop(start)
        found = said(sample.write(tmp_path / str(index)), source)
        assert "R1" in {rule for rule, module, _ in found if ".experts." in module}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_quantized_experts_that_are_left_are_compared_too(family: str, tmp_path: Path) -> None:
    """Dropped and quantized in one run; two that changed places are found."""
    tiny.mixture(family).bfloat16().save_pretrained(tmp_path / "source")
    rows = [{"input_ids": torch.randint(3, 90, (16,)).tolist()} for _ in range(8)]
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {"experts": {"targets": [r"re:.*experts\.\d+\..*"], "weights": weights}}
    oneshot(
        model=str(tmp_path / "source"),
        recipe=[REAPPruningModifier(sparsity=0.5), GPTQModifier(config_groups=groups)],
        dataset=rows,
        output_dir=str(tmp_path / "out"),
        max_seq_length=16,
        num_calibration_samples=8,
    )
    assert not said(tmp_path / "out", tmp_path / "source")
    sample = Sample.read(tmp_path / "out")
    packed = next(name for name in sample.tensors if ".experts.0." in name and "packed" in name)
    for name in (packed, packed.replace("packed", "scale")):
        other = name.replace(".experts.0.", ".experts.2.")
        sample.tensors[name], sample.tensors[other] = sample.tensors[other], sample.tensors[name]
    owner = packed.removesuffix(".weight_packed")
    found = said(sample.write(tmp_path / "bad"), tmp_path / "source")
    other = owner.replace(".experts.0.", ".experts.2.")
    assert {module for _, module, _ in found} == {owner, other}
