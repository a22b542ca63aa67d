# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the tests of this folder read; none is to be written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.checkpoint_samples import Sample
from tests.support.sample_bases import MADE, recipe_of
from transformers import MixtralConfig, MixtralForCausalLM

from llmcompressor import oneshot, reset_session


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("verified") / "llama"
    small.llama(num_key_value_heads=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixtral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of four experts in bfloat16."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=small.VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    model = MixtralForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("verified") / "mixtral"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compresses a model with a recipe and gives the folder."""

    def run(source: Path, recipe: Any, **arguments: Any) -> Path:
        folder = tmp_path_factory.mktemp("compressed") / "model"
        reset_session()
        oneshot(
            model=str(source),
            recipe=recipe,
            dataset=small.token_rows(),
            output_dir=str(folder),
            max_seq_length=16,
            num_calibration_samples=8,
            **arguments,
        )
        reset_session()
        return folder

    return run


@pytest.fixture(scope="session")
def source(llama_folder: Path) -> Path:
    (llama_folder / "tokenizer.json").write_text("{}")
    return llama_folder


@pytest.fixture(scope="session")
def good(source: Path, compressed: Callable[..., Path]) -> Callable[[str], Sample]:
    """A good checkpoint by its name, made once."""
    known: dict[str, Sample] = {}

    def get(base: str) -> Sample:
        if base not in known:
            recipe = recipe_of(base)
            known[base] = Sample.read(compressed(source, recipe)) if recipe else MADE[base]()
        return known[base].copy()

    return get
