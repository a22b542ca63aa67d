# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that several runs made is compared with what any of them began with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_mixtures as tiny
from tests.support.checkpoint_samples import Sample
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.pruning import REAPPruningModifier, SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.verification import Severity
from llmcompressor.verification.files import DROPS, Run, open_checkpoint
from llmcompressor.verification.reference import Work, work_of

REPORT = "compression_report.json"
ROWS = [{"input_ids": row.tolist()} for row in torch.arange(3, 83).reshape(4, 20)]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, initializer_range=0.2))


def rounded() -> Any:
    return QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])


CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "experts dropped twice": (
        lambda: tiny.mixture("mixtral"),
        lambda: [REAPPruningModifier(sparsity=0.25), REAPPruningModifier(sparsity=0.4), rounded()],
    ),
    "pruned": (llama, lambda: [SparseGPTModifier(sparsity=0.5, ignore=["lm_head"]), rounded()]),
    "smoothed": (llama, lambda: [SmoothQuantModifier(), rounded()]),
}


def chain(case: str, folder: Path) -> list[Path]:
    """The model, and what each run made of what the one before it had made."""
    make, recipes = CASES[case]
    folders = [folder / "0"]
    make().bfloat16().save_pretrained(folders[0])
    for number, recipe in enumerate(recipes(), 1):
        folders.append(folder / str(number))
        oneshot(str(folders[-2]), recipe=recipe, dataset=ROWS, output_dir=folders[-1])
    return folders


def errors(checkpoint: Path, reference: Path) -> set[tuple[str, str]]:
    found = verify(checkpoint, reference, tp=1).findings
    return {(one.rule, one.module) for one in found if one.severity is Severity.ERROR}


@pytest.mark.parametrize("case", CASES)
def test_each_is_good_beside_each_before_it(case: str, tmp_path: Path) -> None:
    folders = chain(case, tmp_path)
    for number, checkpoint in enumerate(folders):
        for reference in folders[:number]:
            assert not errors(checkpoint, reference)
    # what no run has changed is compared as ever
    sample = Sample.read(folders[-1])
    sample.tensors["model.embed_tokens.weight"][0] += 1
    sample.write(tmp_path / "bad")
    for reference in folders[:-1]:
        assert errors(tmp_path / "bad", reference) == {("R4", "model.embed_tokens.weight")}


def test_a_report_holds_those_before_it(tmp_path: Path) -> None:
    folders = chain("pruned", tmp_path)
    first, second = (json.loads((one / REPORT).read_text()) for one in folders[1:])
    assert second["before"]["modifiers"] == first["modifiers"]
    assert "verification" in first
    assert "verification" not in second["before"]  # it is about files that are elsewhere
    (folders[1] / REPORT).write_text("{")
    oneshot(str(folders[1]), recipe=rounded(), output_dir=tmp_path / "again")
    assert "before" not in json.loads((tmp_path / "again" / REPORT).read_text())


STAGE = "{}_stage: {{a_modifiers: {{{}: {{}}}}}}\n".format
SMOOTH, ROUND = STAGE("default", "SmoothQuantModifier"), "QuantizationModifier"


@pytest.mark.parametrize(
    ("original", "checkpoint", "runs", "work"),
    [
        # what the original's recipe has too is true of both
        (SMOOTH, SMOOTH + STAGE("default_1", ROUND), [{}], Work.NEAREST),
        (None, SMOOTH + STAGE("default_1", ROUND), [{}, {}], Work.MOVED),
        # the stage is not the one of the original: smoothing is this run's
        (SMOOTH, SMOOTH.replace(": {}}", f": {{}}, {ROUND}: {{}}}}"), [{}], Work.MOVED),
        (SMOOTH, SMOOTH, [{}], Work.MOVED),
        # the original's could not be read when the checkpoint was made
        ("a: [", STAGE("default", ROUND), [{}], Work.NEAREST),
        # dropped by an earlier run: what is left is as it was; by this one: not known
        (None, STAGE("a", DROPS) + STAGE("b", ROUND), [{}, {DROPS: {}}], Work.NEAREST),
        (None, STAGE("a", DROPS) + STAGE("b", ROUND), [{DROPS: {}}], Work.UNKNOWN),
    ],
)
def test_what_was_done_since_the_original(
    original: str | None, checkpoint: str, runs: list[Any], work: Work, tmp_path: Path
) -> None:
    folders = {"original": original, "checkpoint": checkpoint}
    for name, text in folders.items():
        llama().save_pretrained(tmp_path / name)
        if text is not None:
            (tmp_path / name / "recipe.yaml").write_text(text)
    first, last = (open_checkpoint(tmp_path / name) for name in folders)
    assert work_of(last, [Run(each, trained=False) for each in runs], first) is work
