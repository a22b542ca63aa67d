# SPDX-License-Identifier: Apache-2.0
"""Which norm feeds which Linear is seen, without weights too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.errors import TargetError
from llmcompressor.modeling.call_graph import trace_flow
from llmcompressor.modifiers.rotation.probe import InvarianceProbe

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def fed(model: Any) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    return {names[one]: names[other] for one, other in trace_flow(model).feeder.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_feed_linears(device: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(device))
    found = fed(model)
    layer = "model.layers.1"
    for name in ("q_proj", "k_proj", "v_proj"):
        assert found[f"{layer}.self_attn.{name}"] == f"{layer}.input_layernorm"
    for name in ("gate_proj", "up_proj"):
        assert found[f"{layer}.mlp.{name}"] == f"{layer}.post_attention_layernorm"
    assert found["lm_head"] == "model.norm"
    # sums and products make tensors of their own
    assert not {f"{layer}.mlp.down_proj", f"{layer}.input_layernorm"} & set(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_followed(dtype: torch.dtype) -> None:
    class Casting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 32)
            self.norm = torch.nn.RMSNorm(32)
            self.head = torch.nn.Linear(32, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            normed = self.norm(self.embed(input_ids) * 2)
            return self.head(normed.to(self.head.weight.dtype))

    model = Casting()
    model.head.to(dtype)
    assert fed(model) == {"head": "norm"}


def test_the_model_is_left_as_it_was() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    trace_flow(model)
    assert all(module.training for module in model.modules())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, KeyError])
def test_what_a_models_own_code_raises_is_told(error: type[Exception]) -> None:
    class Failing(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise error("no sound")

    for tried in (trace_flow, InvarianceProbe):
        with pytest.raises(TargetError, match=r"Failing does not run .*no sound"):
            tried(Failing())
