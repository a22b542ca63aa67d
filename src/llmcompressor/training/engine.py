# SPDX-License-Identifier: Apache-2.0
"""Hooks into DeepSpeed's engine, which steps by itself at the end of the backward pass.

The trainer's own event comes after the step, so listeners that have to act before it hook in here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from llmcompressor.modeling.flat_pieces import in_pieces

__all__ = ["ToldSteps", "have_gathered", "show_copies"]

_OF_A_TRAINING = ("optimizer", "scheduler", "gradient_clipping")


class ToldSteps:
    """Calls a function before each step of an engine.

    Args:
        engine: a DeepSpeed engine; its ``step`` is replaced until :meth:`leave`.
        before: called when the gradients of all micro-batches of a step are accumulated.
    """

    def __init__(self, engine: Any, before: Callable[[], None]) -> None:
        self._engine, step = engine, engine.step

        def told(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                before()
            return step(*args, **kwargs)

        engine.step = told

    def leave(self) -> None:
        """Restore the engine's own ``step``."""
        del self._engine.step


def show_copies(engine: Any) -> None:
    """Attach the optimizer's float32 master weights to the parameters, as ``fp32_copy``.

    Without ZeRO (stage 0) the engine keeps them in groups parallel to those of the 16-bit weights,
    without a link between the two; its other stages provide a link themselves.

    Args:
        engine: a DeepSpeed engine.
    """
    optimizer = engine.optimizer
    lows, highs = (getattr(optimizer, name, ()) for name in ("fp16_groups", "fp32_groups"))
    for low, high in zip(lows, highs, strict=False):
        for parameter, copy in zip(low, high, strict=True):
            parameter.fp32_copy = copy


def have_gathered(model: Module | None, engine: Any) -> None:
    """Let DeepSpeed gather a second model's weights while its modules run.

    A teacher that was loaded with ZeRO stage 3 is sharded into flat pieces, and only an engine
    gathers them.

    Args:
        model: the second model; it may be unsharded, or have an engine already.
        engine: the engine of the trained model, whose configuration is used.
    """
    if model is None or not in_pieces(model) or hasattr(model, "ds_inflight_param_registry"):
        return
    import deepspeed  # noqa: PLC0415  # an optional companion

    config = {name: value for name, value in engine.config.items() if name not in _OF_A_TRAINING}
    deepspeed.initialize(model=model, config=config)
