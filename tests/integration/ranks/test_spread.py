# SPDX-License-Identifier: Apache-2.0
"""Models that FSDP has sharded over the ranks are compressed as whole ones are."""

from __future__ import annotations

import re

import pytest
import torch
from tests.support import spread_models
from tests.support.rank_runs import LINEARS
from tests.support.small_models import llama, mixture, tree
from transformers import AutoModelForCausalLM, PreTrainedModel

GPTQ = {"GPTQModifier": {**LINEARS, "scheme": "W4A16"}}
RECIPES = {
    "gptq": GPTQ,
    "gradients": {"GPTQModifier": {**LINEARS, "scheme": "W4A16", "gradient_samples": 8}},
    "smoothed": {"SmoothQuantModifier": {}, "GPTQModifier": {**LINEARS, "scheme": "W8A8"}},
    "awq": {"AWQModifier": {**LINEARS, "scheme": "W4A16_ASYM"}},
    "pruned": {"SparseGPTModifier": {**LINEARS, "sparsity": 0.5, "mask_structure": "2:4"}},
    "without data": {"QuantizationModifier": {**LINEARS, "scheme": "FP8_DYNAMIC"}},
    "static": {"QuantizationModifier": {**LINEARS, "scheme": "FP8"}},
}


def assert_same_output(one, other):
    """All files but reports and manifests, which tell of the work."""
    ours, theirs = tree(one), tree(other)
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert differing <= {"compression_report.json", "llmcompressor_manifest.json", "manifest.json"}
    assert "model.safetensors" in ours


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_write_what_they_write_of_a_whole_model(name, groups, llama_folder, tmp_path):
    found = {
        spread: groups[2](
            spread_models.run,
            str(llama_folder),
            tmp_path / str(spread),
            RECIPES[name],
            spread=spread,
        )
        for spread in (False, True)
    }
    for whole, spread in zip(found[False], found[True], strict=True):
        assert not isinstance(spread, str), spread
        assert torch.equal(whole[0], spread[0])
        assert spread[1:] == (True, True)
    assert_same_output(tmp_path / "False", tmp_path / "True")
    AutoModelForCausalLM.from_pretrained(tmp_path / "True")


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_four_ranks_and_replicas(mesh, groups, llama_folder, tmp_path):
    """The root of one has run before, so that its own weights are whole."""
    for spread in (False, True):
        told = groups[4](
            spread_models.run,
            str(llama_folder),
            tmp_path / str(spread),
            GPTQ,
            spread=spread,
            forward_before=spread,
            mesh=mesh,
        )
        assert not any(isinstance(one, str) for one in told), told
    assert_same_output(tmp_path / "False", tmp_path / "True")


def test_what_needs_the_whole_model_gathers_it(groups, llama_folder, tmp_path):
    for spread in (False, True):
        place, given = tmp_path / str(spread), {"spread": spread, "pipeline": "basic"}
        told = groups[2](spread_models.run, str(llama_folder), place, RECIPES["static"], **given)
        assert not any(isinstance(one, str) for one in told), told
    assert_same_output(tmp_path / "False", tmp_path / "True")


def test_the_model_saves_itself_as_the_run_does(groups, llama_folder, tmp_path):
    groups[2](spread_models.run, str(llama_folder), tmp_path / "run", GPTQ, spread=True)
    told = groups[2](spread_models.save, str(llama_folder), tmp_path / "saved", GPTQ)
    assert told == [None, None]
    files = [tmp_path / one / "model.safetensors" for one in ("run", "saved")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"),
    reason="the installed transformers does not shard as it loads",
)
def test_a_model_that_transformers_has_sharded(groups, llama_folder, tmp_path):
    given = (str(llama_folder), tmp_path / "whole", GPTQ)
    groups[2](spread_models.run, *given, spread=False)
    told = groups[2](spread_models.loaded_sharded, str(llama_folder), tmp_path / "spread", GPTQ)
    assert all(isinstance(one, dict) and "distributed_config" not in one for one in told), told
    assert_same_output(tmp_path / "whole", tmp_path / "spread")


def test_a_rank_holds_two_blocks_at_most(groups, tmp_path):
    llama(num_hidden_layers=6).save_pretrained(tmp_path / "model")
    told = groups[2](spread_models.most_held, str(tmp_path / "model"), tmp_path / "out", GPTQ)
    for most, block, every in told:
        assert block <= most <= 2 * block < every


def test_a_run_that_fails_leaves_the_model_sharded(groups, llama_folder):
    told = groups[2](spread_models.fail, str(llama_folder), GPTQ)
    assert told == [(True, True)] * 2


REFUSED = {
    "FSDP 1": "flattened by FSDP version 1.*Give the folder",
    "ZeRO": "DeepSpeed ZeRO stage 3.*Give the folder",
    "tensor parallel": r"parallelism \(model.layers.0.mlp.up_proj.weight\).*Give the folder",
    "tied": "lm_head a weight of its own.*tie_word_embeddings=False",
    "untied": "embeddings tied.*tie_word_embeddings=False",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_ways_to_spread_a_model(kind, groups, llama_folder, tmp_path):
    told = groups[2](spread_models.refused, str(llama_folder), kind, tmp_path / "out")
    for one in told:
        assert one.startswith(("ArgumentError: ", "ProcessError: ")), one
        assert re.search(REFUSED[kind], one), one
    assert not (tmp_path / "out").exists()


def test_stacked_experts_that_are_sharded(groups, tmp_path):
    mixture(blocks=1).save_pretrained(tmp_path / "model")
    told = groups[2](
        spread_models.run, str(tmp_path / "model"), tmp_path / "out", GPTQ, spread=True
    )
    assert all("experts of model.layers.0.mlp.experts are stacks" in one for one in told)
    assert not (tmp_path / "out").exists()
