# SPDX-License-Identifier: Apache-2.0
"""What scripts did to a model before a run, in releases that could not do without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from llmcompressor.logger import logger

__all__ = [
    "fast_pos_embed_interpolate",
    "moe_calibration_context",
    "replace_modules_for_calibration",
]

_Model = TypeVar("_Model")


def replace_modules_for_calibration(model: _Model, calibrate_all_experts: bool = True) -> _Model:
    """The model, as it is: calibration runs the model's own forward, nothing needs replacing."""
    _warn_unless(calibrate_all_experts, "replace_modules_for_calibration")
    return model


def moe_calibration_context(
    model: Any = None, *given: Any, calibrate_all_experts: bool = True
) -> AbstractContextManager[None]:
    """Nothing: ``oneshot`` shows all tokens to all experts by itself.

    Args:
        model: is not changed.
        *given: a stack of contexts in one release, ``calibrate_all_experts`` in another.
        calibrate_all_experts: ``False`` is warned of.
    """
    del model
    all_experts = calibrate_all_experts and not any(one is False for one in given)
    _warn_unless(all_experts, "moe_calibration_context")
    return nullcontext()


def fast_pos_embed_interpolate(self: Any, grid_thw: Any) -> Any:
    """Of a vision tower, what its own class does: nothing has to be patched for a run."""
    return type(self).fast_pos_embed_interpolate(self, grid_thw)


def _warn_unless(all_experts: bool, where: str) -> None:
    if not all_experts:
        logger.warning(
            f"calibrate_all_experts=False has no effect in {where}: give "
            "moe_calibrate_all_experts=False to oneshot."
        )
