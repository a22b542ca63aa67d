# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine, which steps by itself at the end of the backward pass of a step.

The trainer tells of the step when it is over. Who has to hear of it before listens here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from llmcompressor.modeling.flat_pieces import in_pieces

__all__ = ["ToldSteps", "have_gathered", "show_copies"]

_OF_A_TRAINING = ("optimizer", "scheduler", "gradient_clipping")


class ToldSteps:
    """An engine that tells before it steps.

    Args:
        engine: DeepSpeed's; its ``step`` is replaced until :meth:`leave`.
        before: called when the gradients of all micro-batches of a step are there.
    """

    def __init__(self, engine: Any, before: Callable[[], None]) -> None:
        self._engine, step = engine, engine.step

        def told(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                before()
            return step(*args, **kwargs)

        engine.step = told

    def leave(self) -> None:
        """Have the engine step as its class says."""
        del self._engine.step


def show_copies(engine: Any) -> None:
    """Have parameters show the optimizer's float32 copies of them, as ``fp32_copy``.

    Without ZeRO (stage 0) the engine keeps them in groups beside those of the 16-bit weights, and
    tells nobody which belongs to which; its other stages show them themselves.

    Args:
        engine: DeepSpeed's.
    """
    optimizer = engine.optimizer
    lows, highs = (getattr(optimizer, name, ()) for name in ("fp16_groups", "fp32_groups"))
    for low, high in zip(lows, highs, strict=False):
        for parameter, copy in zip(low, high, strict=True):
            parameter.fp32_copy = copy


def have_gathered(model: Module | None, engine: Any) -> None:
    """Have DeepSpeed gather a second model's weights while its modules run.

    A teacher that was loaded while ZeRO stage 3 was configured is in flat pieces, and nobody but
    an engine gathers them.

    Args:
        model: may be whole, or have an engine already.
        engine: of the model that is trained; its configuration is taken.
    """
    if model is None or not in_pieces(model) or hasattr(model, "ds_inflight_param_registry"):
        return
    import deepspeed  # noqa: PLC0415  # an optional companion

    config = {name: value for name, value in engine.config.items() if name not in _OF_A_TRAINING}
    deepspeed.initialize(model=model, config=config)
