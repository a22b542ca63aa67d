# SPDX-License-Identifier: Apache-2.0
r"""Fusion of norm gains into the Linears that read them, before these are rotated.

With g the gain of a norm n, b its bias, d the fused factor, and W a Linear that reads it

.. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(d))\, ((g / d) \odot n(x) + b / d)

A rotation of the residual stream needs the whole gain fused (d = g). A rotation between a norm and
its readers works best on channels of similar size (:mod:`.rescaling`).
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
    """A norm without bias whose gain is fused into the modules that read it.

    Attributes:
        module: the norm.
        offset: constant that it adds to its weight: 0, or 1 as in Gemma.
        readers: modules that read its output, by name.
    """

    module: Module
    offset: float
    readers: dict[Module, str]

    def gain(self) -> Tensor | None:
        """Factor fused into its readers, float64 ``[C]``; ``None`` for a norm without weight."""
        weight_C = self.module._parameters.get("weight")
        return None if weight_C is None else weight_C.detach().double() + self.offset

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters after ``gain_C``, float64 ``[C]``, was fused into its readers."""
        if gain_C is None:
            return {}
        return {"weight": gain_C.new_full(gain_C.shape, 1.0 - self.offset)}


@dataclass(frozen=True)
class RescaledNorm(Norm):
    """A norm, possibly with bias, whose channels are rescaled for the rotations after it.

    Attributes:
        turned: the readers whose inputs are rotated.
    """

    turned: tuple[Module, ...] = ()

    def gain(self) -> Tensor | None:
        """The part of its gain that is fused into its readers: powers of two, float64 ``[C]``."""
        gain_C = super().gain()
        if gain_C is None:
            return None
        square_C, bias_C = gain_C.square(), self.module._parameters.get("bias")
        if bias_C is not None:  # without gain and bias, channels have mean square one on average
            square_C += bias_C.detach().double().square()
        weights = [one._parameters["weight"] for one in self.turned]
        return rescaling(square_C, column_squares(one for one in weights if one is not None))

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters after ``gain_C``, float64 ``[C]``, was fused into its readers."""
        whole_C, bias_C = super().gain(), self.module._parameters.get("bias")
        if gain_C is None or whole_C is None:
            return {}
        found = {"weight": whole_C / gain_C - self.offset}
        return found if bias_C is None else {**found, "bias": bias_C.detach().double() / gain_C}


def gain_of(norm: Norm, gains: dict[Module, Tensor | None]) -> Tensor | None:
    """The fused factor of ``norm``, cached in ``gains``."""
    if norm.module not in gains:
        gains[norm.module] = norm.gain()
    return gains[norm.module]


def norms_before(
    model: Any, turned: Container[Module], smoothed: Container[str]
) -> Iterator[RescaledNorm]:
    """Norms that feed modules of ``turned``, by the structure of the blocks.

    Blocks of one class are assumed to be alike, although they may call different children: a norm
    that feeds more modules in a traced forward than the structure shows is left out.

    Args:
        model: its weights may be on the meta device.
        turned: modules whose inputs are rotated.
        smoothed: names of norms that are not rescaled.
    """
    sets = norm_sets(model)
    try:
        flow = trace_flow(model) if sets else Flow()
    except TargetError as error:  # the trial of the rotations reports it, if they are affected
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
