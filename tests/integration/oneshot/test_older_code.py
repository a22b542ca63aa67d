# SPDX-License-Identifier: Apache-2.0
"""Models with code of their own that was written for transformers 4."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import tiny_llama as tiny
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.errors import CheckpointError

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OlderConfig(LlamaConfig):
    model_type = "older"


class OlderForCausalLM(LlamaForCausalLM):
    config_class = OlderConfig
    _tied_weights_keys = ["lm_head.weight"]
"""
RECIPE = "modifiers: {QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A16}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "older"
    tiny.llama().save_pretrained(made)
    config = json.loads((made / "config.json").read_text())
    config |= {"model_type": "older", "architectures": ["OlderForCausalLM"]}
    classes = {"AutoConfig": "OlderConfig", "AutoModelForCausalLM": "OlderForCausalLM"}
    config["auto_map"] = {auto: f"modeling_older.{name}" for auto, name in classes.items()}
    (made / "config.json").write_text(json.dumps(config))
    (made / "modeling_older.py").write_text(CODE)
    return made


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_ties_that_are_a_list_are_those_of_the_embeddings(folder: Path, tmp_path: Path) -> None:
    """It is planned, compressed and saved, from a folder as in memory; transformers loads it."""
    options: dict[str, Any] = {"recipe": RECIPE, "trust_remote_code_model": True}
    assert plan(model=str(folder), measure=False, **options).sizes is not None
    oneshot(model=str(folder), output_dir=tmp_path / "streamed", **options)
    model = oneshot(model=load(folder), recipe=RECIPE)
    model.save_pretrained(tmp_path / "saved")
    one, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "saved")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "lm_head.weight" in one
    assert torch.isfinite(tiny.logits(load(tmp_path / "streamed"), tiny.batches())).all()


def test_code_that_transformers_cannot_load_is_told(folder: Path) -> None:
    """With tied embeddings transformers itself fails on the list."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(AttributeError):
        load(folder)
    for run in (partial(plan, measure=False), oneshot):
        with pytest.raises(CheckpointError, match=r"code of its own: .*'list' object.*version 4"):
            run(model=str(folder), recipe=RECIPE, trust_remote_code_model=True)
