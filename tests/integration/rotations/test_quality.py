# SPDX-License-Identifier: Apache-2.0
"""On the embedded model with outliers planted in known channels, rotations win by a stated margin.

Three channels of every norm of the residual stream are made 50 times larger, and the weights that
read them smaller: the model computes what it did. Losses are those of text that it never saw, above
its own loss. What was measured stands beside the margins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor import oneshot
from llmcompressor.core.modifier import Modifier
from llmcompressor.datasets.stdlib_text import held_out_texts
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier

pytestmark = pytest.mark.slow

CHANNELS, SIZE = [3, 77, 200], 50.0
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 64}


def dynamic(bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": "token", "dynamic": True}


SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": dynamic(8)},
    "W4A16": {"weights": INT4},
    "W4A4": {"weights": INT4, "input_activations": dynamic(4)},
}


def planted(pico: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32).eval()
    scale = torch.ones(model.config.hidden_size)
    scale[CHANNELS] = SIZE
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
        for norm, linears in (
            (layer.input_layernorm, readers),
            (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
        ):
            norm.weight.data *= scale
            for linear in linears:
                linear.weight.data /= scale
    return model


def windows(pico: Path, texts: list[str], number: int, tokens: int) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(pico, model_max_length=10**9)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= number * tokens:
            break
    return torch.tensor(ids[: number * tokens]).view(number, tokens)


@pytest.fixture(scope="module")
def unseen(pico: Path) -> Tensor:
    return windows(pico, list(held_out_texts()), 8, 256)


@torch.no_grad()
def loss(model: Any, ids: Tensor) -> float:
    logits = model(ids).logits[:, :-1].flatten(0, 1).float()
    return float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))


@pytest.fixture(scope="module")
def dense(pico: Path, unseen: Tensor) -> float:
    found = loss(planted(pico), unseen)
    plain = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32).eval()
    assert abs(found - loss(plain, unseen)) < 1e-5  # nothing but rounding was planted
    return found


class Losses:
    """Loss above the dense model's after a recipe that ends in round-to-nearest."""

    def __init__(self, pico: Path, unseen: Tensor, dense: float) -> None:
        self._pico, self._uncalled, self._dense = pico, unseen, dense

    def __call__(self, scheme: str, *modifiers: Modifier, data: Any = None) -> float:
        model = planted(self._pico)
        groups = {"group_0": {"targets": ["Linear"], **SCHEMES[scheme]}}
        quantize = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
        oneshot(model=model, recipe=[*modifiers, quantize], dataset=data)
        return loss(model, self._uncalled) - self._dense


@pytest.fixture(scope="module")
def above(pico: Path, unseen: Tensor, dense: float) -> Losses:
    return Losses(pico, unseen, dense)


@pytest.mark.parametrize(("scheme", "margin"), [("W8A8", 0.1), ("W4A16", 0.8), ("W4A4", 0.1)])
def test_the_stream_rotated(scheme: str, margin: float, above: Losses) -> None:
    assert above(scheme, SpinQuantModifier()) < margin * above(scheme)


def test_the_mlp_rotated_too(above: Losses) -> None:
    two, three = (above("W4A4", SpinQuantModifier(rotations=one)) for one in (["R1", "R2"], R124))
    assert three < 0.6 * two


R124: Any = ["R1", "R2", "R4"]


@pytest.mark.parametrize(("scheme", "margin"), [("W8A8", 0.1), ("W4A16", 0.8), ("W4A4", 0.5)])
def test_each_linear_rotated(scheme: str, margin: float, above: Losses) -> None:
    assert above(scheme, QuIPModifier()) < margin * above(scheme)
