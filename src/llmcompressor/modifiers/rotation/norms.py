# SPDX-License-Identifier: Apache-2.0
r"""Gains of norms, multiplied into what reads them before that is rotated.

With g the gain of a norm n, b its bias, d what is taken over, and W a Linear that reads it

.. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(d))\, ((g / d) \odot n(x) + b / d)

A rotation of all that reads and writes the stream has to have all of the gain (d = g). One that
stands between a norm and its readers mixes best what is alike in size (:mod:`.rescaling`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.flow import Flow, trace_flow
from llmcompressor.modeling.mappings import norm_sets
from llmcompressor.modeling.scaling import columns_of
from llmcompressor.numerics.rescaling import column_squares, rescaling

__all__ = ["Norm", "RescaledNorm", "gain_of", "norms_before"]


@dataclass(frozen=True)
class Norm:
    """A norm whose gain is taken over by what reads it; it has no bias.

    Attributes:
        module: the norm.
        offset: what it adds to its weight: 0, or 1 as in Gemma.
        readers: the modules that read its output, by name.
    """

    module: Module
    offset: float
    readers: dict[Module, str]

    def gain(self) -> Tensor | None:
        """What its readers take over, float64 ``[C]``; ``None`` where it multiplies by nothing."""
        weight_C = self.module._parameters.get("weight")
        return None if weight_C is None else weight_C.detach().double() + self.offset

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters once its readers have taken over ``gain_C``, float64 ``[C]``."""
        if gain_C is None:
            return {}
        return {"weight": gain_C.new_full(gain_C.shape, 1.0 - self.offset)}


@dataclass(frozen=True)
class RescaledNorm(Norm):
    """A norm whose channels are rescaled for rotations behind it; here there may be a bias.

    Attributes:
        turned: those of its readers whose inputs are rotated.
    """

    turned: tuple[Module, ...] = ()

    def gain(self) -> Tensor | None:
        """The part of its gain that its readers take over: powers of two, float64 ``[C]``."""
        gain_C = super().gain()
        if gain_C is None:
            return None
        square_C, bias_C = gain_C.square(), self.module._parameters.get("bias")
        if bias_C is not None:  # before gain and bias channels have mean square one, on average
            square_C += bias_C.detach().double().square()
        weights = [one._parameters["weight"] for one in self.turned]
        return rescaling(square_C, column_squares(one for one in weights if one is not None))

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters once its readers have taken over ``gain_C``, float64 ``[C]``."""
        whole_C, bias_C = super().gain(), self.module._parameters.get("bias")
        if gain_C is None or whole_C is None:
            return {}
        found = {"weight": whole_C / gain_C - self.offset}
        return found if bias_C is None else {**found, "bias": bias_C.detach().double() / gain_C}


def gain_of(norm: Norm, gains: dict[Module, Tensor | None]) -> Tensor | None:
    """What readers of ``norm`` take over: from ``gains``, to which it is added once it is known."""
    if norm.module not in gains:
        gains[norm.module] = norm.gain()
    return gains[norm.module]


def norms_before(
    model: Any, turned: Container[Module], smoothed: Container[str]
) -> Iterator[RescaledNorm]:
    """The norms that feed modules of ``turned``, as the structure of the blocks shows them.

    Blocks of one form are taken to be alike, and need not call the same of their children: a norm
    that feeds more in the model's own forward than is known of it is left out.

    Args:
        model: its weights may be on the meta device.
        turned: modules whose inputs are rotated.
        smoothed: names of norms that are left as they are.
    """
    sets = norm_sets(model)
    try:
        flow = trace_flow(model) if sets else Flow()
    except TargetError as error:  # the trial of the rotations says so, if they meet it too
        logger.debug(f"No norm of {type(model).__name__} is rescaled: {error!r:.200}")
        return
    fed: dict[Module, set[Module]] = {}
    for module, norm in flow.feeder.items():
        if columns_of(module) is not None:
            fed.setdefault(norm, set()).add(module)
    for one in sets:
        readers = {module: name for name, module in one.balance.items()}
        own = tuple(module for module in readers if module in turned)
        known = fed.get(one.smooth, set()) <= readers.keys()
        if own and known and one.name not in smoothed:
            yield RescaledNorm(one.smooth, one.offset, readers, own)
