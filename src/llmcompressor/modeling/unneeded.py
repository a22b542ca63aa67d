# SPDX-License-Identifier: Apache-2.0
"""What scripts did to a model before a run, in releases that could not do without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from torch.nn import Module

from llmcompressor.logger import logger

__all__ = [
    "MoECalibrationModule",
    "fast_pos_embed_interpolate",
    "moe_calibration_context",
    "replace_modules_for_calibration",
    "wrap_hf_model_class",
]

_Model = TypeVar("_Model")
_Class = TypeVar("_Class", bound=type)


class MoECalibrationModule(Module):
    """Base of classes that scripts have for mixtures; no run puts one in the place of a mixture.

    Attributes:
        is_permanent: whether it was to stay after calibration.
    """

    is_permanent: ClassVar[bool] = False

    @classmethod
    def register(cls, *names: str, **others: Any) -> Callable[[_Class], _Class]:
        """A decorator that leaves a class as it is, and says that no run takes it."""
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
        """What stood there before."""
        return original


def wrap_hf_model_class(hf_model_class: _Class) -> _Class:
    """The class, as it is: transformers loads compressed models, a run saves what it made."""
    return hf_model_class


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
