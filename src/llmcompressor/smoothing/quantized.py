# SPDX-License-Identifier: Apache-2.0
"""Conflicts of smoothing with quantization: sets with modules whose scales are already final.

The scales of a weight depend on its values, those of inputs, outputs, keys and values on the
activations: once an earlier modifier has computed them, neither may be changed. Modules that are
not quantized yet may be smoothed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Linear, Module

from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.modeling.mapped_places import SmoothSet
from llmcompressor.names import named_modules

__all__ = ["quantized_before", "without_quantized"]


def quantized_before(state: State) -> set[Module]:
    """The modules that have a quantization scheme now.

    It comes from a modifier that was initialized before, and so stands before in the recipe, or
    from an earlier run.
    """
    marked = (module for _, module in named_modules(state.model))
    return {one for one in marked if getattr(one, "quantization_scheme", None) is not None}


def without_quantized(
    sets: Iterable[SmoothSet], state: State, *, name: str, are_named: bool
) -> list[SmoothSet]:
    """The sets that a modifier may smooth.

    A set that was found in the model, and whose readers are all quantized, is left out silently.

    Args:
        sets: all of them.
        state: of the session, as :func:`quantized_before` takes it.
        name: the modifier's name.
        are_named: the recipe names the sets.

    Raises:
        TargetError: a set joins what is quantized with what is not, or is one of the recipe's; or
            none is left.
    """
    quantized, cached = quantized_before(state), _makers_of_states(state)
    kept, why, by = [], "", ""
    for one in sets:
        members = {**one.balance, one.name: one.smooth}
        taken = {each: module for each, module in members.items() if module in quantized}
        if not taken and one.smooth in cached:
            taken = {one.name: cached[one.smooth]}
        if not taken:
            kept.append(one)
            continue
        first, module = next(iter(taken.items()))
        owner = state.quantizers.get(module)
        by = "an earlier run" if owner is None else type(owner).__name__
        why = f"{by} quantizes {first}, and smoothing would change what was found for it"
        if are_named or not taken.keys() >= one.balance.keys():
            raise TargetError(
                f"{name} cannot smooth {one}: {why}.",
                f"Put {name} before {by}, or leave {first} to one of them, by an ignore list or by "
                "mappings without it.",
            )
    if why and not kept:
        raise TargetError(f"{name} has nothing to smooth: {why}.", f"Put {name} before {by}.")
    return kept


def _makers_of_states(state: State) -> dict[Module, Module]:
    """Linear → the attention module whose quantized keys and values it helps to compute."""
    return {
        inner: module
        for module in state.cached
        for inner in module.modules()
        if isinstance(inner, Linear)
    }
