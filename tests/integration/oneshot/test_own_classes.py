# SPDX-License-Identifier: Apache-2.0
"""Models of a class that no library has: modules are what they are, whatever they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.small_models import VOCABULARY, probe
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.quantization import QuantizationModifier


class NamedConfig(PreTrainedConfig):
    """Of a type that transformers does not know."""

    model_type = "named_otherwise"

    def __init__(self, table: str = "wte", joint: str = "common", **more: Any) -> None:
        self.table, self.joint, self.vocab_size = table, joint, VOCABULARY
        super().__init__(**more)


class NamedForCausalLM(PreTrainedModel):
    """An embedding, a Linear of any name for each layer, and a head."""

    config_class = NamedConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config: NamedConfig) -> None:
        super().__init__(config)
        setattr(self, config.table, nn.Embedding(VOCABULARY, 64))
        setattr(self, config.joint, nn.Linear(64, 64))
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, self.config.table)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.get_input_embeddings()(input_ids)
        for layer in self.layers:
            hidden = hidden + getattr(self, self.config.joint)(layer(hidden))
        return CausalLMOutput(logits=self.lm_head(hidden))


def quantized(folder: Path, scheme: str = "W8A16", **names: str) -> NamedForCausalLM:
    torch.manual_seed(0)
    model = NamedForCausalLM(NamedConfig(tie_word_embeddings=False, **names)).bfloat16()
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model, recipe, output_dir=folder)
    return model.eval()


@pytest.mark.parametrize(
    "names", [{"joint": "shared"}, {"joint": "patch_embed"}, {"table": "rows"}]
)
def test_a_module_is_what_its_class_is(
    names: dict[str, str], tmp_path: Path, warned: list[str]
) -> None:
    model = quantized(tmp_path / "out", **names)
    assert not [line for line in warned if "would not" in line or "with a limit" in line]
    read = NamedForCausalLM.from_pretrained(tmp_path / "out").eval()
    joint = getattr(read, read.config.joint)
    assert isinstance(joint, nn.Linear)
    assert joint.weight_packed.dtype is torch.int32
    with torch.no_grad():
        assert torch.equal(read(probe()).logits, model(probe()).logits)


@pytest.mark.parametrize("name", ["rows", "wte"])
def test_an_embedding_that_is_not_there_is_missed(name: str, tmp_path: Path) -> None:
    quantized(tmp_path / "out", table=name)

    def is_missed() -> bool:
        return any("no embedding" in one.message for one in verify(tmp_path / "out").findings)

    assert not is_missed()
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{name}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert is_missed()
