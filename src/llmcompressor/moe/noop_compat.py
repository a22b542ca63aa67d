# SPDX-License-Identifier: Apache-2.0
"""Compatibility no-ops: functions that scripts called on a model before a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from torch.nn import Module

from llmcompressor.logger import logger

_Model = TypeVar("_Model")
_Class = TypeVar("_Class", bound=type)


class MoECalibrationModule(Module):
    """Base of the MoE replacements that scripts define; no run uses them.

    Attributes:
        is_permanent: whether it was to stay after calibration.
    """

    is_permanent: ClassVar[bool] = False

    @classmethod
    def register(cls, *names: str, **others: Any) -> Callable[[_Class], _Class]:
        """A decorator that leaves a class as it is, and warns that no run uses it."""
        del others

        def leave(registered: _Class) -> _Class:
            logger.warning(
                f"{registered.__name__} is registered for {', '.join(names) or 'a mixture'}, and "
                "no run puts it there: each takes experts apart by itself, and shows all tokens "
                "to all of them (moe_calibrate_all_experts). plan says which are quantized."
            )
            return registered

        return leave

    def restore(self, original: Module) -> Module:
        """Return the original module."""
        return original


def wrap_hf_model_class(hf_model_class: _Class) -> _Class:
    """Return the class unchanged: transformers loads compressed models, and a run saves them."""
    return hf_model_class


def replace_modules_for_calibration(model: _Model, calibrate_all_experts: bool = True) -> _Model:
    """Return the model unchanged: calibration runs the model's own forward."""
    _warn_unless(calibrate_all_experts, "replace_modules_for_calibration")
    return model


def moe_calibration_context(
    model: Any = None, *given: Any, calibrate_all_experts: bool = True
) -> AbstractContextManager[None]:
    """Do nothing: ``oneshot`` shows all tokens to all experts by itself.

    ``given`` is a stack of contexts in one release, ``calibrate_all_experts`` in another.
    """
    del model
    all_experts = calibrate_all_experts and not any(one is False for one in given)
    _warn_unless(all_experts, "moe_calibration_context")
    return nullcontext()


def fast_pos_embed_interpolate(self: Any, grid_thw: Any) -> Any:
    """Call the method of the vision tower's own class: no patch is needed for a run."""
    return type(self).fast_pos_embed_interpolate(self, grid_thw)


def _warn_unless(all_experts: bool, where: str) -> None:
    if not all_experts:
        logger.warning(
            f"calibrate_all_experts=False has no effect in {where}: give "
            "moe_calibrate_all_experts=False to oneshot."
        )
