# SPDX-License-Identifier: Apache-2.0
"""Arguments and modifiers that the tests of ``train`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tests.support import small_models as small
from tests.support.breaking import Breaker

from llmcompressor.core import Event, EventType, State
from llmcompressor.modifiers import Modifier

__all__ = ["QUANTIZE", "Breaker", "Freezer", "WeightHalver", "arguments"]

QUANTIZE = """
modifiers:
  QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head], start: 0, end: 2}
"""


class Freezer(Modifier):
    """Works in training only: holds one weight at the value that it had at the start."""

    run_types: ClassVar[frozenset[str]] = frozenset({"train"})
    steps: ClassVar[list[int]] = []

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self._weight = state.model.model.norm.weight
        self._kept = self._weight.detach().clone()
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        if event.type_ is EventType.OPTIM_POST_STEP:
            self._weight.data.copy_(self._kept)
            self.steps.append(event.global_step)


class WeightHalver(Modifier):
    """Works in oneshot only: halves the last norm."""

    run_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        state.model.model.norm.weight.data.mul_(0.5)
        return True


def arguments(output: Path | None, **changes: Any) -> dict[str, Any]:
    """A training of four steps on random tokens, without a model."""
    return {
        "dataset": small.token_rows(samples=16, length=12),
        "output_dir": output,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        **changes,
    }
