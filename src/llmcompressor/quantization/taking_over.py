# SPDX-License-Identifier: Apache-2.0
"""Resolution of scheme conflicts: modules that two modifiers of a recipe quantize.

A modifier that only rounds weights leaves a module to a later modifier with the same scheme: the
later one computes the same kind of parameters, and better ones. Any other pair is an error.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.schemes.presets import format_of

__all__ = ["Quantizer", "are_alike", "taken_from"]

_NUMBERS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "scale_dtype",
)
"""What of its arguments decides about the numbers on disk, whatever finds their ranges."""


class Quantizer(Protocol):
    """A modifier that quantizes modules and may leave some of them to another."""

    leaves_modules: ClassVar[bool]
    """Whether it only rounds, so that a later modifier with the same scheme may take them."""

    def leave(self, module: Module) -> None:
        """Stop handling ``module``."""


def taken_from(
    state: State, module: Module, name: str, scheme: QuantizationScheme, later: Quantizer
) -> Quantizer | None:
    """The modifier that leaves ``module`` to ``later``; ``None`` if no other modifier has it.

    Args:
        state: the session's state.
        module: the module that the later modifier is to quantize.
        name: name of the module.
        scheme: the scheme of the later modifier.
        later: the later modifier.

    Raises:
        TargetError: another modifier quantizes it and cannot leave it.
    """
    earlier = getattr(module, "quantization_scheme", None)
    if earlier is None:
        return None
    owner, own = state.quantizers.get(module), type(later).__name__
    if owner is None or getattr(module, "quantization_status", None) is not None:
        raise TargetError(
            f"{name} is quantized already, by an earlier run.",
            f"Put it on the ignore list of {own}, or begin with the original model.",
        )
    by, differ = type(owner).__name__, not _same_numbers(earlier, scheme)
    is_free = owner.leaves_modules and module not in state.cached
    if is_free and not later.leaves_modules and not differ:
        return cast("Quantizer", owner)
    raise TargetError(
        f"{name} is quantized already, by {by}, which stands before {own}"
        + (" and has another scheme." if differ else "."),
        f"Put it on the ignore list of one of them, or leave {by} out.",
    )


def are_alike(one: QuantizationArgs | None, other: QuantizationArgs | None) -> bool:
    """Return True if two arguments describe the same numbers, whatever their observers."""
    if one is None or other is None:
        return one is other
    return all(getattr(one, field) == getattr(other, field) for field in _NUMBERS)


def _same_numbers(one: QuantizationScheme, other: QuantizationScheme) -> bool:
    tensors = ("weights", "input_activations", "output_activations")
    same = all(are_alike(getattr(one, each), getattr(other, each)) for each in tensors)
    return same and format_of(one) == format_of(other)
