# SPDX-License-Identifier: Apache-2.0
"""What is said before the work of an output that its readers would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models as small
from transformers import FalconConfig, FalconForCausalLM

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

ATTENTION = "transformer.h.0.self_attention.query_key_value"


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose initialization reads the weights of all its Linears."""
    folder = tmp_path_factory.mktemp("source") / "falcon"
    sizes = {"vocab_size": small.VOCABULARY, "hidden_size": 128, "num_attention_heads": 4}
    FalconForCausalLM(FalconConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("scheme", "is_read"), [("W4A16", False), ("W8A8", True)])
def test_what_transformers_cannot_load_is_said_before_the_work(
    scheme: str, is_read: bool, falcon: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(falcon, recipe, output_dir=tmp_path / "out")
    said = [line for line in warned if "transformers would not load" in line]
    if is_read:
        assert not said
        FalconForCausalLM.from_pretrained(tmp_path / "out")
        return
    assert len(said) == 1, "one for all modules with one reason"
    for word in (ATTENTION, "L2", "Ignore these modules", "W8A8", "vLLM"):
        assert word in said[0]
    with pytest.raises(AttributeError, match="weight"):
        FalconForCausalLM.from_pretrained(tmp_path / "out")


def test_what_everybody_reads_is_not_warned_of(
    llama_folder: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(llama_folder, recipe, output_dir=tmp_path / "out")
    assert not [line for line in warned if "would not" in line]
