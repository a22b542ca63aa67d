# SPDX-License-Identifier: Apache-2.0
"""Weights and their masks: growing, holding, keeping for later.

A mask is one byte per weight, ones in every bit where the weight is kept and zeros where it is
pruned. Ands with the bits of a weight make it exactly zero, whatever it was, NaN included, at
the rate of memory: a product with a bool tensor or a masked fill take twice to six times as long.

A weight that is spread over processes (FSDP version 2, ZeRO stage 3) is put together for a
moment when its mask is chosen, on all processes alike; each keeps and applies its part.

DeepSpeed's optimizers keep a copy of the weights in float32, of which each process has a part, and
make the weights of it anew at each step. It is masked too: what is let go later grows from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompressor.errors import CheckpointError, NonFiniteError
from llmcompressor.modeling.flat_pieces import change_gradient, change_piece, is_flat
from llmcompressor.modeling.spread import is_spread_as, local, spread_as, together, whole
from llmcompressor.modifiers.pruning.targets import Place
from llmcompressor.numerics.finite import is_finite
from llmcompressor.numerics.masks import Source, Structure, grow_masks
from llmcompressor.wording import listed

__all__ = ["MaskedWeights"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class MaskedWeights:
    """Parameters of a model with the masks that hold them.

    Args:
        places: the parameters, each once.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        # int8, like the parameter: -1 keeps, 0 prunes; empty until a mask is chosen
        self._keep: dict[str, Tensor] = {}
        self._zeros: dict[str, int] = {}

    @property
    def held(self) -> bool:
        """Whether there are masks."""
        return bool(self._keep)

    @torch.no_grad()
    def grow(self, structure: Structure, sparsity: float, *, together: bool) -> None:
        """Mask more weights, the least first, and zero them.

        Args:
            structure: what is masked as one.
            sparsity: the share to reach, of each parameter or of all.
            together: with one threshold for all parameters instead of one for each.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        groups = [self.places] if together else [[place] for place in self.places]
        for group in groups:
            sources = [self._source(place) for place in group]
            for place, mask in zip(group, grow_masks(sources, structure, sparsity), strict=True):
                self._hold(place, mask.t() if place.transposed else mask)
        self.apply()

    @torch.no_grad()
    def freeze(self) -> None:
        """Mask what is zero now."""
        for place in self.places:
            self._hold(place, whole(place.parameter) == 0)

    @torch.no_grad()
    def apply(self) -> None:
        """Zero what is masked."""
        for place, keep in self._fitting():
            parameter = place.parameter
            if is_flat(parameter):
                change_piece(parameter, partial(_zero, keep=keep))
            else:
                _zero(local(parameter.detach()), keep)
                _zero_copy(parameter, keep)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Zero the gradients of what is masked, so that no optimizer remembers them."""
        for place, keep in self._fitting():
            if is_flat(place.parameter):
                change_gradient(place.parameter, partial(_zero, keep=keep))
                continue
            gradient = place.parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                _zero(local(gradient), keep)

    @torch.no_grad()
    def masked_gradient(self, place: Place, gradient: Tensor) -> Tensor | None:
        """The gradient of a parameter, or of a part of a batch, without what is masked.

        Args:
            place: the parameter.
            gradient: of the whole parameter; it stays as it is.

        Returns:
            A new tensor; ``None`` if nothing is masked, or if it is masked in pieces before the
            step.
        """
        keep = self._keep.get(place.name)
        in_pieces = is_flat(place.parameter)
        if keep is None or in_pieces or gradient.layout is not torch.strided:
            return None
        bits = gradient.view(_BITS[gradient.element_size()])
        return (bits & keep.to(gradient.device)).view(gradient.dtype)

    def drop(self) -> None:
        """Hold nothing any more."""
        self._keep.clear()
        self._zeros.clear()

    def sparsities(self) -> dict[str, float]:
        """The share that is masked, by name of the parameter."""
        sizes = {place.name: math.prod(place.shape) for place in self.places}
        return {name: zeros / sizes[name] for name, zeros in self._zeros.items()}

    def sparsity(self) -> float:
        """The share that is masked of all parameters."""
        weights = sum(math.prod(place.shape) for place in self.places)
        return sum(self._zeros.values()) / weights

    @torch.no_grad()
    def measured(self) -> dict[Place, float]:
        """The share of each parameter that is zero, counted; all processes have to call it."""
        return {
            place: 1.0 - int(torch.count_nonzero(whole(place.parameter))) / size
            for place in self.places
            if (size := math.prod(place.shape))
        }

    # ---- for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The masks, a bit per weight, in memory order, the first in the highest bit.

        All processes have to call it where parameters are spread over them.
        """
        packed = {}
        for place in self.places if self._keep else ():
            keep = together(self._keep[place.name], place.parameter)
            pruned = (keep == 0).cpu().numpy()
            bits = torch.from_numpy(np.packbits(pruned.reshape(-1)))
            packed[place.name] = {"bits": bits, "shape": list(pruned.shape)}
        return packed

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Hold the masks of a checkpoint.

        Raises:
            CheckpointError: they are those of other parameters.
        """
        if not saved:
            self.drop()
            return
        shapes = {place.name: list(place.shape) for place in self.places}
        theirs = {name: list(mask["shape"]) for name, mask in saved.items()}
        if shapes != theirs:
            unlike = sorted(
                name for name in {*shapes, *theirs} if shapes.get(name) != theirs.get(name)
            )
            raise CheckpointError(
                f"The checkpoint has masks of other parameters: {listed(unlike)} differ.",
                "Continue with the model and the recipe that it was written with.",
            )
        for place in self.places:
            number = math.prod(place.shape)
            bits = np.unpackbits(saved[place.name]["bits"].cpu().numpy(), count=number)
            self._hold(place, torch.from_numpy(bits).bool().view(place.shape))

    # ---- inner workings

    def _hold(self, place: Place, pruned: Tensor) -> None:
        """Take ``pruned``, bool of the whole parameter, as its mask."""
        self._zeros[place.name] = int(pruned.sum())
        keep = pruned.to(torch.int8).contiguous().sub_(1)
        self._keep[place.name] = spread_as(keep, place.parameter)

    def _fitting(self) -> Iterator[tuple[Place, Tensor]]:
        """Parameters with their masks, which follow them to another device or into parts."""
        for place in self.places if self._keep else ():
            keep, parameter = self._keep[place.name], place.parameter
            if not is_spread_as(keep, parameter):
                keep = self._keep[place.name] = spread_as(whole(keep), parameter)
            yield place, local(keep)

    def _source(self, place: Place) -> Source:
        def read() -> tuple[Tensor, Tensor | None]:
            weight = whole(place.parameter).detach()
            if not is_finite(weight):
                raise NonFiniteError(
                    f"{place.name} holds NaN or infinity, so its least weights cannot be found. "
                    "Lower the learning rate, or clip gradients."
                )
            keep = self._keep.get(place.name)
            pruned = None if keep is None else together(keep, place.parameter) == 0
            pruned = None if pruned is None else pruned.to(weight.device)
            if place.transposed:
                return weight.t(), None if pruned is None else pruned.t()
            return weight, pruned

        shape = place.shape[::-1] if place.transposed else place.shape
        zeros = self._zeros.get(place.name, 0)
        return Source(shape, place.parameter.dtype, zeros, read)


def _zero(tensor: Tensor, keep: Tensor) -> None:
    """Ands the bits of ``tensor`` with those of ``keep``, int8 of the same shape, in place."""
    tensor.view(_BITS[tensor.element_size()]).bitwise_and_(keep.to(tensor.device))


def _zero_copy(parameter: Any, keep: Tensor) -> None:
    """Zeroes in this process's part of the optimizer's own copy, if it has one."""
    copy = getattr(parameter, "fp32_copy", None)  # training shows it
    if copy is not None:
        _zero(copy.detach(), keep)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        part, copy = mapping.lp_fragment_address, mapping.hp_fragment
        _zero(copy, keep.flatten()[part.start : part.start + part.numel])
