# SPDX-License-Identifier: Apache-2.0
"""Nothing runs behind the last layer; what its experts are shown is no other for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import mixtures
from tests.support.thinned import thinned

from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier

IGNORED = ["lm_head", "re:.*gate$", "re:.*self_attn.*"]
GROUPS = {
    "g": {
        "targets": ["Linear"],
        "weights": {"num_bits": 3, "strategy": "group", "group_size": 64},
    }
}
# gradients know what stands behind
ALONE: dict[str, Any] = {"config_groups": GROUPS, "ignore": IGNORED, "gradient_samples": 0}
RECIPES = {
    "twin streams": lambda: GPTQModifier(**ALONE),
    "one stream": lambda: GPTQModifier(**ALONE, asymmetric=False),
    "pruned": lambda: SparseGPTModifier(sparsity=0.5, asymmetric=True, ignore=IGNORED),
    "by size and input": lambda: WandaPruningModifier(sparsity=0.5, ignore=IGNORED),
}


def second_layer(recipe: str, layers: int, **arguments: Any) -> dict[str, torch.Tensor]:
    """The experts of layer 1, compressed in a model of so many layers."""
    model = mixtures.build("qwen3_moe", num_hidden_layers=3)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    model = oneshot(model=model, recipe=RECIPES[recipe](), dataset=mixtures.rows(), **arguments)
    state = model.model.layers[1].mlp.experts.state_dict()
    return {name: value for name, value in state.items() if value.is_floating_point()}


@pytest.mark.parametrize(("recipe", "propagates"), thinned(RECIPES, [True, False]))
def test_experts_of_the_last_layer_are_as_with_one_behind(recipe: str, propagates: bool) -> None:
    last = second_layer(recipe, 2, propagate_error=propagates)
    within = second_layer(recipe, 3, propagate_error=propagates)
    assert last.keys() == within.keys()
    for name, value in last.items():
        assert torch.equal(value, within[name]), name
