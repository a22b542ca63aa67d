# SPDX-License-Identifier: Apache-2.0
"""A compiled model is trained as one that is not: hooks that come or go later act too."""

from __future__ import annotations

import pytest
from tests.support import tiny_training as tiny

from llmcompressor.core import create_session
from llmcompressor.modifiers import Modifier
from llmcompressor.training import Trainer

QUANTIZE = """
modifiers:
  QuantizationModifier:
    start: START
    config_groups:
      g:
        targets: [Linear]
        weights: {num_bits: 3, type: int, strategy: channel}
        input_activations: {num_bits: 4, type: int, strategy: tensor, dynamic: DYNAMIC}
"""
DISTILL = "modifiers: {OutputDistillationModifier: {targets: ['re:.*layers.0$'], start: 1, end: 2}}"


class Doubling(Modifier):
    """Doubles what a Linear gives, within its schedule."""

    def on_initialize(self, state, **kwargs):
        return True

    def on_start(self, state, event, **kwargs):
        linear = state.model.model.layers[-1].mlp.down_proj
        self.register_hook(linear, lambda module, args, output: 2 * output, "forward")

    def on_end(self, state, event, **kwargs):
        self.remove_hooks()


def losses(folder, recipe, *, compiled: bool) -> list[float]:
    """Of three epochs of two steps, in which nothing is learned."""
    changed = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    with create_session():
        trainer = Trainer(
            model=tiny.tiny_model(),
            args=tiny.arguments(folder, learning_rate=0.0, num_train_epochs=3, **changed),
            train_dataset=tiny.Rows(4),
            recipe=recipe,
            teacher=tiny.tiny_model(seed=1),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what is traced warns of being traced
@pytest.mark.parametrize(
    "recipe",
    [
        QUANTIZE.replace("START", "1").replace("DYNAMIC", "true"),
        QUANTIZE.replace("START", "0").replace("DYNAMIC", "false"),
        DISTILL,
        [Doubling(start=1, end=2)],
    ],
    ids=["quantized later", "observed first", "distilled later", "a hook of one's own"],
)
def test_a_schedule_acts_on_a_compiled_model(tmp_path, recipe):
    plain = losses(tmp_path / "plain", recipe, compiled=False)
    again = [type(one)(start=1, end=2) for one in recipe] if isinstance(recipe, list) else recipe
    assert losses(tmp_path / "ours", again, compiled=True) == pytest.approx(plain, rel=1e-4)
    assert len({round(loss, 3) for loss in plain}) > 2, "it does something"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_fake_quantization_stays_compiled(tmp_path, dynamic):
    """torch gives up what it has compiled too often; the books of fake quantization are no reason.

    A compiled forward ends before a hook and goes on behind it, as often as there are shapes.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        recipe = QUANTIZE.replace("START", "0").replace("DYNAMIC", dynamic)
        assert len(losses(tmp_path, recipe, compiled=True)) == 6
