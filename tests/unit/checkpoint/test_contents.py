# SPDX-License-Identifier: Apache-2.0
"""What a model's tensors are divided into, beside transformers' own way to leave out twins."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmcompressor import oneshot
from llmcompressor.checkpoint import planned_tensors
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier

RECIPES = {
    "one matrix": QuIPModifier(rotations=["v"], randomize=False),
    "both sides": QuIPModifier(rotations=["u", "v"], randomize=False),
    "drawn": QuIPModifier(rotations=["u", "v"], transform_type="random-hadamard"),
    "in the forward": SpinQuantModifier(rotations=["R1", "R4"]),
}


@pytest.mark.parametrize(("recipe", "is_meta"), [*zip(RECIPES, [False, True] * 2, strict=True)])
def test_rotation_matrices_are_kept_under_transformers_names(
    recipe: str, is_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    oneshot(model=model, recipe=RECIPES[recipe].model_copy(deep=True))
    state = dict(model.state_dict())
    if is_meta:
        state = {name: tensor.to("meta") for name, tensor in state.items()}
    given: list[str] = []

    def remove(plain: dict[str, Tensor], of: PreTrainedModel) -> dict[str, Tensor]:
        given.extend(name for name in plain if name.endswith("put.weight"))
        assert len({id(of.get_parameter(name)) for name in given}) == len(given) > 0
        return remove_tied_weights_from_state_dict(plain, of)

    expected = set(remove_tied_weights_from_state_dict(dict(state), model))
    monkeypatch.setattr(planned_tensors, "remove_tied_weights_from_state_dict", remove)
    found = planned_tensors.partition_state_dict(model, [], state)
    assert found.plain_keys == expected
    assert given, "none has a twin that is left to look for"
