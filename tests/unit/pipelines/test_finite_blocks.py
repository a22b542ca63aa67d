# SPDX-License-Identifier: Apache-2.0
"""What blocks return is looked at, but for padding, and afterwards no hook is left."""

from __future__ import annotations

import pytest
import torch
from tests.support import tiny_models as tiny
from torch.utils.data import DataLoader

from llmcompressor import oneshot
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.pipelines.watchers import check_finite_outputs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_padding", [False, True])
def test_a_token_that_is_not_finite_is_seen_unless_it_is_padding(
    value: float, is_padding: bool
) -> None:
    model, state = tiny.build("llama"), State()
    hidden_BTC = torch.randn(2, 6, model.config.hidden_size)
    state.calibration.token_mask = torch.ones(2, 6, dtype=torch.bool)
    state.calibration.token_mask[1, 0] = not is_padding
    block = model.model.layers[1]
    block.forward = lambda hidden_BTC: (hidden_BTC,)
    with check_finite_outputs(model, state):
        block(hidden_BTC)
        hidden_BTC[1, 0, 3] = value
        if is_padding:
            block(hidden_BTC)
        else:
            with pytest.raises(NonFiniteError, match=r"What model\.layers\.1 returns"):
                block(hidden_BTC)
    assert not block._forward_hooks
    block(hidden_BTC)


def test_what_goes_wrong_behind_the_last_module_is_seen() -> None:
    """Its output is what nobody would compute: all batches have been seen before."""
    data = DataLoader(tiny.text_batches(), batch_size=None)  # type: ignore[arg-type]
    model, heads = tiny.build("llama"), list[int]()
    handle = model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    oneshot(model, recipe=GPTQModifier(scheme="W8A16", ignore=["lm_head"]), dataset=data)
    handle.remove()
    assert len(heads) <= 1, "what lies behind the blocks runs for the order of calls alone"
    model = tiny.build("llama")
    last = model.model.layers[1].mlp.down_proj
    last.register_forward_hook(lambda module, args, output: output * float("inf"))
    with pytest.raises(NonFiniteError, match=r"What model\.layers\.1 returns"):
        oneshot(model, recipe=GPTQModifier(scheme="W8A16", ignore=["lm_head"]), dataset=data)
    assert not any("forward" in vars(module) for module in model.modules())
